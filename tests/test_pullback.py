"""Stored layouts divided by the built-in plans: against slices made by hand, and against what transformers saves.

``CONVERSIONS`` chooses the types, as in `tests.test_conversions_transformers`.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader import load_model
from manifests.errors import LoadError, PlanError
from manifests.header import StoredTensor
from manifests.layout import Mesh
from manifests.manifest import Link, Part, Tensor
from manifests.placement import PARTIAL, REPLICATED, Cut, Placement
from manifests.runs import Run
from reshard import merge, plan, split, verify
from reshard.placing import Resolution
from reshard.recipes.pullback import pull_back
from tests.checkpoints import LLAMA, count, mentions, save
from tests.test_conversions_transformers import UNEQUAL, build, chosen

MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
BLOCK = "model.layers.0.block_sparse_moe"
ATTENTION = "model.layers.0.self_attn"


def tensors_of(folder: Path, *patterns: str) -> dict[str, torch.Tensor]:
    return {name: x for pattern in patterns for path in folder.glob(pattern) for name, x in load_file(path).items()}


def of_rank(folder: Path, rank: int, tp: int) -> dict[str, torch.Tensor]:
    """Return every tensor that a rank opens."""
    return tensors_of(folder, f"rank-{rank:05d}-of-{tp:05d}*.safetensors", "common*.safetensors")


def part(x: torch.Tensor, rank: int, parts: int, dim: int = 0) -> torch.Tensor:
    return x.chunk(parts, dim)[rank]


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: count(*shape, start=1000 * i) for i, (name, shape) in enumerate(shapes.items())}


def check_merged(out: Path, folder: Path, back: Path) -> None:
    verify(out)
    merge(out, back)
    for path in folder.glob("*.safetensors"):
        assert (back / path.name).read_bytes() == path.read_bytes()


@pytest.fixture
def mixtral(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a small Mixtral, which is saved in the folder m."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{BLOCK}.experts.{e}.{w}.weight": (8, 12) if w == "w2" else (12, 8) for e in (0, 1) for w in ("w1", "w2", "w3")
    }
    shapes |= {f"{ATTENTION}.{x}_proj.weight": (4 if x in "kv" else 8, 8) for x in "qkvo"}
    shapes |= {f"{BLOCK}.gate.weight": (2, 8), "model.embed_tokens.weight": (8, 8), "lm_head.weight": (8, 8)}
    tensors = numbered(shapes)
    save(tmp_path / "m", tensors, MIXTRAL)
    return tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_experts_stored_one_by_one_are_cut_by_their_width(
    tp: int, tmp_path: Path, mixtral: dict[str, torch.Tensor]
) -> None:
    manifest = split(tmp_path / "m", tmp_path / "out", tp=tp, layout="checkpoint")
    assert (manifest.layout, set(manifest.tensors)) == ("checkpoint", set(mixtral))
    for rank in range(tp):
        held = of_rank(tmp_path / "out", rank, tp)
        assert held.keys() == mixtral.keys()
        for name, x in mixtral.items():
            if "k_proj" in name or "v_proj" in name:
                # Four ranks have the two heads in pairs.
                expected = part(x, rank * min(tp, 2) // tp, min(tp, 2))
            elif "gate" in name:
                expected = x
            else:
                expected = part(x, rank, tp, dim=1 if "w2" in name or "o_proj" in name else 0)
            assert torch.equal(held[name], expected), (name, rank)
    check_merged(tmp_path / "out", tmp_path / "m", tmp_path / "back")


def test_experts_stored_one_by_one_are_not_divided_over_ranks(tmp_path: Path, mixtral: dict[str, torch.Tensor]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(tmp_path / "m", tp=2, experts=2, layout="checkpoint")
    name, taker = f"{BLOCK}.experts.0.w1.weight", "model.layers.0.mlp.experts.gate_up_proj"
    assert name in mixtral
    assert mentions(caught.value, name, taker, "rank 1 has nothing of it", "--layout runtime", "leave --ep out")
    assert plan(tmp_path / "m", tp=2, experts=2).world_size == 2


def test_what_the_stored_names_lack_has_no_steps(tmp_path: Path, mixtral: dict[str, torch.Tensor]) -> None:
    made = plan(tmp_path / "m", tp=2, layout="checkpoint").resolution
    assert set(made.modules) == {f"{ATTENTION}.o_proj", "model.embed_tokens", "lm_head"}
    assert any("other consumers" in note and "--layout runtime" in note for note in made.notes)
    assert made.rules[f"{BLOCK}.experts.1.w2.weight"].style == "rowwise"
    assert set(made.tensors) == set(mixtral)


@pytest.mark.parametrize("rules", [None, {f"{BLOCK}.experts.*.w1": "colwise"}])
@pytest.mark.usefixtures("mixtral")
def test_a_split_in_the_stored_layout_is_not_loaded(rules: dict[str, str] | None, tmp_path: Path) -> None:
    split(tmp_path / "m", tmp_path / "out", tp=1, plan=rules, layout="checkpoint")
    with pytest.raises(LoadError) as caught:
        load_model(tmp_path / "out")
    assert mentions(caught.value, "MixtralForCausalLM", "as they are stored", "--layout runtime")


def test_where_both_layouts_are_one_so_are_the_splits(tmp_path: Path) -> None:
    """Fused projections that the running model has as well: a Phi-3, which can be loaded from either."""
    shapes = {
        f"{ATTENTION}.qkv_proj.weight": (16, 8),
        f"{ATTENTION}.o_proj.weight": (8, 8),
        "model.layers.0.mlp.gate_up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 6),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.norm.weight": (8,),
        "model.embed_tokens.weight": (8, 8),
        "lm_head.weight": (8, 8),
    }
    tensors = numbered(shapes)
    config = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "intermediate_size": 6}
    folder = save(tmp_path / "m", tensors, config)
    running = split(folder, tmp_path / "running", tp=2)
    stored = split(folder, tmp_path / "stored", tp=2, layout="checkpoint")
    assert (stored.tensors, stored.modules, stored.attributes, stored.model) == (
        running.tensors, running.modules, running.attributes, running.model
    )  # fmt: skip
    for rank in range(2):
        held = of_rank(tmp_path / "stored", rank, 2)
        q, k, v = tensors[f"{ATTENTION}.qkv_proj.weight"].split([8, 4, 4])
        expected = torch.cat([part(x, rank, 2) for x in (q, k, v)])
        assert torch.equal(held[f"{ATTENTION}.qkv_proj.weight"], expected)
        halves = tensors["model.layers.0.mlp.gate_up_proj.weight"].chunk(2)
        expected = torch.cat([part(x, rank, 2) for x in halves])
        assert torch.equal(held["model.layers.0.mlp.gate_up_proj.weight"], expected)


def test_what_is_taken_apart_is_cut_in_each_part(tmp_path: Path) -> None:
    """An HRM stores gate, query, key and value in one, and gate and up in one."""
    model = build("hrm_text")
    model.save_pretrained(tmp_path / "m")
    whole = tensors_of(tmp_path / "m", "*.safetensors")
    split(tmp_path / "m", tmp_path / "out", tp=2, layout="checkpoint")
    for rank in range(2):
        held = of_rank(tmp_path / "out", rank, 2)
        for name, count_of_parts in (("attn.gqkv_proj", 4), ("mlp.gate_up_proj", 2)):
            name = f"model.H_module.layers.0.{name}.weight"
            expected = torch.cat([part(x, rank, 2) for x in whole[name].chunk(count_of_parts)])
            assert torch.equal(held[name], expected)
    check_merged(tmp_path / "out", tmp_path / "m", tmp_path / "back")


@pytest.mark.parametrize("experts", [1, 2])
def test_what_is_stored_transposed_is_cut_along_its_own_dimension(experts: int, tmp_path: Path) -> None:
    """A Qwen3-VL of the hub has its experts as [experts, in, out], which transformers turns when it loads."""
    folder = tmp_path / "m"
    build("qwen3_vl_moe").save_pretrained(folder)
    whole = tensors_of(folder, "*.safetensors")
    turned = {name: x.mT.contiguous() if ".experts." in name else x for name, x in whole.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    split(folder, tmp_path / "out", tp=2, experts=experts, layout="checkpoint")
    names = [name for name in turned if ".experts." in name]
    assert names
    for rank in range(2):
        held = of_rank(tmp_path / "out", rank, 2)
        for name in names:
            if experts == 2:
                expected = part(turned[name], rank, 2)
            elif "gate_up" in name:
                expected = torch.cat([part(x, rank, 2, dim=2) for x in turned[name].chunk(2, dim=2)], dim=2)
            else:
                expected = part(turned[name], rank, 2, dim=1)
            assert torch.equal(held[name], expected), name
    check_merged(tmp_path / "out", folder, tmp_path / "back")


def test_rows_that_the_running_model_lacks_are_with_every_rank(tmp_path: Path) -> None:
    """An Inkling has its output layer padded; the layer is cut along its inputs, and so are the rows that pad."""
    build("inkling2_text").save_pretrained(tmp_path / "m")
    name = "model.llm.unembed.weight"
    whole = tensors_of(tmp_path / "m", "*.safetensors")[name]
    manifest = split(tmp_path / "m", tmp_path / "out", tp=2, layout="checkpoint")
    assert not any(tensor.unused for tensor in manifest.tensors.values())
    for rank in range(2):
        assert torch.equal(of_rank(tmp_path / "out", rank, 2)[name], part(whole, rank, 2, dim=1))


TP2 = (("tp", 2),)
HEADS = (("kv", 1), ("rep", 2))
ROWS = Link(1, 1, (Run(0, 0, 4),))


def cut(axis: str, dim: int = 0, unit: int = 1, mesh: Mesh = TP2) -> Placement:
    return Placement((Cut(dim, axis, unit),), mesh)


def take(source: str, placement: Placement, *runs: Run, size: int = 0, unused: bool = False) -> Tensor:
    """Return a tensor (size, 4) of which runs from rows of a source are a part."""
    part = Part(source, (Link(0, 0, runs), ROWS))
    return Tensor("F32", (size or sum(run.length * run.repeat for run in runs), 4), placement, (part,), unused)


def pulled(rows: int, *tensors: Tensor) -> Placement:
    """Return what becomes of a stored tensor s (rows, 4) of which tensors are made."""
    names = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    resolution = Resolution(names, {}, {}, {}, {}, {}, ())
    return (
        pull_back(resolution, {"s": StoredTensor("F32", (rows, 4), 0, rows * 16)}, 2, "the plan").tensors["s"].placement
    )


@pytest.mark.parametrize(
    ("rows", "tensors", "placement"),
    [
        # Taken apart, in this order and the other.
        (16, [take("s", cut("(8*)"), Run(0, 0, 8)), take("s", cut("(8*)"), Run(8, 0, 8))], cut("(2, 8*)")),
        (12, [take("s", cut("(4*)"), Run(8, 0, 4)), take("s", cut("(8*)"), Run(0, 0, 8))], cut("(8*) + (4*)")),
        (12, [take("s", REPLICATED, Run(8, 0, 4)), take("s", cut("(8*)"), Run(0, 0, 8))], cut("(8*) + (4)")),
        # Two meshes, of which one is all ranks.
        (
            12,
            [take("s", cut("(8*)"), Run(0, 0, 8)), take("s", cut("(1@kv, 4)", mesh=HEADS), Run(8, 0, 4))],
            cut("(8*) + (1@kv, 4)", mesh=HEADS),
        ),
        # One half of what is joined, and two neighbours of three.
        (8, [take("s", cut("(2, 8*)"), Run(0, 8, 8), size=16)], cut("(8*)")),
        (16, [take("s", cut("(3, 8*)"), Run(0, 8, 16), size=24)], cut("(2, 8*)")),
        (12, [take("s", cut("q:(8*) + k:(4*) + v:(4*)"), Run(0, 0, 12), size=16)], cut("q:(8*) + k:(4*)")),
        # Pairs that the model has as halves; halves that it has as pairs; the two rows of a head exchanged.
        (8, [take("s", cut("(2, 4*)"), Run(0, 0, 1, 4, 2, 1), Run(1, 4, 1, 4, 2, 1))], cut("(4*, 2)")),
        (8, [take("s", cut("(4*, 2)"), Run(0, 0, 1, 4, 1, 2), Run(4, 1, 1, 4, 1, 2))], cut("(2, 4*)")),
        (8, [take("s", cut("(4*, 2)"), Run(1, 0, 1, 4, 2, 2), Run(0, 1, 1, 4, 2, 2))], cut("(4*, 2)")),
        # Padding, which no rank needs and so every rank has.
        (
            10,
            [take("s", cut("(8*)"), Run(0, 0, 8)), take("s", REPLICATED, Run(8, 0, 2), unused=True)],
            cut("(8*) + (2)"),
        ),
        # Scales, one for 4 rows.
        (
            4,
            [take("s", cut("(8*)", unit=4), Run(2, 0, 2)), take("s", cut("(8*)", unit=4), Run(0, 0, 2))],
            cut("(2, 8*)", unit=4),
        ),
        (8, [take("s", PARTIAL, Run(0, 0, 4)), take("s", PARTIAL, Run(4, 0, 4))], PARTIAL),
        (8, [take("s", REPLICATED, Run(4, 0, 4)), take("s", REPLICATED, Run(0, 0, 4))], REPLICATED),
    ],
)  # fmt: skip
def test_axes_of_stored_dimensions(rows: int, tensors: list[Tensor], placement: Placement) -> None:
    assert pulled(rows, *tensors) == placement


@pytest.mark.parametrize(
    ("rows", "tensors", "words"),
    [
        (8, [take("s", PARTIAL, Run(0, 0, 4)), take("s", REPLICATED, Run(4, 0, 4))], ("t0 and t1", "rank 0 alone")),
        # The first half of what rank 0 has alone.
        (4, [take("s", cut("(8*)"), Run(0, 0, 4), size=8)], ("rank 1 has nothing of it",)),
        # Ranks in the reverse order.
        (8, [take("s", cut("(8*)"), Run(4, 0, 4), Run(0, 4, 4))], ("dim 0", "8 entries", "4 to 7 on rank 0")),
        (6, [take("s", cut("(8*)"), Run(0, 0, 6), size=8)], ("6 entries", "0 to 3 on rank 0")),
        (8, [take("s", cut("(4*)"), Run(0, 0, 4)), take("s", cut("(4*)", 1), Run(4, 0, 4))], ("unlike", "dim 1")),
        (
            8,
            [take("s", cut("(4@ep)", mesh=(("ep", 2), ("etp", 1))), Run(0, 0, 4)),
             take("s", cut("(4@rep)", mesh=HEADS), Run(4, 0, 4))],
            ("ep 2 x etp 1", "kv 1 x rep 2"),
        ),
    ],
)  # fmt: skip
def test_what_no_placement_says_is_refused(rows: int, tensors: list[Tensor], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        pulled(rows, *tensors)
    assert mentions(caught.value, "the plan: s, of which t0", "--layout runtime", *words)


CHOSEN = ("granitemoe", "hrm_text", "inkling2_text", "kimi_k25", "lara_mini", "qwen2_moe", "sarvam_moe")


@pytest.mark.parametrize("model_type", chosen(CHOSEN))
def test_a_rank_has_what_transformers_saves_of_its_part_of_the_running_model(model_type: str, tmp_path: Path) -> None:
    """Every entry that a rank does not have at run time is made a NaN, and the model is saved: the rest is the rank's.

    So the way from the running model to the stored layout is transformers' own.
    """
    if model_type in UNEQUAL:
        pytest.skip(UNEQUAL[model_type])
    model, folder, tp = build(model_type), tmp_path / "m", 2
    state = {name: x for name, x in model.state_dict().items() if x.is_floating_point()}
    for x in state.values():
        x.copy_(torch.arange(x.numel()).reshape(x.shape))
    model.save_pretrained(folder)
    whole = {name: x.clone() for name, x in state.items()}
    running = split(folder, tmp_path / "running", tp=tp)
    split(folder, tmp_path / "stored", tp=tp, layout="checkpoint")
    padded = {tensor.parts[0].source for tensor in running.tensors.values() if tensor.unused and tensor.parts}
    nothing = torch.empty(0)
    for rank in range(tp):
        held = of_rank(tmp_path / "running", rank, tp)
        for name in state.keys() & running.tensors.keys():
            mine = torch.isin(whole[name], held.get(name, nothing))
            state[name].copy_(torch.where(mine, whole[name], torch.nan))
        model.save_pretrained(tmp_path / f"of{rank}")
        parts = of_rank(tmp_path / "stored", rank, tp)
        for name, x in tensors_of(tmp_path / f"of{rank}", "*.safetensors").items():
            if x.is_floating_point() and name not in padded:
                assert torch.equal(parts.get(name, nothing).flatten(), x[~x.isnan()]), (name, rank)
    check_merged(tmp_path / "stored", folder, tmp_path / "back")
