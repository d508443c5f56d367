"""Owners of hidden folders: a process, seen from its own machine and from others, and claims that one alone wins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.publishing import owner
from reshard.publishing.owner import beating, claim, is_alive, read_owner, release, write_owner

CLAIM = """
import sys, time
from pathlib import Path
from reshard.publishing.owner import claim
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(claim(folder, f"{folder.name}-{sys.argv[2]}"))
sys.stdin.readline()
"""


def made(folder: Path) -> Path:
    folder.mkdir()
    write_owner(folder)
    return folder


def change(folder: Path, **fields: Any) -> None:
    """Make the owner of a folder another one."""
    (path,) = folder.glob(".owner-*")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def age(folder: Path, seconds: float) -> None:
    """Make the heartbeat of a folder older."""
    (path,) = folder.glob(".owner-*")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_this_process_owns_what_it_makes(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    found = read_owner(folder)
    assert found is not None
    assert found.pid == os.getpid()
    age(folder, 1e6)
    assert is_alive(folder), "a process that is seen needs no heartbeat"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_process_that_ended_is_dead(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code = "import sys; from pathlib import Path; from reshard.publishing.owner import *"
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{code}; write_owner(Path(sys.argv[1])); print(1, flush=True); input()",
            tmp_path / "folder",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        assert is_alive(tmp_path / "folder")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(tmp_path / "folder"), "one that nobody has waited for yet has ended too"
    assert not is_alive(tmp_path / "folder")


def test_another_process_of_the_same_number_is_another(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    found = read_owner(folder)
    assert found is not None
    change(folder, started=found.started - 1)
    assert not is_alive(folder)


@pytest.mark.parametrize("field", ["host", "boot", "namespace"])
def test_elsewhere_the_heartbeat_tells(tmp_path: Path, field: str) -> None:
    folder = made(tmp_path / "folder")
    change(folder, pid=1, **{field: "another"})
    assert is_alive(folder)
    age(folder, owner.SILENT_S + 1)
    assert not is_alive(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"], "what asks for the time leaves nothing"


def test_the_file_systems_clock_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "folder")
    change(folder, host="another")
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert is_alive(folder)


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "folder")
    change(folder, host="another")
    age(folder, owner.SILENT_S + 1)
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    with beating(folder):
        for _ in range(500):
            if is_alive(folder):
                break
    assert is_alive(folder)


def test_an_owner_file_that_cannot_be_read_is_judged_by_its_age(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    (path,) = folder.glob(".owner-*")
    path.write_text("{")
    assert read_owner(folder) is None
    assert is_alive(folder)
    age(folder, owner.SILENT_S + 1)
    assert not is_alive(folder)


def test_a_folder_without_an_owner_is_about_to_have_one_while_it_is_young(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert is_alive(folder)
    os.utime(folder, (1e9, 1e9))
    assert not is_alive(folder)
    assert not is_alive(tmp_path / "none")


def test_a_released_folder_is_free_at_once(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    release(folder)
    assert not is_alive(folder)
    assert claim(folder, "mine")
    assert is_alive(tmp_path / "mine")


def test_a_living_owners_folder_is_not_claimed(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    assert not claim(folder, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert not claim(tmp_path / "none", "mine")


def test_of_many_claims_one_succeeds(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = made(tmp_path / f"folder{attempt}")
        release(folder)
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CLAIM, folder, str(position)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for position in range(6)
        ]
        try:
            for process in processes:
                assert process.stdout
                assert process.stdout.readline() == "ready\n"
            for process in processes:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [process.stdout.readline().strip() for process in processes if process.stdout]
            (renamed,) = tmp_path.glob(f"folder{attempt}*")
            assert is_alive(renamed)
            assert not claim(renamed, "again")
        finally:
            for process in processes:
                process.communicate()
        assert sorted(said) == ["False"] * 5 + ["True"]
        assert renamed.name == f"folder{attempt}-{said.index('True')}"
