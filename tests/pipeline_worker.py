"""One rank of the tests of pipelines: loads a split pipeline, calls it, and tells what it found."""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.pipelines import call

REFUSED = ("to", "save_pretrained", "load_lora_weights", "enable_model_cpu_offload")


def main(folder: str, *names: str) -> None:
    """Load and call the splits of these names."""
    torch.set_num_threads(1)
    rank, size, root = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    found = {name: _run(root, name, rank, size) for name in names}
    (root / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _run(root: Path, name: str, rank: int, size: int) -> dict[str, Any]:
    from loader import load_pipeline

    # Every process would draw other numbers, were it not for the loader.
    torch.manual_seed(100 + rank)
    try:
        pipeline = load_pipeline(root / f"{name}-tp{size}", read="mmap")
        tensors = {what: call(pipeline, what) for what in ("latent", "pt")}
        tensors |= {"default": call(pipeline, seed=None), "again": call(pipeline, seed=None)}
        save_file({key: value.contiguous() for key, value in tensors.items()}, root / f"{name}-{rank}.safetensors")
    except Exception:  # noqa: BLE001 - told to the test
        return {"error": traceback.format_exc()}
    models = {part: held for part, held in pipeline.components.items() if isinstance(held, torch.nn.Module)}
    return {
        "error": "",
        "class": type(pipeline).__name__,
        "parameters": {part: sum(p.numel() for p in model.parameters()) for part, model in models.items()},
        "refused": {what: _refusal(pipeline, what, root) for what in REFUSED},
    }


def _refusal(pipeline: Any, name: str, root: Path) -> str:
    try:
        getattr(pipeline, name)("cuda" if name == "to" else root / "saved")
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
