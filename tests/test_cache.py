"""The cache: what counts as a split that is there, the command line, listing, pruning and removing."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from manifests import uses
from manifests.errors import ManifestError, OutputError
from manifests.manifest import MANIFEST_NAME
from manifests.process import this_process
from reshard import plan, split, verify
from reshard.cache import removing
from reshard.cache.building import find, provide
from reshard.cache.entries import entry_name, named_by, problem_of
from reshard.cache.listing import Item, State, items_of
from reshard.cache.pruning import Limits, choose
from reshard.cache.turn import Taken, turn
from reshard.cli import main
from reshard.publishing.owner import write_owner
from tests.checkpoints import mentions

DAY = 86400.0
PLAN = {"up": "colwise"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", 0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RESHARD_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))


def write_model(folder: Path, seed: int) -> Path:
    folder.mkdir()
    random = np.random.default_rng(seed)
    tensors = {name: random.random((8, 4), np.float32) for name in ("up.weight", "norm.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def reshard(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)], prog_name="reshard")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def made(model: Path, cache: Path, *more: object) -> Path:
    """Make a split with the command, and return the path that it prints."""
    result = reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", cache, *more)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    return Path(result.stdout.strip())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(entry: Path, seconds: float) -> None:
    """Make a split of a cache older, and its last use with it."""
    then = time.time() - seconds
    for path in [*entry.rglob("*"), entry, *(entry.parent / uses.FOLDER / entry.name).iterdir()]:
        os.utime(path, (then, then))


def abandoned(folder: Path) -> Path:
    """Make a folder whose owner is dead: a process of this number that started at another time."""
    folder.mkdir()
    write_owner(folder)
    (owner,) = folder.glob(".owner-*")
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"started": 1}))
    return folder


def key_of(model: Path) -> str:
    return plan(model, tp=2, plan=PLAN).key


# --- the key


def test_the_key_covers_what_is_carried_over(model: Path) -> None:
    before = key_of(model)
    os.utime(model / "config.json", (0, 0))
    assert key_of(model) == before, "the small files are known by their content"
    (model / "config.json").write_text('{"rope_theta": 1}')
    changed = key_of(model)
    assert changed != before
    (model / "tokenizer.json").write_text("{}")
    assert key_of(model) not in (before, changed)
    (model / "notes.md").write_text("not carried over")
    (model / "tokenizer.json").unlink()
    assert key_of(model) == changed


# --- finding and making


def test_a_second_call_finds_it_and_does_nothing(model: Path, cache: Path) -> None:
    out = made(model, cache)
    assert out == cache / f"tiny-tp2-{key_of(model)[:16]}"
    verify(out)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in [out, *out.iterdir()]}
    result = reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", cache)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert "found in the cache, nothing was made" in result.stderr
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in [out, *out.iterdir()]} == before
    facts = json.loads(reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", cache, "--json").stdout)
    assert (facts["out"], facts["found"]) == (str(out), True)
    assert names(cache) == [uses.FOLDER, out.name]


def test_the_same_split_is_found_from_another_path(model: Path, cache: Path, tmp_path: Path) -> None:
    out = made(model, cache)
    copy = shutil.copytree(model, tmp_path / "mounted" / "elsewhere")  # with the times
    assert made(copy, cache) == out
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert made(model, cache) != out
    assert made(copy, cache) == out


def test_what_goes_before_what(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = (model, "--tp", 2, "--plan", "plan.json")
    refused = reshard(*command, "--cache", cache, "-o", "out")
    assert refused.exit_code == 2
    assert "-o names an output" in refused.stderr
    assert reshard(*command, "--cache", cache, "--force").exit_code == 2
    assert not cache.exists()
    monkeypatch.setenv("RESHARD_CACHE", str(cache))
    assert reshard(*command, "-o", "out").stdout == "out\n"
    assert not cache.exists()
    assert reshard(*command, "--dry-run").stdout.endswith(f"to {cache}/tiny-tp2-{key_of(model)[:16]}\n")
    assert not cache.exists()
    assert Path(reshard(*command).stdout.strip()).parent == cache
    assert Path(reshard(*command, "--cache", tmp_path / "other").stdout.strip()).parent == tmp_path / "other"
    monkeypatch.setenv("RESHARD_CACHE", "")
    assert reshard(*command).stdout == f"{model}-tp2\n"


def test_what_is_not_the_leading_process_leaves_the_cache_alone(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", cache).stdout == ""
    assert not cache.exists()
    monkeypatch.setenv("RANK", "0")
    verify(made(model, cache))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


RANK_0 = "rank-00000-of-00002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "short": (lambda out: os.truncate(out / RANK_0, 4100), "4100 bytes, "),
    "long": (lambda out: os.truncate(out / RANK_0, 9999), "9999 bytes, "),
    "missing": (lambda out: (out / RANK_0).unlink(), "missing"),
    "no config": (lambda out: (out / "config.json").unlink(), "missing"),
    "no manifest": (lambda out: (out / MANIFEST_NAME).unlink(), "holds no manifest.json"),
    "short manifest": (lambda out: os.truncate(out / MANIFEST_NAME, 100), "not a readable manifest"),
    "changed manifest": (lambda out: flip(out / MANIFEST_NAME), MANIFEST_NAME),
    "empty": (lambda out: [path.unlink() for path in out.iterdir()], "holds no manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_split_is_made_again(model: Path, cache: Path, damage: str) -> None:
    out = made(model, cache)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    spoil, words = DAMAGES[damage]
    spoil(out)
    (item,) = items_of(cache)
    assert item.state == "damaged"
    assert words in item.problem
    result = reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", cache)
    assert result.stdout == f"{out}\n"
    assert words in result.stderr
    assert "it is made again" in result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert names(cache) == [uses.FOLDER, out.name]


def test_a_split_of_another_key_under_the_name_is_not_taken(model: Path, cache: Path, tmp_path: Path) -> None:
    other = made(write_model(tmp_path / "other", 1), cache)
    out = cache / f"tiny-tp2-{key_of(model)[:16]}"
    shutil.copytree(other, out)
    assert "holds another split" in problem_of(out)
    assert made(model, cache) == out
    assert problem_of(out, key_of(model)) == ""


def test_a_split_of_another_version_is_not_ours_to_judge(model: Path, cache: Path) -> None:
    out = made(model, cache)
    manifest = out / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"version":', '"version":10', 1))
    with pytest.raises(ManifestError, match="format version"):
        find(cache, key_of(model))
    age(out, 9 * DAY)
    assert [item.state for item in items_of(cache)] == ["unreadable"]
    assert reshard("cache", "prune", "--cache", cache).exit_code == 0
    assert manifest.exists()


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of nobody's, while the test is not privileged: root may write everywhere."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    # Nobody may not import what is in root's home; so everything is imported before.
    split(write_model(folder / "first", 0), tp=2, plan=PLAN)
    if os.geteuid():
        yield folder
    else:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_cache_that_cannot_be_written_is_read(nobody: Path) -> None:
    model, cache = write_model(nobody / "tiny", 0), nobody / "cache"
    planned = plan(model, tp=2, plan=PLAN)
    path, found = provide(planned, cache, entry_name(model, planned), notice=pytest.fail)
    assert not found
    cache.chmod(0o555)
    (cache / uses.FOLDER).chmod(0o555)
    (cache / uses.FOLDER / path.name).chmod(0o555)
    try:
        assert provide(planned, cache, entry_name(model, planned), notice=pytest.fail) == (path, True)
        uses.note_use(path)
        assert uses.users_here(path) == []
        other = plan(write_model(nobody / "other", 1), tp=2, plan=PLAN)
        with pytest.raises(OutputError) as caught:
            provide(other, cache, "other", notice=pytest.fail)
        assert mentions(caught.value, cache, "cannot be written", "Permission denied")
        with pytest.raises(OutputError, match="cannot be removed"):
            removing.remove(path)
        assert problem_of(path) == ""
    finally:
        for folder in (cache, cache / uses.FOLDER, cache / uses.FOLDER / path.name):
            folder.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_what_another_user_left_is_no_hindrance(nobody: Path) -> None:
    model, cache = write_model(nobody / "tiny", 0), nobody / "cache"
    planned = plan(model, tp=2, plan=PLAN)
    name = entry_name(model, planned)
    cache.mkdir()
    cache.chmod(0o777)
    os.seteuid(0)
    left = [abandoned(cache / f".{planned.key[:16]}.turn"), abandoned(cache / f".{name}.partial-00")]
    os.seteuid(65534)
    path, found = provide(planned, cache, name, notice=pytest.fail)
    assert not found
    assert problem_of(path, planned.key) == ""
    assert {*names(cache)} == {uses.FOLDER, path.name, *(folder.name for folder in left)}
    pruned = reshard("cache", "prune", "--cache", cache, "--grace", 0, "--max-size", 0)
    assert pruned.exit_code == 5
    assert pruned.stdout == f"{path.name}\n"
    assert pruned.stderr.count("cannot be removed whole") == 2
    os.seteuid(0)
    assert [item.state for item in items_of(cache)] == ["abandoned", "abandoned"]
    assert reshard("cache", "prune", "--cache", cache, "--grace", 0).exit_code == 0
    assert names(cache) == [uses.FOLDER]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_permissions_follow_the_umask(model: Path, cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        out = made(model, cache)
        uses.note_use(out)
        uses_of = cache / uses.FOLDER / out.name
        for path in (cache, out, cache / uses.FOLDER, uses_of):
            assert path.stat().st_mode & 0o777 == 0o777 & ~umask
        for path in (*out.iterdir(), *uses_of.iterdir()):
            assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)


def test_a_file_in_place_of_the_cache(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert reshard(model, "--tp", 2, "--plan", "plan.json", "--cache", "file").exit_code == 2
    planned = plan(model, tp=2, plan=PLAN)
    with pytest.raises(OutputError, match="cannot be listed"):
        provide(planned, tmp_path / "file", "x", notice=pytest.fail)
    with pytest.raises(OutputError, match="cannot be"):
        provide(planned, tmp_path / "file" / "below", "x", notice=pytest.fail)


# --- the turn


def test_one_has_the_turn_at_a_time(cache: Path) -> None:
    with turn(cache, "0" * 32):
        with pytest.raises(Taken) as caught, turn(cache, "0" * 32):
            pass
        assert caught.value.owner == this_process()
        with turn(cache, "1" * 32):
            assert len(names(cache)) == 2
    assert names(cache) == []


def test_the_turn_of_a_dead_process_is_taken_and_its_remains_go(cache: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from reshard.cache.turn import turn
with turn(Path(sys.argv[1]), "0" * 32):
    os.mkdir(sys.argv[1] + "/." + "0" * 16 + ".turn-0123")  # of one that was killed before it had the turn
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code, cache], check=False)
    assert len(names(cache)) == 2
    with turn(cache, "0" * 32):
        assert names(cache) == [f".{'0' * 16}.turn"]
    assert names(cache) == []


# --- listing and pruning


def item(name: str, state: State = "whole", nbytes: int = 10, made: float = 5, used: float = 5, **more: Any) -> Item:
    """Return an item that was made and used that many days ago."""
    users = (this_process(),) if more.get("held") else ()
    return Item(Path(name), state, "", nbytes, -made * DAY, -used * DAY, users)


CHOICES: dict[str, tuple[list[Item], Limits, list[str], list[str]]] = {
    "nothing is asked for": ([item("a"), item("b", used=900, made=900)], Limits(), [], []),
    "what is damaged or abandoned goes": (
        [item("a", "damaged"), item("b", "abandoned"), item("c", "being made"), item("d", "unreadable")],
        Limits(),
        ["a", "b"],
        [],
    ),
    "but not within the grace time": (
        [item("a", "damaged", used=0.01), item("b", "abandoned", used=0.01)],
        Limits(),
        [],
        ["a", "b"],
    ),
    "by age": ([item("a", made=31), item("b", made=29)], Limits(age_s=30 * DAY), ["a"], []),
    "by use": ([item("a", made=31, used=2), item("b", made=31, used=31)], Limits(unused_s=14 * DAY), ["b"], []),
    "what is used stays": ([item("a", made=31, held=True)], Limits(age_s=30 * DAY, unused_s=0), [], ["a"]),
    "what was just wanted stays": ([item("a", made=31, used=0.02)], Limits(age_s=30 * DAY), [], ["a"]),
    "by size, the longest unused first": (
        [item("a", used=3), item("b", used=9), item("c", used=6)],
        Limits(nbytes=10),
        ["b", "c"],
        [],
    ),
    "what stays fills the room": (
        [item("a", used=9, held=True), item("b", used=6), item("c", used=3)],
        Limits(nbytes=20),
        ["b"],
        ["a"],
    ),
    "age before size": (
        [item("a", made=40, used=1), item("b", used=9)],
        Limits(nbytes=10, age_s=30 * DAY),
        ["a"],
        [],
    ),
    "what is aged but held is not asked twice": (
        [item("a", made=40, used=9, held=True), item("b", used=3)],
        Limits(nbytes=10, age_s=30 * DAY),
        ["b"],
        ["a"],
    ),
    "the unfinished is no part of the size": (
        [item("a"), item("b", "being made", nbytes=99)],
        Limits(nbytes=10),
        [],
        [],
    ),
    "down to nothing": ([item("a"), item("b", used=0.01)], Limits(nbytes=0), ["a"], ["b"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_goes_and_what_stays(case: str) -> None:
    items, limits, going, staying = CHOICES[case]
    chosen = choose(items, limits, now=0)
    assert [item.name for item, _ in chosen.going] == going
    assert [item.name for item, _ in chosen.staying] == staying


def test_ls_tells_what_there_is(model: Path, cache: Path, tmp_path: Path) -> None:
    out = made(model, cache)
    other = made(write_model(tmp_path / "other", 1), cache)
    age(out, 3 * DAY)
    os.truncate(other / RANK_0, 4100)
    for name in ("photos", "notes", f".{out.name}.partial-00aa", f".{out.name}.removed-1"):
        (cache / name).mkdir()
        (cache / name / "file").write_bytes(b"12345")
    write_owner(cache / f".{out.name}.partial-00aa")
    abandoned(cache / f".{out.name}.partial-00bb")
    facts = json.loads(reshard("cache", "ls", "--cache", cache, "--json").stdout)
    states = {one["name"]: one["state"] for one in facts["items"]}
    assert states == {
        out.name: "whole",
        other.name: "damaged",
        f".{out.name}.partial-00aa": "being made",
        f".{out.name}.partial-00bb": "abandoned",
        f".{out.name}.removed-1": "abandoned",
    }
    whole = next(one for one in facts["items"] if one["name"] == out.name)
    assert whole["nbytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert round(whole["age_s"] / DAY) == round(whole["unused_s"] / DAY) == 3
    text = reshard("cache", "ls", "--cache", cache).stdout.splitlines()
    assert len(text) == 5
    assert "made 3 d ago" in next(line for line in text if line.startswith(out.name))
    assert any(f"being made by process {os.getpid()} on" in line for line in text)
    # A load or a look-up is a use.
    made(model, cache)
    (used,) = [one.used for one in items_of(cache) if one.name == out.name]
    assert time.time() - used < 60


def test_prune_removes_what_it_may(model: Path, cache: Path, tmp_path: Path) -> None:
    outs = [made(model, cache), *(made(write_model(tmp_path / f"other-{seed}", seed), cache) for seed in (1, 2))]
    (cache / "photos").mkdir()
    left = abandoned(cache / f".{outs[0].name}.partial-00")
    for out, days in zip(outs, (40, 20, 0), strict=True):
        age(out, days * DAY)
    result = reshard("cache", "prune", "--cache", cache, "--unused", "14d", "--dry-run")
    assert result.stdout.splitlines() == [out.name for out in sorted(outs[:2])]
    assert all(out.exists() for out in outs)
    uses.note_use(outs[1])
    age(outs[1], 20 * DAY)
    result = reshard("cache", "prune", "--cache", cache, "--unused", "14d", "--max-size", "1GB")
    assert result.stdout == f"{outs[0].name}\n"
    assert f"kept {outs[1].name}" in result.stderr
    assert f"in use by process {os.getpid()}" in result.stderr
    assert "within the grace time" in reshard("cache", "prune", "--cache", cache).stderr, "what is left is young"
    for user in (cache / uses.FOLDER / outs[1].name).iterdir():
        user.unlink()
    facts = json.loads(reshard("cache", "prune", "--cache", cache, "--max-size", 0, "--grace", 0, "--json").stdout)
    assert {one["name"] for one in facts["removed"]} == {outs[1].name, outs[2].name, left.name}
    assert names(cache) == [uses.FOLDER, "photos"]
    assert names(cache / uses.FOLDER) == []


@pytest.mark.parametrize("arguments", [("--max-age", "soon"), ("--max-size", "much"), ("--grace", "-1"), ()])
def test_prune_refuses_what_is_no_limit(cache: Path, arguments: tuple[str, ...]) -> None:
    assert reshard("cache", "prune", "--cache", cache, *arguments).exit_code == 2
    cache.mkdir()
    assert reshard("cache", "prune", "--cache", cache, *arguments).exit_code == (2 if arguments else 0)


def test_rm_removes_what_is_named_unless_it_is_used(model: Path, cache: Path, tmp_path: Path) -> None:
    out, other = made(model, cache), made(write_model(tmp_path / "other", 1), cache)
    uses.note_use(other)
    refused = reshard("cache", "rm", out.name, other.name, "--cache", cache)
    assert refused.exit_code == 5
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert "nothing was removed" in refused.stderr
    assert reshard("cache", "rm", "nothing", "--cache", cache).exit_code == 5
    assert reshard("cache", "rm", tmp_path / out.name, "--cache", cache).exit_code == 5
    assert out.exists()
    assert reshard("cache", "rm", out, "--cache", cache).stdout == f"{out.name}\n"
    assert names(cache) == [uses.FOLDER, other.name]
    assert names(cache / uses.FOLDER) == [other.name]


def test_verify_names_what_is_damaged(model: Path, cache: Path, tmp_path: Path) -> None:
    out, other = made(model, cache), made(write_model(tmp_path / "other", 1), cache)
    assert reshard("cache", "verify", "--cache", cache).exit_code == 0
    content = bytearray((out / RANK_0).read_bytes())
    content[-1] ^= 1
    (out / RANK_0).write_bytes(content)
    result = reshard("cache", "verify", "--cache", cache)
    assert result.exit_code == 7
    assert "1 of 2 splits are not whole" in result.stderr
    assert f"{RANK_0}: up.weight" in result.stdout
    assert f"{other.name}: whole" in result.stdout
    assert reshard("cache", "verify", other.name, "--cache", cache).exit_code == 0
    facts = json.loads(reshard("cache", "verify", "--cache", cache, "--json").stdout)
    assert ["problem" in one for one in facts["items"]] == [one["out"] == out.name for one in facts["items"]]


# --- removing


def test_what_is_half_removed_has_no_name(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(model, cache)

    def failing(path: Path, **_: Any) -> None:
        (path / RANK_0).unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(removing.shutil, "rmtree", failing)
        with pytest.raises(OutputError, match="cannot be removed whole"):
            removing.remove(out)
    assert not out.exists()
    assert [item.state for item in items_of(cache)] == ["abandoned"]
    assert made(model, cache) == out
    assert reshard("cache", "prune", "--cache", cache, "--grace", "0").stdout.startswith(f".{out.name}.removed-")
    assert names(cache) == [uses.FOLDER, out.name]


def test_what_is_wanted_after_all_comes_back(model: Path, cache: Path) -> None:
    out = made(model, cache)
    assert not removing.remove(out, unless=lambda hidden: problem_of(hidden, key_of(model)) == "")
    assert problem_of(out) == ""
    assert names(cache) == [uses.FOLDER, out.name]
    assert not removing.remove(cache / "nothing")


def test_of_a_key_only_one_name_is_taken(model: Path, cache: Path) -> None:
    out = made(model, cache)
    assert named_by(cache, key_of(model)) == [out]
    assert named_by(cache, "0" * 32) == []
