"""Cutting a model that is in memory, in place, by the plan by which a checkpoint of it would be split.

For tests, and for models that one process can hold: every rank has the whole model first. This is the one place in the
package that imports `reshard`, when `parallelize` is called: it does the splitter's work.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loader.agreement import Agreement, versions
from loader.attaching import attach, check_fits
from loader.dtypes import TORCH_DTYPES
from loader.filling import filled
from loader.group import Place, kept
from loader.guard import align_sampling, refuse_unsafe
from loader.hooks import check_fresh, check_modules, install_hooks
from loader.shard import Shard
from manifests.errors import LoadError
from manifests.manifest import Manifest, Model, Source, Tensor, digest_of
from manifests.placement import counts, dim_runs

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "F4"}


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Any] | Path | str | None = None,
    *,
    tp: int | None = None,
    ep: int = 1,
    uneven: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Cut a model in place: this process keeps its rank's part, and the collectives are put around the forwards.

    Everything is checked first: the model is unchanged if anything does not fit. Its parameters need no gradients
    afterwards.

    Args:
        model: The model, the same on every rank.
        plan: A plan, the file of one (`docs/plans.md`), or None for the built-in one of its class.
        tp: Number of ranks; that of the group if not given.
        ep: Over how many of the ranks experts are divided; 1 leaves all experts on every rank.
        uneven: What becomes of what the ranks do not divide: "ceil" or "pad" (`docs/plans.md`); empty to refuse it.
        group: The ranks that compute together; the default group if not given.

    Raises:
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
        LoadError: Another number of ranks than the group's; or the model was cut before, is compiled or quantized; or
            the ranks hold different models. Every rank raises, and before any collective.
    """
    check_fresh(model)
    group = _chosen_group(group, tp)
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    agreement = Agreement(Place(rank, world_size, group))
    with agreement.refusing():
        _refuse_unsuitable(model)
        manifest = _decide(model, plan, world_size, ep, uneven)
        agreement.arrive({"split": manifest.key, "version": versions("transformers")})
        part = _Part(model, manifest, rank)
        check_fits(model, part)
        check_modules(model, manifest)
        agreement.conclude()
    install_hooks(model, manifest, group)
    attach(model, part)
    refuse_unsafe(model, None)
    if group is not None:
        align_sampling(model, kept(group))


def _chosen_group(group: dist.ProcessGroup | None, tp: int | None) -> dist.ProcessGroup | None:
    chosen = group or (dist.group.WORLD if dist.is_initialized() else None)
    size = 1 if chosen is None else dist.get_world_size(chosen)
    if tp is not None and tp != size:
        raise LoadError(f"tp {tp}: the process group has {size} ranks; start {tp} processes, or give tp {size}")
    return chosen


def _refuse_unsuitable(model: nn.Module) -> None:
    # A second to import, and needed by nothing else here.
    from torch.distributed.tensor import DTensor

    name = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None or getattr(model, "is_quantized", False):
        raise LoadError(f"{name}: is quantized; split its checkpoint and use loader.open_shard for the tensors")
    for parameter_name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise LoadError(f"{name}: {parameter_name} is a DTensor, divided already; build the model anew")


def _decide(
    model: nn.Module, plan: Mapping[str, Any] | Path | str | None, world_size: int, ep: int, uneven: str
) -> Manifest:
    """Return the manifest that a split of the model would have, without files."""
    from reshard.resolving import resolve_model

    name = type(model).__name__
    tensors, ties = tensors_of(model)
    chosen: dict[str, Any] = {"experts": ep, "uneven": uneven}
    resolved = resolve_model(tensors, config_of(model), plan, world_size, ties=ties, label=name, **chosen)
    resolution = resolved.resolution
    return Manifest(
        key=digest_of([world_size, ep, resolution.tensors, resolution.modules, resolution.attributes, resolution.ties]),
        world_size=world_size,
        layout="runtime",
        model=Model("", "", name),
        source=Source(()),
        plan=resolved.plan.rules,
        sizes=resolution.sizes,
        tensors=resolution.tensors,
        files=(),
        ties=resolution.ties,
        modules=resolution.modules,
        attributes=resolution.attributes,
        carried={},
    )


def tensors_of(model: nn.Module) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """Return dtype and shape of every parameter and stored buffer, and which parameters are another one."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.dtype not in _DTYPE_NAMES:
            raise LoadError(f"{name}: {tensor.dtype} is no dtype of a safetensors file; it cannot be cut")
        if isinstance(tensor, nn.Parameter) and id(tensor) in first:
            ties[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        tensors[name] = (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    return tensors, ties


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's configuration as its ``config.json`` would be; empty if it has none that is known."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if isinstance(config, Mapping):
        return {**config, "_class_name": name}
    to_dict = getattr(config, "to_dict", None)
    return {**to_dict(), "architectures": [name]} if to_dict else {}


class _Part(Shard):
    """A rank's part of a model's tensors, each cut when it is asked for."""

    def __init__(self, model: nn.Module, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self.rank = rank
        self._model = model

    def __getitem__(self, name: str) -> torch.Tensor:
        owner, leaf = self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        whole = (owner.get_buffer(leaf) if leaf in owner._buffers else owner.get_parameter(leaf)).detach()
        tensor = self.manifest.tensors[name]
        part = _cut(whole, tensor, self.rank)
        return part if counts(tensor.placement, self.rank) else torch.zeros_like(part)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)


def _cut(whole: torch.Tensor, tensor: Tensor, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor, in memory of its own where anything is left out."""
    # Not every dtype of one byte can be indexed; bytes can.
    part = whole.view(torch.uint8) if whole.element_size() == 1 else whole
    for dim, runs in enumerate(dim_runs(tensor.placement, tensor.dtype, tensor.shape, rank) or ()):
        spans = sorted(
            (run.dst + i * run.dst_step, run.src + i * run.src_step, run.length)
            for run in runs
            for i in range(run.repeat)
        )
        if spans != [(0, 0, whole.shape[dim])]:
            chosen = [torch.arange(src, src + length, device=whole.device) for _, src, length in spans]
            part = part.index_select(dim, torch.cat([torch.arange(0, device=whole.device), *chosen]))
    return filled(part.view(whole.dtype), tensor, rank)
