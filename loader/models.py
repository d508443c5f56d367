"""Loading a model of transformers or diffusers: its class, its rank's weights, its hooks.

The class is built with its parameters on meta and its buffers real, so nothing is allocated or initialised that the
shard will bring. Which class of which library it is, the manifest says.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from loader import diffusers_models, transformers_models
from loader.attaching import attach
from loader.group import agree, check_world_size, join_group, kept
from loader.guard import align_sampling, refuse_unsafe
from loader.hooks import install_hooks
from loader.mapping import TORCH_DTYPES
from loader.shard import open_shard
from manifests.errors import LoadError
from manifests.manifest import Manifest, read_manifest

LIBRARIES = {"transformers": transformers_models, "diffusers": diffusers_models}

_log = logging.getLogger(__name__)


def load_model(
    out: str | Path,
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    **config: Any,  # noqa: ANN401 - the configuration's own
) -> Any:  # noqa: ANN401 - the class that the manifest names
    """Load this process's rank of a split model of transformers or diffusers, ready to run.

    Under torchrun the process group is started if there is none. On a CPU the parameters are mapped: no weight is read
    before it is used.

    Args:
        out: The folder of the split.
        device: Where to load; the CPU if not given.
        group: The ranks that compute together; the default group if not given.
        dtype: Converts the floating-point tensors to this dtype, which copies them; the stored dtypes if not given.
        config: Values that replace the configuration's (``attn_implementation="eager"``).

    Raises:
        ManifestError: The folder holds no finished split.
        LoadError: The split does not fit this process, its group, or the model's class; every rank raises, and before
            any collective.
    """
    folder, device = Path(out), torch.device(device or "cpu")
    wanted = _named_dtype(dtype) if isinstance(dtype, str) else dtype
    started = time.perf_counter()
    group = join_group(folder, group, device)
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        check_world_size(manifest, group)
        rank = dist.get_rank(group) if group is not None else 0
        check_carried(folder, manifest)
        shard = open_shard(folder, rank, device)
        opened = time.perf_counter()
        model = build_model(folder, manifest, wanted or stored_dtype(manifest), dict(config))
        built = time.perf_counter()
        attach(model, shard, convert=LIBRARIES[manifest.model.library].converter(model, wanted) if wanted else None)
        model.to(device)
    except BaseException as error:
        agree(group, manifest.key if manifest else "", f"{type(error).__name__}: {error}")
        raise
    agree(group, manifest.key)
    install_hooks(model, manifest, group)
    refuse_unsafe(model, folder)
    if group is not None:
        align_sampling(model, kept(group))
    ready = time.perf_counter()
    _log.info("opened %.3f s, built %.3f s, attached %.3f s", opened - started, built - opened, ready - built)
    return model


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"dtype {name!r}: torch has none of that name")
    return dtype


def check_carried(folder: Path, manifest: Manifest) -> None:
    """Compare the files that the model is built from with those that were carried over.

    Raises:
        LoadError: One is missing or was changed; values for this process go to `load_model` as arguments.
    """
    for name in ("config.json", "generation_config.json"):
        if name not in manifest.carried:
            continue
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise LoadError(f"{folder / name}: {error.strerror}; copy it, or split again") from error
        if xxhash.xxh3_128_hexdigest(content) != manifest.carried[name]:
            raise LoadError(
                f"{folder / name}: was changed after the split; split again, or give the values to load_model"
            )


def stored_dtype(manifest: Manifest) -> torch.dtype:
    """Return the floating-point dtype that most of a split's elements have; float32 if none has one."""
    counts: dict[str, int] = {}
    for tensor in manifest.tensors.values():
        if tensor.dtype in ("F64", "F32", "F16", "BF16"):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    return TORCH_DTYPES[max(counts, key=lambda name: counts[name])] if counts else torch.float32


def build_model(folder: Path, manifest: Manifest, dtype: torch.dtype, config_values: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the model's class, built with its parameters on meta and its buffers real.

    Raises:
        LoadError: It is of neither library, the library is not installed, or it has no such class.
    """
    entry = manifest.model
    if entry.library not in LIBRARIES:
        if manifest.layout == "checkpoint" and entry.type:
            raise LoadError(
                f"{folder}: holds the tensors of {entry.architecture or entry.type} as they are stored (layout "
                "checkpoint), which its class does not have; split again with --layout runtime"
            )
        raise LoadError(
            f"{folder}: {entry.architecture or 'no class named'}: not a split of a model of transformers or diffusers; "
            "build the module and use loader.attach and loader.install_hooks"
        )
    return LIBRARIES[entry.library].build(folder, entry.architecture, dtype, config_values)
