"""Pulling back: placements of the running model's tensors, said of the stored tensors that they are made of.

A stored tensor is divided so that every rank holds, in the stored order, those of its entries that the rank has at run
time. A link says which entries of a stored dimension become which of a running one, so the stored dimension's axis is
the running one's, or the concatenation of those pieces of it that the links lead to. An axis found so is a guess:
it is taken only if it gives every rank exactly the entries that the links give it.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby, permutations
from math import prod
from typing import NamedTuple

from manifests.dtypes import atom, atoms
from manifests.errors import PlanError
from manifests.header import StoredTensor
from manifests.layout import Axis, Factor, Mesh, Segment
from manifests.manifest import Link, Part, Rule, Tensor
from manifests.placement import PARTIAL, REPLICATED, Cut, Placement, bound_axis, dim_runs
from manifests.runs import Runs, compose, expand
from reshard.placing import Resolution, RuntimeTensor
from reshard.plans import modules_of
from reshard.program import identity_links

NOTE = (
    "stored and running names or layouts differ: this split is for other consumers; "
    "loader.load_model needs --layout runtime"
)

Blocks = tuple[tuple[int, int], ...]
"""Entries of a dimension, ascending: (first, number), no two adjacent."""


class _Use(NamedTuple):
    """What a tensor of the running model takes of a stored one: the tensor, with one of its parts."""

    dtype: str
    shape: tuple[int, ...]
    placement: Placement
    part: Part


class _Piece(NamedTuple):
    """What a tensor of the running model takes of a stored dimension.

    Attributes:
        runs: From the stored dimension, in atoms.
        cut: How the tensor's dimension is divided, if it is.
        size: Atoms of the tensor's dimension.
    """

    runs: Runs
    cut: Cut | None
    size: int


def in_stored_order(tensors: Mapping[str, RuntimeTensor], stored: Mapping[str, StoredTensor]) -> dict[str, RuntimeTensor]:
    """Return the tensors of the running model in the order of the stored tensors that they begin with."""
    position = {name: at for at, name in enumerate(stored)}
    return dict(sorted(tensors.items(), key=lambda item: position[_parts(*item)[0].source]))


def runs_as_stored(tensors: Mapping[str, RuntimeTensor]) -> bool:
    """Tell whether the running model's tensors have their stored names and layout."""
    return not any(tensor.parts for tensor in tensors.values())


def pull_back(
    resolution: Resolution, stored: Mapping[str, StoredTensor], world_size: int, label: str
) -> Resolution:
    """Return what a plan of the running model makes of the stored tensors.

    Steps and attributes of modules, and ties, stay where the stored names have what they speak of.

    Args:
        resolution: What the plan makes of the running model.
        stored: The stored tensors by name.
        world_size: Number of ranks.
        label: The plan, for messages.

    Raises:
        PlanError: A stored tensor's entries on the ranks are not what a placement can say.
    """
    if not any(tensor.parts for tensor in resolution.tensors.values()):
        return resolution
    uses: dict[str, list[_Use]] = {name: [] for name in stored}
    takers: dict[str, str] = {}
    for name, tensor in resolution.tensors.items():
        for part in _parts(name, tensor):
            if not tensor.unused:
                takers.setdefault(part.source, name)
                uses[part.source].append(_Use(tensor.dtype, tensor.shape, tensor.placement, _anywhere(part, tensor)))
    tensors: dict[str, Tensor] = {}
    rules: dict[str, Rule] = {}
    for name, (dtype, shape, *_) in stored.items():
        if name not in takers:
            tensors[name] = Tensor(dtype, shape, unused=True)
            continue
        if takers[name] in resolution.rules:
            rules[name] = resolution.rules[takers[name]]
        try:
            tensors[name] = Tensor(dtype, shape, _pulled(tuple(uses[name]), dtype, shape, world_size))
        except PlanError as error:
            raise PlanError(f"{label}: {name}: {error}; use --layout runtime, or give a --plan of stored names") from error
    modules = set(modules_of(tensors))
    return resolution._replace(
        tensors=tensors,
        rules=rules,
        modules={name: module for name, module in resolution.modules.items() if name in modules},
        attributes={name: values for name, values in resolution.attributes.items() if name in modules},
        ties={name: source for name, source in resolution.ties.items() if source in tensors},
        notes=(*resolution.notes, NOTE),
    )
