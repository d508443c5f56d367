"""Every layout that models use, against torch code that takes the part by hand.

Rows follow table 2.2 of the survey of layouts; ``x`` counts the entries of the axis, so that order shows.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, cat

from manifests.expression import parse_axis
from manifests.layout import Axis, Factor, Mesh, Segment, coordinates, misfits, packed_axis, plain_axis, rank_runs
from manifests.runs import expand, invert, numel
from tests.copying import apply, positions

# Sizes have no factor in common with each other beyond what divides the ranks, so that no two layouts agree by chance.
SIZES = {
    "N": 20, "I": 12, "D": 4, "M": 12, "V": 28, "E": 3, "H": 8, "hd": 3, "nh": 4, "P": 3, "ng": 2, "S": 5, "Di": 8,
    "Hk": 4, "Hv": 8, "dk": 2, "dv": 3, "r": 2, "nope": 2, "rope": 1, "v": 3, "KV": 4, "g": 2,
}  # fmt: skip
WORLDS = (1, 2, 4)

Part = Callable[[Tensor, int, int], Tensor]
"""(axis, world size, rank) -> the rank's part."""


def blocks(x: Tensor, sizes: list[int], world: int, rank: int) -> Tensor:
    return cat([block.chunk(world)[rank] for block in x.split(sizes)])


OVER_TP: list[tuple[str, Part]] = [
    ("(0*)", lambda x, w, r: x),
    ("(0*, 4)", lambda x, w, r: x),
    ("(N*)", lambda x, w, r: x.chunk(w)[r]),
    ("(V*)", lambda x, w, r: x.chunk(w)[r]),
    # gate|up fused: Phi-3, GLM, Flux2 linear_in, GEGLU, stacked experts
    ("(2, I*)", lambda x, w, r: x.view(2, 12).chunk(w, 1)[r].flatten()),
    # NeoX, BLOOM: query, key and value of a head lie together
    ("(H*, 3*hd)", lambda x, w, r: x.view(8, 3, 3).chunk(w)[r].flatten()),
    # GPT-2 c_attn and c_fc
    ("(3, H*, hd)", lambda x, w, r: x.view(3, 8, 3).chunk(w, 1)[r].flatten()),
    ("(4H*)", lambda x, w, r: x.chunk(w)[r]),
    # DBRX experts, their inner width divided
    ("(E, I*)", lambda x, w, r: x.view(3, 12).chunk(w, 1)[r].flatten()),
    # gpt-oss: gate and up alternate
    ("(I*, 2)", lambda x, w, r: torch.stack([half.chunk(w)[r] for half in (x[::2], x[1::2])], 1).flatten()),
    # gpt-oss mxfp4, in groups of 32
    ("(256/32*, 64)", lambda x, w, r: x.view(8, 64).chunk(w)[r].flatten()),
    # Mamba-1
    ("(2, Di*)", lambda x, w, r: cat([half.chunk(w)[r] for half in x.chunk(2)])),
    # Qwen3-Next: qkvz and ba by key heads; its conv1d and Qwen3.5 by q, k, v
    ("(Hk*, dk+dk+r*dv+r*dv)", lambda x, w, r: x.view(4, 16).chunk(w)[r].flatten()),
    ("(Hk*, 2r)", lambda x, w, r: x.view(4, 4).chunk(w)[r].flatten()),
    ("q:(Hk*, dk) + k:(Hk*, dk) + v:(Hv*, dv)", lambda x, w, r: blocks(x, [8, 8, 24], w, r)),
    # MLA
    ("(H*, nope+rope)", lambda x, w, r: x.view(8, 3).chunk(w)[r].flatten()),
    ("(H*, nope+v)", lambda x, w, r: x.view(8, 5).chunk(w)[r].flatten()),
    ("(H*, v)", lambda x, w, r: x.view(8, 3).chunk(w)[r].flatten()),
    # Flux: attention|mlp; Flux2: q|k|v|gate|up
    ("attn:(D*) + mlp:(M*)", lambda x, w, r: blocks(x, [4, 12], w, r)),
    ("(3, D*) + (2, M*)", lambda x, w, r: blocks(x, [4, 4, 4, 12, 12], w, r)),
    # blocks [1, 1, 1, 3, 3] of a unit, as cosmos3 has them
    ("(D*) + (D*) + (D*) + (3D*) + (3D*)", lambda x, w, r: blocks(x, [4, 4, 4, 12, 12], w, r)),
    # a segment without a star is whole on every rank
    ("(D*) + (5)", lambda x, w, r: cat([x[:4].chunk(w)[r], x[4:]])),
    # a nested axis may lie under no divided factor of its own
    ("(2, [(D*) + (M*)])", lambda x, w, r: cat([blocks(half, [4, 12], w, r) for half in x.chunk(2)])),
]  # fmt: skip

HeadPart = Callable[[Tensor, int, int, int, int], Tensor]
"""(axis, kv ranks, rep ranks, kv position, rep position) -> the rank's part."""


def queries(x: Tensor, kv: int, rep: int, i: int, j: int) -> Tensor:
    return x.view(4, 2, -1).chunk(kv)[i].chunk(rep, 1)[j].flatten()


def keys(x: Tensor, kv: int, i: int) -> Tensor:
    return x.view(4, -1).chunk(kv)[i].flatten()


OVER_HEADS: list[tuple[str, HeadPart]] = [
    # separate projections of grouped heads; o_proj's inputs are cut like q_proj's outputs
    ("(KV@kv, g@rep, hd)", lambda x, kv, rep, i, j: queries(x, kv, rep, i, j)),
    ("(KV@kv, hd)", lambda x, kv, rep, i, j: keys(x, kv, i)),
    # gpt-oss sinks
    ("(KV@kv, g@rep)", lambda x, kv, rep, i, j: x.view(4, 2).chunk(kv)[i].chunk(rep, 1)[j].flatten()),
    # Phi-3, DBRX, ChatGLM: fused by blocks of unequal size
    (
        "q:(KV@kv, g@rep, hd) + k:(KV@kv, hd) + v:(KV@kv, hd)",
        lambda x, kv, rep, i, j: cat([queries(x[:24], kv, rep, i, j), keys(x[24:36], kv, i), keys(x[36:], kv, i)]),
    ),
    # Falcon, InternLM2: a group's queries, key and value lie together
    (
        "(KV@kv, [(g@rep, hd) + (hd) + (hd)])",
        lambda x, kv, rep, i, j: cat(
            [x.view(4, 4, 3)[:, :2].chunk(rep, 1)[j], x.view(4, 4, 3)[:, 2:]], 1
        ).chunk(kv)[i].flatten(),
    ),
    # Falcon-7B: one key and value for all queries; only `rep` has ranks
    (
        "(1@kv, [(g@rep, hd) + (hd) + (hd)])",
        lambda x, kv, rep, i, j: cat([x[:6].view(2, 3).chunk(rep)[j].flatten(), x[6:]]),
    ),
]  # fmt: skip


def bound(text: str) -> Axis:
    return parse_axis(text, SIZES.get)


def entries(axis: Axis) -> Tensor:
    return torch.arange(axis.size)


def check_merge(axis: Axis, mesh: Mesh, world: int) -> None:
    """Put the parts of all ranks back; equal parts of several ranks may lie on each other."""
    x = entries(axis)
    merged = torch.full_like(x, -1)
    for rank in range(world):
        runs = rank_runs(axis, mesh, rank)
        part = torch.from_numpy(apply(runs, x.numpy()))
        for src, dst in positions(invert(runs)):
            assert merged[dst] in (-1, part[src])
            merged[dst] = part[src]
    assert merged.equal(x)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("text", "part"), OVER_TP, ids=[text for text, _ in OVER_TP])
def test_axes_over_tp(text: str, part: Part, world: int) -> None:
    axis, mesh = bound(text), (("tp", world),)
    x = entries(axis)
    assert misfits(axis, mesh) == []
    for rank in range(world):
        assert apply(rank_runs(axis, mesh, rank), x.numpy()).tolist() == part(x, world, rank).tolist()
    check_merge(axis, mesh, world)


@pytest.mark.parametrize(("kv", "rep"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize(("text", "part"), OVER_HEADS, ids=[text for text, _ in OVER_HEADS])
def test_axes_over_heads_and_their_copies(text: str, part: HeadPart, kv: int, rep: int) -> None:
    if text.startswith("(1@kv"):
        kv = 1
    axis, mesh = bound(text), (("kv", kv), ("rep", rep))
    x = entries(axis)
    assert misfits(axis, mesh) == []
    for rank in range(kv * rep):
        expected = part(x, kv, rep, rank // rep, rank % rep)
        assert apply(rank_runs(axis, mesh, rank), x.numpy()).tolist() == expected.tolist()
    check_merge(axis, mesh, kv * rep)


def test_fewer_key_heads_than_ranks_are_copied_as_repeat_interleave_does() -> None:
    axis = parse_axis("(2@kv, 3)")
    parts = [apply(rank_runs(axis, (("kv", 2), ("rep", 2)), rank), entries(axis).numpy()) for rank in range(4)]
    copied = torch.arange(6).view(2, 3).repeat_interleave(2, 0)
    assert [part.tolist() for part in parts] == copied.tolist()


def test_experts_over_ep_and_their_width_over_tp() -> None:
    axis, mesh = parse_axis("(6@ep, 4@tp)"), (("ep", 3), ("tp", 2))
    x = entries(axis)
    for rank in range(6):
        expected = x.view(6, 4).chunk(3)[rank // 2].chunk(2, 1)[rank % 2].flatten()
        assert apply(rank_runs(axis, mesh, rank), x.numpy()).tolist() == expected.tolist()
    check_merge(axis, mesh, 6)


# Mamba-2 has both kinds.
@pytest.mark.parametrize(("kv", "rep"), [(2, 1), (2, 2)])
def test_starred_factors_beside_heads_are_divided_over_all_ranks(kv: int, rep: int) -> None:
    axis = bound("z:(nh*, P) + x:(nh*, P) + B:(ng@kv, S) + C:(ng@kv, S) + dt:(nh*)")
    x = entries(axis)
    z, inner, b, c, dt = x.split([12, 12, 10, 10, 4])
    for rank in range(kv * rep):
        divided = [part.chunk(kv * rep)[rank] for part in (z, inner, dt)]
        shared = [part.chunk(kv)[rank // rep] for part in (b, c)]
        expected = cat([divided[0], divided[1], *shared, divided[2]])
        runs = rank_runs(axis, (("kv", kv), ("rep", rep)), rank)
        assert apply(runs, x.numpy()).tolist() == expected.tolist()


@pytest.mark.parametrize("text", [text for text, _ in (*OVER_TP, *OVER_HEADS)])
def test_the_text_of_an_axis_gives_it_back(text: str) -> None:
    axis = bound(text)
    assert parse_axis(str(axis)) == axis
    assert str(parse_axis(str(axis))) == str(axis)


@pytest.mark.parametrize(
    ("text", "mesh", "sizes"),
    [
        ("(9*)", (("tp", 2),), [9]),
        ("(6*, 4)", (("tp", 4),), [6]),
        ("(4*) + (6*)", (("tp", 4),), [6]),
        ("(4@kv, 7@rep, 64)", (("kv", 4), ("rep", 2)), [7]),
        ("(4@kv, [(3@rep, 2) + (2)])", (("kv", 8), ("rep", 2)), [4, 3]),
        ("(9)", (("tp", 2),), []),
        ("(0*)", (("tp", 2),), []),
    ],
)
def test_misfits_are_the_factors_that_do_not_divide(text: str, mesh: Mesh, sizes: list[int]) -> None:
    assert [factor.size for factor in misfits(parse_axis(text), mesh)] == sizes


def test_coordinates_count_the_last_mesh_axis_fastest() -> None:
    mesh = (("ep", 2), ("kv", 3), ("rep", 2))
    expected = [tuple(int(i) for i in at) for at in torch.cartesian_prod(*(torch.arange(size) for _, size in mesh))]
    assert [tuple(coordinates(mesh, rank).values()) for rank in range(12)] == expected
    assert list(coordinates(mesh, 0)) == ["ep", "kv", "rep"]
    assert coordinates((), 0) == {}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((8,), "(8*)"), ((4, 4), "(2, 4*)"), ((4, 12), "(4*) + (12*)"), ((4, 4, 12), "(4*) + (4*) + (12*)")],
)
def test_packed_axes_divide_each_block(sizes: tuple[int, ...], text: str) -> None:
    axis = packed_axis(sizes)
    assert (str(axis), axis.size) == (text, sum(sizes))
    for rank in range(2):
        expected = blocks(torch.arange(sum(sizes)), list(sizes), 2, rank)
        assert apply(rank_runs(axis, (("tp", 2),), rank), entries(axis).numpy()).tolist() == expected.tolist()


def test_an_axis_knows_its_size_and_its_mesh_axes() -> None:
    axis = bound("q:(KV@kv, [(g@rep, hd) + (hd)]) + (D*)")
    assert (axis.size, axis.mesh_axes()) == (4 * (6 + 3) + 4, {"kv", "rep", "tp"})
    assert plain_axis(7) == Axis((Segment((Factor(7, "tp"),)),))


def test_a_regular_division_is_few_runs_whatever_the_sizes() -> None:
    runs = rank_runs(parse_axis("(2, 14336*)"), (("tp", 8),), 3)
    assert len(runs) == 1
    assert numel(runs) == 2 * 14336 // 8
    assert len(rank_runs(parse_axis("(256, 1408*)"), (("tp", 2),), 0)) == 1


@pytest.mark.parametrize("size", [1, 4, 5, 7, 8, 99])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_does_not_divide_is_divided_as_torch_chunk_does(size: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    mesh = (("tp", ranks),)
    for rank, expected in enumerate(chunks):
        spans = expand(rank_runs(plain_axis(size), mesh, rank))
        assert [src + i for src, _, length in spans for i in range(length)] == expected
