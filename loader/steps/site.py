"""Sites and steps: where a step is put, and what it is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from loader.steps.state import Sequence
from manifests.errors import LoadError
from manifests.layout import Mesh, rank_runs, running_part
from manifests.manifest import Module
from manifests.placement import bound_axis
from manifests.runs import numel

Group = dist.ProcessGroup | None
"""The ranks that compute together; None is the default group."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Inputs]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class Step(NamedTuple):
    """What a step does to a module.

    Attributes:
        before: To its inputs; None for nothing.
        after: To its output; None for nothing.
        attributes: What is set on it when the step is installed.
    """

    before: Before | None = None
    after: After | None = None
    attributes: Mapping[str, Any] = {}


class Site(NamedTuple):
    """Where a step is put.

    Attributes:
        module: The module.
        entry: What the manifest says of it.
        group: The ranks that compute together.
        sequence: What the steps of one model share.
    """

    module: nn.Module
    entry: Module
    group: Group
    sequence: Sequence

    @property
    def label(self) -> str:
        """The module's class, for messages."""
        return type(self.module).__name__

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return dist.get_rank(self.group)

    @property
    def mesh(self) -> Mesh:
        """The mesh over which the site's axis is divided."""
        return self.entry.mesh or (("tp", self.world_size),)

    def owned_numel(self, rank: int | None = None) -> int:
        """Return the number of entries that a rank, this one if none is given, owns of the site's axis."""
        return numel(rank_runs(bound_axis(self.entry.axis), self.mesh, self.rank if rank is None else rank))

    def running_numel(self, rank: int | None = None) -> int:
        """Return the same with the zeros that it is filled up with."""
        return running_part(bound_axis(self.entry.axis), self.mesh, self.rank if rank is None else rank)[1]

    def owned_range(self) -> tuple[int, int, int]:
        """Return the first entry and the number of entries that this rank owns of the site's axis, and its size."""
        return owned_range(self.entry.axis, self.mesh, self.rank)

    @property
    def copy(self) -> tuple[int, int]:
        """Which copy of its part of the axis this rank has, and how many there are."""
        copies = dict(self.entry.mesh).get("rep", 1)
        return self.rank % copies, copies


def owned_range(axis: str, mesh: Mesh, rank: int) -> tuple[int, int, int]:
    """Return the first entry, the number of entries that a rank owns of a contiguous axis, and the axis's size.

    >>> owned_range("(12*)", (("tp", 3),), 1), owned_range("(8@ep)", (("ep", 2), ("etp", 2)), 3)
    ((4, 4, 12), (4, 4, 8))
    """
    bound = bound_axis(axis)
    runs = rank_runs(bound, mesh, rank)
    if len(runs) > 1 or any(run.repeat > 1 for run in runs):
        raise LoadError(f"{axis}: a rank's part is not contiguous")
    return (runs[0].src, runs[0].length, bound.size) if runs else (0, 0, bound.size)
