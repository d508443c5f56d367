"""The step of a module that gets an argument with entries for all heads: a rank keeps those of its own heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loader.filling import spread
from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step
from manifests.errors import LoadError
from manifests.layout import running_part
from manifests.manifest import Input
from manifests.placement import bound_axis
from manifests.runs import expand


def take_inputs(site: Site) -> Step:
    """Return the step that keeps the rank's entries of the arguments that the site's entry lists.

    An argument that is several tensors, as cosines and sines are, has the entries of each.

    Raises:
        LoadError: The module's forward has no such argument.
    """
    names = InputNames(site.module)
    parts = [(names.index(entry.name), _Part(entry, site)) for entry in site.entry.inputs]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        for at, part in parts:
            value = names.find(at, args, kwargs)
            if isinstance(value, torch.Tensor):
                args, kwargs = names.put(at, part.of(value), args, kwargs)
            elif isinstance(value, tuple):
                args, kwargs = names.put(at, tuple(map(part.of, value)), args, kwargs)
        return args, kwargs

    return Step(before)


class _Part:
    """A rank's entries of one argument."""

    def __init__(self, entry: Input, site: Site) -> None:
        axis = bound_axis(entry.axis)
        self._runs, self._numel = running_part(axis, entry.mesh, dist.get_rank(site.group))
        self._entry, self._label, self._size = entry, site.label, axis.size
        chosen = (torch.arange(src, src + length) for src, _, length in expand(self._runs))
        self._mine = torch.cat([torch.arange(0), *chosen])

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of every repetition of the axis; what has one entry for all heads stays whole.

        Raises:
            LoadError: The dimension is no multiple of the axis.
        """
        dim, size = self._entry.dim % value.ndim, value.shape[self._entry.dim]
        if size == 1 < self._size:
            return value
        if size % self._size:
            raise LoadError(
                f"{self._label}: its input {self._entry.name!r} has {size} entries in dimension {dim}, "
                f"its split expects {self._size} or a multiple"
            )
        each = value.reshape(*value.shape[:dim], size // self._size, self._size, *value.shape[dim + 1 :])
        mine = each.index_select(dim + 1, self._mine.to(value.device))
        return spread(mine, dim + 1, self._runs, self._numel).flatten(dim, dim + 1)
