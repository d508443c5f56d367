"""A split, and a merge, that a fault ended: what the next run makes of what is left."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import CheckpointError, DamageError, OutputError
from reshard import merge, split, verify
from reshard.engine import chains, files, journal
from reshard.torchrun import together
from tests.checkpoints import count, files_of, mentions, save, save_indexed

PLAN = {"model.column.*": "colwise", "model.row.*": "rowwise"}
TENSORS = {
    f"model.{kind}.{i}.weight": count(256, 256, start=i) for i in range(4) for kind in ("column", "row", "whole")
}


@pytest.fixture(autouse=True)
def everything_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chains, journal):
        monkeypatch.setattr(module, "RECORD_NBYTES", 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_indexed(tmp_path / "m", TENSORS, {"model.norm.weight": count(8)}, config={"a": 1})


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """Return what an undisturbed run makes."""
    split(model, tmp_path / "whole", tp=2, plan=PLAN)
    return files_of(tmp_path / "whole")


@contextmanager
def writes(monkeypatch: pytest.MonkeyPatch, most: float, number: int = errno.ENOSPC) -> Iterator[list[int]]:
    """Count the bytes of the engine's writes; after so many, writing fails."""
    done: list[int] = []

    def counted(call: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, data: Any, offset: int) -> int:
            if len(done) >= most:
                raise OSError(number, os.strerror(number))
            done.append(call(descriptor, data, offset))
            return done[-1]

        return write

    with monkeypatch.context() as patch:
        for name in ("pwrite", "pwritev"):
            patch.setattr(files.os, name, counted(getattr(os, name)))
        yield done


def left(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def end_early(
    work: Callable[[], object], monkeypatch: pytest.MonkeyPatch, most: int, number: int = errno.ENOSPC
) -> str:
    with writes(monkeypatch, most, number), pytest.raises(OutputError) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_split_that_ended_is_gone_on_with(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    total = sum(len(content) for name, content in whole.items() if name.endswith(".safetensors"))
    said = end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10, number)
    for words in (os.strerror(number), ".safetensors: cannot be written", f"of {total} bytes are kept", "--no-resume"):
        assert words in said
    assert len(left(tmp_path)) == 1
    assert not (tmp_path / "out").exists()
    finished: list[tuple[int, int]] = []
    with writes(monkeypatch, 1e9) as again:
        split(model, tmp_path / "out", tp=2, plan=PLAN, progress=lambda *progress: finished.append(progress))
    kept = int(said.split(" bytes are kept")[0].split("; ")[-1].split(" of ")[0])
    assert kept > 0
    assert sum(again) <= total - kept
    assert finished[-1][0] == finished[-1][1]
    assert files_of(tmp_path / "out") == whole
    assert left(tmp_path) == []


def test_starting_over(model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10)
    with writes(monkeypatch, 1e9) as again:
        split(model, tmp_path / "out", tp=2, plan=PLAN, resume=False)
    assert sum(again) == sum(x.nbytes for x in TENSORS.values()) + 32
    assert files_of(tmp_path / "out") == whole
    assert left(tmp_path) == []


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "source": lambda model: os.utime(model / "model-00001-of-00002.safetensors", ns=(1, 1)) or {},
    "plan": lambda _: {"plan": {**PLAN, "model.row.*": "colwise"}},
    "ranks": lambda _: {"tp": 4},
    "option": lambda _: {"self_contained": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_starts_over(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10)
    options: dict[str, Any] = {"tp": 2, "plan": PLAN, **CHANGES[change](model)}
    with writes(monkeypatch, 1e9) as again:
        split(model, tmp_path / "out", **options)
    with writes(monkeypatch, 1e9) as anew:
        split(model, tmp_path / "anew", **options)
    assert sum(again) == sum(anew)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "anew")
    assert left(tmp_path) == []


def test_nothing_is_kept_of_a_source_that_has_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(done: int, _total: int) -> None:
        if done:
            os.utime(model / "model-00001-of-00002.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError) as caught:
        split(model, tmp_path / "out", tp=2, plan=PLAN, progress=touch)
    assert mentions(caught.value, model / "model-00001-of-00002.safetensors", "changed while it was read")
    assert "are kept" not in str(caught.value)
    assert left(tmp_path) == []


def test_damage_of_what_is_kept_is_found(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10)
    for path in left(tmp_path)[0].glob("content/*.safetensors"):
        content = bytearray(path.read_bytes())
        content[5000::1000] = bytes(len(content[5000::1000]))
        path.write_bytes(content)
    split(model, tmp_path / "out", tp=2, plan=PLAN)
    assert files_of(tmp_path / "out") == whole
    verify(tmp_path / "out")


@pytest.mark.parametrize("change", ["shorter", "another header", "gone"])
def test_files_that_are_not_as_they_were_made_start_over(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10)
    (path,) = left(tmp_path)[0].glob("content/rank-00001*")
    if change == "shorter":
        os.truncate(path, path.stat().st_size - 1)
    elif change == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    split(model, tmp_path / "out", tp=2, plan=PLAN)
    assert files_of(tmp_path / "out") == whole


def test_a_merge_that_ended_is_gone_on_with(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, back = tmp_path / "whole", tmp_path / "back"
    said = end_early(lambda: merge(out, back), monkeypatch, 8)
    assert "bytes are kept" in said
    with writes(monkeypatch, 1e9) as again:
        merge(out, back)
    assert sum(again) < sum(x.nbytes for x in TENSORS.values())
    for path in model.glob("*.safetensors"):
        assert (back / path.name).read_bytes() == path.read_bytes()
    assert left(tmp_path) == []


def test_a_merge_of_a_damaged_split_keeps_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "whole" / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamageError):
        merge(tmp_path / "whole", tmp_path / "back")
    assert left(tmp_path) == []
    assert not (tmp_path / "back").exists()


def test_links_are_read_through_and_never_written_through(tmp_path: Path) -> None:
    """As the hub's cache lays files out: names that are links to blobs."""
    blobs = save(tmp_path / "repo" / "blobs", {"a.weight": count(4, 4)}, {"a": 1}, tokenizer="{}")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in blobs.iterdir()}
    model = tmp_path / "repo" / "snapshots" / "main"
    model.mkdir(parents=True)
    for path in blobs.iterdir():
        (model / path.name).symlink_to(Path("../..") / "blobs" / path.name)
    split(model, tmp_path / "out", tp=2, plan={"a": "colwise"})
    merge(tmp_path / "out", tmp_path / "back")
    for folder in ("out", "back"):
        assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / folder).iterdir())
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in blobs.iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "out")
    out = files_of(tmp_path / "out")
    with pytest.raises(OutputError):
        split(model, tmp_path / "link", tp=2, plan={"a": "rowwise"}, force=True)
    assert files_of(tmp_path / "out") == out


def test_under_torchrun_what_is_left_is_removed(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_early(lambda: split(model, tmp_path / "out", tp=2, plan=PLAN), monkeypatch, 10)
    planned = together.plan_split(together.LocalFolder(model), 2, together_options())
    together.carry_out(planned, tmp_path / "out", together.Processes(0, 1, "token"))
    assert files_of(tmp_path / "out") == whole
    assert left(tmp_path) == []


def together_options() -> Any:
    from reshard.options import Options

    return Options(plan=PLAN)
