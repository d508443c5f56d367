"""The other classes of diffusers that make images: their outputs, shards and collectives on 2 and 4 ranks.

The comparisons are made by `diffusers_image_worker.py`, in four processes, in one launch. The oracle is diffusers in
one process; of shards, torch.
"""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from loader import open_shard
from manifests.errors import CheckpointError, DegreeError, PlanError
from reshard import plan, split
from tests.diffusers_image import COMPANIONS, CONFIGS, outputs
from tests.diffusers_image_worker import ALTERED
from tests.diffusers_worker import DEGREES, WORLD_SIZE, Outcome
from tests.launching import run_ranks

TIMEOUT_S = 300
TOLERANCE = 1e-5

# Flux's class for positions, of diffusers itself.
pytestmark = pytest.mark.filterwarnings("ignore:.FluxPosEmbed. is deprecated:FutureWarning")


def build(case: str) -> Any:
    """Return a case's model with random parameters, norms included, none of them small."""
    torch.manual_seed(0)
    model = getattr(diffusers, case.partition("@")[0])(**CONFIGS[case]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            wide = 0.6 * noise / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.1 * noise
            parameter.copy_(wide + (parameter.ndim == 1 and name.endswith("weight")))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every case's model, expected outputs and splits."""
    folder = tmp_path_factory.mktemp("diffusers-image")
    for case in CONFIGS:
        model = build(case)
        model.save_pretrained(folder / case)
        companion = build(COMPANIONS[case]) if case in COMPANIONS else None
        save_file(outputs(model, case, companion), folder / f"{case}-expected.safetensors")
        for degree in DEGREES:
            split(folder / case, folder / f"{case}-tp{degree}", tp=degree)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    """What every rank found, by the name of a case and the number of ranks."""
    run_ranks("tests.diffusers_image_worker", folder, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [found[name] for found in ranks] for name in ranks[0]}


# Two of each kind of block, unless said otherwise; every attention and every feed-forward sums once for each stream.
SUMS = {
    "PixArtTransformer2DModel@gated": 6,
    "DiTTransformer2DModel@gated": 4,
    "BriaTransformer2DModel": 10,
    "BriaFiboTransformer2DModel": 10,
    "LongCatImageTransformer2DModel": 10,
    "FluxControlNetModel": 10,
    "OvisImageTransformer2DModel": 10,
    "Flux3Transformer2DModel": 10,  # one for every stream, then two
    "HunyuanImageTransformer2DModel": 12,  # and one block that refines the text
    "SD3ControlNetModel": 8,
    "SanaControlNetModel": 6,
    "GlmImageTransformer2DModel": 6,  # the feed-forward takes image and text one after the other
    "CogView3PlusTransformer2DModel": 4,
    "QwenImageControlNetModel": 8,
    "HunyuanDiT2DModel": 13,  # 4 blocks, the last with a skip
    "HunyuanDiT2DModel@gated": 6,
    "HunyuanDiT2DControlNetModel": 3,  # one block
    "Ideogram4Transformer2DModel": 4,
    "ErnieImageTransformer2DModel": 4,
    "ZImageTransformer2DModel": 8,  # and one block for image and text each
    "ZImageTransformer2DModel@few": 8,
    "ZImageTransformer2DModel@siglip": 10,
    "ZImageControlNetModel": 15,  # three blocks, whose projections sum 5 times, and two of the transformer
    "BriaFibo2Transformer2DModel": 10,  # and one on the image, one of three parts on the text, one more attention on it
    "LuminaNextDiT2DModel": 4,
    "LuminaNextDiT2DModel@grouped": 4,
    "PRXTransformer2DModel": 4,
    "JoyImageEditTransformer3DModel": 8,
    "JoyImageEditPlusTransformer3DModel": 8,
    "OmniGenTransformer2DModel": 5,  # and the embedding
    "Krea2Transformer2DModel": 8,  # and two blocks on the text
    "Krea2Transformer2DModel@few": 8,
    "NucleusMoEImageTransformer2DModel": 4,
    "HiDreamImageTransformer2DModel": 12,  # one of each: 4 and 2 norms, 2 and 1 attentions, 2 and 1 feed-forwards
    "Kandinsky5Transformer3DModel": 5,  # one of each
    "Kandinsky6Transformer3DModel": 12,  # one of each, with text, image and sound
    "PriorTransformer": 4,
    "Transformer2DModel": 6,
    "Transformer2DModel@patches": 4,
    "UNet2DConditionModel": 20,  # 8 convolution blocks, 4 transformers
    "UNet2DConditionModel@xl": 32,  # 8, and 8 of a block each
    "UNet2DConditionModel@few": 23,  # one transformer more
    "UNet2DConditionModel@shifted": 20,
    "ControlNetModel": 10,  # 4 and 2
    "UNetMotionModel": 41,  # 8 and 4, and 7 over the frames
    "SparseControlNetModel": 14,  # 4 and 2, and 2 of two parts over the frames
    "UNetSpatioTemporalConditionModel": 48,  # 16 and 4, with 5 more sums over the frames
    "UNet3DConditionModel": 48,  # 8, 8 of four convolutions, and 4 over the image and 4 over the frames
    "I2VGenXLUNet": 48,
    "UVit2DModel": 6,
    "ControlNetUnionModel": 10,
}
JOINS = {"LuminaNextDiT2DModel": 8, "LuminaNextDiT2DModel@grouped": 8}
"""Norms of queries and keys over all heads, of two attentions in a block."""


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CONFIGS)
def test_outputs_are_those_of_one_process(outcomes: dict[str, list[Outcome]], case: str, degree: int):
    for outcome in outcomes[f"{case} {degree}"]:
        assert not outcome["error"], outcome["error"]
        assert outcome["difference"] <= TOLERANCE
        assert outcome["collectives"].pop("allreduce") == SUMS[case]
        assert [*outcome["collectives"].values()] == ([JOINS[case]] if case in JOINS else [])


@pytest.mark.parametrize("case", ALTERED)
def test_other_processors(outcomes: dict[str, list[Outcome]], case: str):
    for outcome in (*outcomes[f"{case} 2"], *outcomes[f"{case} 4"]):
        assert "fused" in outcome["altered"]
        assert max(outcome["altered"].values()) <= TOLERANCE


def test_heads_of_every_block(outcomes: dict[str, list[Outcome]]):
    heads = outcomes["UNet2DConditionModel@xl 2"][0]["heads"]
    inner = {name: number for name, number in heads.items() if "transformer_blocks" in name}
    assert {name.partition(".attentions")[0]: number for name, number in inner.items()} == {
        "down_blocks.1": 4,
        "up_blocks.0": 4,
        "mid_block": 4,
    }
    assert len(inner) == 16


Slices = dict[str, tuple[str, Any]]
"""What rank r of two has of a tensor, by the case and the tensor, as torch takes it."""


def rows(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(2, 0)[rank]


def columns(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(2, 1)[rank]


def blocks_of_rows(tensor: torch.Tensor, rank: int, blocks: int) -> torch.Tensor:
    return torch.cat([rows(block, rank) for block in tensor.chunk(blocks, 0)])


def heads_and_inner(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.cat([columns(tensor[:, :64], rank), columns(tensor[:, 64:], rank)], 1)


SLICES = [
    ("BriaTransformer2DModel", "single_transformer_blocks.1.proj_out.weight", heads_and_inner),
    ("OvisImageTransformer2DModel", "single_transformer_blocks.0.proj_mlp.bias", lambda t, r: blocks_of_rows(t, r, 2)),
    ("OvisImageTransformer2DModel", "transformer_blocks.0.ff.net.0.proj.weight", lambda t, r: blocks_of_rows(t, r, 2)),
    ("HunyuanDiT2DModel", "blocks.1.ff.net.0.proj.weight", rows),
    ("HunyuanDiT2DModel@gated", "blocks.1.ff.net.0.proj.weight", lambda t, r: blocks_of_rows(t, r, 2)),
    ("HunyuanDiT2DModel", "blocks.3.skip_linear.weight", columns),
    ("PRXTransformer2DModel", "blocks.0.attention.img_qkv_proj.weight", lambda t, r: blocks_of_rows(t, r, 3)),
    ("PRXTransformer2DModel", "blocks.0.attention.txt_kv_proj.weight", lambda t, r: blocks_of_rows(t, r, 2)),
    ("OmniGenTransformer2DModel", "embed_tokens.weight", rows),
    ("Krea2Transformer2DModel", "transformer_blocks.0.attn.to_gate.weight", rows),
    ("HiDreamImageTransformer2DModel", "double_stream_blocks.0.block.attn1.q_rms_norm_t.weight", rows),
    (
        "NucleusMoEImageTransformer2DModel",
        "transformer_blocks.1.img_mlp.experts.gate_up_proj",
        lambda t, r: blocks_of_rows(t.movedim(2, 0), r, 2).movedim(0, 2),
    ),
    ("NucleusMoEImageTransformer2DModel", "transformer_blocks.1.img_mlp.experts.down_proj", columns),
    ("LuminaNextDiT2DModel", "layers.0.gate", rows),
    ("LuminaNextDiT2DModel@grouped", "layers.1.attn2.norm_k.bias", rows),
    ("Kandinsky6Transformer3DModel", "visual_transformer_blocks.0.av_cross_attention.out_layer.weight", columns),
    ("UNet3DConditionModel", "mid_block.temp_convs.0.conv4.3.weight", columns),
    ("UNet2DConditionModel", "down_blocks.0.resnets.0.conv1.weight", rows),
    ("UNet2DConditionModel", "up_blocks.1.resnets.1.norm2.weight", rows),
    ("UNet2DConditionModel", "mid_block.resnets.1.conv2.weight", columns),
    ("UNet2DConditionModel@shifted", "mid_block.resnets.0.time_emb_proj.bias", lambda t, r: blocks_of_rows(t, r, 2)),
    ("UNet2DConditionModel@xl", "up_blocks.0.attentions.1.transformer_blocks.1.attn2.to_k.weight", rows),
]


@pytest.mark.parametrize(("case", "name", "part"), SLICES)
def test_a_rank_has_a_slice(folder: Path, case: str, name: str, part: Any):
    whole = load_file(folder / case / "diffusion_pytorch_model.safetensors")[name]
    for rank in range(2):
        assert torch.equal(open_shard(folder / f"{case}-tp2", rank)[name], part(whole, rank))


# Modulation and norms as in all plans; routers; the text's projection of Nucleus's blocks, which keys and values share;
# what comes before and after the transformers of a U-Net, and its convolutions between the blocks; of UVit's all that
# is not in its transformers.
WHOLE = re.compile(
    r"norm|_mod|modulation|adaLN|scale_shift_table|controlnet_|encoder_proj|img_mlp\.gate|ff_i\.gate"
    r"|transformer_in\.|proj_in|proj_out|conv_shortcut|samplers|time_mixer|(up|down)_block\.(res|attention)_blocks"
)


@pytest.mark.parametrize("case", CONFIGS)
def test_matrices_of_blocks_that_stay_whole(folder: Path, case: str):
    tensors = plan(folder / case, tp=2).resolution.tensors
    inner = {
        name: tensor for name, tensor in tensors.items() if re.search(r"(blocks|layers|refiner|resnets)\.\d", name)
    }
    whole = [name for name, tensor in inner.items() if len(tensor.shape) > 1 and not tensor.placement.cuts]
    assert inner
    assert [name for name in whole if not WHOLE.search(name)] == []


def test_heads_are_not_cut(folder: Path):
    with pytest.raises(DegreeError) as caught:
        plan(folder / "UNet2DConditionModel@xl", tp=16)
    assert caught.value.allowed == (1, 2, 4, 8)
    with pytest.raises(DegreeError, match=r"\(4\*, 16\)"):
        plan(folder / "PRXTransformer2DModel", tp=8)


def test_heads_of_blocks_that_are_no_numbers(folder: Path, tmp_path: Path):
    config = json.loads((folder / "UNet2DConditionModel@xl" / "config.json").read_text())
    weights = load_file(folder / "UNet2DConditionModel@xl" / "diffusion_pytorch_model.safetensors")
    for heads, message in ((["4", "8"], "attention_head_dim is '8'"), ([4], "attention_head_dim"), ([], "head_dim")):
        save(tmp_path, weights, config | {"attention_head_dim": heads})
        with pytest.raises(PlanError, match=message):
            plan(tmp_path, tp=2)


def test_projections_fused_before_the_split(folder: Path, tmp_path: Path):
    model = build("UNet2DConditionModel")
    model.fuse_qkv_projections()
    model.save_pretrained(tmp_path / "fused")
    tensors = plan(tmp_path / "fused", tp=2).resolution.tensors
    unused = {name for name, tensor in tensors.items() if tensor.unused}
    assert {name.split(".")[-2] for name in unused} == {"to_qkv", "to_kv"}
    weights = load_file(tmp_path / "fused" / "diffusion_pytorch_model.safetensors")
    del weights["mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight"]
    save(tmp_path, weights, json.loads((tmp_path / "fused" / "config.json").read_text()))
    with pytest.raises(CheckpointError, match=r"attn2\.to_kv\.weight: .*attn2\.to_v\.weight is not stored"):
        plan(tmp_path, tp=2)


def save(model: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(weights, model / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
