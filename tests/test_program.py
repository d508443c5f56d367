"""The program: what it says it moves, carried out by hand, and every way in which it can be wrong."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from manifests.errors import ReshardError
from manifests.manifest import Link, Part, Tensor
from manifests.placement import Cut, Placement
from manifests.runs import Run, whole
from reshard.moves import Place, build_input, build_program, split_moves
from reshard.program import (
    Copy,
    Gather,
    Input,
    Loop,
    Move,
    Program,
    Scatter,
    copies,
    identity_links,
    invert_links,
    row_major,
    strided,
)
from reshard.proof import check_program
from tests.checkpoints import mentions

TP2 = (("tp", 2),)


def carry_out(copy: Copy, source: NDArray, target: NDArray) -> None:
    """Copy atom by atom."""
    for at in product(*(range(loop.size) for loop in copy.loops)):
        src = copy.src + sum(i * loop.src_step for i, loop in zip(at, copy.loops, strict=True))
        dst = copy.dst + sum(i * loop.dst_step for i, loop in zip(at, copy.loops, strict=True))
        assert target[dst] == -1
        target[dst] = source[src]


def placed(axis: str, dim: int) -> Placement:
    return Placement((Cut(dim, axis),), TP2)


X = np.arange(4 * 6)
BOTH = (Link(0, 0, whole(4)), Link(1, 1, whole(6)))
TRANSPOSED = (Link(0, 1, whole(4)), Link(1, 0, whole(6)))

SPLITS: dict[str, tuple[tuple[int, ...], tuple[Link, ...], Placement, Callable[[NDArray, int], NDArray]]] = {
    "rows": ((4, 6), (), placed("(4*)", 0), lambda x, r: x[2 * r : 2 * r + 2]),
    "columns": ((4, 6), (), placed("(6*)", 1), lambda x, r: x[:, 3 * r : 3 * r + 3]),
    "halves of columns": ((4, 6), BOTH, placed("(3, 2*)", 1), lambda x, r: x[:, r::2]),
    "transposed": ((6, 4), TRANSPOSED, placed("(6*)", 0), lambda x, r: x.T[3 * r : 3 * r + 3]),
    "transposed, other dim": ((6, 4), TRANSPOSED, placed("(2, 2*)", 1), lambda x, r: x.T[:, r::2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPLITS)
def test_copies_are_what_numpy_takes(kind: str) -> None:
    shape, links, placement, expected = SPLITS[kind]
    tensor = Tensor("F32", shape, placement, (Part("x", links),) if links else ())
    places = {"x": [Place(rank, 0, rank) for rank in range(2)]}
    (move,) = split_moves({"x": tensor}, {"x": build_input("x", "F32", (4, 6), 0, 0)}, places)
    parts = [np.full(12, -1) for _ in range(2)]
    for _, scatter, copy in copies(move):
        carry_out(copy, X, parts[scatter.file])
    for rank, part in enumerate(parts):
        assert part.tolist() == expected(X.reshape(4, 6), rank).ravel().tolist()


def test_whole_rows_are_one_loop() -> None:
    places = {"x": [Place(0, 0, 0)]}
    tensor = Tensor("F32", (4, 6), placed("(4*)", 0))
    (move,) = split_moves({"x": tensor}, {"x": build_input("x", "F32", (4, 6), 0, 0)}, places)
    assert [copy for _, _, copy in copies(move)] == [Copy(0, 0, (Loop(12, 1, 1),))]


def test_a_scalar_is_one_copy_without_loops() -> None:
    assert list(strided([])) == [Copy(0, 0, ())]
    places = {"x": [Place(0, 0, 0)]}
    (move,) = split_moves({"x": Tensor("F32", ())}, {"x": build_input("x", "F32", (), 0, 0)}, places)
    assert [copy for _, _, copy in copies(move)] == [Copy(0, 0, ())]
    assert move.nbytes == 4


def test_an_empty_tensor_is_no_copy() -> None:
    places = {"x": [Place(0, 0, 0)]}
    (move,) = split_moves({"x": Tensor("F32", (0, 3))}, {"x": build_input("x", "F32", (0, 3), 0, 0)}, places)
    assert list(copies(move)) == []
    check_program(Program(("in",), ("out",), (move,)), [0], [0])


def test_steps_are_those_of_numpy() -> None:
    for shape in ((), (3,), (2, 3, 4)):
        assert row_major(shape) == tuple(step // 8 for step in np.zeros(shape, np.int64).strides)


def test_links_are_inverted_by_swapping_their_ends() -> None:
    links = (Link(0, 1, (Run(2, 0, 4),)), Link(None, 0, (Run(0, 3, 1),)), Link(1, None, (Run(5, 0, 1),)))
    assert invert_links(links) == (
        Link(1, 0, (Run(0, 2, 4),)),
        Link(0, None, (Run(3, 0, 1),)),
        Link(None, 1, (Run(0, 5, 1),)),
    )


# Two stored tensors of 4 x 2 items of 4 bytes: `a` by rows to two files, `b` whole to the first.
A = Input("a", 0, 100, (4, 2), 4)
B = Input("b", 0, 132, (4, 2), 4)
COLUMNS = whole(2)
DATA = 4096


def half(rank: int) -> tuple[tuple[Run, ...], ...]:
    return ((Run(2 * rank, 0, 2),), COLUMNS)


GOOD = Program(
    ("model.safetensors",),
    ("rank-0", "rank-1"),
    (
        Move(
            "a",
            (4, 2),
            4,
            (Gather(A, identity_links((4, 2))),),
            (Scatter(0, DATA, half(0)), Scatter(1, DATA, half(1))),
        ),
        Move("b", (4, 2), 4, (Gather(B, identity_links((4, 2))),), (Scatter(0, DATA + 16, (whole(4), COLUMNS)),)),
    ),
)
SIZES, OFFSETS = [DATA + 48, DATA + 16], [DATA, DATA]


def test_a_good_program_passes() -> None:
    check_program(GOOD, SIZES, OFFSETS)
    assert GOOD.nbytes_read == 64


def first(**changed: object) -> Program:
    return GOOD._replace(moves=(GOOD.moves[0]._replace(**changed), GOOD.moves[1]))


def gathered(*rows: tuple[Run, ...], source: Input = A) -> Program:
    """Return the program with its first tensor made of these rows of a source, 2 columns each."""
    links = [(Link(0, 0, runs), Link(1, 1, COLUMNS)) for runs in rows]
    return first(gathers=tuple(Gather(source, link) for link in links))


def scattered(*scatters: Scatter) -> Program:
    return first(scatters=scatters)


DOCTORED: dict[str, tuple[Program, list[int], tuple[str, ...]]] = {
    "a part is left out": (scattered(Scatter(0, DATA, half(0))), SIZES, ("rank-1",)),
    "a hole": (scattered(Scatter(0, DATA, half(0)), Scatter(1, DATA + 4, half(1))), SIZES, ("rank-1", "4096 to 4100")),
    "a hole at the end": (GOOD, [DATA + 52, DATA + 16], ("rank-0", "4144", "4148")),
    "written past the end": (GOOD, [DATA + 44, DATA + 16], ("rank-0", "4144", "4140")),
    "into the header": (scattered(Scatter(0, DATA - 4, half(0)), Scatter(1, DATA, half(1))), SIZES, ("rank-0",)),
    "written twice": (
        scattered(Scatter(0, DATA, half(0)), Scatter(1, DATA, half(1)), Scatter(1, DATA, half(1))),
        SIZES,
        ("rank-1",),
    ),
    "rows on each other in a part": (
        scattered(
            Scatter(0, DATA, half(0)), Scatter(1, DATA, ((Run(2, 0, 1), Run(3, 0, 1)), COLUMNS))
        ),
        SIZES,
        ("a", "rank-1"),
    ),
    "a hole in a part": (
        scattered(Scatter(0, DATA, half(0)), Scatter(1, DATA, ((Run(2, 0, 1), Run(3, 2, 1)), COLUMNS))),
        SIZES,
        ("a", "rank-1"),
    ),
    "a row not read": (gathered((Run(0, 0, 3),)), SIZES, ("a", "6 atoms of 8")),
    "a row read twice": (gathered((Run(0, 0, 4),), (Run(3, 0, 1),)), SIZES, ("a",)),
    "two parts on each other": (gathered((Run(0, 0, 2),), (Run(2, 1, 2),)), SIZES, ("a", "overlap")),
    "two interleaved parts on each other": (
        gathered((Run(0, 0, 1, 2, 1, 2),), (Run(2, 2, 2),)),
        SIZES,
        ("a", "overlap"),
    ),
    "a source not read": (gathered((Run(0, 0, 4),), source=B), SIZES, ("b", "16 atoms", "8")),
    # To count what is read and written is not enough.
    "a row read twice for one not read": (gathered((Run(0, 0, 2),), (Run(0, 2, 2),)), SIZES, ("a",)),
    "a row past the end of the source": (gathered((Run(1, 0, 4),)), SIZES, ("a",)),
    "a row of the tensor in no part": (
        scattered(Scatter(0, DATA, half(0)), Scatter(1, DATA, half(0))),
        SIZES,
        ("a",),
    ),
    "a row past the end of the tensor": (
        scattered(Scatter(0, DATA, half(0)), Scatter(1, DATA, half(2))),
        SIZES,
        ("a",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCTORED)
def test_a_doctored_program_is_caught(kind: str) -> None:
    program, sizes, words = DOCTORED[kind]
    with pytest.raises(ReshardError) as caught:
        check_program(program, sizes, OFFSETS)
    assert mentions(caught.value, *words)


def test_interleaved_parts_that_miss_each_other_pass() -> None:
    """Even rows of one source and odd rows of another."""
    even, odd = (Run(0, 0, 1, 2, 1, 2),), (Run(0, 1, 1, 2, 1, 2),)
    halves = [Input(name, 0, 0, (2, 2), 4) for name in "pq"]
    gathers = tuple(
        Gather(source, (Link(0, 0, runs), Link(1, 1, COLUMNS)))
        for source, runs in zip(halves, (even, odd), strict=True)
    )
    check_program(first(gathers=gathers), SIZES, OFFSETS)


def test_moves_come_in_the_order_in_which_their_sources_lie() -> None:
    tensors = {name: Tensor("F32", (2,)) for name in ("c", "a", "b")}
    inputs = {"a": (1, 0), "b": (0, 64), "c": (0, 0)}
    moves = split_moves(
        tensors,
        {name: build_input(name, "F32", (2,), *at) for name, at in inputs.items()},
        {name: [Place(0, 0, 0)] for name in tensors},
    )
    assert [move.name for move in build_program(["x", "y"], ["z"], moves).moves] == ["c", "b", "a"]


def test_a_source_is_seen_under_shapes_of_its_size_alone() -> None:
    source, places = build_input("x", "F32", (4, 6), 0, 0), {"x": [Place(0, 0, 0)]}
    (move,) = split_moves({"x": Tensor("F32", (2, 12), parts=(Part("x", (), (2, 12)),))}, {"x": source}, places)
    assert [copy for _, _, copy in copies(move)] == [Copy(0, 0, (Loop(24, 1, 1),))]
    check_program(Program(("in",), ("out",), (move,)), [96], [0])
    with pytest.raises(ReshardError) as caught:
        split_moves({"x": Tensor("F32", (2, 11), parts=(Part("x", (), (2, 11)),))}, {"x": source}, places)
    assert mentions(caught.value, "x", [4, 6], [2, 11])
