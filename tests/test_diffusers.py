"""The models of diffusers that have a plan: their outputs, shards and collectives on 2 and 4 ranks; what is refused.

The comparisons are made by `diffusers_worker.py`, in four processes, in one launch. The oracle is diffusers, in one
process and with its own tensor parallelism.
"""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from loader import load_model, open_shard
from manifests.errors import CheckpointError, DegreeError, LoadError, PlanError
from manifests.expression import parse_axis
from reshard import plan, split
from reshard.catalogue import built_in_plan, find_architecture
from reshard.catalogue.diffusers import class_names
from reshard.sizes import Sizes
from tests.diffusers_image import CONFIGS as IMAGE_CONFIGS
from tests.diffusers_video import CASES as VIDEO_CASES
from tests.diffusers_worker import (
    CASES,
    CONFIGS,
    DEGREES,
    FILM,
    FILM_PLAN,
    OWN,
    PLAIN,
    WORLD_SIZE,
    Case,
    Outcome,
    flux_inputs,
    outputs,
)
from tests.launching import run_ranks
from tools.export_diffusers import export_catalogue

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300
TOLERANCE = 1e-4

FLUX = PLAIN[0]

# Chroma's class, of diffusers itself.
pytestmark = pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")

Outcomes = dict[str, list[Outcome]]


def build(case: Case) -> Any:
    """Return a case's model with random parameters, no two of them alike."""
    torch.manual_seed(0)
    model = getattr(diffusers, case.architecture)(**CONFIGS[case.architecture] | case.config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(size * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every case's model, expected outputs and splits; and a model saved after it was fused."""
    folder = tmp_path_factory.mktemp("diffusers")
    for case in (*CASES, FILM):
        model = build(case)
        model.save_pretrained(folder / case.name)
        save_file(outputs(model, case), folder / f"{case.name}-expected.safetensors")
        for degree in DEGREES:
            given = FILM_PLAN if case is FILM else None
            split(folder / case.name, folder / f"{case.name}-tp{degree}", tp=degree, plan=given)
    fused = build(FLUX)
    fused.fuse_qkv_projections()
    fused.save_pretrained(folder / "fused")
    split(folder / "fused", folder / "fused-tp2", tp=2)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """What every rank found, by the name of a case or check."""
    run_ranks("tests.diffusers_worker", folder, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [found[name] for found in ranks if name in found] for name in ranks[-1]}


def refuse_errors(found: list[Outcome]) -> None:
    errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(found) if outcome["error"]]
    assert not errors, "\n".join(errors)


def check_outputs(found: list[Outcome], tolerance: float = TOLERANCE) -> None:
    refuse_errors(found)
    for outcome in found:
        assert outcome["shapes"] == outcome["expected_shapes"]
        assert outcome["finite"]
        assert outcome["difference"] <= tolerance * outcome["largest"]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_those_of_one_process(outcomes: Outcomes, case: Case, degree: int):
    found = outcomes[f"{case.name} {degree}"]
    check_outputs(found)
    assert [(outcome["class"], outcome["training"]) for outcome in found] == [(case.architecture, False)] * degree


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_shards_are_those_of_diffusers(outcomes: Outcomes, case: Case, degree: int):
    found = outcomes[f"{case.name} peer {degree}"]
    check_outputs(found)
    for outcome in found:
        assert outcome["names"] == outcome["peer_names"]
        assert outcome["different"] == []
        assert outcome["cut"]
        assert all(name.endswith(".bias") for name in outcome["summed"])


# Two blocks of each kind: the double ones of Flux and QwenImage sum 4 times, the single ones once; 2.1's twice.
COLLECTIVES = {"flux": 10, "flux2": 10, "qwenimage": 8, "qwenimage21": 4}


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_collectives_are_as_many_as_those_of_diffusers(outcomes: Outcomes, case: Case, degree: int):
    for mine, peer in zip(outcomes[f"{case.name} {degree}"], outcomes[f"{case.name} peer {degree}"], strict=True):
        assert mine["collectives"] == peer["collectives"] == {"allreduce": COLLECTIVES[case.name]}


def test_compiled_without_a_break(outcomes: Outcomes):
    check_outputs(outcomes["compiled"])


def test_projections_fused_after_loading(outcomes: Outcomes):
    check_outputs(outcomes["fused after loading"])
    assert outcomes["fused after loading"][0]["fused"] == [3 * 64 // 2, 64]


def test_projections_fused_before_the_split_are_not_used(outcomes: Outcomes, folder: Path):
    check_outputs(outcomes["fused before splitting"])
    planned = plan(folder / "fused", tp=2)
    unused = {name for name, tensor in planned.resolution.tensors.items() if tensor.unused}
    assert unused == {name for name in planned.resolution.tensors if "qkv" in name}
    assert len(unused) == 12


def test_a_class_without_a_plan_by_a_plan_of_ones_own(outcomes: Outcomes):
    check_outputs(outcomes["own plan"])
    assert [outcome["heads"] for outcome in outcomes["own plan"]] == [[2, 2]] * 2


def test_weights_stored_in_fewer_bits(outcomes: Outcomes):
    refuse_errors(outcomes["layerwise"])
    for outcome in outcomes["layerwise"]:
        assert outcome["stored"] == "torch.float8_e4m3fn"
        assert outcome["difference"] <= TOLERANCE * outcome["largest"]


def test_another_dtype(outcomes: Outcomes):
    refuse_errors(outcomes["converted"])
    for outcome in outcomes["converted"]:
        assert outcome["dtypes"] == ["torch.bfloat16"]
        # The names' parts, as diffusers goes by: the last projection and those of the single blocks.
        assert len(outcome["kept"]) == 6
        assert all("proj_out" in name for name in outcome["kept"])


ADVICE = {
    "save_pretrained": "reshard merge",
    "load_lora_adapter": "merge it into the checkpoint",
    "add_adapter": "merge it into the checkpoint",
    "_load_ip_adapter_weights": "counts all heads",
    "enable_parallelism": "divided already",
    "enable_group_offload": "one rank's shards",
    "load_state_dict": "split it again",
}


@pytest.mark.parametrize("method", ADVICE)
def test_refused_on_a_sharded_model(outcomes: Outcomes, method: str):
    refuse_errors(outcomes["refused"])
    for outcome in outcomes["refused"]:
        assert f"{method}: refused" in outcome["messages"][method]
        assert ADVICE[method] in outcome["messages"][method]


def test_the_catalogue_is_that_of_the_installed_diffusers():
    exported = json.loads((ROOT / "reshard" / "catalogue" / "diffusers.json").read_text())
    assert exported == json.loads(json.dumps(export_catalogue()))


PACKED = [
    ("FluxTransformer2DModel", {}),
    ("Flux2Transformer2DModel", {}),
    ("Flux2Transformer2DModel", {"mlp_ratio": 2.51}),
    ("Flux2Transformer2DModel", {"mlp_ratio": 4}),
]


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize(("architecture", "config"), PACKED)
def test_blocks_are_those_of_the_class(architecture: str, config: dict[str, Any], heads: int):
    config = {**CONFIGS[architecture], "num_attention_heads": heads, **config}
    with torch.device("meta"):
        model = getattr(diffusers, architecture)(**config)
    found = find_architecture({"_class_name": architecture, **config})
    assert found is not None
    known = built_in_plan(found)
    sizes = Sizes(known.sizes, config, found.defaults)
    packed = [rule for rule in known.rules if rule.style.startswith("packed") and rule.layout]
    assert packed
    for rule in packed:
        module = model.get_submodule(rule.pattern.replace("*", "0"))
        attribute = "_tp_packed_col_blocks" if rule.style == "packed_colwise" else "_tp_packed_row_blocks"
        axis = parse_axis(rule.layout, sizes.get)
        blocks = []
        for segment in axis.segments:
            copies = 1 if segment.factors[0].on else segment.factors[0].size
            blocks += [segment.size // copies] * copies
        assert blocks == getattr(module, attribute)
        assert axis.size == module.weight.shape[0 if rule.style == "packed_colwise" else 1]


def test_every_class_with_a_plan_is_known():
    image = {name.partition("@")[0] for name in IMAGE_CONFIGS}
    assert set(class_names()) == {case.architecture for case in (*PLAIN, *OWN, *VIDEO_CASES)} | image


def test_a_subfolder_of_a_pipeline(folder: Path, tmp_path: Path):
    build(FLUX).save_pretrained(tmp_path / "pipeline" / "transformer")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    manifest = split(tmp_path / "pipeline", tp=2, subfolder="transformer")
    assert (manifest.model.library, manifest.model.architecture) == ("diffusers", FLUX.architecture)
    made = open_shard(tmp_path / "pipeline-transformer-tp2", 1)
    theirs = open_shard(folder / "flux-tp2", 1)
    assert all(torch.equal(made[name], theirs[name]) for name in theirs)


def test_one_rank_is_the_model_itself(folder: Path, tmp_path: Path):
    model = build(FLUX).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    split(tmp_path / "model", tmp_path / "tp1", tp=1)
    whole = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "model", torch_dtype=torch.bfloat16)
    mine = load_model(tmp_path / "tp1")
    assert mine.dtype == torch.bfloat16
    assert {**mine.config, "_name_or_path": ""} == {**whole.config, "_name_or_path": ""}
    for name, parameter in whole.state_dict().items():
        assert torch.equal(mine.state_dict()[name], parameter)
    inputs = {n: t.to(torch.bfloat16) for n, t in flux_inputs({}).items()}
    with torch.inference_mode():
        assert torch.equal(mine(**inputs).sample, whole(**inputs).sample)


def test_values_given_to_load_model(folder: Path, tmp_path: Path):
    split(folder / "flux", tmp_path / "tp1", tp=1)
    assert load_model(tmp_path / "tp1", axes_dims_rope=(8, 4, 4)).config.axes_dims_rope == (8, 4, 4)
    with pytest.raises(LoadError, match="takes no attn_implementation"):
        load_model(tmp_path / "tp1", attn_implementation="eager")


def test_a_class_that_diffusers_lacks(folder: Path, tmp_path: Path):
    config = load_config(folder / "flux") | {"_class_name": "FluxScheduler"}
    save(tmp_path / "model", load_weights(folder / "flux"), config)
    split(tmp_path / "model", tmp_path / "tp1", tp=1, plan={"proj_out": "colwise_gather_output"})
    with pytest.raises(LoadError, match="has no model FluxScheduler"):
        load_model(tmp_path / "tp1")


def test_quantized(folder: Path, tmp_path: Path):
    config = load_config(folder / "flux")
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    save(tmp_path / "model", load_weights(folder / "flux"), config)
    with pytest.raises(CheckpointError, match="quantized by 'bitsandbytes'"):
        plan(tmp_path / "model", tp=2)


def test_heads_are_not_cut(folder: Path):
    with pytest.raises(DegreeError) as caught:
        plan(folder / "flux", tp=8)
    assert caught.value.allowed == (1, 2, 4)
    assert "num_attention_heads 4" in str(caught.value)


def test_a_plan_of_ones_own_knows_the_heads(folder: Path):
    with pytest.raises(DegreeError, match=r"dim 0 has 64 = \(4\*, 16\)"):
        plan(folder / "flux", tp=8, plan={"transformer_blocks.*.attn.add_q_proj": "colwise"})


def test_a_plan_of_ones_own_knows_the_blocks(folder: Path):
    given = {"single_transformer_blocks.*.attn.to_qkv_mlp_proj": "packed_colwise", "proj_out": "packed_colwise"}
    tensors = plan(folder / "flux2", tp=2, plan=given).resolution.tensors
    packed = tensors["single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"].placement.cuts
    assert [cut.axis for cut in packed] == ["(3, 4*, 16) + (2, 192*)"]
    assert [cut.axis for cut in tensors["proj_out.weight"].placement.cuts] == ["(2, 2*)"]


def test_sizes_that_do_not_fit_the_configuration(folder: Path, tmp_path: Path):
    config = load_config(folder / "flux2") | {"mlp_ratio": 2.0}
    save(tmp_path / "model", load_weights(folder / "flux2"), config)
    with pytest.raises(PlanError, match=r"has 192 elements .* the tensor 256"):
        plan(tmp_path / "model", tp=2)
    save(tmp_path / "model", load_weights(folder / "flux2"), config | {"mlp_ratio": "3"})
    with pytest.raises(PlanError, match="mlp_ratio is '3'"):
        plan(tmp_path / "model", tp=2)


FOREIGN = {
    "transformer_blocks.0.attn.to_q.lora_A.default.weight": "fuse_lora",
    "transformer_blocks.0.attn.to_q.base_layer.weight": "fuse_lora",
    "transformer_blocks.0.attn.processor.to_k_ip.0.weight": "unload_ip_adapter",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_adapter_inside(folder: Path, tmp_path: Path, name: str):
    save(tmp_path / "model", {**load_weights(folder / "flux"), name: torch.zeros(2)}, load_config(folder / "flux"))
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "model", tp=2)
    assert name in str(caught.value)
    assert FOREIGN[name] in str(caught.value)


def test_fused_projections_alone(folder: Path, tmp_path: Path):
    weights = load_weights(folder / "fused")
    del weights["transformer_blocks.1.attn.add_k_proj.bias"]
    save(tmp_path / "model", weights, load_config(folder / "flux"))
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "model", tp=2)
    assert "transformer_blocks.1.attn.to_added_qkv.bias" in str(caught.value)
    assert "transformer_blocks.1.attn.add_k_proj.bias is not stored" in str(caught.value)


def test_the_plans_of_diffusers_only(folder: Path):
    with pytest.raises(PlanError, match="diffusers has no plan for it"):
        plan(folder / "wan", tp=2, plan_source="transformers")


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_a_plan_of_ours_leaves_no_matrix_of_a_block_whole_but_modulations(folder: Path, case: Case):
    tensors = plan(folder / case.name, tp=2).resolution.tensors
    whole = [
        name
        for name, tensor in tensors.items()
        if "block" in name and len(tensor.shape) > 1 and not tensor.placement.cuts
    ]
    assert [name for name in whole if not re.search(r"norm\w*\.|scale_shift_table", name)] == []


def test_a_class_without_a_plan(folder: Path, tmp_path: Path):
    save(tmp_path / "model", load_weights(folder / "flux"), {"_class_name": FILM.architecture})
    with pytest.raises(PlanError) as caught:
        plan(tmp_path / "model", tp=2)
    assert FILM.architecture in str(caught.value)
    assert all(name in str(caught.value) for name in class_names())


def load_weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "diffusion_pytorch_model.safetensors")


def load_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def save(model: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    model.mkdir(exist_ok=True)
    save_file(weights, model / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
