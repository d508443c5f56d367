"""Steps on features, and the sum that ends most of what is divided.

Features are the last dimension; those of a convolution are the one before its positions.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.modules.conv import _ConvNd

from loader.steps.collectives import collectable, gathered, summed
from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step
from manifests.errors import LoadError
from manifests.placement import bound_axis


def all_reduce(site: Site) -> Step:
    """Return the step that sums the output over the ranks, in place; None stays None."""
    group, kind = site.group, torch.Tensor

    def after(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor | None) -> torch.Tensor | None:
        # The usual case by the shortest way: it is what every layer does twice.
        if type(output) is kind and output.is_contiguous() and not output.requires_grad:
            return summed(output, group)
        return None if output is None else summed(collectable(module, output), group)

    return Step(after=after)


def all_gather(site: Site) -> Step:
    """Return the step that joins the ranks' features; those of the last ranks may be fewer, or filled up with zeros."""
    world_size, group, dim = site.world_size, site.group, _features(site.module)
    size, most = (bound_axis(site.entry.axis).size, site.running_numel(0)) if site.entry.axis else (0, 0)
    if size == most * world_size:

        def after(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return gathered(collectable(module, output), dim, world_size, group)

        return Step(after=after)

    def after_shorter(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        filled = pad(collectable(module, output), (0, 0) * (-1 - dim) + (0, most - output.shape[dim]))
        return gathered(filled, dim, world_size, group).narrow(dim, 0, size).contiguous()

    return Step(after=after_shorter)


def gather_input(site: Site) -> Step:
    """Return the step that joins the ranks' features of the first input."""
    world_size, group, inputs = site.world_size, site.group, InputNames(site.module)
    dim = _features(site.module)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        own = collectable(module, inputs.get(0, args, kwargs))
        return inputs.put(0, gathered(own, dim, world_size, group), args, kwargs)

    return Step(before)


def slice_input(site: Site) -> Step:
    """Return the step that keeps the rank's own features of the first input."""
    start, length, size = site.owned_range()
    zeros = (0, 0) * (-1 - _features(site.module)) + (0, site.running_numel() - length)
    inputs, label, dim = InputNames(site.module), site.label, _features(site.module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        value = inputs.get(0, args, kwargs)
        if value.shape[dim] != size:
            raise LoadError(
                f"{label}: gets {value.shape[dim]} features, its split expects all {size}; "
                "the module before it is cut otherwise"
            )
        mine = value.narrow(dim, start, length)
        return inputs.put(0, pad(mine, zeros) if any(zeros) else mine, args, kwargs)

    return Step(before)


def divide_input(site: Site) -> Step:
    """Return the step that divides the first input by the number of ranks.

    For what every rank computes alike inside of a module whose output is summed over the ranks.
    """
    world_size, inputs = site.world_size, InputNames(site.module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return inputs.put(0, inputs.get(0, args, kwargs) / world_size, args, kwargs)

    return Step(before)


def _features(module: nn.Module) -> int:
    """Return the dimension of a module's features, counted from the end."""
    return -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
