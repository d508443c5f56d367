"""One rank of the tests of pipelines: loads a split pipeline, calls it, and tells what it found."""

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.pipelines import call

REFUSED = ("to", "save_pretrained", "load_lora_weights", "enable_model_cpu_offload")


def main(folder: str, name: str, kind: str) -> None:
    """Load a split of the name, and do what a test asks for."""
    from loader import load_pipeline

    torch.set_num_threads(1)
    rank, root = int(os.environ["RANK"]), Path(folder)
    # Every process would draw other numbers, were it not for the loader.
    torch.manual_seed(100 + rank)
    found: dict[str, Any] = {"error": ""}
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        pipeline = load_pipeline(root / f"{name}-tp{size}", read="mmap")
        if kind == "call":
            tensors = {what: call(pipeline, what) for what in ("latent", "pt")}
            tensors |= {"default": call(pipeline, seed=None), "again": call(pipeline, seed=None)}
            save_file({key: value.contiguous() for key, value in tensors.items()}, root / f"{name}-{rank}.safetensors")
            found["parameters"] = {
                part: sum(p.numel() for p in module.parameters())
                for part, module in pipeline.components.items()
                if isinstance(module, torch.nn.Module)
            }
            found["class"] = type(pipeline).__name__
            found["refused"] = {what: _refusal(pipeline, what, root) for what in REFUSED}
    except Exception as error:  # noqa: BLE001 - told to the test
        found["error"] = f"{type(error).__name__}: {error}"
    (root / f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _refusal(pipeline: Any, name: str, root: Path) -> str:
    try:
        getattr(pipeline, name)("cuda" if name == "to" else root / "saved")
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
