"""What the engine costs: each byte read and written once, in a bounded memory; counted at the calls of the system."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from manifests.errors import CheckpointError
from manifests.manifest import Link, Part, Tensor
from manifests.placement import REPLICATED, Cut, Placement
from manifests.runs import Run, whole
from reshard.engine import Hashes, files, run_program
from reshard.engine.copying import copy_strided
from reshard.engine.limits import LEAST_BUDGET_NBYTES, limits_of
from reshard.moves import Place, build_input, build_program, split_moves
from reshard.program import Copy, Loop
from tests.test_engine import tiles_of

TP2 = (("tp", 2),)
MIB = 1 << 20
ROWS, COLUMNS = 768, 1000


class Calls:
    """Counts what is read and written, in pieces of 500 bytes by file and place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[tuple[str, int]] = Counter()
        self.written: Counter[tuple[str, int]] = Counter()
        self.reads: list[int] = []
        """Bytes of each read."""
        for name, counter in (("preadv", self.read), ("pwrite", self.written), ("pwritev", self.written)):
            monkeypatch.setattr(files.os, name, self._counted(getattr(os, name), counter))

    def _counted(self, call: Callable[..., int], counter: Counter[tuple[str, int]]) -> Callable[..., int]:
        def count(descriptor: int, data: Any, offset: int) -> int:
            done = call(descriptor, data, offset)
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            counter.update((name, at) for at in range(offset // 500, (offset + done) // 500))
            if counter is self.read:
                self.reads.append(done)
            return done

        return count


class Work(NamedTuple):
    """Tensors made of sources, all float32 in one file in this order, with what their parts must be."""

    tensors: dict[str, Tensor]
    sources: dict[str, NDArray]
    expected: dict[str, list[NDArray]]


def numbers(*shape: int, start: int = 0) -> NDArray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def placed(dim: int, axis: str) -> Placement:
    return Placement((Cut(dim, axis),), TP2)


def halves(x: NDArray, dim: int) -> list[NDArray]:
    return np.split(x, 2, dim)


def rowwise() -> Work:
    x = numbers(ROWS, COLUMNS)
    return Work({"x": Tensor("F32", x.shape, placed(1, f"({COLUMNS}*)"))}, {"x": x}, {"x": halves(x, 1)})


def many_small() -> Work:
    sources = {f"x{i}": numbers(20, 100, start=i) for i in range(500)}
    kinds = [placed(0, "(20*)"), placed(1, "(100*)"), REPLICATED]
    tensors = {name: Tensor("F32", (20, 100), kinds[i % 3]) for i, name in enumerate(sources)}
    return Work(
        tensors,
        sources,
        {name: [x, x] if i % 3 == 2 else halves(x, i % 3) for i, (name, x) in enumerate(sources.items())},
    )


def stacked() -> Work:
    """Two projections of experts, which lie in the order of the experts' numbers as texts."""
    order = sorted(range(12), key=str)
    sources = {f"{e}.{w}": numbers(100, 500, start=e) for e in order for w in ("w1", "w3")}
    parts = tuple(
        Part(f"{e}.{w}", (Link(0, 1, (Run(0, 100 * at, 100),)), Link(1, 2, whole(500)), Link(None, 0, (Run(0, e, 1),))))
        for e in range(12)
        for at, w in enumerate(("w1", "w3"))
    )
    made = np.stack([np.concatenate([sources[f"{e}.w1"], sources[f"{e}.w3"]]) for e in range(12)])
    w1, w3 = np.split(made, 2, 1)
    expected = [np.concatenate(pair, 1) for pair in zip(halves(w1, 1), halves(w3, 1), strict=True)]
    return Work({"x": Tensor("F32", made.shape, placed(1, "(2, 100*)"), parts)}, sources, {"x": expected})


def transposed() -> Work:
    x = numbers(ROWS, COLUMNS)
    part = Part("x", (Link(0, 1, whole(ROWS)), Link(1, 0, whole(COLUMNS))))
    tensor = Tensor("F32", (COLUMNS, ROWS), placed(0, f"({COLUMNS}*)"), (part,))
    return Work({"x": tensor}, {"x": x}, {"x": halves(x.T, 0)})


def interleaved() -> Work:
    """Even columns, then odd ones."""
    x = numbers(ROWS, COLUMNS)
    half = COLUMNS // 2
    runs = (Run(0, 0, 1, half, 2, 1), Run(1, half, 1, half, 2, 1))
    tensor = Tensor("F32", x.shape, placed(0, f"({ROWS}*)"), (Part("x", (Link(0, 0, whole(ROWS)), Link(1, 1, runs))),))
    return Work({"x": tensor}, {"x": x}, {"x": halves(np.concatenate([x[:, ::2], x[:, 1::2]], 1), 0)})


def taken_apart() -> Work:
    """Queries, keys and values of one head after another, as three tensors."""
    heads, size = 8, ROWS // 24
    x = numbers(ROWS, COLUMNS)
    tensors, expected = {}, {}
    for at, name in enumerate("qkv"):
        runs = (Run(at * size, 0, size, heads, 3 * size, size),)
        tensors[name] = Tensor(
            "F32", (heads * size, COLUMNS), placed(0, f"({heads * size}*)"),
            (Part("x", (Link(0, 0, runs), Link(1, 1, whole(COLUMNS)))),),
        )  # fmt: skip
        expected[name] = halves(x.reshape(heads, 3, size, COLUMNS)[:, at].reshape(-1, COLUMNS), 0)
    return Work(tensors, {"x": x}, expected)


def carry_out(work: Work, folder: Path, **options: int) -> tuple[Hashes, list[Path]]:
    """Run the program of the work and check what it writes and hashes."""
    content = b"".join(x.tobytes() for x in work.sources.values())
    (folder / "in").write_bytes(content)
    inputs, offset = {}, 0
    for name, x in work.sources.items():
        inputs[name] = build_input(name, "F32", x.shape, 0, offset)
        offset += x.nbytes
    places: dict[str, list[Place]] = {name: [] for name in work.tensors}
    ends = [0, 0]
    for name, parts in work.expected.items():
        for rank, part in enumerate(parts):
            places[name].append(Place(rank, ends[rank], rank))
            ends[rank] += part.nbytes
    outputs = [folder / "out-0", folder / "out-1"]
    for path, end in zip(outputs, ends, strict=True):
        path.write_bytes(b"\xee" * end)
    program = build_program(["in"], ["out-0", "out-1"], split_moves(work.tensors, inputs, places))
    hashes = run_program(program, [folder / "in"], outputs, **options)
    for rank, path in enumerate(outputs):
        assert path.read_bytes() == b"".join(parts[rank].tobytes() for parts in work.expected.values())
    for source, tiles in hashes.read.items():
        assert tiles == tiles_of(work.sources[source.name].tobytes(), 4 * MIB)
    for move, written in zip(program.moves, hashes.written, strict=True):
        assert written == tuple(tiles_of(part.tobytes(), 4 * MIB) for part in work.expected[move.name])
    return hashes, outputs


WORKS = [rowwise, many_small, stacked, transposed, interleaved, taken_apart]


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_each_byte_is_read_once_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Work], jobs: int
) -> None:
    calls = Calls(monkeypatch)
    carry_out(work(), tmp_path, jobs=jobs)
    total = sum(x.nbytes for x in work().sources.values())
    assert sum(calls.reads) == total
    assert set(calls.read.values()) == set(calls.written.values()) == {1}


def test_reads_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of small tensors, of strided ones, and of those that several tensors share."""
    for work in (rowwise, many_small, interleaved, taken_apart):
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            carry_out(work(), tmp_path)
            assert len(calls.reads) <= 2 + sum(calls.reads) // (MIB // 2), work.__name__


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_transposed_tensor_larger_than_the_budget_is_read_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    rows, columns = 2500, 2000
    x = numbers(rows, columns)
    assert x.nbytes > LEAST_BUDGET_NBYTES
    part = Part("x", (Link(0, 1, whole(rows)), Link(1, 0, whole(columns))))
    tensor = Tensor("F32", (columns, rows), placed(1, f"({rows}*)"), (part,))
    calls = Calls(monkeypatch)
    carry_out(Work({"x": tensor}, {"x": x}, {"x": halves(x.T, 1)}), tmp_path, jobs=jobs, memory=LEAST_BUDGET_NBYTES)
    assert sum(calls.reads) <= 2 * x.nbytes


BUDGET = """
import resource, sys
from pathlib import Path
import numpy as np
from manifests.manifest import Link, Part, Tensor
from manifests.placement import Cut, Placement
from manifests.runs import whole
from reshard.engine import batches, run_program
from reshard.moves import Place, build_input, build_program, split_moves
folder, kind, memory = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rows, columns = 8000, 4000
(folder / "in").touch()
for name in ("in", "out-0", "out-1"):
    (folder / name).touch()
    import os
    os.truncate(folder / name, rows * columns * 2 // (1 if name == "in" else 2))
links = {"transposed": (Link(0, 1, whole(rows)), Link(1, 0, whole(columns)))}.get(kind, ())
shape = (columns, rows) if links else (rows, columns)
tensor = Tensor("F16", shape, Placement((Cut(1, f"({shape[1]}*)"),), (("tp", 2),)), (Part("x", links),))
moves = split_moves(
    {"x": tensor}, {"x": build_input("x", "F16", (rows, columns), 0, 0)}, {"x": [Place(0, 0, 0), Place(1, 0, 1)]}
)
program = build_program(["in"], ["out-0", "out-1"], moves)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_program(program, [folder / "in"], [folder / "out-0", folder / "out-1"], memory=memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", ["rowwise", "transposed"])
@pytest.mark.parametrize("memory", [16 * MIB, 64 * MIB])
def test_the_budget_holds(tmp_path: Path, kind: str, memory: int) -> None:
    """A tensor of 61 MiB; what the resident memory grows by at its peak, in a process of its own."""
    command = [sys.executable, "-c", BUDGET, str(tmp_path), kind, str(memory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) << 10 < memory


def test_limits_stay_within_their_budget() -> None:
    for jobs in (1, 2, 8, 64):
        for budget in (LEAST_BUDGET_NBYTES, 100 * MIB, 256 * MIB, 10 << 30):
            limits = limits_of(budget, jobs)
            assert limits.band <= limits.unit <= limits.held
            assert 3 * limits.unit * jobs + limits.held <= budget


@pytest.mark.parametrize("item", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 5), (64, 64), (130, 33), (33, 130), (600, 257), (40_000, 19), (19, 40_000)]
)
def test_a_transpose_by_panels_is_a_transpose(item: int, shape: Sequence[int]) -> None:
    rows, columns = shape
    rng = np.random.default_rng(0)
    for pad in (0, 3):  # of a part of a wider tensor, which begins anywhere
        width, height = columns + pad, rows + pad
        source = rng.integers(0, 256, (rows * width + pad) * item, dtype=np.uint8)
        target = np.zeros((columns * height + pad) * item, np.uint8)
        copy = Copy(pad, pad, (Loop(rows, width, 1), Loop(columns, 1, height)))
        copy_strided(source, target, copy, item)
        taken = source[pad * item :].reshape(rows, width, item)[:, :columns]
        made = target[pad * item :].reshape(columns, height, item)
        assert np.array_equal(made[:, :rows], taken.transpose(1, 0, 2))
        assert not made[:, rows:].any()


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(3, 300, 200), (70, 90, 9), (300, 5, 6)])
def test_a_transpose_of_each_of_several(item: int, shape: tuple[int, int, int]) -> None:
    count, rows, columns = shape
    source = np.random.default_rng(0).integers(0, 256, count * rows * columns * item, dtype=np.uint8)
    target = np.zeros_like(source)
    loops = (Loop(count, rows * columns, rows * columns), Loop(rows, columns, 1), Loop(columns, 1, rows))
    copy_strided(source, target, Copy(0, 0, loops), item)
    made = target.reshape(count, columns, rows, item)
    assert np.array_equal(made, source.reshape(*shape, item).transpose(0, 2, 1, 3))


def test_a_failure_ends_workers_that_wait_for_each_other(tmp_path: Path) -> None:
    work = transposed()
    (tmp_path / "in").write_bytes(b"")
    moves = split_moves(
        work.tensors,
        {"x": build_input("x", "F32", (ROWS, COLUMNS), 0, 0)},
        {"x": [Place(0, 0, 0), Place(1, 0, 1)]},
    )
    for name in ("out-0", "out-1"):
        (tmp_path / name).write_bytes(b"")
    paths = [tmp_path / "out-0", tmp_path / "out-1"]
    for jobs in (1, 2, 7):
        with pytest.raises(CheckpointError):
            run_program(build_program(["in"], ["out-0", "out-1"], moves), [tmp_path / "in"], paths, jobs=jobs)
