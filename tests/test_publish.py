"""Publishing: what has a destination's name is whole, and a failed run leaves nothing behind."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from manifests.errors import OutputError, ReshardError
from manifests.manifest import encode_manifest
from reshard import publish
from reshard.publish import check_destination, create_sized, staged, write_synced
from tests.checkpoints import mentions
from tests.test_manifest import SMALL


def tree(folder: Path) -> dict[str, str]:
    """Return every file below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def finished(folder: Path, content: str = "old") -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    return folder


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "deep" / "out", force=False) as staging:
        (staging / "file").write_text("new")
        assert staging.parent == tmp_path / "deep"
        assert staging.name.startswith(".out.partial-")
        assert not (tmp_path / "deep" / "out").exists()
    assert tree(tmp_path) == {"deep/out/file": "new"}
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "out"]


@pytest.mark.parametrize("error", [ReshardError("x"), KeyboardInterrupt(), SystemExit(1), OSError(28, "No space", "f")])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException, force: bool) -> None:
    if force:
        finished(tmp_path / "out")
    before = tree(tmp_path)
    with (
        pytest.raises((ReshardError, KeyboardInterrupt, SystemExit)) as caught,
        staged(tmp_path / "out", force=force) as staging,
    ):
        (staging / "manifest.json").write_text("new")
        raise error
    if isinstance(error, OSError):
        assert isinstance(caught.value, OutputError)
        assert mentions(caught.value, tmp_path / "out", "No space", "(f)")
    else:
        assert caught.value is error
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if force else [])


def test_an_older_folder_is_replaced_by_force(tmp_path: Path) -> None:
    (finished(tmp_path / "out") / "stray").write_text("old")
    with staged(tmp_path / "out", force=True) as staging:
        (staging / "manifest.json").write_text("new")
        assert tree(tmp_path / "out") == {"manifest.json": "old", "stray": "old"}
    assert tree(tmp_path) == {"out/manifest.json": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught, staged(tmp_path / "out", force=False) as staging:
        (staging / "manifest.json").write_text("new")
        finished(tmp_path / "out")
    assert mentions(caught.value, tmp_path / "out", "appeared", "nothing was replaced")
    assert tree(tmp_path) == {"out/manifest.json": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_older_folder_comes_back_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "out")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(13, "Permission denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError) as caught, staged(tmp_path / "out", force=True) as staging:
        (staging / "manifest.json").write_text("new")
    assert mentions(caught.value, tmp_path / "out", "Permission denied")
    assert tree(tmp_path) == {"out/manifest.json": "old"}


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    with staged(tmp_path / "out", force=True) as one, staged(tmp_path / "out", force=True) as other:
        assert one != other
        (one / "file").write_text("one")
        (other / "file").write_text("other")
    assert tree(tmp_path) == {"out/file": "one"}


def test_a_relative_destination_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with staged(Path("out"), force=False) as staging:
        (staging / "file").write_text("new")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert tree(tmp_path) == {"out/file": "new"}


def refusal(destination: Path, nbytes: int = 10, *, force: bool = False) -> OutputError:
    with pytest.raises(OutputError) as caught:
        check_destination(destination, nbytes, force=force)
    assert caught.value.exit_code == 5
    assert mentions(caught.value, destination)
    return caught.value


def test_an_existing_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    finished(tmp_path / "split")
    for name in ("empty", "file", "link", "split"):
        assert mentions(refusal(tmp_path / name), "exists already", "--force")


def test_force_replaces_splits_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    finished(tmp_path / "split", encode_manifest(SMALL).decode())
    for name in ("empty", "split", "new"):
        check_destination(tmp_path / name, 10, force=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "split")
    assert mentions(refusal(tmp_path / "photos", force=True), "no split", "not ours")
    for name in ("file", "link"):
        assert mentions(refusal(tmp_path / name, force=True), "no folder")


# Shows a bug: any file of that name passes for ours, so `--force` removes a folder that never was a split.
@pytest.mark.parametrize("content", ['{"name": "an app"}', "{}", "", '{"format": "other", "version": 1}'])
def test_force_does_not_replace_a_folder_with_a_manifest_of_another_kind(tmp_path: Path, content: str) -> None:
    finished(tmp_path / "app", content)
    assert mentions(refusal(tmp_path / "app", force=True), "not ours")


def test_a_destination_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert mentions(refusal(tmp_path / "file" / "out"), "file is not a folder")
    assert mentions(refusal(tmp_path / "file" / "deep" / "out"), "file is not a folder")


def test_a_destination_without_the_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=512))
    check_destination(tmp_path / "out", 1536, force=False)
    assert mentions(refusal(tmp_path / "out", 1537), "1537 bytes are needed", "1536 are free")


def test_a_destination_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.os, "access", lambda path, mode: Path(path) != tmp_path)
    assert mentions(refusal(tmp_path / "out"), "no permission", tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught, staged(tmp_path / "file" / "out", force=False):
        pass
    assert mentions(caught.value, "cannot be made")


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[str]]:
    seen: list[str] = []
    real: Callable[[int], None] = getattr(os, name)

    def spy(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(publish.os, name, spy)
    yield seen


def test_files_and_names_are_on_disk_before_the_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with calls(monkeypatch, "fsync") as synced, staged(tmp_path / "out", force=False) as staging:
        write_synced(staging / "manifest.json", b"x")
        partial = staging.name
    assert synced == ["manifest.json", partial, tmp_path.name]


def test_files_are_made_anew_with_their_size(tmp_path: Path) -> None:
    create_sized(tmp_path / "a", b"head", 10)
    assert (tmp_path / "a").read_bytes() == b"head".ljust(10, b"\0")
    with pytest.raises(FileExistsError):
        create_sized(tmp_path / "a", b"head", 10)
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "a", b"x")
