"""Uneven division: axes that the ranks do not divide, in files against torch slices, and in running models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import pad

from loader import attach, open_shard
from loader.filling import taken
from manifests.errors import DegreeError, PlanError
from manifests.expression import parse_axis
from manifests.layout import plain_axis, rank_runs, running_part
from manifests.manifest import read_manifest
from manifests.runs import expand
from reshard import merge, plan, split, verify
from tests.checkpoints import count, mentions, of_rank, raw, save
from tests.fuzz_targets import resealed
from tools.sweep.cases import Case
from tools.sweep.pool import Outcomes, work_through
from tools.sweep.records import record

FP8 = torch.float8_e4m3fn


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_those_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [*torch.arange(size).chunk(ranks), *[torch.arange(0)] * ranks]
    for rank, chunk in enumerate(chunks[:ranks]):
        spans = expand(rank_runs(plain_axis(size), (("tp", ranks),), rank))
        assert [src + i for src, _, length in spans for i in range(length)] == chunk.tolist()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_padded_parts_are_chunks_of_the_padded_axis(units: int, ranks: int, blocks: int, inner: int) -> None:
    """Blocks are padded by themselves: gate and up, of which a rank has as much of each."""
    axis = parse_axis(f"({blocks}, {units}~*, {inner})")
    whole = torch.arange(1, 1 + blocks * units * inner)
    by_block = whole.reshape(blocks, units, inner)
    filled = pad(by_block, (0, 0, 0, -units % ranks)).chunk(ranks, dim=1)
    for rank in range(ranks):
        assert torch.equal(taken(whole, 0, axis, (("tp", ranks),), rank), filled[rank].flatten())
        owned = rank_runs(axis, (("tp", ranks),), rank)
        assert sum(length for _, _, length in expand(owned)) == int((filled[rank] > 0).sum())


def test_padding_in_two_mesh_axes() -> None:
    """3 groups of 3 heads on 2 x 2: a group of zeros, and a head of zeros in each group."""
    axis, mesh = parse_axis("(3~@kv, 3~@rep, 2)"), (("kv", 2), ("rep", 2))
    heads = pad(torch.arange(1, 19).reshape(3, 3, 2), (0, 0, 0, 1, 0, 1))
    for rank in range(4):
        mine = heads.chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2]
        assert torch.equal(taken(torch.arange(1, 19), 0, axis, mesh, rank), mine.flatten())
        assert running_part(axis, mesh, rank)[1] == 8


MLP = {"mlp.up": "colwise", "mlp.down": "rowwise"}
WIDTH = 1040
"""65 times 16: on 3 ranks 22, 22 and 21 times."""


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    up, down = count(WIDTH, 4), count(4, WIDTH, start=9000)
    return save(tmp_path / "m", {"mlp.up.weight": up, "mlp.down.weight": down}), up, down


@pytest.mark.parametrize("policy", ["ceil", "pad"])
def test_a_width_is_cut_at_multiples_of_16(mlp: Any, policy: str, tmp_path: Path) -> None:
    folder, up, down = mlp
    with pytest.raises(DegreeError, match="--uneven ceil or pad"):
        plan(folder, tp=3, plan=MLP)
    split(folder, tmp_path / "out", tp=3, plan=MLP, uneven=policy)
    for rank, (begin, end) in enumerate([(0, 352), (352, 704), (704, 1040)]):
        mine = of_rank(tmp_path / "out", rank, 3)
        assert mine["mlp.up.weight"] == ("F32", (end - begin, 4), raw(up[begin:end]))
        assert mine["mlp.down.weight"] == ("F32", (4, end - begin), raw(down[:, begin:end]))
        shard = open_shard(tmp_path / "out", rank)
        zeros = 352 - (end - begin) if policy == "pad" else 0
        assert torch.equal(shard["mlp.up.weight"], pad(up[begin:end], (0, 0, 0, zeros)))
        assert torch.equal(shard["mlp.down.weight"], pad(down[:, begin:end], (0, zeros)))
    verify(tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_what_divides_is_cut_as_ever(mlp: Any) -> None:
    folder, *_ = mlp
    without, *others = (plan(folder, tp=2, plan=MLP, uneven=policy) for policy in ("", "ceil", "pad"))
    assert {other.key for other in others} == {without.key}


def test_ceil_leaves_no_rank_without_anything_and_pad_may(tmp_path: Path) -> None:
    """5 heads on 4 ranks: 2, 2, 1 and none."""
    folder = save(tmp_path / "m", {"attn.v.weight": count(10, 4), "attn.o.weight": count(4, 10)}, {"num_heads": 5})
    rules = {
        "attn.v": {"style": "colwise", "layout": "(H*, 2)"},
        "attn.o": {"style": "rowwise", "layout": "(H*, 2)"},
    }
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=4, plan=rules, uneven="ceil")
    assert mentions(caught.value, "tp 1, 2, 3, 5 would do")
    split(folder, tmp_path / "out", tp=4, plan=rules, uneven="pad")
    assert [tuple(of_rank(tmp_path / "out", rank, 4)["attn.v.weight"][1]) for rank in range(4)] == [
        *[(4, 4)] * 2,
        (2, 4),
        (0, 4),
    ]
    shard = open_shard(tmp_path / "out", 3)
    assert torch.equal(shard["attn.v.weight"], torch.zeros(4, 4))
    assert torch.equal(shard["attn.o.weight"], torch.zeros(4, 4))


def test_blocks_of_scales_stay_whole(tmp_path: Path) -> None:
    """5 blocks of 128 rows on 3 ranks: 2, 2, 1, the weight at the borders of its scales."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    weight, scale = count(640, 128, dtype=FP8), count(5, 1)
    down, down_scale = count(128, 640, dtype=FP8), count(1, 5)
    tensors = {
        "mlp.up.weight": weight,
        "mlp.up.weight_scale_inv": scale,
        "mlp.down.weight": down,
        "mlp.down.weight_scale_inv": down_scale,
    }
    split(save(tmp_path / "m", tensors, config), tmp_path / "out", tp=3, plan=MLP, uneven="ceil")
    for rank, blocks in enumerate([slice(0, 2), slice(2, 4), slice(4, 5)]):
        mine = of_rank(tmp_path / "out", rank, 3)
        rows = slice(128 * blocks.start, 128 * blocks.stop)
        assert mine["mlp.up.weight"][2] == raw(weight[rows])
        assert mine["mlp.up.weight_scale_inv"][2] == raw(scale[blocks])
        assert mine["mlp.down.weight"][2] == raw(down.view(torch.uint8)[:, rows])
        assert mine["mlp.down.weight_scale_inv"][2] == raw(down_scale[:, blocks])


def test_experts_get_rows_of_16_bytes(tmp_path: Path) -> None:
    """40 = 2 x 20 divides, but 20 numbers of 2 bytes are no multiple of 16 bytes; of 4 bytes they are."""
    rules = {
        "experts": "moe_tp_experts",
        "experts.up": {"style": "colwise", "dim": 1},
        "experts.down": {"style": "rowwise", "dim": 2},
    }
    for dtype, width, expected in [(torch.bfloat16, 40, 24), (torch.bfloat16, 48, 24), (torch.float32, 40, 20)]:
        tensors = {"experts.up": count(2, width, 4, dtype=dtype), "experts.down": count(2, 4, width, dtype=dtype)}
        folder = save(tmp_path / f"{dtype}-{width}", tensors)
        made = plan(folder, tp=2, plan=rules, uneven="ceil").resolution
        axis = parse_axis(made.tensors["experts.down"].placement.cuts[0].axis)
        assert made.tensors["experts.up"].placement.cuts[0].axis == str(axis)
        assert expand(rank_runs(axis, (("tp", 2),), 0)) == [(0, 0, expected)]


def test_what_cannot_be_shown_to_meet_is_refused(tmp_path: Path) -> None:
    """Heads of 8 on one side, of 4 on the other: at 4 ranks 16 rows and 12 columns; and columns that nothing makes."""
    tensors = {"0.attn.v.weight": count(40, 4), "0.attn.o.weight": count(4, 40)}
    folder = save(tmp_path / "m", tensors, {"num_heads": 5})
    rules: dict[str, Any] = {"0.attn.v": {"style": "colwise", "layout": "(H*, 8)"}, "0.attn.o": "rowwise"}
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=4, plan=rules | {"0.attn.o": {"style": "rowwise", "layout": "(10*, 4)"}}, uneven="pad")
    assert mentions(caught.value, "0.attn.o.weight", "(10~*, 4)", "0.attn.v.weight", "(5~*, 8)")
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=3, plan={"0.attn.o": "rowwise"}, uneven="pad")
    assert mentions(caught.value, "0.attn.o.weight", "nothing beside it")


def test_features_of_two_kinds_are_shown_one_by_one(tmp_path: Path) -> None:
    """Attention's output and a dense layer's go into one product, as in single blocks of Flux: 5 heads of 8, 21."""
    tensors = {"0.v.weight": count(40, 4), "0.up.weight": count(21, 4), "0.out.weight": count(4, 61)}
    folder = save(tmp_path / "m", tensors, {"num_heads": 5})
    rules: dict[str, Any] = {"0.v": {"style": "colwise", "layout": "(H*, 8)"}, "0.up": "colwise"}
    together = rules | {"0.out": {"style": "packed_rowwise", "layout": "(H*, 8) + (21*)"}}
    split(folder, tmp_path / "out", tp=2, plan=together, uneven="ceil")
    mine = of_rank(tmp_path / "out", 1, 2)
    assert mine["0.out.weight"][2] == raw(tensors["0.out.weight"][:, [*range(24, 40), *range(51, 61)]])
    for layout in ("(10*, 4) + (21*)", "(H*, 8) + (7*, 3)"):
        with pytest.raises(PlanError) as caught:
            plan(folder, tp=2, plan=rules | {"0.out": {"style": "packed_rowwise", "layout": layout}}, uneven="ceil")
        assert mentions(caught.value, "0.out.weight", "cannot be shown")


def test_what_comes_into_a_module_must_be_as_much_on_every_rank_to_be_joined(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"0.v.weight": count(40, 4), "0.out.weight": count(4, 40)}, {"num_heads": 5})
    gathering = {"style": "colwise_gather_input", "layout": "(4*)"}
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan={"0.v": {"style": "colwise", "layout": "(H*, 8)"}, "0.out": gathering}, uneven="ceil")
    assert mentions(caught.value, "0.out: joins", "0.v.weight")


@pytest.mark.parametrize("policy", ["ceil", "pad"])
def test_a_layer_norm_over_all_ranks_wants_equal_parts(policy: str, tmp_path: Path) -> None:
    tensors = {"0.q.weight": count(40, 4), "0.norm.weight": count(40), "0.out.weight": count(4, 40)}
    folder = save(tmp_path / "m", tensors, {"num_heads": 5})
    layout = {"layout": "(H*, 8)"}
    rules = {
        "0.q": {"style": "colwise", **layout},
        "0.norm": {"style": "layer_norm", **layout},
        "0.out": {"style": "rowwise", **layout},
    }
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan=rules, uneven=policy)
    assert mentions(caught.value, "0.norm", "layer norm")


def colwise(layout: str) -> dict[str, str]:
    return {"style": "colwise", "layout": layout}


def rowwise(layout: str) -> dict[str, str]:
    return {"style": "rowwise", "layout": layout}


APART: list[tuple[int, dict[str, tuple[int, int]], dict[str, Any], list[str]]] = [
    # 12 query heads of 3 groups on 2 ranks: 6 and 6 of queries, 2 and 1 of keys. The sixth query is of the second key.
    (
        2,
        {"0.q": (48, 4), "0.k": (12, 4), "0.v": (12, 4), "0.o": (4, 48)},
        {"0.q": colwise("(12*, 4)"), "0.k": colwise("(3*, 4)"), "0.v": colwise("(3*, 4)"), "0.o": rowwise("(12*, 4)")},
        ["0.k.weight", "(3*, 4)"],
    ),
    (
        2,
        {"0.qkv": (72, 4), "0.o": (4, 48)},
        {"0.qkv": colwise("(12*, 4) + (3*, 4) + (3*, 4)"), "0.o": rowwise("(12*, 4)")},
        ["0.qkv.weight", "(3*, 4)"],
    ),
    # Two blocks of 40 rows, of which one alone is cut as the columns are.
    (
        2,
        {"0.gate_up": (80, 4), "0.down": (4, 40)},
        {"0.gate_up": colwise("(5*, 8) + (10*, 4)"), "0.down": rowwise("(10*, 4)")},
        ["0.down.weight", "(10*, 4)", "(5*, 8)"],
    ),
    # 10 heads in 5 groups: 6 and 4; slopes of 5 and 5.
    (
        2,
        {"0.q": (40, 4), "0.k": (20, 4), "0.v": (20, 4), "0.o": (4, 40)},
        {
            "plan": {
                "0.q": colwise("(5@kv, 2@rep, 4)"),
                "0.k": colwise("(5@kv, 4)"),
                "0.v": colwise("(5@kv, 4)"),
                "0.o": rowwise("(5@kv, 2@rep, 4)"),
            },
            "inputs": {"0": {"slopes": "(10*)"}},
        },
        ["0.slopes", "evenly as (10*)"],
    ),
    # 10 heads in 2 groups, 4, 4 and 2 on 3 ranks, as many as of a row of 10, but others.
    (
        3,
        {"0.q": (40, 4), "0.k": (8, 4), "0.v": (8, 4), "0.o": (4, 40)},
        {
            "plan": {
                "0.q": colwise("(2@kv, 5@rep, 4)"),
                "0.k": colwise("(2@kv, 4)"),
                "0.v": colwise("(2@kv, 4)"),
                "0.o": rowwise("(2@kv, 5@rep, 4)"),
            },
            "inputs": {"0": {"slopes": "(10*)"}},
        },
        ["0.slopes", "cut unevenly as"],
    ),
    # A module joins what the ranks have of it: 3 and 2 heads.
    (
        2,
        {"0.a.b": (20, 4), "0.v": (20, 4), "0.o": (4, 20)},
        {"0.a": "all_gather", "0.a.b": colwise("(5*, 4)"), "0.v": colwise("(5*, 4)"), "0.o": rowwise("(5*, 4)")},
        ["0.a", "0.a.b.weight", "colwise_gather_output"],
    ),
]


@pytest.mark.parametrize(
    ("ranks", "shapes", "document", "words"), APART, ids=["keys", "fused", "blocks", "input", "order", "joined"]
)
def test_what_is_cut_apart_is_refused(ranks: int, shapes: Any, document: Any, words: list[str], tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {f"{name}.weight": count(*shape) for name, shape in shapes.items()})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=ranks, plan=document, uneven="ceil")
    assert mentions(caught.value, *words)


def test_biases_of_experts_are_cut_as_their_weights(tmp_path: Path) -> None:
    """20 of 40 numbers of 2 bytes are no multiple of 16 bytes, so that 24 are taken, also of the bias."""
    tensors = {"experts.up": (2, 40, 4), "experts.up_bias": (2, 40), "experts.down": (2, 4, 40)}
    folder = save(tmp_path / "m", {name: count(*shape, dtype=torch.bfloat16) for name, shape in tensors.items()})
    rules = {
        "experts": "moe_tp_experts",
        "experts.up": {"style": "colwise", "dim": 1},
        "experts.up_bias": {"style": "colwise", "dim": 1},
        "experts.down": {"style": "rowwise", "dim": 2},
    }
    split(folder, tmp_path / "out", tp=2, plan=rules, uneven="ceil")
    mine = of_rank(tmp_path / "out", 0, 2)
    assert [mine[name][1] for name in tensors] == [(2, 24, 4), (2, 24), (2, 4, 24)]


def test_an_attribute_of_heads_beside_another_width_is_refused(tmp_path: Path) -> None:
    """10 heads in 5 groups are 6 and 4, the width 16 and 16: which of the two "/ tp" is, is not known; "/ kv" is."""
    shapes = {"m.v": (20, 4), "m.q": (40, 4), "m.o": (4, 40), "m.up": (32, 4), "m.down": (4, 32)}
    folder = save(tmp_path / "m", {f"{name}.weight": count(*shape) for name, shape in shapes.items()})
    rules = {
        "m.v": colwise("(5@kv, 4)"),
        "m.q": colwise("(5@kv, 2@rep, 4)"),
        "m.o": rowwise("(5@kv, 2@rep, 4)"),
        "m.up": "colwise",
        "m.down": "rowwise",
    }
    made = plan(folder, tp=2, plan={"plan": rules, "attributes": {"m": {"heads": "10 / kv / rep"}}}, uneven="ceil")
    assert made.resolution.attributes == {"m": {"heads": (6, 4)}}
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan={"plan": rules, "attributes": {"m": {"heads": "10 / tp"}}}, uneven="ceil")
    assert mentions(caught.value, "attributes of m", "tp")


def test_attributes_differ_by_rank(tmp_path: Path) -> None:
    """5 heads on 2 ranks: 3 and 2, or 3 and 3 of which one is zeros."""
    tensors = {"attn.v.weight": count(20, 4), "attn.o.weight": count(4, 20)}
    folder = save(tmp_path / "m", tensors, {"num_heads": 5})
    document: dict[str, Any] = {
        "plan": {
            "attn.v": {"style": "colwise", "layout": "(H*, 4)"},
            "attn.o": {"style": "rowwise", "layout": "(H*, 4)"},
        },
        "attributes": {"attn": {"heads": "H / tp", "width": "4H / tp", "each": "4"}},
    }
    for policy, expected in (("ceil", {"heads": (3, 2), "width": (12, 8)}), ("pad", {"heads": 3, "width": 12})):
        split(folder, tmp_path / policy, tp=2, plan=document, uneven=policy)
        assert read_manifest(tmp_path / policy).attributes == {"attn": expected}
        for rank, heads in enumerate([3, 2 if policy == "ceil" else 3]):
            model = nn.Module()
            model.attn = nn.Module()
            model.attn.v, model.attn.o = nn.Linear(4, 20, bias=False), nn.Linear(20, 4, bias=False)
            model.attn.heads = model.attn.width = 0
            attach(model, open_shard(tmp_path / policy, rank))
            assert (model.attn.heads, model.attn.width) == (heads, 4 * heads)
            assert model.attn.v.weight.shape == (4 * heads, 4)


def test_an_attribute_of_what_no_share_tells_is_refused(tmp_path: Path) -> None:
    """Two widths in one module, with other shares: what "/ tp" takes of a third is not known."""
    rules: dict[str, Any] = {}
    tensors = {}
    for name, layout, size in (("a", "(7*, 16)", 112), ("b", "(5*, 2)", 10)):
        tensors |= {f"m.{name}_in.weight": count(size, 4), f"m.{name}_out.weight": count(4, size)}
        rules |= {f"m.{name}_in": {"style": "colwise", "layout": layout}}
        rules |= {f"m.{name}_out": {"style": "rowwise", "layout": layout}}
    folder = save(tmp_path / "m", tensors)
    plan(folder, tp=3, plan={"plan": rules}, uneven="ceil")
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=3, plan={"plan": rules, "attributes": {"m": {"width": "112 / tp"}}}, uneven="ceil")
    assert mentions(caught.value, "attributes of m", "tp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uneven": "floor"}, ["'floor'", "ceil, pad"]),
        ({"uneven": "pad", "layout": "checkpoint"}, ["'pad'", "'checkpoint'", "'ceil' would do"]),
        ({"plan": {"mlp.up": {"style": "colwise", "layout": "(?~*)"}}}, ["(?~*)", "--uneven pad"]),
    ],
)
def test_what_is_refused(mlp: Any, options: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(mlp[0], tp=3, **{"plan": MLP, **options})
    assert mentions(caught.value, *words)


def test_a_manifest_with_a_number_too_few_is_refused(tmp_path: Path) -> None:
    from manifests.errors import ManifestError

    tensors = {"attn.v.weight": count(20, 4), "attn.o.weight": count(4, 20)}
    document = {
        "plan": {
            "attn.v": {"style": "colwise", "layout": "(5*, 4)"},
            "attn.o": {"style": "rowwise", "layout": "(5*, 4)"},
        },
        "attributes": {"attn": {"heads": "5 / tp"}},
    }
    split(save(tmp_path / "m", tensors), tmp_path / "out", tp=2, plan=document, uneven="ceil")
    file = tmp_path / "out/manifest.json"
    text = file.read_text()
    assert '"heads":[3,2]' in text
    file.write_bytes(resealed(text.replace('"heads":[3,2]', '"heads":[3]').encode()))
    with pytest.raises(ManifestError, match="1 numbers for 2 ranks"):
        open_shard(tmp_path / "out", 0)


CHUNKED = {"chunked": {"cache_implementation": "static", "prefill_chunk_size": 5}}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
TWO = [
    Case("llama-ceil", "llama", uneven="ceil", values=HEADS, generations={"greedy": {}, **CHUNKED}),
    Case("llama-pad", "llama", uneven="pad", values=HEADS, generations={"greedy": {}, **CHUNKED}),
    Case("phi3-ceil", "phi3", uneven="ceil", values=HEADS),
    # Norms over the heads of all ranks; attributes by rank; widths of experts, in matrix products of all experts.
    Case("olmo2-ceil", "olmo2", uneven="ceil", values=HEADS),
    Case("olmo2-pad", "olmo2", uneven="pad", values=HEADS),
    Case("gpt2-ceil", "gpt2", uneven="ceil", values={"n_head": 5, "n_embd": 80}),
    Case("gpt2-pad", "gpt2", uneven="pad", values={"n_head": 5, "n_embd": 80}),
    Case("mixtral-ceil", "mixtral", uneven="ceil", values={**HEADS, "intermediate_size": 36}),
    Case("mixtral-pad", "mixtral", uneven="pad", values={**HEADS, "intermediate_size": 36}),
    Case("experts-ceil", "mixtral", uneven="ceil", experts=2, values={"num_local_experts": 5}),
    Case("experts-pad", "mixtral", uneven="pad", experts=2, values={"num_local_experts": 5}),
    # Slopes of all heads as an argument.
    Case("bloom-pad", "bloom", uneven="pad", values={"n_head": 5, "hidden_size": 80}),
    # A vocabulary whose last part gets a row of zeros: no logit may come of it.
    Case("vocabulary-pad", "granite", uneven="pad", values={"vocab_size": 99}),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return work_through(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_output_and_tokens_are_those_of_one_process(two_ranks: Outcomes, case: Case) -> None:
    found = record(two_ranks[case.name])
    assert found.right, (found.stage, found.error)
    assert found.tokens == "equal"
