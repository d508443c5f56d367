"""Hooks: the steps of a split's modules, as ordinary forward hooks."""

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from loader.group import find_place, kept
from loader.own import ReplacedForward, own_step, replace_forward
from loader.steps import Sequence, Site, Step, make_step
from manifests.errors import LoadError, PlanError
from manifests.manifest import Manifest, Module
from manifests.runtime import RuntimeManifest
from manifests.strategy import Strategy
from manifests.styles import STYLES, resolve_style

Handle = RemovableHandle | ReplacedForward
"""Takes away what was installed."""

_MARK = "_reshard_key"


def install_hooks(
    module: nn.Module, manifest: Manifest | RuntimeManifest, group: dist.ProcessGroup | None = None
) -> list[Handle]:
    """Put the collectives around the forwards of a module's sub-modules.

    Args:
        module: The model; its parameters are its rank's.
        manifest: The split's manifest.
        group: The ranks that compute together, in the order of their ranks; the default group if not given.

    Returns:
        The handles of the hooks. A split for one rank needs none.

    Raises:
        LoadError: Another number of ranks, a module that is not there, hooks installed already, or a compiled module,
            on which hooks would never fire; or a step does not suit its module. Nothing is changed then.
    """
    check_modules(module, manifest)
    handles: list[Handle] = []
    if manifest.world_size > 1:
        group, sequence = kept(check_group(manifest, group)), Sequence()
        sites: dict[nn.Module, Site] = {}
        for name, entry in manifest.modules.items():
            site = Site(module.get_submodule(name), entry, group, sequence)
            # A module that has two names is called under both, with its steps once.
            if sites.setdefault(site.module, site).entry != entry:
                raise LoadError(f"{name}: is one module with another name, and has other steps there")
        for work in [_prepare(site) for site in sites.values()]:
            handles += work.install()
        if "torch._dynamo" in sys.modules:
            # Code compiled before has no hooks in it.
            torch._dynamo.reset()
    object.__setattr__(module, _MARK, manifest.key)
    return handles


def check_modules(module: nn.Module, manifest: Manifest | RuntimeManifest) -> None:
    """Refuse a module that lacks what a split has steps for; nothing is changed, and no group is needed.

    Raises:
        LoadError: It has its hooks already or is compiled, or a module or a style is not there.
    """
    check_fresh(module)
    missing = [name for name in manifest.modules if not _has(module, name)]
    if missing:
        raise LoadError(f"{type(module).__name__}: has no module {missing[0]}, which the split has a step for")
    if manifest.world_size > 1:
        for entry in {entry.style: entry for entry in manifest.modules.values()}.values():
            _strategy_of(entry)


def check_fresh(module: nn.Module) -> None:
    """Refuse a module on which hooks cannot be installed.

    Raises:
        LoadError: It has its hooks already, or is compiled.
    """
    if getattr(module, _MARK, None) is not None:
        raise LoadError(f"{type(module).__name__}: has its hooks already; build a new module to load another split")
    _refuse_compiled(module)


def check_group(manifest: Manifest | RuntimeManifest, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group to compute in.

    Raises:
        LoadError: There is none, or it has another number of ranks than the split.
    """
    if not dist.is_initialized():
        raise LoadError(f"the split is for {manifest.world_size} ranks; start a process group or run under torchrun")
    chosen = group or dist.group.WORLD
    if chosen is None:
        raise LoadError("the process group was destroyed; start it again")
    find_place(chosen).check(manifest)
    return chosen


def _refuse_compiled(module: nn.Module) -> None:
    for name, child in module.named_modules():
        # What a module has itself: looking further costs more than the rest of loading.
        if "_orig_mod" in child._modules or child.__dict__.get("_compiled_call_impl") is not None:
            what = name or type(module).__name__
            raise LoadError(f"{what}: is compiled; hooks put on now would never fire: load first, then compile")


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


class _Work(NamedTuple):
    """What is to be installed on one module."""

    site: Site
    steps: list[Step]
    strategy: Strategy | None

    def install(self) -> list[Handle]:
        module, handles = self.site.module, list[Handle]()
        if self.strategy is not None and (replaced := replace_forward(self.strategy, self.site)):
            handles.append(replaced)
        for step in self.steps:
            for name, value in step.attributes.items():
                setattr(module, name, value)
            if step.before:
                handles.append(module.register_forward_pre_hook(step.before, with_kwargs=True))
            if step.after:
                handles.append(module.register_forward_hook(step.after))
        return handles


def _prepare(site: Site) -> _Work:
    """Return what a split's entry means for a module: its steps, those on the inputs first. Nothing is changed."""
    strategy = _strategy_of(site.entry)
    names = ("take_inputs" if site.entry.inputs else "", site.entry.before, site.entry.after)
    steps = [make_step(name, site) for name in names if name and name != "own"]
    return _Work(site, steps if strategy is None else [*steps, own_step(strategy, site)], strategy)


def _strategy_of(entry: Module) -> Strategy | None:
    if entry.style in STYLES:
        return None
    try:
        own = resolve_style(entry.style).own
    except PlanError as error:
        raise LoadError(f"the split needs a style that this process does not have: {error}") from error
    return own() if own else None
