"""A rank that loads a model one way, and measures: python -m tools.bench.load_worker RANK WORLD_SIZE."""

import time
from pathlib import Path
from typing import Any

from tools.bench.common import drop_cached, forget_peak, status
from tools.bench.ranks import Job, serve, start_group

MODULES = (
    "torch",
    "loader",
    "safetensors.torch",
    "transformers.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)


def measure(job: Job, rank: int, world_size: int) -> dict[str, Any]:
    """Load, then either compute a forward or copy every local byte; return seconds and bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    start_group(job, rank, world_size)
    folder = Path(job["folder"])
    if job["cold"] and rank == 0:
        drop_cached(folder)
    dist.barrier()
    forget_peak()
    before, started = status(), time.perf_counter()
    held = LOADERS[job["contender"]](folder, job, rank)
    at_ready, ready = status(), time.perf_counter()
    if job["then"] == "forward":
        with torch.inference_mode():
            held(torch.arange(1, 17).view(1, 16))
    elif job["then"] == "copy":
        kept = copies(held)
    elif job["then"] == "save":
        held.save_pretrained(job["out"], distributed_checkpoint=True)
    ended = time.perf_counter()
    after = status()
    local = local_tensors(held)
    nbytes = sum(tensor.nbytes for tensor in local)
    peak, private = after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"]
    # What was mapped and is not any more shows only in the peak.
    mapped = max(at_ready["RssFile"] - before["RssFile"], after["RssFile"] - before["RssFile"], peak - private)
    dist.barrier()
    del held, local
    return {
        "ready": ready - started,
        "ended": ended - started,
        "held": nbytes,
        "private": at_ready["RssAnon"] - before["RssAnon"],
        "private_after": private,
        "peak": peak,
        "touched": max(mapped, 0) + after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "copied": sum(tensor.nbytes for tensor in kept) if job["then"] == "copy" else 0,
    }


def load_mapped(folder: Path, job: Job, rank: int) -> Any:
    """Map a rank's files."""
    from loader import load_model

    return load_model(folder, dtype=job.get("dtype"))


def load_read(folder: Path, job: Job, rank: int) -> Any:
    """Read a rank's files, hashes compared."""
    from loader import load_model

    return load_model(folder, read="read", dtype=job.get("dtype"))


def load_peer(folder: Path, job: Job, rank: int) -> Any:
    """Load by transformers' own tensor parallelism, from a checkpoint or from its distributed form of one."""
    import torch
    import torch.distributed as dist
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, job["architecture"])
    dtype = getattr(torch, job.get("dtype") or job["stored"])
    config = DistributedConfig(tp_size=dist.get_world_size())
    return model_class.from_pretrained(folder, dtype=dtype, distributed_config=config, local_files_only=True)


def load_tensors(folder: Path, job: Job, rank: int) -> dict[str, Any]:
    """Load a rank's files by the safetensors library: no model, no hashes."""
    from safetensors.torch import load_file

    return {name: tensor for path in files_of(folder, rank) for name, tensor in load_file(path).items()}


def read_plainly(folder: Path, job: Job, rank: int) -> list[Any]:
    """Read a rank's files by plain calls of 8 MiB into one buffer each: no tensors, no hashes."""
    import torch

    buffers = []
    for path in files_of(folder, rank):
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
        view, at = memoryview(buffer.numpy()), 0
        with path.open("rb", buffering=0) as stream:
            while got := stream.readinto(view[at : at + (8 << 20)]):
                at += got
        buffers.append(buffer)
    return buffers


LOADERS = {
    "mapped": load_mapped,
    "read": load_read,
    "transformers": load_peer,
    "dcp": load_peer,
    "load_file": load_tensors,
    "plain read": read_plainly,
}


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files that a rank of a split opens."""
    return [*sorted(folder.glob(f"rank-{rank:05d}-*.safetensors")), *sorted(folder.glob("common*.safetensors"))]


def local_tensors(held: Any) -> list[Any]:
    """Return the tensors of this rank."""
    from torch import nn

    if isinstance(held, nn.Module):
        return [getattr(p, "to_local", lambda p=p: p)().detach() for p in held.parameters()]
    return list(held.values()) if isinstance(held, dict) else held


def copies(held: Any) -> list[Any]:
    """Return every local tensor in private memory, copied if it is a view of a file's pages."""
    spans = []
    with Path("/proc/self/maps").open() as stream:
        for line in stream:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].strip().endswith((".safetensors", ".distcp")):
                begin, end = fields[0].split("-")
                spans.append(range(int(begin, 16), int(end, 16)))
    return [
        tensor.clone() if any(tensor.data_ptr() in span for span in spans) else tensor for tensor in local_tensors(held)
    ]


if __name__ == "__main__":
    serve(measure, MODULES)
