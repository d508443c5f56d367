"""The classes of diffusers that make videos and sounds: their outputs and collectives on 2 and 4 ranks, their shards.

The comparisons are made by `diffusers_video_worker.py`, in four processes, in one launch. The oracle is diffusers in
one process.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader import open_shard
from manifests.errors import CheckpointError, DegreeError
from reshard import plan, split
from tests.diffusers_video import CASES, FLEX, FUSED, VideoCase, build, fuse, outputs
from tests.diffusers_worker import DEGREES, WORLD_SIZE, Outcome
from tests.launching import run_ranks

TIMEOUT_S = 300
TOLERANCE = 1e-5

# Of the classes of diffusers, on a CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
]

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every case's model, expected outputs and splits; and a model saved after it was fused."""
    folder = tmp_path_factory.mktemp("video")
    for case in (*CASES, FUSED):
        model = build(case)
        save_file(outputs(model, case), folder / f"{case.name}-expected.safetensors")
        if case is FUSED:
            fuse(model)
        model.save_pretrained(folder / case.name)
        for degree in DEGREES:
            split(folder / case.name, folder / f"{case.name}-tp{degree}", tp=degree)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """What every rank found, by the name of a case and the number of ranks."""
    run_ranks("tests.diffusers_video_worker", folder, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [found[name] for found in ranks if name in found] for name in ranks[-1]}


def check_outputs(found: list[Outcome], case: VideoCase, degree: int) -> None:
    errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(found) if outcome["error"]]
    assert not errors, "\n".join(errors)
    assert [(outcome["class"], outcome["finite"]) for outcome in found] == [(case.architecture, True)] * degree
    assert max(outcome["difference"] for outcome in found) <= TOLERANCE


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_those_of_one_process(outcomes: Outcomes, case: VideoCase, degree: int):
    check_outputs(outcomes[f"{case.name} {degree}"], case, degree)


# Blocks times what they sum, and what is joined. An attention of Wan sums its output, and squares of queries and keys.
COLLECTIVES: dict[str, tuple[int, int]] = {
    "wan-image": (2 * (3 + 4 + 1), 0),
    "sana-normed": (2 * (3 + 3 + 1), 0),
    "vace": ((3 + 2) * (3 + 3 + 1), 1 + 2),
    "animate": (2 * (3 + 4 + 1) + 2, 0),
    "skyreels": (2 * (3 + 3 + 1), 0),
    "chronoedit": (2 * (3 + 4 + 1), 0),
    "anyflow": (2 * (3 + 3 + 1), 0),
    "helios": (2 * (3 + 3 + 1), 0),
    "helios-scalar": (2 * (3 + 3 + 1), 0),
    "sana-video": (2 * (3 + 3 + 1), 2),
    "ltx2": (2 * (6 * 3 + 2), 0),
    "ltx2-split": (2 * (6 * 3 + 2), 0),
    "longcat-audio": (2 * (3 + 3 + 1) + 4, 4),
    "framepack": (2 + 4 + 1, 0),
    "hunyuan15": (2 + 2 * 4, 2 * 2),
    "motif": (2 * 4 + 3, 2 * 2 + 3),
    "motif-crossed": (2 * 5 + 3, 2 * 2 + 2 * 2 + 3),
    # The second block has one feed-forward, for the video and for the text.
    "easyanimate": (4 + 2, 2 * 2),
    "consisid": (2 * 2 + 2 * 2 + 2, 2 * 2),
    "latte": (2 * 3 + 2 * 2, 0),
    "allegro": (2 * 3, 0),
    "temporal": (2 * 3, 0),
    # The last block gives no text.
    "mochi": (2 * 4 + 2, 3 * 2),
    "cosmos": (2 * 3, 0),
    "cosmos-image": (2 * 3, 0),
    "cosmos3": (1 + 2 * 4, 0),
    "ace-step": (2 * 3, 0),
    "minimax-h3": (2 + 2 * 2, 2),
    "music3": (2 * 2, 0),
    # Beside its blocks the ids, a projection and two heads.
    "music3-depth": (2 * 2 + 1, 3),
    "stable-audio": (2 * 3, 0),
    "stable-audio3": (2 * 4, 0),
    "stable-audio3-plain": (2 * 4, 0),
}


@pytest.mark.parametrize("case", [case for case in CASES if case.architecture not in FLEX], ids=lambda case: case.name)
def test_collectives_are_as_many_as_the_plan_says(outcomes: Outcomes, case: VideoCase):
    summed, joined = COLLECTIVES[case.name]
    expected = {"allreduce": summed, **({"allgatherbase": joined} if joined else {})}
    for degree in DEGREES:
        assert [found["collectives"] for found in outcomes[f"{case.name} {degree}"]] == [expected] * degree


BLOCKS = r"(^|\.)\w*blocks\.|layers?\.|face_adapter|perceiver|text_conv"
WHOLE = r"norm\w*\.|scale_shift_table|modulation|adaln|dwconv|grn"
"""Norms and modulation, and convolutions of every feature by itself."""
WHOLE_OF = {
    "WanAnimateTransformer3DModel": r"^motion_encoder\.",
    "EasyAnimateTransformer3DModel": r"^transformer_blocks\.1\.attn1\.",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_matrix_of_a_block_is_whole_but_modulations(folder: Path, case: VideoCase):
    tensors = plan(folder / case.name, tp=2).resolution.tensors
    whole = [
        name
        for name, tensor in tensors.items()
        if re.search(BLOCKS, name) and len(tensor.shape) > 1 and not tensor.placement.cuts
    ]
    known = f"{WHOLE}|{WHOLE_OF.get(case.architecture, '(?!)')}"
    assert [name for name in whole if not re.search(known, name)] == []


def rows(*blocks: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return what cuts rows: each block by itself."""
    return lambda weight, rank: torch.cat([block.chunk(4)[rank] for block in weight.split(blocks)])


# In all of them a rank of four has one head in each of the blocks, or a quarter of the features.
SLICES: dict[tuple[str, str], Callable[[torch.Tensor, int], torch.Tensor]] = {
    ("latte", "transformer_blocks.0.ff.net.0.proj.weight"): rows(256),
    ("temporal", "transformer_blocks.0.ff.net.0.proj.weight"): rows(256, 256),
    ("temporal", "transformer_blocks.0.ff.net.0.proj.bias"): rows(256, 256),
    ("stable-audio3", "transformer_blocks.0.self_attn.to_qkv.weight"): rows(64, 64, 64, 64, 64),
    ("stable-audio3", "transformer_blocks.1.cross_attn.to_kv.weight"): rows(64, 64, 64),
    ("stable-audio3-plain", "transformer_blocks.0.self_attn.to_qkv.weight"): rows(64, 64, 64),
    ("consisid", "local_facial_extractor.layers.0.0.to_kv.weight"): rows(32, 32),
    ("motif-crossed", "single_transformer_blocks.0.cross_attn.to_out.0.weight"): rows(64),
    ("motif", "single_transformer_blocks.0.proj_out.weight"): lambda weight, rank: torch.cat(
        [weight[:, :64].chunk(4, 1)[rank], weight[:, 64:].chunk(4, 1)[rank]], 1
    ),
    ("mochi", "pos_frequencies"): lambda weight, rank: weight[:, rank : rank + 1],
    ("helios", "blocks.0.attn1.history_key_scale"): lambda weight, rank: weight[rank : rank + 1],
    ("ltx2-split", "transformer_blocks.0.audio_to_video_attn.to_gate_logits.weight"): rows(8),
    ("sana-video", "transformer_blocks.0.ff.conv_temp.weight"): rows(64),
    # Two key heads: ranks 0 and 1 have the first.
    ("cosmos3", "layers.0.self_attn.add_k_proj.weight"): lambda weight, rank: weight.chunk(2)[rank // 2],
    ("stable-audio", "transformer_blocks.0.attn2.to_v.weight"): lambda weight, rank: weight.chunk(2)[rank // 2],
}


@pytest.mark.parametrize(("name", "tensor"), SLICES)
def test_parts_are_those_that_torch_cuts(folder: Path, name: str, tensor: str):
    whole = load_file(folder / name / "diffusion_pytorch_model.safetensors")[tensor]
    for rank in range(4):
        part = SLICES[name, tensor](whole, rank)
        assert torch.equal(open_shard(folder / f"{name}-tp4", rank)[tensor], part)


def test_projections_fused_before_the_split_are_not_used(outcomes: Outcomes, folder: Path):
    check_outputs(outcomes[f"{FUSED.name} 2"], FUSED, 2)
    planned = plan(folder / FUSED.name, tp=2)
    unused = {name for name, tensor in planned.resolution.tensors.items() if tensor.unused}
    fused = {"attn1.to_qkv", "attn2.to_kv", "attn2.to_added_kv"}
    assert unused == {f"blocks.{at}.{name}.{leaf}" for at in (0, 1) for name in fused for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("fused", "absent"),
    [("attn1.to_qkv", "attn1.to_q"), ("attn2.to_kv", "attn2.to_v"), ("attn2.to_added_kv", "attn2.add_k_proj")],
)
def test_fused_projections_alone(folder: Path, tmp_path: Path, fused: str, absent: str):
    weights = load_file(folder / FUSED.name / "diffusion_pytorch_model.safetensors")
    del weights[f"blocks.1.{absent}.weight"]
    save(tmp_path / "model", weights, json.loads((folder / FUSED.name / "config.json").read_text()))
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "model", tp=2)
    assert f"blocks.1.{fused}.weight" in str(caught.value)
    assert f"blocks.1.{absent}.weight is not stored" in str(caught.value)


def test_heads_of_either_kind_are_not_cut(folder: Path):
    with pytest.raises(DegreeError) as caught:
        plan(folder / "ltx2", tp=8)
    assert caught.value.allowed == (1, 2, 4)
    assert "num_attention_heads 4" in str(caught.value)
    # Each of two key heads is on four ranks.
    assert plan(folder / "ace-step", tp=8).resolution.tensors["layers.0.self_attn.to_k.weight"].placement.cuts


def save(model: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    model.mkdir()
    save_file(weights, model / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
