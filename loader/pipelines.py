"""Loading a split pipeline of diffusers: its divided parts by `loader.load_model`, the others by diffusers.

Source: ``DiffusionPipeline.from_pretrained`` of diffusers 0.42, which takes parts that were loaded already; the stored
dtypes are kept where none is asked for, and not converted to float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loader.agreement import WAIT_S, Agreement
from loader.dtypes import main_dtype
from loader.group import find_place, kept
from loader.guard import refuse, share_generator_state
from loader.models import load_model, named_dtype
from loader.ways import Check, Way
from manifests.errors import LoadError
from manifests.header import read_header
from manifests.pipeline import PipelineRecord, check_carried_file, read_pipeline
from manifests.runtime import read_runtime

_CHECKED_NBYTES = 1 << 20
"""Carried files up to this size are hashed at every load; larger ones where everything is checked."""

_OFFLOAD = "the parameters are one rank's shards, mapped from its files; split for more ranks"
_REFUSED = {
    "to": "its models are this rank's shards; give load_pipeline the device, and the dtype",
    "save_pretrained": "this process holds one rank's shards; `reshard merge {folder} DEST` gives the pipeline back",
    "push_to_hub": "this process holds one rank's shards; `reshard merge {folder} DEST` gives the pipeline back",
    "load_lora_weights": "an adapter is made for whole weights; fuse it (`fuse_lora`), save the pipeline, split that",
    "load_ip_adapter": "its attention counts all heads, of which this process holds some",
    "load_textual_inversion": "it resizes an embedding that may be divided; load it, save the pipeline, split that",
    "enable_model_cpu_offload": _OFFLOAD,
    "enable_sequential_cpu_offload": _OFFLOAD,
    "enable_group_offload": _OFFLOAD,
}


def load_pipeline(
    out: str | Path,
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    read: Way = "auto",
    verify: Check = "auto",
    wait_s: float = WAIT_S,
    **parts: Any,  # noqa: ANN401 - parts of the pipeline
) -> Any:  # noqa: ANN401 - the class that the pipeline names
    """Load this process's rank of a split pipeline, ready to be called alike on all ranks.

    Every rank draws the numbers of rank 0: before each call the default generators, and those that are given, take
    rank 0's state. Other arguments must be the same on all ranks.

    Args:
        out: The folder of the split pipeline.
        device: Where to load; the CPU if not given.
        group: The ranks that compute together; the default group if not given.
        dtype: Converts the floating-point tensors of all parts; the stored dtypes if not given.
        read: "mmap", "read" or "auto", as for `loader.open_shard`; of the divided parts.
        verify: "headers", "full" or "auto", as for `loader.open_shard`.
        wait_s: As for `loader.load_model`.
        parts: Parts that are used instead of the stored ones (``safety_checker=None``).

    Raises:
        ManifestError: The folder holds no finished split of a pipeline.
        LoadError: It does not fit this process, its group, or diffusers; every rank raises.
    """
    folder, device = Path(out), torch.device(device or "cpu")
    wanted = named_dtype(dtype) if isinstance(dtype, str) else dtype
    record, pipeline_class, group = _begin(folder, group, device, wait_s, full=verify == "full")
    how: dict[str, Any] = {"device": device, "group": group, "dtype": wanted, "read": read, "verify": verify}
    models = {name: load_model(folder / name, wait_s=wait_s, **how) for name in record.splits if name not in parts}
    agreement = Agreement(find_place(group), wait_s)
    with agreement.refusing():
        agreement.arrive({})
        pipeline = _assemble(folder, record, pipeline_class, wanted, {**models, **parts})
        for name in record.whole:
            if name not in parts:
                getattr(pipeline, name).to(device)
        agreement.conclude()
    refuse(pipeline, {name: advice.format(folder=folder) for name, advice in _REFUSED.items()}, "pipeline")
    if group is not None:
        _align_calls(pipeline, kept(group), device)
    return pipeline


def _begin(
    folder: Path, group: dist.ProcessGroup | None, device: torch.device, wait_s: float, *, full: bool
) -> tuple[PipelineRecord, Any, dist.ProcessGroup | None]:
    """Return the record, the pipeline's class, and the group to compute in, started once all ranks can go on."""
    place = find_place(group)
    agreement = Agreement(place, wait_s)
    with agreement.refusing():
        record = read_pipeline(folder)
        place.check(record)
        _check_files(folder, record, full=full)
        pipeline_class = _find_class(folder, record.pipeline)
        agreement.arrive({"pipeline.json": f"digest {record.digest}", "kind of device": device.type})
        agreement.conclude()
    return record, pipeline_class, agreement.group(device)


def _check_files(folder: Path, record: PipelineRecord, *, full: bool) -> None:
    for name, key in record.splits.items():
        found = read_runtime(folder / name).key
        if found != key:
            raise LoadError(f"{folder / name}: is of another split: its key is {found}, {key} is expected; split again")
    problems = [
        line
        for name, expected in record.carried.items()
        for line in check_carried_file(folder, name, expected, content=full or expected.nbytes <= _CHECKED_NBYTES)
    ]
    if problems:
        raise LoadError(f"{folder}: was changed after the split: {'; '.join(problems)}; split again")


def _find_class(folder: Path, name: str) -> Any:  # noqa: ANN401
    try:
        import diffusers
    except ImportError as error:
        raise LoadError(f"{folder}: needs diffusers: pip install 'reshard[diffusers]'") from error
    pipeline_class = getattr(diffusers, name, None)
    if diffusers.DiffusionPipeline not in getattr(pipeline_class, "__mro__", ()):
        raise LoadError(f"{folder}: diffusers {diffusers.__version__} has no pipeline {name}")
    return pipeline_class


def _assemble(
    folder: Path,
    record: PipelineRecord,
    pipeline_class: Any,  # noqa: ANN401
    dtype: torch.dtype | None,
    parts: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Build the pipeline around parts that were loaded; the others are loaded by diffusers, in their stored dtypes."""
    stored = {name: dtype or _stored_dtype(folder / name) for name in record.whole if name not in parts}
    variant = record.variant if any(f".{record.variant}." in name for name in record.carried) else None
    with _silent():
        return pipeline_class.from_pretrained(
            folder, dtype=stored or None, variant=variant, local_files_only=True, use_safetensors=True, **parts
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Within it, neither library shows how far it is: every rank would."""
    import diffusers
    import transformers

    libraries = [diffusers.utils.logging, transformers.utils.logging]
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the floating-point dtype of most of a model that is stored whole."""
    headers = (read_header(path, str(path)) for path in folder.glob("*.safetensors"))
    return main_dtype(tensor for header in headers for tensor in header.tensors.values())


def _align_calls(pipeline: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:  # noqa: ANN401
    """Make calls of a pipeline draw the same numbers on all ranks; its class becomes a child that does."""
    whole_class = type(pipeline)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        for each in {torch.device("cpu"), device}:
            share_generator_state(group, each)
        given = kwargs.get("generator")
        for generator in given if isinstance(given, list) else [given] if given is not None else []:
            share_generator_state(group, device, generator)
        return whole_class.__call__(self, *args, **kwargs)

    pipeline.__class__ = type(whole_class.__name__, (whole_class,), {"__call__": call, "__doc__": whole_class.__doc__})
