"""A run that ended anywhere is gone on with: the same bytes and hashes as without the end, and little written twice."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manifests.errors import OutputError
from manifests.manifest import Tensor
from reshard import engine, tiles
from reshard.engine import Hashes, batches, chains, files, journal, run_program
from reshard.engine.limits import Limits
from reshard.moves import Place, build_input, build_program, split_moves
from tests.test_engine import Case, Job, build_job, random_case, tiles_of

TILE_NBYTES = 16
LIMITS = [
    Limits(1, 1, 1),
    Limits(7, 16, 60),
    Limits(16, 16, 1 << 20),
    Limits(64, 64, 64),
    Limits(1 << 20, 1 << 22, 1 << 26),
]


@pytest.fixture(params=LIMITS, ids=lambda limits: f"bands of {limits.band}, held {limits.held}", autouse=True)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Small boxes and tiles, each of which is noted."""
    monkeypatch.setattr(engine, "limits_of", lambda *_: request.param)
    monkeypatch.setattr(tiles, "TILE_NBYTES", TILE_NBYTES)
    for module in (chains, journal):
        monkeypatch.setattr(module, "RECORD_NBYTES", 1)
    found: Limits = request.param
    return found


@contextmanager
def writes(monkeypatch: pytest.MonkeyPatch, most: float = float("inf")) -> Iterator[list[int]]:
    """Count the bytes of each write; the disk is full after so many writes."""
    done: list[int] = []

    def counted(call: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, data: Any, offset: int) -> int:
            if len(done) >= most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done.append(call(descriptor, data, offset))
            return done[-1]

        return write

    with monkeypatch.context() as patch:
        for name in ("pwrite", "pwritev"):
            patch.setattr(files.os, name, counted(getattr(os, name)))
        yield done


def random_job(seed: int, folder: Path) -> tuple[Job, dict[str, Case]]:
    rng = random.Random(seed)
    world = rng.choice((1, 2, 3))
    cases = {f"t{i}": random_case(rng, f"t{i}", world) for i in range(6)}
    folder.mkdir(exist_ok=True)
    return build_job(rng, cases, world, folder), cases


def run(job: Job, **options: Any) -> Hashes:
    journal = job.inputs[0].parent / "journal"
    return run_program(job.program, job.inputs, job.outputs, **{"journal": journal, "key": "key", **options})


def check(job: Job, cases: dict[str, Case], hashes: Hashes) -> None:
    for path, expected in zip(job.outputs, job.expected, strict=True):
        assert path.read_bytes() == expected, path.name
    read = {source.name: found for source, found in hashes.read.items()}
    assert read == {name: tiles_of(content, TILE_NBYTES) for name, content in job.sources.items()}
    for move, written in zip(job.program.moves, hashes.written, strict=True):
        assert list(written) == [tiles_of(part.tobytes(), TILE_NBYTES) for part in cases[move.name].parts]


def end_early(job: Job, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Run until a random write fails, or to the end if there are not so many any more."""
    with writes(monkeypatch, int(rng.random() ** 2 * 300)), suppress(OutputError):
        run(job, jobs=rng.choice((1, 3)))


def flip(path: Path, rng: random.Random, begin: int = 0) -> None:
    """Change a random byte of a file."""
    content = bytearray(path.read_bytes())
    if len(content) > begin:
        content[rng.randrange(begin, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


@pytest.mark.parametrize("seed", range(25))
def test_a_run_that_ended_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, limits: Limits
) -> None:
    (job, cases), rng = random_job(seed, tmp_path), random.Random(seed)
    for _ in range(3):
        end_early(job, monkeypatch, rng)
    finished: list[int] = []
    check(job, cases, run(job, progress=finished.append, jobs=rng.choice((1, 3))))
    assert sum(finished) == job.program.nbytes_read
    with writes(monkeypatch) as again:
        check(job, cases, run(job))
    if limits.held >= 1 << 20:
        assert again == [], "what is finished is not written again"


@pytest.mark.parametrize("seed", range(10))
def test_what_is_finished_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """One worker that fails loses the box that it was at, and no more."""
    monkeypatch.setattr(engine, "limits_of", lambda *_: Limits(16, 16, 1 << 20))
    (job, cases), rng = random_job(seed, tmp_path), random.Random(seed)
    with writes(monkeypatch, rng.randrange(5, 40)) as first, suppress(OutputError):
        run(job, jobs=1)
    with writes(monkeypatch) as second:
        check(job, cases, run(job, jobs=1))
    part_nbytes = sum(part.nbytes for case in cases.values() for part in case.parts)
    largest = max(sum(part.nbytes for part in case.parts) for case in cases.values())
    assert part_nbytes <= sum(first) + sum(second) <= part_nbytes + largest


@pytest.mark.parametrize("seed", range(25))
def test_what_differs_from_its_hash_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As after a crash of the machine: the journal tells of bytes that are not on the disk."""
    (job, cases), rng = random_job(seed, tmp_path), random.Random(seed)
    end_early(job, monkeypatch, rng)
    for _ in range(3):
        flip(rng.choice(job.outputs), rng, len(b"header"))
    check(job, cases, run(job))
    flip(rng.choice(job.outputs), rng, len(b"header"))
    check(job, cases, run(job))


@pytest.mark.parametrize("seed", range(25))
def test_a_journal_that_is_damaged_counts_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    (job, cases), rng = random_job(seed, tmp_path), random.Random(seed)
    path = tmp_path / "journal"
    end_early(job, monkeypatch, rng)
    if seed % 2:
        flip(path, rng)
    else:
        os.truncate(path, rng.randrange(path.stat().st_size))
    check(job, cases, run(job))


def one_tensor(folder: Path) -> tuple[Job, dict[str, Case]]:
    """A tensor of 20 tiles, copied to one file."""
    content = random.Random(0).randbytes(20 * TILE_NBYTES)
    for name in ("in", "out"):
        (folder / name).write_bytes(content if name == "in" else bytes(len(content)))
    tensor, source = Tensor("U8", (len(content),)), build_input("x", "U8", (len(content),), 0, 0)
    program = build_program(["in"], ["out"], split_moves({"x": tensor}, {"x": source}, {"x": [Place(0, 0, 0)]}))
    case = Case(tensor, {}, [np.frombuffer(content, np.uint8)])
    return Job(program, {}, [folder / "in"], [folder / "out"], [content], {"x": content}), {"x": case}


@pytest.mark.parametrize("name", ["in", "out"])
def test_what_was_begun_of_a_tile_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bytes for which no tile's hash answers yet; a source that differs is read anew."""
    monkeypatch.setattr(engine, "limits_of", lambda *_: Limits(10, 10, 100))
    monkeypatch.setattr(batches, "SMALL_NBYTES", 0)
    job, cases = one_tensor(tmp_path)
    with writes(monkeypatch, 13) as first, pytest.raises(OutputError):
        run(job, jobs=1)
    assert sum(first) == 8 * TILE_NBYTES + 2
    content = bytearray((tmp_path / name).read_bytes())
    content[8 * TILE_NBYTES] ^= 1
    (tmp_path / name).write_bytes(content)
    if name == "in":
        job, cases = (
            job._replace(expected=[bytes(content)], sources={"x": bytes(content)}),
            {"x": cases["x"]._replace(parts=[np.frombuffer(content, np.uint8)])},
        )
    with writes(monkeypatch) as again:
        check(job, cases, run(job, jobs=1))
    assert sum(again) == 20 * TILE_NBYTES


@pytest.mark.parametrize("seed", range(10))
def test_in_other_boxes_what_was_begun_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    (job, cases), rng = random_job(seed, tmp_path), random.Random(seed)
    end_early(job, monkeypatch, rng)
    monkeypatch.setattr(engine, "limits_of", lambda *_: Limits(9, 18, 90))
    check(job, cases, run(job))


@pytest.mark.parametrize("change", ["key", "program", "limits", "none"])
def test_a_journal_of_another_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    job, cases = random_job(1, tmp_path)
    run(job)
    for path, expected in zip(job.outputs, job.expected, strict=True):
        path.write_bytes(b"header".ljust(len(expected), b"\xee"))
    if change == "limits":
        monkeypatch.setattr(engine, "limits_of", lambda *_: Limits(9, 18, 90))
    if change == "program":
        moves = [move._replace(name=f"{move.name} of another") for move in job.program.moves]
        run_program(
            job.program._replace(moves=tuple(moves)), job.inputs, job.outputs, journal=tmp_path / "journal", key="key"
        )
    elif change == "none":
        (tmp_path / "journal").unlink()
        check(job, cases, run(job))
    else:
        check(job, cases, run(job, key="another" if change == "key" else "key"))
    for path, expected in zip(job.outputs, job.expected, strict=True):
        assert path.read_bytes() == expected


def test_a_journal_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    job, cases = random_job(2, tmp_path)
    check(job, cases, run(job, journal=tmp_path / "none" / "journal"))
