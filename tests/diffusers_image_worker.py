"""One rank of the tests of diffusers' models that make images: loads the splits, and tells what it found.

Started by `test_diffusers_image.py`, which made the models, the expected outputs and the splits, in four processes.
What was split for two ranks is run by the first two and the last two, each in a group of their own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.diffusers_image import COMPANIONS, CONFIGS, outputs
from tests.diffusers_worker import COLLECTIVE_TIMEOUT, DEGREES, WORLD_SIZE, Collectives, Outcome, attempt

ALTERED = ("UNet2DConditionModel", "HunyuanDiT2DModel", "LongCatImageTransformer2DModel", "QwenImageControlNetModel")
"""Cases whose attentions other processors run, too."""


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, each relative to the largest number that one process has of the tensor."""
    assert {name: tensor.shape for name, tensor in found.items()} == {n: tensor.shape for n, tensor in expected.items()}
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    return max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in found)


def run(case: str, folder: Path, degree: int, group: Any) -> Outcome:
    """Compare a case's outputs with those of one process, and count collectives."""
    from loader import load_model

    expected = load_file(folder / f"{case}-expected.safetensors")
    model = load_model(folder / f"{case}-tp{degree}", group=group)
    companion = load_model(folder / f"{COMPANIONS[case]}-tp{degree}", group=group) if case in COMPANIONS else None
    with Collectives() as collectives:
        found = outputs(model, case, companion)
    outcome = {
        "difference": difference(found, expected),
        "collectives": dict(collectives.counts),
        "heads": {name: module.heads for name, module in model.named_modules() if hasattr(module, "heads")},
    }
    if case in ALTERED:
        outcome["altered"] = {name: difference(outputs(model, case), expected) for name in alter(model)}
    return outcome


def alter(model: Any) -> Any:
    """Give a model's attentions other processors, one after the other; yield the name of each."""
    if hasattr(model, "set_attention_slice"):
        model.set_attention_slice("auto")
        yield "sliced"
        model.set_default_attn_processor()
        yield "default"
    model.fuse_qkv_projections()
    yield "fused"


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=COLLECTIVE_TIMEOUT)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = dict(zip(DEGREES, (pairs[rank // 2], None), strict=True))
    found = {
        f"{case} {degree}": attempt(run, case, Path(folder), degree, group)
        for degree, group in groups.items()
        for case in CONFIGS
    }
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
