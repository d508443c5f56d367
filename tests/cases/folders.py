"""Kind E: which files of a folder are the checkpoint, and a plan that is for another."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from manifests.errors import PlanError
from tests.cases.case import Case, Tensors, cut, even, of, refused
from tests.cases.formats import ALL, BOTH, HALVES, SECOND, A, B
from tests.checkpoints import LLAMA, count, save, save_indexed

INDEX = "model.safetensors.index.json"
FIRST_BLOCK, SECOND_BLOCK = (f"transformer_blocks.{number}.attn.to_q.weight" for number in (0, 1))
FULL = {FIRST_BLOCK: count(4, 4), SECOND_BLOCK: count(4, 4, start=40)}
HALF = {
    FIRST_BLOCK: count(4, 4, dtype=torch.float16, start=500),
    SECOND_BLOCK: count(4, 4, dtype=torch.float16, start=540),
}
BLOCKS = {"transformer_blocks.*.attn.to_q": "colwise"}
VISION = {
    "model.language_model.layers.0.mlp.up_proj.weight": count(4, 4),
    "model.visual.blocks.0.attn.qkv.weight": count(6, 4, start=60),
}


def indexed(then: Callable[[Path], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        save_indexed(folder, A, B, config=LLAMA)
        then(folder)

    return write


def beside(files: dict[str, Tensors]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        save(folder, BOTH, LLAMA)
        for name, tensors in files.items():
            save_file(dict(tensors), folder / name)

    return write


def variants(folder: Path) -> None:
    inner, stem = folder / "transformer", "diffusion_pytorch_model"
    save_indexed(
        inner,
        {FIRST_BLOCK: HALF[FIRST_BLOCK]},
        {SECOND_BLOCK: HALF[SECOND_BLOCK]},
        config={"_class_name": "QwenImageTransformer2DModel"},
        stem=f"{stem}.fp16",
        index=f"{stem}.safetensors.index.fp16.json",
    )
    save_file(FULL, inner / f"{stem}.safetensors")


def halves(tensors: Tensors) -> tuple[Tensors, ...]:
    return cut(tensors, dict.fromkeys(tensors, 0), even(4, 2))


def reindexed(weight_map: dict[str, str]) -> Callable[[Path], object]:
    return indexed(lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": weight_map})))


STRAY = {"layers.0.a.weight": count(4, 4, start=9000), "model.a.weight": count(4, 4, start=9100)}
TRANSFORMER = ("--subfolder", "transformer")
FOLDERS = (
    refused("e01 a shard is missing", indexed(lambda folder: (folder / SECOND).unlink()), ALL, INDEX, SECOND,
            "not there"),
    refused("e01 a shard is there under another case", indexed(
        lambda folder: (folder / SECOND).rename(folder / SECOND.upper())), ALL, INDEX, SECOND, "not there"),
    refused("e01 a tensor is in the other shard", reindexed({"model.a.weight": SECOND, "model.b.weight": SECOND}), ALL,
            INDEX, "model.a.weight", SECOND),
    refused("e01 a shard is out of the folder", reindexed({"model.a.weight": "../x.safetensors"}), ALL, INDEX,
            "'../x.safetensors'"),
    Case("e02 consolidated beside the shards", indexed(
        lambda folder: save_file(STRAY, folder / "consolidated.safetensors")), ALL, HALVES),
    Case("e02 a whole model beside the shards", indexed(
        lambda folder: save_file(STRAY, folder / "model.safetensors")), ALL, HALVES),
    Case("e03 an adapter and a state beside the model", beside({
        "adapter_model.safetensors": {"base_model.model.model.a.lora_A.weight": count(2, 4, start=700)},
        "training_state.safetensors": {"exp_avg": count(3, start=800)}}), ALL, HALVES),
    Case("e04 no variant", variants, BLOCKS, halves(FULL), options=TRANSFORMER),
    Case("e04 a variant", variants, BLOCKS, halves(HALF), options=(*TRANSFORMER, "--variant", "fp16")),
    refused("e04 a variant that is not there", variants, BLOCKS, "'bf16'", options=(*TRANSFORMER, "--variant", "bf16")),
    refused("e05 a plan for other names", of(VISION, model_type="x", architectures=["X"]), {
        "model.layers.*.mlp.up_proj": "colwise"}, "model.layers.*.mlp.up_proj", "take nothing", refusal=PlanError),
)  # fmt: skip
