"""Steps on the sequence, dimension 1 of hidden states (batch, sequence, features): between them every rank has a part.

The module that scatters decides, by the length: if the number of ranks divides it, every rank goes on with its part,
else, as with the single tokens of decoding, with all of it. The other steps follow that decision.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loader.steps.collectives import collectable, gathered, summed, summed_part
from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step


def scatter_sequence(site: Site) -> Step:
    """Return the step that decides whether the sequence is divided, and keeps the rank's part of the first input."""
    world_size, rank, sequence = site.world_size, dist.get_rank(site.group), site.sequence
    inputs = InputNames(site.module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        states = inputs.get(0, args, kwargs)
        sequence.split = states.ndim == 3 and states.shape[1] % world_size == 0
        if not sequence.split:
            return args, kwargs
        part = states.shape[1] // world_size
        return inputs.put(0, states.narrow(1, rank * part, part), args, kwargs)

    return Step(before)


def reduce_scatter_sequence(site: Site) -> Step:
    """Return the step that sums over the ranks and keeps the rank's part of the sequence, if it is divided."""
    world_size, group, sequence = site.world_size, site.group, site.sequence

    def after(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        output = collectable(module, output)
        return summed_part(output, 1, world_size, group) if sequence.split else summed(output, group)

    return Step(after=after)


def gather_sequence(site: Site) -> Step:
    """Return the step that joins the ranks' parts of the sequence, if it is divided."""
    world_size, group, sequence = site.world_size, site.group, site.sequence

    def after(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return gathered(collectable(module, output), 1, world_size, group) if sequence.split else output

    return Step(after=after)
