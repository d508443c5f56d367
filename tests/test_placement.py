"""Placements of every dtype, as cuts of raw bytes that numpy makes by hand."""

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manifests.dtypes import BITS, atom, atoms, nbytes
from manifests.placement import PARTIAL, REPLICATED, Cut, Placement, dim_runs, local_shape, part_of
from tests.copying import apply

TP2, TP4 = (("tp", 2),), (("tp", 4),)
TORCH_ITEM_NBYTES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64,
    "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


def cells(dtype: str, shape: tuple[int, ...]) -> NDArray:
    """Return bytes 0, 1, 2, … as cells of whole bytes: 1 element, or 2 of F4, or 4 of F6."""
    per_cell, cell_nbytes = {4: (2, 1), 6: (4, 3)}.get(BITS[dtype], (1, BITS[dtype] // 8))
    in_cells = shape if per_cell == 1 else (*shape[:-1], shape[-1] // per_cell)
    data = (np.arange(prod(in_cells) * cell_nbytes) % 251).astype(np.uint8)
    return data.view(f"V{cell_nbytes}").reshape(in_cells)


def part(placement: Placement, dtype: str, shape: tuple[int, ...], rank: int) -> NDArray:
    """Return a rank's part as the library's runs take it from the cells."""
    runs = dim_runs(placement, dtype, shape, rank)
    assert runs is not None
    result = cells(dtype, shape)
    for dim, dim_part in enumerate(runs):
        result = apply(dim_part, result, dim)
    return result


def rows(text: str, *, mesh: tuple[tuple[str, int], ...] = TP2, dim: int = 0, unit: int = 1) -> Placement:
    return Placement((Cut(dim, text, unit),), mesh)


Expected = Callable[[NDArray, int], NDArray]
"""(cells of the whole tensor, rank) -> cells of the rank's part."""

CASES: list[tuple[str, str, tuple[int, ...], Placement, tuple[int, ...], Expected]] = [
    ("0-d", "F32", (), REPLICATED, (), lambda x, r: x),
    ("0-d partial", "I64", (), PARTIAL, (), lambda x, r: x),
    ("empty rows", "F32", (0, 3), rows("(0*)"), (0, 3), lambda x, r: x),
    ("empty columns", "BF16", (4, 0), rows("(4*)"), (2, 0), lambda x, r: x[2 * r : 2 * r + 2]),
    ("replicated", "F8_E4M3", (3, 5), REPLICATED, (3, 5), lambda x, r: x),
    ("vector", "F32", (6,), rows("(6*)"), (3,), lambda x, r: x[3 * r : 3 * r + 3]),
    ("columns", "C64", (3, 4), rows("(4*)", dim=1), (3, 2), lambda x, r: x[:, 2 * r : 2 * r + 2]),
    ("middle", "I8", (2, 6, 3), rows("(2, 3*)", mesh=(("tp", 3),), dim=1), (2, 2, 3), lambda x, r: x[:, r::3]),
    (
        "both dims",
        "I16",
        (4, 6),
        Placement((Cut(0, "(4@a)"), Cut(1, "(6@b)")), (("a", 2), ("b", 3))),
        (2, 2),
        lambda x, r: x[2 * (r // 3) : 2 * (r // 3) + 2, 2 * (r % 3) : 2 * (r % 3) + 2],
    ),
    ("F4 rows", "F4", (4, 6), rows("(4*)"), (2, 6), lambda x, r: x[2 * r : 2 * r + 2]),
    ("F4 columns, two a byte", "F4", (4, 8), rows("(8*)", dim=1), (4, 4), lambda x, r: x[:, 2 * r : 2 * r + 2]),
    ("F4 vector", "F4", (8,), rows("(8*)", mesh=TP4), (2,), lambda x, r: x[r : r + 1]),
    ("F4 blocks", "F4", (1, 8), rows("(2, 4*)", dim=1), (1, 4), lambda x, r: x[:, [r, 2 + r]]),
    ("F4 between", "F4", (2, 4, 2), rows("(4*)", dim=1), (2, 2, 2), lambda x, r: x[:, 2 * r : 2 * r + 2]),
    ("F4 odd rows, whole", "F4", (2, 7), REPLICATED, (2, 7), lambda x, r: x),
    ("F6 columns, four in three bytes", "F6_E2M3", (2, 8), rows("(8*)", dim=1), (2, 4), lambda x, r: x[:, r : r + 1]),
    ("F6 rows", "F6_E3M2", (2, 4), rows("(2*)"), (1, 4), lambda x, r: x[r : r + 1]),
    ("scales of 128 rows", "F32", (4, 3), rows("(512*)", unit=128), (2, 3), lambda x, r: x[2 * r : 2 * r + 2]),
    ("scales of 128 cols", "F32", (2, 4), rows("(512*)", dim=1, unit=128), (2, 2), lambda x, r: np.split(x, 2, 1)[r]),
    ("scales of 2 x 4, rows", "F32", (2, 2), rows("(4*)", unit=2), (1, 2), lambda x, r: x[r : r + 1]),
    ("scales of 2 x 4, columns", "F8_E8M0", (2, 2), rows("(8*)", dim=1, unit=4), (2, 1), lambda x, r: x[:, r : r + 1]),
    ("scales, last block partial", "F32", (3, 1), rows("(2*, 128) + (44)", unit=128), (2, 1), lambda x, r: x[[r, 2]]),
    ("scales of gate|up", "F32", (4, 1), rows("(2, 256*)", unit=128), (2, 1), lambda x, r: x[[r, 2 + r]]),
    ("scales of one rank", "F32", (3, 1), rows("(300*)", mesh=(("tp", 1),), unit=128), (3, 1), lambda x, r: x),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "shape", "placement", "local", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_parts(
    dtype: str, shape: tuple[int, ...], placement: Placement, local: tuple[int, ...], expected: Expected
) -> None:
    world = prod(size for _, size in placement.mesh)
    for rank in range(world):
        assert local_shape(placement, dtype, shape, rank) == local
        if placement.cuts:
            taken = part(placement, dtype, shape, rank)
            assert taken.tobytes() == expected(cells(dtype, shape), rank).tobytes()
            assert taken.nbytes == nbytes(dtype, local)


@pytest.mark.parametrize(
    ("dtype", "shape", "placement"),
    [
        ("F4", (4, 6), rows("(6*)", dim=1)),
        ("F4", (2, 12), rows("(2, 6*)", dim=1)),
        ("F4", (4, 7), rows("(4*)")),
        ("F6_E2M3", (2, 12), rows("(12*)", dim=1)),
        ("F6_E2M3", (2, 6), rows("(2*)")),
        ("F32", (3, 1), rows("(384*)", unit=128)),
        ("F32", (3, 1), rows("(300*)", unit=128)),
        ("F32", (2, 3), rows("(12*)", dim=1, unit=4)),
        ("F32", (3, 1), rows("(2, 192*)", unit=128)),
    ],
)
def test_a_cut_inside_a_byte_or_a_block_is_none(dtype: str, shape: tuple[int, ...], placement: Placement) -> None:
    assert [dim_runs(placement, dtype, shape, rank) for rank in range(2)] == [None, None]


@pytest.mark.parametrize("dtype", TORCH_ITEM_NBYTES)
def test_every_dtype_of_torch_has_its_width(dtype: str) -> None:
    itemsize = TORCH_ITEM_NBYTES[dtype].itemsize
    assert atom(dtype) == (1, itemsize)
    assert nbytes(dtype, (3, 5)) == 15 * itemsize
    placement = rows("(2, 4*)", dim=1)
    for rank in range(2):
        expected = cells(dtype, (3, 8))[:, [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]]
        assert part(placement, dtype, (3, 8), rank).tobytes() == expected.tobytes()


def test_sub_byte_dtypes_are_moved_in_whole_bytes() -> None:
    assert set(BITS) - set(TORCH_ITEM_NBYTES) == {"F4", "F6_E2M3", "F6_E3M2"}
    assert (atom("F4"), atom("F6_E2M3"), atom("F6_E3M2")) == ((2, 1), (4, 3), (4, 3))
    # torch's F4 has two elements in one of its own: a shape in torch is that of the bytes.
    packed = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert nbytes("F4", (4, 8)) == packed.numel() * packed.itemsize
    assert atoms("F4", (4, 8)) == tuple(packed.shape)
    assert nbytes("F6_E2M3", (2, 8)) == 2 * 8 * 6 // 8
    assert (atoms("F6_E2M3", (2, 8)), atoms("F4", ()), atoms("F4", (3,)), atoms("F32", ())) == ((2, 2), None, None, ())


@pytest.mark.parametrize(
    ("placement", "parts"),
    [
        (REPLICATED, [()] * 4),
        (rows("(8*)", mesh=TP4), [(0,), (1,), (2,), (3,)]),
        (rows("(2@kv, 4)", mesh=(("kv", 2), ("rep", 2))), [(0,), (0,), (1,), (1,)]),
        (rows("(2@kv, 4@rep)", mesh=(("kv", 2), ("rep", 2))), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (rows("(2, 8)", mesh=TP4), [()] * 4),
    ],
)
def test_ranks_with_equal_parts_hold_equal_bytes(placement: Placement, parts: list[tuple[int, ...]]) -> None:
    assert [part_of(placement, rank) for rank in range(4)] == parts
    if not placement.cuts:
        return
    shape = (16,) if "(2, 8)" in placement.cuts[0].axis else (8,)
    held = [part(placement, "U8", shape, rank).tobytes() for rank in range(4)]
    assert [[a == b for b in held] for a in held] == [[a == b for b in parts] for a in parts]
