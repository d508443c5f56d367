"""Steps on features, the last dimension, and the sum that ends most of what is divided."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

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
    """Return the step that joins the ranks' features; those of the last rank may be fewer."""
    world_size, group = site.world_size, site.group
    size = bound_axis(site.entry.axis).size if site.entry.axis else 0
    most = -(-size // world_size)
    if size == most * world_size:

        def after(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return gathered(collectable(module, output), -1, world_size, group)

        return Step(after=after)

    _, mine, _ = site.owned_range()

    def after_shorter(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        filled = pad(collectable(module, output), (0, most - mine))
        return gathered(filled, -1, world_size, group).narrow(-1, 0, size)

    return Step(after=after_shorter)


def slice_input(site: Site) -> Step:
    """Return the step that keeps the rank's own features of the first input."""
    start, length, size = site.owned_range()
    inputs, label = InputNames(site.module), site.label

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        value = inputs.get(0, args, kwargs)
        if value.shape[-1] != size:
            raise LoadError(
                f"{label}: gets {value.shape[-1]} features, its split expects all {size}; "
                "the module before it is cut otherwise"
            )
        return inputs.put(0, value.narrow(-1, start, length), args, kwargs)

    return Step(before)


def divide_input(site: Site) -> Step:
    """Return the step that divides the first input by the number of ranks.

    For what every rank computes alike inside of a module whose output is summed over the ranks.
    """
    world_size, inputs = site.world_size, InputNames(site.module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return inputs.put(0, inputs.get(0, args, kwargs) / world_size, args, kwargs)

    return Step(before)
