"""A rank that loads a pipeline one way, and measures: python -m tools.bench.pipeline_worker RANK WORLD_SIZE."""

import time
from pathlib import Path
from typing import Any

from tools.bench.common import forget_peak, status
from tools.bench.ranks import Job, serve, start_group

MODULES = (
    "torch",
    "loader",
    "diffusers.pipelines.flux2.pipeline_flux2",
    "diffusers.models.transformers.transformer_flux2",
    "diffusers.hooks.tensor_parallel",
    "transformers.models.mistral3.modeling_mistral3",
    "transformers.distributed",
)


def measure(job: Job, rank: int, world_size: int) -> dict[str, Any]:
    """Load, then compute a forward of each large part; return seconds and bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _let_diffusers_divide_on_a_cpu()
    start_group(job, rank, world_size)
    dist.barrier()
    forget_peak()
    before, started = status(), time.perf_counter()
    pipeline = LOADERS[job["contender"]](Path(job["folder"]))
    ready, at_ready = time.perf_counter(), status()
    with torch.inference_mode():
        _forward(pipeline)
    ended, after = time.perf_counter(), status()
    dist.barrier()
    return {
        "ready": ready - started,
        "ended": ended - started,
        "peak": after["VmHWM"] - before["VmRSS"],
        "private": at_ready["RssAnon"] - before["RssAnon"],
        "held": _held(pipeline),
    }


def _let_diffusers_divide_on_a_cpu() -> None:
    import diffusers.hooks.tensor_parallel as peer
    import torch

    peer._SUPPORTED_TP_DEVICES = (*peer._SUPPORTED_TP_DEVICES, "cpu")
    # The rank modulo the number of accelerators is taken before the kind of device is looked at.
    torch.accelerator.device_count = lambda: 1


def load_ours(folder: Path) -> Any:
    """Load a split pipeline."""
    from loader import load_pipeline

    return load_pipeline(folder, tokenizer=None)


def load_divided(folder: Path) -> Any:
    """Load as diffusers does with a transformer that is divided while it is read."""
    import diffusers
    import torch

    transformer = diffusers.Flux2Transformer2DModel.from_pretrained(
        folder / "transformer", parallel_config=_config(), dtype=torch.bfloat16
    )
    return diffusers.Flux2Pipeline.from_pretrained(
        folder, transformer=transformer, tokenizer=None, dtype=torch.bfloat16
    )


def load_then_divide(folder: Path) -> Any:
    """Load as diffusers does with a transformer that is divided when all is loaded."""
    import diffusers
    import torch

    pipeline = diffusers.Flux2Pipeline.from_pretrained(folder, tokenizer=None, dtype=torch.bfloat16)
    pipeline.transformer.enable_parallelism(config=_config())
    return pipeline


def _config() -> Any:
    import diffusers
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return diffusers.TensorParallelConfig(
        mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    )


LOADERS = {"reshard": load_ours, "shard on read": load_divided, "enable_parallelism": load_then_divide}


def _forward(pipeline: Any) -> None:
    import torch

    pipeline.text_encoder(torch.arange(1, 17).view(1, 16))
    config = pipeline.transformer.config
    one, four = torch.arange(1), torch.arange(4)
    pipeline.transformer(
        hidden_states=torch.zeros(1, 16, config.in_channels, dtype=torch.bfloat16),
        encoder_hidden_states=torch.zeros(1, 8, config.joint_attention_dim, dtype=torch.bfloat16),
        img_ids=torch.cartesian_prod(one, four, four, one)[None],
        txt_ids=torch.cartesian_prod(one, one, one, torch.arange(8))[None],
        timestep=torch.tensor([0.5], dtype=torch.bfloat16),
        guidance=torch.tensor([4.0], dtype=torch.bfloat16),
    )


def _held(pipeline: Any) -> int:
    from torch import nn

    models = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    return sum(
        getattr(parameter, "to_local", lambda p=parameter: p)().nbytes
        for model in models
        for parameter in model.parameters()
    )


if __name__ == "__main__":
    serve(measure, MODULES)
