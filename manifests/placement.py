"""Placements: what happens to one tensor, and which of its bytes a rank owns.

A placement cuts dimensions of a tensor by axes (`manifests.layout`), over a mesh. One without cuts is replicated. Of
the ranks that hold the same part of a partial one, the first alone counts; the others use zeros, so that the sum over
the ranks counts it once.
"""

from functools import lru_cache

import msgspec

from manifests.dtypes import atom, atoms
from manifests.expression import parse_axis
from manifests.layout import Axis, Mesh, coordinates, rank_runs
from manifests.runs import Runs, divide_unit, numel, whole


class Cut(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One divided dimension.

    Attributes:
        dim: The stored dimension, from 0.
        axis: The logical axis, in the notation of `manifests.expression`, with numbers only.
        unit: Elements of the axis that one entry of the dimension stands for (128 for FP8 block scales).
    """

    dim: int
    axis: str
    unit: int = 1


class Placement(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What happens to one tensor.

    Attributes:
        cuts: The divided dimensions; none means that every rank holds the whole tensor.
        mesh: The mesh axes with their sizes, outermost first; their product is the world size.
        partial: Whether, of the ranks that hold the same part, the first alone uses it and the others zeros of its
            shape, whichever files hold it. Without cuts this is rank 0.
    """

    cuts: tuple[Cut, ...] = ()
    mesh: Mesh = ()
    partial: bool = False


REPLICATED = Placement()
PARTIAL = Placement(partial=True)


@lru_cache(maxsize=4096)
def bound_axis(text: str) -> Axis:
    """Return the axis of a cut."""
    return parse_axis(text)


@lru_cache(maxsize=16384)
def dim_runs(placement: Placement, dtype: str, shape: tuple[int, ...], rank: int) -> tuple[Runs, ...] | None:
    """Return, for every dimension, the runs from the whole tensor into a rank's part, in atoms of the dtype.

    Returns:
        None where a boundary lies inside an entry that cannot be divided: a block of scales, a packed byte.
    """
    sizes = atoms(dtype, shape)
    if sizes is None:
        return None if placement.cuts else ()
    runs: list[Runs] = [whole(size) for size in sizes]
    for cut in placement.cuts:
        axis = bound_axis(cut.axis)
        elements = divide_unit(rank_runs(axis, placement.mesh, rank), cut.unit, axis.size)
        per_atom = atom(dtype)[0] if cut.dim == len(shape) - 1 else 1
        divided = None if elements is None else divide_unit(elements, per_atom, shape[cut.dim])
        if divided is None:
            return None
        runs[cut.dim] = divided
    return tuple(runs)


@lru_cache(maxsize=16384)
def local_shape(placement: Placement, dtype: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape, in elements, of a rank's part of a tensor.

    >>> local_shape(Placement((Cut(0, "(8*)"),), (("tp", 4),)), "F32", (8, 3), 1)
    (2, 3)
    """
    runs = dim_runs(placement, dtype, shape, rank)
    if not placement.cuts or runs is None:
        return shape
    per_atom, _ = atom(dtype)
    local = [numel(dim) for dim in runs]
    local[-1] *= per_atom
    return tuple(local)


def part_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """Return which part a rank holds; ranks with equal values hold the same bytes.

    >>> kv = Placement((Cut(0, "(3@kv, 64)"),), (("kv", 3), ("rep", 2)))
    >>> [part_of(kv, rank) for rank in range(4)]
    [(0,), (0,), (1,), (1,)]
    """
    used = {name for cut in placement.cuts for name in bound_axis(cut.axis).mesh_axes()}
    at = {"tp": rank, **coordinates(placement.mesh, rank)}
    return tuple(position for name, position in at.items() if name in used)


def counts(placement: Placement, rank: int) -> bool:
    """Tell whether a rank uses its part: of a partial tensor only the first of those that hold the same part does.

    >>> counts(PARTIAL, 0), counts(PARTIAL, 1)
    (True, False)
    >>> experts = Placement((Cut(0, "(4@ep)"),), (("ep", 2), ("etp", 2)), partial=True)
    >>> [counts(experts, rank) for rank in range(4)]
    [True, False, True, False]
    """
    if not placement.partial:
        return True
    used = {name for cut in placement.cuts for name in bound_axis(cut.axis).mesh_axes()}
    at = coordinates(placement.mesh, rank) if placement.mesh else {"tp": rank}
    return not any(position for name, position in at.items() if name not in used)
