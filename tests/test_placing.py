"""Placing: what a plan makes of every tensor, as bytes in rank files against torch slices; and what it refuses."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, cat

from manifests.errors import CheckpointError, DegreeError, PlanError
from manifests.expression import parse_axis
from manifests.manifest import Module
from reshard import merge, plan, split, verify
from reshard.degrees import World, choose_mesh
from reshard.model import Model, RuntimeTensor
from reshard.placing import resolve
from reshard.plans import Plan, build_rule
from reshard.sizes import ScopedSizes, Sizes
from tests.checkpoints import LLAMA, count, mentions, of_rank, raw, save

FP8 = torch.float8_e4m3fn
Rules = Mapping[str, Any]


def chunked(x: Tensor, world: int, dim: int = 0) -> list[Tensor]:
    return list(x.chunk(world, dim))


def by_blocks(x: Tensor, sizes: list[int], world: int, dim: int = 0) -> list[Tensor]:
    return [cat([block.chunk(world, dim)[rank] for block in x.split(sizes, dim)], dim) for rank in range(world)]


def everywhere(x: Tensor, world: int) -> list[Tensor]:
    return [x] * world


def on_rank_0(x: Tensor, world: int) -> list[Tensor | None]:
    return [x, *[None] * (world - 1)]


W, B = count(8, 12), count(8, start=200)
QKV, QKV_B = count(16, 8, dtype=torch.bfloat16), count(16, dtype=torch.bfloat16, start=128)
GATE_UP, DOWN = count(3, 8, 4), count(3, 4, 4, start=300)
SCALAR = torch.tensor(4.6052)

CASES: dict[str, tuple[Rules, dict[str, Any], dict[str, Tensor], dict[str, list[Any]]]] = {
    # name: (rules, config, tensors, expected parts of 2 ranks)
    "0-d and empty": (
        {"m": "colwise", "z": "colwise"},
        {},
        {"m.weight": W, "m.scale": SCALAR, "z.weight": torch.zeros(0, 4), "logit_scale": SCALAR + 1},
        {
            "m.weight": chunked(W, 2),
            "m.scale": everywhere(SCALAR, 2),
            "z.weight": everywhere(torch.zeros(0, 4), 2),
            "logit_scale": everywhere(SCALAR + 1, 2),
        },
    ),
    "colwise": (
        {"m": "colwise"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": chunked(W, 2), "m.bias": chunked(B, 2)},
    ),
    "colwise_gather_output": (
        {"m": "colwise_gather_output"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": chunked(W, 2), "m.bias": chunked(B, 2)},
    ),
    "rowwise": (
        {"m": "rowwise"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": chunked(W, 2, 1), "m.bias": on_rank_0(B, 2)},
    ),
    "rowwise_split_input": (
        {"m": "rowwise_split_input"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": chunked(W, 2, 1), "m.bias": on_rank_0(B, 2)},
    ),
    "packed_colwise, two halves": (
        {"m": "packed_colwise"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": by_blocks(W, [4, 4], 2), "m.bias": by_blocks(B, [4, 4], 2)},
    ),
    "packed_colwise, proportions": (
        {"m": {"style": "packed_colwise", "blocks": [2, 1, 1]}},
        {},
        {"m.weight": QKV, "m.bias": QKV_B},
        {"m.weight": by_blocks(QKV, [8, 4, 4], 2), "m.bias": by_blocks(QKV_B, [8, 4, 4], 2)},
    ),
    "packed_colwise, sizes": (
        {"m": {"style": "packed_colwise", "blocks": [8, 4, 4]}},
        {},
        {"m.weight": QKV, "m.bias": QKV_B},
        {"m.weight": by_blocks(QKV, [8, 4, 4], 2), "m.bias": by_blocks(QKV_B, [8, 4, 4], 2)},
    ),
    "packed_rowwise": (
        {"m": {"style": "packed_rowwise", "blocks": [4, 8]}},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": by_blocks(W, [4, 8], 2, 1), "m.bias": on_rank_0(B, 2)},
    ),
    "a layout": (
        {"m": {"style": "colwise", "layout": "q:(KV@kv, g@rep, hd) + k:(KV@kv, hd) + v:(KV@kv, hd)"}},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2},
        {"m.weight": QKV, "m.bias": QKV_B},
        {"m.weight": by_blocks(QKV, [8, 4, 4], 2), "m.bias": by_blocks(QKV_B, [8, 4, 4], 2)},
    ),
    "embeddings": (
        {"rows": "embedding_rowwise", "columns": "embedding_colwise"},
        {},
        {"rows.weight": W, "columns.weight": W + 1},
        {"rows.weight": chunked(W, 2), "columns.weight": chunked(W + 1, 2, 1)},
    ),
    "stacked experts": (
        {"e": "moe_tp_experts", "e.gate_up_proj": "packed_colwise", "e.down_proj": "rowwise"},
        {},
        {"e.gate_up_proj": GATE_UP, "e.down_proj": DOWN},
        {"e.gate_up_proj": by_blocks(GATE_UP, [4, 4], 2, 1), "e.down_proj": chunked(DOWN, 2, 2)},
    ),
    "another dim": (
        {"conv1d": {"style": "colwise", "dim": 1}, "bmm": {"style": "rowwise", "dim": -2}},
        {},
        {"conv1d.weight": W, "bmm.weight": GATE_UP},
        {"conv1d.weight": chunked(W, 2, 1), "bmm.weight": chunked(GATE_UP, 2, 1)},
    ),
    "a parameter by its own key": (
        {"m": "colwise", "m.bias": "replicate"},
        {},
        {"m.weight": W, "m.bias": B},
        {"m.weight": chunked(W, 2), "m.bias": everywhere(B, 2)},
    ),
    "vectors": (
        {"out": "colwise", "in": "rowwise", "in2": "rowwise"},
        {},
        {"out.scale": B, "in.weight": W, "in.scale": B + 1, "in2.weight": W + 1},
        {"out.scale": chunked(B, 2), "in.weight": chunked(W, 2, 1), "in.scale": everywhere(B + 1, 2)},
    ),
    "per-channel scales": (
        {"c": "colwise", "r": "rowwise"},
        {},
        {"c.weight": W, "c.weight_scale": B[:, None], "r.weight": W + 1, "r.weight_scale": B[:, None] + 1},
        {
            "c.weight_scale": chunked(B[:, None], 2),
            "r.weight": chunked(W + 1, 2, 1),
            "r.weight_scale": everywhere(B[:, None] + 1, 2),
        },
    ),
    "whole": (
        {"m": "replicate", "m2": "all_reduce", "c": "colwise"},
        {},
        {"m.weight": W, "m2.weight": W + 1, "c.weight": W + 2, "other": B},
        {"m.weight": everywhere(W, 2), "m2.weight": everywhere(W + 1, 2), "other": everywhere(B, 2)},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_parts(tmp_path: Path, kind: str) -> None:
    rules, config, tensors, expected = CASES[kind]
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    split(save(tmp_path / "m", contiguous, config), tmp_path / "out", tp=2, plan=rules)
    for rank in range(2):
        held = of_rank(tmp_path / "out", rank, 2)
        for name, parts in expected.items():
            if parts[rank] is None:
                assert name not in held
            else:
                assert held[name][1:] == (tuple(parts[rank].shape), raw(parts[rank])), name


@pytest.mark.parametrize("tp", [2, 4])
def test_separate_projections_of_grouped_heads(tmp_path: Path, tp: int) -> None:
    """8 query heads on 2 key heads of 4: from 4 ranks on, ranks share a key head, as repeat_interleave copies it."""
    q, k, o = count(32, 32), count(8, 32, start=2000), count(32, 32, start=6000)
    config = LLAMA | {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    names = {"q": q, "k": k, "v": k + 500, "o": o}
    tensors = {f"model.layers.0.self_attn.{n}_proj.weight": tensor for n, tensor in names.items()}
    rules = {"layers.*.self_attn.o_proj": "rowwise"} | {f"layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"}
    split(save(tmp_path / "m", tensors | heads(32), config), tmp_path / "out", tp=tp, plan=rules)
    copied = k.view(2, 4, 32).repeat_interleave(max(tp // 2, 1), 0).reshape(-1, 32)
    for rank in range(tp):
        held = of_rank(tmp_path / "out", rank, tp)
        expected = {"q": q.chunk(tp)[rank], "k": copied.chunk(tp)[rank], "o": o.chunk(tp, 1)[rank]}
        expected["v"] = expected["k"] + 500
        for name, part in expected.items():
            assert held[f"model.layers.0.self_attn.{name}_proj.weight"][2] == raw(part)


def heads(hidden: int) -> dict[str, Tensor]:
    return {"model.embed_tokens.weight": count(8, hidden), "lm_head.weight": count(8, hidden, start=9000)}


def attention(q_heads: int, kv_heads: int, head_dim: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of a Llama of one layer with nothing but its attention."""
    hidden = q_heads * head_dim
    rows = {"q": hidden, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": hidden}
    tensors = {f"model.layers.0.self_attn.{n}_proj.weight": torch.zeros(size, hidden) for n, size in rows.items()}
    sizes = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return tensors | heads(hidden), LLAMA | sizes | {"hidden_size": hidden}


def degrees_of(q_heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the degrees that leave every head whole, by arithmetic: key heads, times queries of a group."""
    group = q_heads // kv_heads
    return tuple(
        sorted({a * b for a in range(1, kv_heads + 1) for b in range(1, group + 1) if kv_heads % a == group % b == 0})
    )


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "tp", "allowed"),
    [
        (9, 3, 64, 2, (1, 3, 9)),
        (28, 4, 2, 8, (1, 2, 4, 7, 14, 28)),
        (6, 6, 4, 4, (1, 2, 3, 6)),
        (8, 2, 4, 16, (1, 2, 4, 8)),
    ],
)
def test_a_head_is_never_cut(
    tmp_path: Path, q_heads: int, kv_heads: int, head_dim: int, tp: int, allowed: tuple[int, ...]
) -> None:
    tensors, config = attention(q_heads, kv_heads, head_dim)
    folder = save(tmp_path / "m", tensors, config)
    rules = {"layers.*.self_attn.o_proj": "rowwise"} | {f"layers.*.self_attn.{n}_proj": "colwise" for n in "qkv"}
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=tp, plan=rules)
    error = caught.value
    assert error.allowed == allowed == degrees_of(q_heads, kv_heads)
    assert mentions(error, f"tp {tp}", f"num_attention_heads {q_heads}", f"num_key_value_heads {kv_heads}")
    assert mentions(error, ", ".join(map(str, allowed)), f"{tp} ranks do not divide it")
    assert {line.split(":")[0] for line in error.misfits} == {
        f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkvo"
    }
    assert error.exit_code == 4
    for degree in allowed:
        plan(folder, tp=degree, plan=rules)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 8), (3, 3), (4, 7), (8, 1), (2, 4)])
def test_meshes_copy_a_key_head_as_rarely_as_can_be(kv_heads: int, group: int) -> None:
    axes = [parse_axis(f"({kv_heads}@kv, {group}@rep, 64)"), parse_axis(f"({kv_heads}@kv, 64)")]
    for world in range(1, 30):
        fitting = [
            (world // rep, rep)
            for rep in range(1, world + 1)
            if world % rep == 0 and kv_heads % (world // rep) == 0 and group % rep == 0
        ]
        expected = (("kv", fitting[0][0]), ("rep", fitting[0][1])) if fitting else None
        assert choose_mesh(axes, world) == expected, world


# Shows a bug: an axis that names `rep` alone is divided over no rank.
def test_a_mesh_for_query_heads_alone() -> None:
    assert choose_mesh([parse_axis("(8@rep, 64)")], 2) == (("kv", 1), ("rep", 2))


def test_all_misfits_are_reported_at_once(tmp_path: Path) -> None:
    tensors = {
        f"layers.{i}.{part}.weight": torch.zeros(size, 4) for i in range(3) for part, size in (("a", 6), ("b", 10))
    }
    folder = save(tmp_path / "m", tensors | {"c.weight": torch.zeros(8, 4)})
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=4, plan={"layers.*.a": "colwise", "layers.*.b": "colwise", "c": "colwise"})
    assert caught.value.misfits == (
        "layers.*.a.weight (3 tensors): dim 0 has 6 = (6*); 4 ranks do not divide it; 1, 2, 3, 6 do",
        "layers.*.b.weight (3 tensors): dim 0 has 10 = (10*); 4 ranks do not divide it; 1, 2, 5, 10 do",
    )
    assert caught.value.allowed == (1, 2)
    assert mentions(caught.value, "tp 4", "tp 1, 2 would do", *caught.value.misfits)


@pytest.mark.parametrize(
    ("rule", "tp", "allowed"),
    [
        ("packed_colwise", 4, (1, 2, 3, 6)),
        ({"style": "packed_colwise", "blocks": [6, 4, 2]}, 3, (1, 2)),
        ({"style": "packed_rowwise", "blocks": [3, 1]}, 2, (1, 3)),
        ("colwise", 5, (1, 2, 3, 4, 6, 12)),
        ("embedding_rowwise", 10**6, (1, 2, 3, 4, 6, 12)),
    ],
)
def test_blocks_divide_each_by_itself(tmp_path: Path, rule: Any, tp: int, allowed: tuple[int, ...]) -> None:
    folder = save(tmp_path / "m", {"m.weight": torch.zeros(12, 12)})
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=tp, plan={"m": rule})
    assert caught.value.allowed == allowed
    assert mentions(caught.value, "m.weight", f"tp {tp} ", "12")


@pytest.mark.parametrize("tp", [0, -1, 1.5, 2.0, True, False, None, "2"])
def test_what_is_no_number_of_ranks(tmp_path: Path, tp: Any) -> None:
    folder = save(tmp_path / "m", {"m.weight": torch.zeros(4, 4)})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=tp, plan={"m": "colwise"})
    assert mentions(caught.value, repr(tp), "tp")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_unequal_blocks_at_every_degree(tmp_path: Path, tp: int) -> None:
    sizes = [16, 4, 8, 4]
    x = count(32, 3)
    rules = {"m": {"style": "packed_colwise", "blocks": sizes}}
    split(save(tmp_path / "m", {"m.weight": x}), tmp_path / "out", tp=tp, plan=rules)
    for rank, part in enumerate(by_blocks(x, sizes, tp)):
        assert of_rank(tmp_path / "out", rank, tp)["m.weight"][2] == raw(part)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"style": "packed_colwise", "blocks": [5, 2]}, ("m.weight", "12", "[5, 2]")),
        ({"style": "colwise", "layout": "(5*)"}, ("m.weight", "(5*)", "5 elements", "12")),
        ({"style": "colwise", "layout": "(width*)"}, ("'width'", "[sizes]")),
        ({"style": "colwise", "layout": "(4*"}, ("'(4*'",)),
        ({"style": "colwise", "layout": "(H/5*)"}, ("4 / 5",)),
        ({"style": "colwise", "dim": 2}, ("m", "dim 2", "2 dimensions")),
        ({"style": "colwise", "dim": -3}, ("m", "dim -3")),
        # A rule that cuts must not leave its tensor whole with no word.
        ({"style": "colwise", "layout": "(12)"}, ("m",)),
        ({"style": "colwise", "layout": "(12@tpp)"}, ("m", "tpp")),
        ({"style": "colwise", "layout": "(12@ep)"}, ("m", "ep")),
    ],
)
def test_rules_that_do_not_fit_their_tensor(tmp_path: Path, rule: Any, words: tuple[str, ...]) -> None:
    folder = save(tmp_path / "m", {"m.weight": torch.zeros(12, 12)}, {"num_attention_heads": 4})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan={"m": rule})
    assert mentions(caught.value, *words)


def test_heads_and_starred_factors_in_one_axis(tmp_path: Path) -> None:
    x = count(24, 3)
    rules = {"m": {"style": "colwise", "layout": "(KV@kv, 4) + (16*)"}}
    split(save(tmp_path / "m", {"m.weight": x}, {"num_key_value_heads": 2}), tmp_path / "out", tp=2, plan=rules)
    for rank, part in enumerate(by_blocks(x, [8, 16], 2)):
        assert of_rank(tmp_path / "out", rank, 2)["m.weight"][1:] == (tuple(part.shape), raw(part))


# Rows of an odd number of half bytes are cut nowhere, but one rank divides nothing.
def test_one_rank_divides_every_dtype() -> None:
    model = Model({"m.weight": RuntimeTensor("F4", (4, 7))}, ScopedSizes(Sizes({}, {})), {})
    made = resolve(model, Plan("plan", (build_rule("m", "colwise", "plan"),)), World(1))
    assert set(made.tensors) == {"m.weight"}


def test_heads_of_unknown_size_are_cut_as_rows_and_noted(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"a.q_proj.weight": torch.zeros(24, 4)})
    resolution = plan(folder, tp=4, plan={"a.q_proj": "colwise"}).resolution
    assert resolution.tensors["a.q_proj.weight"].placement.cuts[0].axis == "(24*)"
    (note,) = resolution.notes
    for word in ("q_proj", "plain rows", "is not known"):
        assert word in note


def test_a_size_that_is_a_list_is_refused(tmp_path: Path) -> None:
    config = {"num_attention_heads": [4, 8], "head_dim": 2}
    folder = save(tmp_path / "m", {"a.q_proj.weight": torch.zeros(24, 4)}, config)
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=4, plan={"a.q_proj": "colwise"})
    assert mentions(caught.value, "num_attention_heads", "[4, 8]")


def test_sizes_may_be_bound_in_the_plan(tmp_path: Path) -> None:
    document = {
        "plan": {"m": {"style": "colwise", "layout": "(heads*, width)"}},
        "sizes": {"heads": "vision.heads", "width": "vision.hidden / heads"},
    }
    config = {"vision": {"heads": 3, "hidden": 12}}
    folder = save(tmp_path / "m", {"m.weight": torch.zeros(12, 4)}, config)
    resolution = plan(folder, tp=3, plan=document).resolution
    assert (resolution.sizes["heads"], resolution.sizes["width"]) == (3, 4)
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=2, plan=document)
    assert caught.value.allowed == (1, 3)
    document["sizes"]["heads"] = "width / 4"
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=3, plan=document)
    assert mentions(caught.value, "heads -> width -> heads", "refers to itself")


MODULES = {
    "colwise": None,
    "colwise_gather_output": Module("colwise_gather_output", "", "all_gather", "(8*)"),
    "rowwise": Module("rowwise", "", "all_reduce", "(12*)"),
    "rowwise_split_input": Module("rowwise_split_input", "slice_input", "all_reduce", "(12*)"),
    "packed_colwise": None,
    "packed_rowwise": Module("packed_rowwise", "", "all_reduce", "(2, 6*)"),
    "embedding_rowwise": Module("embedding_rowwise", "mask_ids", "all_reduce", "(8*)"),
    "embedding_colwise": Module("embedding_colwise", "", "all_gather", "(12*)"),
    "moe_tp_experts": Module("moe_tp_experts", "", "all_reduce"),
    "all_reduce": Module("all_reduce", "", "all_reduce"),
    "replicate": None,
}


@pytest.mark.parametrize("style", MODULES)
def test_what_happens_around_a_module(tmp_path: Path, style: str) -> None:
    folder = save(tmp_path / "m", {"m.weight": W, "n.weight": W + 1})
    modules = plan(folder, tp=2, plan={"m": style, "n": "colwise"}).resolution.modules
    assert modules.get("m") == MODULES[style]
    assert set(modules) <= {"m"}


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIE_RULES = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}


@pytest.mark.parametrize("rules", [None, TIE_RULES], ids=["built-in", "given"])
@pytest.mark.parametrize(
    ("present", "flag", "ties"),
    [
        ((EMBED,), True, {HEAD: EMBED}),
        ((HEAD,), True, {EMBED: HEAD}),
        # Both stored: two parameters, whatever the flag says, as transformers keeps them if they differ.
        ((EMBED, HEAD), True, {}),
        ((EMBED, HEAD), False, {}),
    ],
)
def test_ties(tmp_path: Path, present: tuple[str, ...], flag: bool, ties: dict[str, str], rules: Rules | None) -> None:
    tensors = {name: count(8, 4, start=100 * i) for i, name in enumerate(present)}
    folder = save(tmp_path / "m", tensors, LLAMA | {"tie_word_embeddings": flag})
    manifest = split(folder, tmp_path / "out", tp=2, plan=rules)
    assert manifest.ties == ties
    assert set(manifest.tensors) == set(present)
    # A tied module has its hooks like any other.
    assert {name: module.after for name, module in manifest.modules.items()} == {
        "model.embed_tokens": "all_reduce",
        "lm_head": "all_gather",
    }
    for rank in range(2):
        held = {name: data for name, (_, _, data) in of_rank(tmp_path / "out", rank, 2).items()}
        assert held == {name: raw(tensor.chunk(2)[rank]) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("present", "absent"), [(EMBED, HEAD), (HEAD, EMBED)])
@pytest.mark.parametrize("flag", [False, None])
def test_a_parameter_that_is_neither_stored_nor_tied(
    tmp_path: Path, present: str, absent: str, flag: bool | None
) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    folder = save(tmp_path / "m", {present: count(8, 4)}, config)
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tp=2)
    assert mentions(caught.value, absent, "not stored", "tie_word_embeddings")


def test_tied_parameters_must_be_cut_alike(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {EMBED: count(8, 4)}, LLAMA | {"tie_word_embeddings": True})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan=TIE_RULES | {"model.embed_tokens": "embedding_colwise"})
    assert mentions(caught.value, EMBED, HEAD, "embedding_colwise", "colwise_gather_output")


# Under the stored names there is no lm_head to miss.
def test_stored_names_of_another_head_are_no_missing_head(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "tie_word_embeddings": False}
    tensors = {"gpt_neox.embed_in.weight": count(8, 4), "embed_out.weight": count(8, 4, start=100)}
    folder = save(tmp_path / "m", tensors, config)
    rules = {"embed_out": "colwise_gather_output", "gpt_neox.embed_in": "embedding_rowwise"}
    made = plan(folder, tp=2, plan=rules, layout="checkpoint").resolution
    assert set(made.tensors) == set(tensors)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt", "hqq", "torchao", None, 8]
)
@pytest.mark.parametrize("layout", ["runtime", "checkpoint"])
def test_quantized_formats_are_refused_by_name(tmp_path: Path, method: Any, layout: str) -> None:
    folder = save(tmp_path / "m", {"m.qweight": count(4, 4)}, LLAMA | {"quantization_config": {"quant_method": method}})
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tp=2, plan={"m": "colwise"}, layout=layout)
    assert mentions(caught.value, repr(method), "fp8", folder)


def quantized(*blocks: int) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(blocks)}}


@pytest.mark.parametrize("tp", [1, 2])
def test_block_scales_are_cut_with_their_weight(tmp_path: Path, tp: int) -> None:
    tensors = {
        "c.weight": count(4, 8, dtype=FP8),
        "c.weight_scale_inv": count(2, 2),
        "c.bias": count(4),
        "r.weight": count(4, 8, dtype=FP8, start=60),
        "r.weight_scale_inv": count(2, 2, start=9),
    }
    folder = save(tmp_path / "m", tensors, quantized(2, 4))
    split(folder, tmp_path / "out", tp=tp, plan={"c": "colwise", "r": "rowwise"})
    for rank in range(tp):
        held = {name: data for name, (_, _, data) in of_rank(tmp_path / "out", rank, tp).items()}
        dims = {name: 1 if name.startswith("r.") else 0 for name in tensors}
        views = {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}
        # Cut as bytes: torch does not chunk every FP8 dtype.
        assert held == {name: raw(view.chunk(tp, dims[name])[rank]) for name, view in views.items()}


@pytest.mark.parametrize(
    ("shape", "scales", "blocks", "style", "tp", "allowed"),
    [
        ((4, 12), (2, 3), (2, 4), "rowwise", 2, (1, 3)),
        ((6, 8), (3, 2), (2, 4), "colwise", 2, (1, 3)),
        ((300, 4), (3, 1), (128, 128), "colwise", 2, (1,)),
        ((512, 4), (4, 1), (128, 128), "colwise", 8, (1, 2, 4)),
        ((384, 4), (3, 1), (128, 128), "packed_colwise", 2, (1,)),
    ],
)
def test_a_cut_inside_a_block_of_scales(
    tmp_path: Path,
    shape: tuple[int, int],
    scales: tuple[int, int],
    blocks: tuple[int, int],
    style: str,
    tp: int,
    allowed: tuple[int, ...],
) -> None:
    tensors = {"m.weight": torch.zeros(shape, dtype=FP8), "m.weight_scale_inv": torch.zeros(scales)}
    folder = save(tmp_path / "m", tensors, quantized(*blocks))
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=tp, plan={"m": style})
    block = blocks[1 if style == "rowwise" else 0]
    assert caught.value.allowed == allowed
    assert any("m.weight_scale_inv" in line and f"blocks of {block}" in line for line in caught.value.misfits)
    assert mentions(caught.value, f"tp {tp} ")


@pytest.mark.parametrize("blocks", [[128], [128, 0], "128", [128, 1.5], [True, 128], {"rows": 128}])
def test_a_block_size_that_is_no_pair_of_sizes(tmp_path: Path, blocks: Any) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": blocks}}
    folder = save(tmp_path / "m", {"m.weight": count(4, 4)}, config)
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tp=2, plan={"m": "colwise"})
    assert mentions(caught.value, "config.json", "weight_block_size", repr(blocks))


@pytest.mark.parametrize("config", [{}, quantized(2, 4)])
def test_scales_of_another_number_of_blocks_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = {"m.weight": count(8, 8, dtype=FP8), "m.weight_scale_inv": torch.zeros(3, 2)}
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", tensors, config), tp=2, plan={"m": "colwise"})
    assert mentions(caught.value, "m.weight_scale_inv", "dim 0", "3 entries", "8")


@pytest.mark.parametrize(("tp", "groups"), [(1, None), (2, None), (4, 2), (8, 1)])
@pytest.mark.parametrize("given", [False, True], ids=["built-in", "the plan of transformers, given"])
def test_fewer_queries_a_key_head_where_ranks_share_it(
    tmp_path: Path, tp: int, groups: int | None, given: bool
) -> None:
    """Whatever plan cuts the heads, the module must be told."""
    from transformers import LlamaConfig

    tensors, config = attention(8, 2, 4)
    rules = {key: style for key, style in LlamaConfig.base_model_tp_plan.items() if "self_attn" in key}
    resolution = plan(save(tmp_path / "m", tensors, config), tp=tp, plan=rules if given else None).resolution
    expected = {} if groups is None else {"model.layers.0.self_attn": {"num_key_value_groups": groups}}
    assert resolution.attributes == expected


PHI3 = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 16, "num_attention_heads": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "changed"),
    [
        (1, {}),
        # 8 query heads on 2 key heads, hidden 16: heads of 2 entries.
        (2, {"num_key_value_heads": 1, "config.num_attention_heads": 4}),
        (4, {"num_key_value_heads": 1, "config.num_attention_heads": 2, "num_key_value_groups": 2}),
        (8, {"num_key_value_heads": 1, "config.num_attention_heads": 1, "num_key_value_groups": 1}),
    ],
)
def test_phi3_takes_its_fused_projection_apart_by_attributes(tmp_path: Path, tp: int, changed: dict[str, int]) -> None:
    qkv, gate_up = count(24, 16), count(16, 16)
    tensors = {
        "model.layers.0.self_attn.qkv_proj.weight": qkv,
        "model.layers.0.self_attn.o_proj.weight": count(16, 16),
        "model.layers.0.mlp.gate_up_proj.weight": gate_up,
        "model.layers.0.mlp.down_proj.weight": count(16, 8),
    }
    manifest = split(save(tmp_path / "m", tensors | heads(16), PHI3), tmp_path / "out", tp=tp)
    assert manifest.attributes == ({"model.layers.0.self_attn": changed} if changed else {})
    q, k, v = qkv.split([16, 4, 4])
    shared = max(tp // 2, 1)
    for rank in range(tp):
        keys = [x.view(2, 2, 16).repeat_interleave(shared, 0).reshape(-1, 16).chunk(tp)[rank] for x in (k, v)]
        held = of_rank(tmp_path / "out", rank, tp)
        assert held["model.layers.0.self_attn.qkv_proj.weight"][2] == raw(cat([q.chunk(tp)[rank], *keys]))
        assert held["model.layers.0.mlp.gate_up_proj.weight"][2] == raw(by_blocks(gate_up, [8, 8], tp)[rank])
    # The key heads are in two ranks' parts, their queries in one: merging takes each once.
    verify(tmp_path / "out")
    assert merge(tmp_path / "out", tmp_path / "back").identical == ("model.safetensors",)


def test_the_plan_of_transformers_can_be_asked_for(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_up_proj.weight": count(16, 16), **heads(16)}
    modules = {
        source: plan(save(tmp_path / source, tensors, PHI3), tp=2, plan_source=source).resolution.modules
        for source in ("reshard", "transformers")
    }
    name = "model.layers.0.mlp.gate_up_proj"
    assert (modules["reshard"].get(name), modules["transformers"][name].after) == (None, "all_gather")


def test_attributes_may_be_given_in_the_plan(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "plan": {"m.up": "colwise"},
        "sizes": {"width": "hidden"},
        "attributes": {"m": {"width": "width / tp", "same": "width"}},
    }
    folder = save(tmp_path / "m", {"m.up.weight": torch.zeros(12, 4)}, {"hidden": 12})
    assert plan(folder, tp=3, plan=document).resolution.attributes == {"m": {"width": 4}}
    document["attributes"]["m"]["width"] = "width / tp / 5"
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=3, plan=document)
    assert mentions(caught.value, "attributes of m", "is not a whole number")


def test_what_no_rule_names_is_whole_and_counted(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"m.weight": W, "n.weight": W + 1})
    resolution = plan(folder, tp=2, plan={"m": "colwise"}).resolution
    assert {name: rule.style for name, rule in resolution.rules.items()} == {"m.weight": "colwise"}
    whole = [name for name, tensor in resolution.tensors.items() if not tensor.placement.cuts]
    assert sum(prod(resolution.tensors[name].shape) for name in whole) == W.numel()


def test_a_condition_picks_the_modules_that_have_a_child(tmp_path: Path) -> None:
    """Of two kinds of layers only those with queries are cut; a plain pattern beside it takes the others."""
    tensors = {
        "layers.0.attn.q.weight": count(4, 6),
        "layers.0.attn.o.weight": count(6, 4),
        "layers.1.attn.o.weight": count(6, 8),
    }
    folder = save(tmp_path / "m", tensors)
    rules = {"layers.*.attn.q": "colwise", "layers.*.attn[q].o": "rowwise", "layers.*.attn.o": "rowwise_split_input"}
    modules = split(folder, tmp_path / "out", tp=2, plan=rules).modules
    assert modules["layers.0.attn.o"] == Module("rowwise", "", "all_reduce", "(4*)")
    assert modules["layers.1.attn.o"] == Module("rowwise_split_input", "slice_input", "all_reduce", "(8*)")


def test_a_condition_that_nothing_meets_is_a_rule_that_takes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"attn.o.weight": count(4, 4)})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan={"attn[q].o": "rowwise"})
    assert mentions(caught.value, "attn[q].o")


def test_a_layout_may_be_given_by_the_size_of_a_sibling(tmp_path: Path) -> None:
    """The heads of a layer are what its own key projection has: 2 of width 3, each with 2 query heads."""
    q, k = count(12, 5), count(6, 5, start=100)
    folder = save(tmp_path / "m", {"attn.q.weight": q, "attn.k.weight": k}, {"width": 3})
    rules = {
        "attn.q": {"style": "colwise", "layout": "(k.out/width@kv, q.out/k.out@rep, width)"},
        "attn.k": {"style": "colwise", "layout": "(k.out/width@kv, width)"},
    }
    split(folder, tmp_path / "out", tp=4, plan=rules)
    for rank in range(4):
        mine = of_rank(tmp_path / "out", rank, 4)
        assert mine["attn.q.weight"][2] == raw(q.chunk(4)[rank])
        assert mine["attn.k.weight"][2] == raw(k.chunk(2)[rank // 2])


def test_a_layout_may_be_given_by_a_size_further_out(tmp_path: Path) -> None:
    """One block of rows or two, by the columns of what comes after it; the innermost of its name counts."""
    gated, plain = count(16, 5), count(8, 5, start=100)
    tensors = {
        "a.ff.net.0.proj.weight": gated,
        "a.ff.net.2.weight": count(5, 8),
        "b.ff.net.0.proj.weight": plain,
        "b.ff.net.2.weight": count(5, 8),
        "net.2.weight": count(5, 4),
        "c.up.weight": gated.clone(),
        "down.weight": count(5, 8),
    }
    rule = {"style": "colwise", "layout": "(proj.out / net.2.in, net.2.in*)"}
    outmost = {"style": "colwise", "layout": "(up.out / down.in, down.in*)"}
    rules = {"*.ff.net.0.proj": rule, "*.ff.net.2": "rowwise", "c.up": outmost}
    split(save(tmp_path / "m", tensors), tmp_path / "out", tp=2, plan=rules)
    for rank in range(2):
        mine = of_rank(tmp_path / "out", rank, 2)
        assert mine["a.ff.net.0.proj.weight"][2] == raw(torch.cat([half.chunk(2)[rank] for half in gated.chunk(2)]))
        assert mine["b.ff.net.0.proj.weight"][2] == raw(plain.chunk(2)[rank])
        assert mine["c.up.weight"][2] == mine["a.ff.net.0.proj.weight"][2]


def test_a_vocabulary_may_be_odd(tmp_path: Path) -> None:
    """Its steps take parts of any length; other dimensions must divide, and no rank is left without rows."""
    embed, head = count(7, 4), count(7, 4, start=100)
    folder = save(
        tmp_path / "m", {"embed.weight": embed, "head.weight": head, "h.weight": head.clone()}, {"vocab_size": 7}
    )
    rules = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    made = plan(folder, tp=2, plan=rules)
    assert [note for note in made.resolution.notes if "embed.weight: 4 of 7 entries a rank, 3 on the last" in note]
    split(folder, tmp_path / "out", tp=2, plan=rules)
    for rank in range(2):
        mine = of_rank(tmp_path / "out", rank, 2)
        assert mine["embed.weight"][2] == raw(embed.chunk(2)[rank])
        assert mine["head.weight"][2] == raw(head.chunk(2)[rank])
    merge(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    for rule, tp in (({"h": "colwise"}, 2), ({"embed": "embedding_rowwise"}, 6)):
        with pytest.raises(DegreeError):
            plan(folder, tp=tp, plan=rule)
