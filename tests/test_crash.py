"""Splits that are killed, or refused something by the system: samples of what ``make test-full`` does."""

import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.crash import disks, faults
from tools.crash.kills import kill_often
from tools.crash.trial import INTERRUPTED, REFUSED, Bench

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def large() -> Iterator[Bench]:
    """Return a split of more than 50 tiles, in memory where there is some."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as work:
        yield Bench(Path(work) / "bench", 51)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("small") / "bench", 6, options=["--jobs", "1"])


def test_kills_at_random_moments(large: Bench) -> None:
    assert kill_often(large, 12).kills >= 12


@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
def test_faults_at_calls_of_the_system(small: Bench, force: bool) -> None:
    if not faults.is_possible():
        pytest.skip("strace is not installed")
    older, arguments = (faults.older_split(small), ["--force"]) if force else (None, [])
    calls = faults.calls_of(small, *arguments, older=older)
    chosen = [*faults.every_fault(calls, 2)]
    met = faults.Faults()
    for fault in chosen[force :: len(chosen) // 12 | 1]:
        faults.meet(small, fault, met, *arguments, older=older)
    assert sum(met.kinds.values()) > 8
    assert met.kinds["KILL"]
    assert met.codes[f"exit code {REFUSED}"]


def test_full_disks(large: Bench) -> None:
    if not disks.is_possible(large.work / "try"):
        pytest.skip("mounting a file system is not permitted")
    assert disks.fill(large, 3).kept == 3 - 1


def wait_for_tiles(bench: Bench) -> None:
    """Wait until a run has finished some."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 1000 for path in bench.out.parent.glob(".out.partial-*/journal")):
        assert time.monotonic() < deadline


@pytest.fixture
def bench(small: Bench) -> Bench:
    small.begin()
    return small


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_says_how_to_go_on(large: Bench, number: signal.Signals) -> None:
    large.begin()
    process = large.start("--json")
    wait_for_tiles(large)
    os.kill(process.pid, number)
    ended = large.finish(process)
    assert ended.code == INTERRUPTED
    assert "interrupted; " in ended.said
    total = sum(path.stat().st_size for path in (large.work / "reference").glob("*.safetensors"))
    assert f" of {total} bytes are kept: the same command goes on from there" in ended.said
    assert "--no-resume starts over" in ended.said
    assert not large.check_nothing_half()
    again = large.check_rerun()
    assert ended.nbytes + again.nbytes < 1.2 * large.nbytes


def test_starting_over_is_asked_for(large: Bench) -> None:
    large.begin()
    process = large.start()
    wait_for_tiles(large)
    os.kill(process.pid, signal.SIGKILL)
    large.finish(process)
    assert large.check_rerun("--no-resume").nbytes >= large.nbytes


def test_another_split_starts_over(large: Bench) -> None:
    """What is left of another plan, or of a source that has changed, is of no use."""
    large.begin()
    process = large.start("--self-contained")
    wait_for_tiles(large)
    os.kill(process.pid, signal.SIGKILL)
    large.finish(process)
    assert large.check_rerun().nbytes >= large.nbytes


def test_a_file_system_that_is_mounted_read_only(bench: Bench) -> None:
    place = bench.out.parent
    if not disks.is_possible(bench.work / "try"):
        pytest.skip("mounting a file system is not permitted")
    with disks.mounted(place, 1 << 26):
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        ended = bench.finish(bench.start())
        assert ended.code == REFUSED
        assert f"{place} is on a file system that is mounted read-only" in ended.said


def test_a_source_that_cannot_be_read(bench: Bench) -> None:
    """An error of the disk names the file; what was made is kept, since the source has not changed."""
    if not faults.is_possible():
        pytest.skip("strace is not installed")
    wrapper = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=preadv,preadv2",
        "-e",
        "inject=preadv,preadv2:error=EIO:when=10",
    ]
    ended = bench.finish(bench.start(wrapper=wrapper))
    assert ended.code == 3
    assert f"{bench.work / 'model' / 'model.safetensors'}: cannot be read at byte" in ended.said
    assert os.strerror(errno.EIO) in ended.said
    assert "bytes are kept" in ended.said
    assert bench.check_rerun().nbytes < bench.nbytes


def test_a_source_that_shrinks(tmp_path: Path) -> None:
    """While it is read: the sizes are told, and what was made of it is removed."""
    bench = Bench(tmp_path / "bench", 51)
    bench.begin()
    path = bench.work / "model" / "model.safetensors"
    before = path.stat().st_size
    process = bench.start()
    wait_for_tiles(bench)
    os.truncate(path, 1 << 20)
    ended = bench.finish(process)
    assert ended.code == 3
    assert f"{path}: became shorter while it was read: ends at byte {1 << 20}, {before} expected" in ended.said
    assert [*bench.out.parent.iterdir()] == []
