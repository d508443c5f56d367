"""Hooks: the steps of a split's modules, as ordinary forward hooks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from loader import steps
from loader.group import check_world_size, kept
from manifests.errors import LoadError
from manifests.manifest import Manifest, Module

_MARK = "_reshard_key"


def install_hooks(
    module: nn.Module, manifest: Manifest, group: dist.ProcessGroup | None = None
) -> list[RemovableHandle]:
    """Put the collectives around the forwards of a module's sub-modules.

    Args:
        module: The model; its parameters are its rank's.
        manifest: The split's manifest.
        group: The ranks that compute together, in the order of their ranks; the default group if not given.

    Returns:
        The handles of the hooks. A split for one rank needs none.

    Raises:
        LoadError: Another number of ranks, a module that is not there, hooks installed already, or a compiled module,
            on which hooks would never fire.
    """
    if getattr(module, _MARK, None) is not None:
        raise LoadError(f"{type(module).__name__}: has its hooks already; build a new module to load another split")
    _refuse_compiled(module)
    missing = [name for name in manifest.modules if not _has(module, name)]
    if missing:
        raise LoadError(f"{type(module).__name__}: has no module {missing[0]}, which the split has a step for")
    handles: list[RemovableHandle] = []
    if manifest.world_size > 1:
        group = kept(check_group(manifest, group))
        for name, entry in manifest.modules.items():
            handles += _install(module.get_submodule(name), entry, group)
        if "torch._dynamo" in sys.modules:
            # Code compiled before has no hooks in it.
            torch._dynamo.reset()
    object.__setattr__(module, _MARK, manifest.key)
    return handles


def check_group(manifest: Manifest, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group to compute in.

    Raises:
        LoadError: There is none, or it has another number of ranks than the split.
    """
    if not dist.is_initialized():
        raise LoadError(f"the split is for {manifest.world_size} ranks; start a process group or run under torchrun")
    chosen = group or dist.group.WORLD
    if chosen is None:
        raise LoadError("the process group was destroyed; start it again")
    check_world_size(manifest, chosen)
    return chosen


def _refuse_compiled(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None:
            what = name or type(module).__name__
            raise LoadError(f"{what}: is compiled; hooks put on now would never fire: load first, then compile")


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _install(module: nn.Module, entry: Module, group: dist.ProcessGroup | None) -> list[RemovableHandle]:
    if entry.before == "mask_ids":
        masked = steps.MaskedIds(entry.axis, group)
        if getattr(module, "max_norm", None) is not None:
            raise LoadError(f"{type(module).__name__}: max_norm rescales rows in place, which its split cannot")
        if getattr(module, "padding_idx", None) is not None:
            # It only stops gradients, of which there are none; torch wants it among the rank's own rows.
            setattr(module, "padding_idx", None)  # noqa: B010 - the class declares tensors and modules only
        return [
            module.register_forward_pre_hook(masked.before, with_kwargs=True),
            module.register_forward_hook(masked.after),
        ]
    handles: list[RemovableHandle] = []
    if entry.before == "slice_input":
        handles.append(module.register_forward_pre_hook(steps.slice_input(entry.axis, group), with_kwargs=True))
    if entry.after == "all_reduce":
        handles.append(module.register_forward_hook(steps.all_reduce(group)))
    elif entry.after == "all_gather":
        handles.append(module.register_forward_hook(steps.all_gather(group)))
    return handles
