"""The engine on random tensors, in bands of a few bytes, against numpy slices; and its hashes against xxhash."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from manifests.errors import CheckpointError, OutputError
from manifests.manifest import Link, Part, Tensor
from manifests.placement import PARTIAL, REPLICATED, Cut, Mesh, Placement
from manifests.runs import Run, whole
from reshard import engine, tiles
from reshard.engine import run_program
from reshard.engine.boxes import boxes, natural_grain, whole_box
from reshard.engine.limits import Limits
from reshard.moves import Place, build_input, build_program, merge_moves, split_moves
from reshard.program import Gather, Input, Move, Program, Scatter
from reshard.proof import check_program
from reshard.recipes.lazy import Lazy, concatenate, stack
from tests.checkpoints import mentions

CELLS = {"U8": (1, 1), "BF16": (1, 2), "F32": (1, 4), "C64": (1, 8), "F4": (2, 1), "F6_E3M2": (4, 3)}
"""For every dtype the elements and the bytes of the least piece that can be cut out."""

Cutter = Callable[[NDArray, int], NDArray]


class Case(NamedTuple):
    """A tensor of the running model: made of sources, and cut for every rank by numpy."""

    tensor: Tensor
    sources: dict[str, NDArray]
    parts: list[NDArray]


def cells(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> NDArray:
    nbytes = CELLS[dtype][1]
    return np.frombuffer(rng.randbytes(prod(shape) * nbytes), f"V{nbytes}").reshape(shape)


def elements(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    per_cell = CELLS[dtype][0]
    return (*shape[:-1], shape[-1] * per_cell) if shape and per_cell > 1 else shape


def gathered(
    rng: random.Random, name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[Lazy, dict[str, NDArray], NDArray]:
    """Return a tensor of this shape, made in one of the ways of recipes, with its sources and its value."""
    kind = rng.choice(("as it is", "as it is", "transposed", "stacked", "joined", "seen under another shape"))
    dim = rng.randrange(len(shape)) if shape else 0
    # A scalar has no cell of several elements.
    if kind == "stacked" and len(shape) > (CELLS[dtype][0] > 1) and 0 < shape[dim] <= 4:
        pieces = [gathered(rng, f"{name}.{i}", dtype, shape[:dim] + shape[dim + 1 :]) for i in range(shape[dim])]
        lazy, join = stack([piece[0] for piece in pieces], dim, name), np.stack
    elif kind == "joined" and shape and shape[dim] > 1:
        at = rng.randrange(1, shape[dim])
        sizes = [at, shape[dim] - at]
        pieces = [
            gathered(rng, f"{name}.{i}", dtype, (*shape[:dim], size, *shape[dim + 1 :])) for i, size in enumerate(sizes)
        ]
        lazy, join = concatenate([piece[0] for piece in pieces], dim, name), np.concatenate
    elif kind == "seen under another shape" and CELLS[dtype][0] == 1 and shape:
        value = cells(rng, dtype, shape)
        links = tuple(Link(at, at, whole(size)) for at, size in enumerate(shape))
        return (
            Lazy(dtype, shape, (Part(name, links, shape),)),
            {name: value.reshape(prod(shape[:dim]), prod(shape[dim:]))},
            value,
        )
    else:
        order = list(range(len(shape)))
        if kind == "transposed":
            rng.shuffle(order)
        source = cells(rng, dtype, tuple(shape[dim] for dim in order))
        links = tuple(Link(src, dst, whole(shape[dst])) for src, dst in enumerate(order))
        return Lazy(dtype, shape, (Part(name, links),)), {name: source}, source.transpose(np.argsort(order))
    sources: dict[str, NDArray] = {}
    for piece in pieces:
        sources |= piece[1]
    return lazy, sources, join([piece[2] for piece in pieces], dim)


def cut(rng: random.Random, dtype: str, world: int) -> tuple[tuple[int, ...], Placement, Cutter]:
    """Return a shape in cells, a placement of it, and how numpy takes a rank's part."""
    ndim = rng.randint(1, 4)
    shape = [rng.randint(1, 6) for _ in range(ndim)]
    dim = rng.randrange(ndim)
    outer, inner, each = rng.randint(1, 3), rng.randint(1, 2), rng.randint(0 if rng.random() < 0.1 else 1, 3)
    scale = CELLS[dtype][0] if dim == ndim - 1 else 1
    kind = rng.choice(("strided", "strided", "blocks", "heads", "fused heads", "two dims"))
    if kind == "strided":
        shape[dim] = outer * world * each * inner
        placement = Placement((Cut(dim, f"({outer}, {world * each}*, {inner * scale})"),), (("tp", world),))

        def take(x: NDArray, rank: int) -> NDArray:
            moved = np.moveaxis(x, dim, 0)
            wide = moved.reshape(outer, world, each, inner, *moved.shape[1:])[:, rank]
            return np.moveaxis(wide.reshape(outer * each * inner, *moved.shape[1:]), 0, dim)

    elif kind == "blocks":
        sizes = [world * rng.randint(1, 2) for _ in range(rng.randint(2, 4))]
        shape[dim] = sum(sizes)
        placement = Placement((Cut(dim, " + ".join(f"({size * scale}*)" for size in sizes)),), (("tp", world),))

        def take(x: NDArray, rank: int) -> NDArray:
            blocks = np.split(x, np.cumsum(sizes)[:-1], dim)
            return np.concatenate([np.split(block, world, dim)[rank] for block in blocks], dim)

    elif kind == "heads":
        rep = rng.choice([rep for rep in (1, 2, 3) if world % rep == 0])
        kv = world // rep
        shape[dim] = kv * each * inner
        mesh: Mesh = (("kv", kv), ("rep", rep))
        placement = Placement((Cut(dim, f"({kv * each}@kv, {inner * scale})"),), mesh)

        def take(x: NDArray, rank: int) -> NDArray:
            return np.split(x, kv, dim)[rank // rep]

    elif kind == "fused heads":
        rep = rng.choice([rep for rep in (1, 2, 3) if world % rep == 0])
        kv, group = world // rep, rep * rng.randint(1, 2)
        sizes = [kv * each * group * inner, kv * each * inner]
        shape[dim] = sum(sizes) + 2 * world
        text = f"({kv * each}@kv, {group}@rep, {inner * scale}) + ({kv * each}@kv, {inner * scale})"
        text += f" + ({2 * world * scale}*)"
        placement = Placement((Cut(dim, text),), (("kv", kv), ("rep", rep)))

        def take(x: NDArray, rank: int) -> NDArray:
            queries, keys, rows = np.split(np.moveaxis(x, dim, 0), np.cumsum(sizes))
            queries = queries.reshape(kv, each, rep, group // rep * inner, *queries.shape[1:])[
                rank // rep, :, rank % rep
            ]
            keys = np.split(keys, kv)[rank // rep]
            rows = np.split(rows, world)[rank]
            return np.moveaxis(
                np.concatenate([queries.reshape(sizes[0] // world, *rows.shape[1:]), keys, rows]), 0, dim
            )

    else:
        shape += [rng.randint(1, 3)] if ndim == 1 else []
        a = rng.choice([a for a in (1, 2, 3) if world % a == 0])
        mesh = (("a", a), ("b", world // a))
        shape[0], shape[1] = a * each, (world // a) * inner
        scale = CELLS[dtype][0] if len(shape) == 2 else 1
        cuts = (Cut(0, f"({shape[0]}@a)"), Cut(1, f"({shape[1] * scale}@b)"))
        placement = Placement(cuts, mesh)

        def take(x: NDArray, rank: int) -> NDArray:
            return np.split(np.split(x, a)[rank // (world // a)], world // a, 1)[rank % (world // a)]

    return tuple(shape), placement, take


def random_case(rng: random.Random, name: str, world: int) -> Case:
    dtype = rng.choice(list(CELLS))
    kind = rng.choice(("cut", "cut", "cut", "whole", "partial"))
    if kind == "cut":
        shape, placement, take = cut(rng, dtype, world)
    else:
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(rng.randint(1, 4)))
        shape = () if CELLS[dtype][0] == 1 and rng.random() < 0.2 else shape
        placement, take = (REPLICATED if kind == "whole" else PARTIAL), lambda x, _: x
    lazy, sources, value = gathered(rng, name, dtype, shape)
    ranks = range(1) if kind == "partial" else range(world)
    return Case(
        Tensor(dtype, elements(dtype, shape), placement, lazy.parts), sources, [take(value, rank) for rank in ranks]
    )


SEEDS = range(25)


class Job(NamedTuple):
    """A program with the files that it reads, and what the files that it writes must hold."""

    program: Program
    places: dict[str, list[Place]]
    inputs: list[Path]
    outputs: list[Path]
    expected: list[bytes]
    sources: dict[str, bytes]


def build_job(rng: random.Random, cases: dict[str, Case], world: int, folder: Path) -> Job:
    """Lay the sources out in two files with gaps, the parts in one file for every rank."""
    files = [bytearray(rng.randbytes(rng.randint(0, 9))) for _ in range(2)]
    inputs: dict[str, Input] = {}
    sources = {name: (case.tensor.dtype, x) for case in cases.values() for name, x in case.sources.items()}
    for name in rng.sample(list(sources), len(sources)):
        dtype, x = sources[name]
        file = rng.randrange(2)
        inputs[name] = build_input(name, dtype, elements(dtype, x.shape), file, len(files[file]))
        files[file] += x.tobytes() + rng.randbytes(rng.randint(0, 3))
    expected = [bytearray(b"header") for _ in range(world)]
    places: dict[str, list[Place]] = {name: [] for name in cases}
    for name, case in cases.items():
        for rank, part in enumerate(case.parts):
            places[name].append(Place(rank, len(expected[rank]), rank))
            expected[rank] += part.tobytes()
    moves = split_moves({name: case.tensor for name, case in cases.items()}, inputs, places)
    paths = [folder / f"in-{i}" for i in range(2)], [folder / f"out-{i}" for i in range(world)]
    for path, content in zip(paths[0], files, strict=True):
        path.write_bytes(content)
    for path, content in zip(paths[1], expected, strict=True):
        path.write_bytes(b"header".ljust(len(content), b"\xee"))
    program = build_program([path.name for path in paths[0]], [path.name for path in paths[1]], moves)
    return Job(
        program, places, *paths, [bytes(e) for e in expected], {name: x.tobytes() for name, (_, x) in sources.items()}
    )


SMALL = [
    Limits(1, 1, 1),
    Limits(7, 16, 60),
    Limits(16, 16, 1 << 20),
    Limits(64, 64, 64),
    Limits(1 << 20, 1 << 22, 1 << 26),
]


@pytest.fixture(params=SMALL, ids=lambda limits: f"bands of {limits.band}, held {limits.held}")
def small_bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(engine, "limits_of", lambda *_: request.param)
    return request.param


def tiles_of(content: bytes, tile_nbytes: int) -> tuple[str, ...]:
    return tuple(
        xxhash.xxh3_128_hexdigest(content[at : at + tile_nbytes]) for at in range(0, len(content), tile_nbytes)
    )


def test_random_programs(small_bands: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tile_nbytes = 16
    monkeypatch.setattr(tiles, "TILE_NBYTES", tile_nbytes)
    for seed in SEEDS:
        rng = random.Random(seed)
        world = rng.choice((1, 2, 3, 4, 6))
        cases = {f"t{i}": random_case(rng, f"t{i}", world) for i in range(6)}
        job = build_job(rng, cases, world, tmp_path)
        check_program(job.program, [len(content) for content in job.expected], [len(b"header")] * world)
        finished: list[int] = []
        hashes = run_program(job.program, job.inputs, job.outputs, jobs=rng.choice((1, 3)), progress=finished.append)
        for path, expected in zip(job.outputs, job.expected, strict=True):
            assert path.read_bytes() == expected, (seed, path.name)
        read = {source.name: tiles for source, tiles in hashes.read.items()}
        assert read == {name: tiles_of(content, tile_nbytes) for name, content in job.sources.items()}, seed
        for move, written in zip(job.program.moves, hashes.written, strict=True):
            parts = [part.tobytes() for part in cases[move.name].parts]
            assert list(written) == [tiles_of(part, tile_nbytes) for part in parts], (seed, move.name)
        assert sum(finished) == job.program.nbytes_read == sum(map(len, job.sources.values()))


def test_random_programs_taken_back(small_bands: int, tmp_path: Path) -> None:
    """From the parts alone, the first of equal ones, back to the sources."""
    for seed in SEEDS:
        rng = random.Random(seed)
        world = rng.choice((1, 2, 3, 4, 6))
        cases = {f"t{i}": random_case(rng, f"t{i}", world) for i in range(6)}
        job = build_job(rng, cases, world, tmp_path)
        for path, content in zip(job.outputs, job.expected, strict=True):
            path.write_bytes(content)
        sources: dict[str, tuple[str, tuple[int, ...]]] = {}
        targets: dict[str, Place] = {}
        end = 0
        for case in cases.values():
            for name, x in case.sources.items():
                sources[name] = case.tensor.dtype, elements(case.tensor.dtype, x.shape)
                targets[name] = Place(0, end, 0)
                end += x.nbytes
        (tmp_path / "back").write_bytes(bytes(end))
        moves = merge_moves({name: case.tensor for name, case in cases.items()}, job.places, sources, targets)
        program = build_program([path.name for path in job.outputs], ["back"], moves)
        check_program(program, [end], [0], whole_inputs=False)
        hashes = run_program(program, job.outputs, [tmp_path / "back"])
        assert (tmp_path / "back").read_bytes() == b"".join(job.sources[name] for name in targets), seed
        assert [written for (written,) in hashes.written] == [
            tiles_of(job.sources[name], tiles.TILE_NBYTES) for name in targets
        ], seed


def test_a_transposed_source_is_read_in_any_order_and_hashed_in_its_own(small_bands: int, tmp_path: Path) -> None:
    x = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    (tmp_path / "in").write_bytes(x.tobytes())
    (tmp_path / "out").write_bytes(bytes(x.nbytes))
    tensor = Tensor("F32", (5, 7), REPLICATED, (Part("x", (Link(0, 1, whole(7)), Link(1, 0, whole(5)))),))
    moves = split_moves({"t": tensor}, {"x": build_input("x", "F32", (7, 5), 0, 0)}, {"t": [Place(0, 0, 0)]})
    hashes = run_program(Program(("in",), ("out",), moves), [tmp_path / "in"], [tmp_path / "out"])
    assert (tmp_path / "out").read_bytes() == x.T.tobytes()
    assert list(hashes.read.values()) == [(xxhash.xxh3_128_hexdigest(x.tobytes()),)]
    assert tuple(hashes.written) == (((xxhash.xxh3_128_hexdigest(x.T.tobytes()),),),)


def test_a_source_that_several_tensors_share_is_hashed_once(small_bands: int, tmp_path: Path) -> None:
    """A stacked tensor taken apart, as merging does it: an entry of a dimension becomes a tensor."""
    x = np.arange(3 * 4 * 2, dtype=np.int16).reshape(3, 4, 2)
    (tmp_path / "in").write_bytes(x.tobytes())
    (tmp_path / "out").write_bytes(bytes(x.nbytes))
    source = Input("x", 0, 0, (3, 4, 2), 2)
    moves = tuple(
        Move(
            f"e{i}",
            (4, 2),
            2,
            (Gather(source, (Link(0, None, (Run(i, 0, 1),)), Link(1, 0, whole(4)), Link(2, 1, whole(2)))),),
            (Scatter(0, 16 * (2 - i), (whole(4), whole(2))),),
        )
        for i in range(3)
    )
    hashes = run_program(Program(("in",), ("out",), moves), [tmp_path / "in"], [tmp_path / "out"], jobs=3)
    assert (tmp_path / "out").read_bytes() == x[::-1].tobytes()
    assert hashes.read == {source: (xxhash.xxh3_128_hexdigest(x.tobytes()),)}


def one_file(folder: Path, nbytes: int = 4000) -> tuple[Program, list[Path], list[Path]]:
    (folder / "in").write_bytes(bytes(nbytes))
    (folder / "out").write_bytes(bytes(nbytes))
    tensor = Tensor("F32", (nbytes // 4,))
    source = build_input("x", "F32", (nbytes // 4,), 0, 0)
    moves = split_moves({"x": tensor}, {"x": source}, {"x": [Place(0, 0, 0)]})
    return Program(("in",), ("out",), moves), [folder / "in"], [folder / "out"]


@pytest.mark.parametrize("left", [0, 1, 3999])
def test_a_source_that_became_shorter(small_bands: int, tmp_path: Path, left: int) -> None:
    program, inputs, outputs = one_file(tmp_path)
    inputs[0].write_bytes(bytes(left))
    with pytest.raises(CheckpointError) as caught:
        run_program(program, inputs, outputs)
    assert mentions(caught.value, inputs[0], "became shorter", f"ends at byte {left}")


def test_a_full_disk_is_the_outputs_fault(tmp_path: Path) -> None:
    program, inputs, _ = one_file(tmp_path)
    with pytest.raises(OutputError) as caught:
        run_program(program, inputs, [Path("/dev/full")])
    assert mentions(caught.value, "/dev/full", "No space left on device")


# Whose fault it is must not be left to whoever catches an OSError.
@pytest.mark.parametrize(("gone", "error"), [("in", CheckpointError), ("out", OutputError)])
def test_a_file_that_is_gone(tmp_path: Path, gone: str, error: type[Exception]) -> None:
    program, inputs, outputs = one_file(tmp_path)
    (tmp_path / gone).unlink()
    with pytest.raises(error) as caught:
        run_program(program, inputs, outputs)
    assert mentions(caught.value, tmp_path / gone)


def test_the_first_failure_ends_a_run_and_closes_its_files(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise KeyError("progress")

    program, inputs, outputs = one_file(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(KeyError):
        run_program(program, inputs, outputs, progress=fail)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def taken_in_boxes(shape: tuple[int, ...], item_nbytes: int, band_nbytes: int) -> Iterator[NDArray[Any]]:
    x = np.arange(prod(shape)).reshape(shape)
    for box in boxes(whole_box(shape), natural_grain(shape, item_nbytes, band_nbytes)):
        yield x[tuple(slice(lo, hi) for lo, hi in box)]


@pytest.mark.parametrize("band_nbytes", [1, 4, 30, 64, 1000])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (1, 1, 5, 1), (2, 1, 3, 2)])
def test_bands_are_pieces_of_a_tensor_in_row_major_order(shape: tuple[int, ...], band_nbytes: int) -> None:
    taken = [box.ravel().tolist() for box in taken_in_boxes(shape, 4, band_nbytes)]
    assert list(chain.from_iterable(taken)) == list(range(prod(shape)))
    assert all(len(box) * 4 <= max(band_nbytes, 4) for box in taken)
