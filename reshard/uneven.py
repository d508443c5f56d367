"""Uneven division: what becomes of an axis that the number of ranks does not divide, where that is asked for.

``ceil`` gives the ranks parts as ``torch.chunk`` makes them: as large as must be, the last shorter, none empty. ``pad``
does the same in the files, and fills the shorter parts up with zeros where they run, so that all ranks have equal
shapes; a rank may have nothing but zeros. Heads stay whole, and so do blocks of scales; a width is cut at multiples of
entries that kernels like. Both are exact if all that meets is cut at the same entries (`reshard.meeting`).
"""

from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Literal, NamedTuple

from manifests.layout import Axis, Factor, Mesh, Segment, mesh_sizes

Uneven = Literal["", "ceil", "pad"]
POLICIES: tuple[Uneven, ...] = ("ceil", "pad")
GRAIN = 16
"""Units that are kept together where that leaves no rank much more than its share, as kernels like it."""
MUCH = Fraction(1, 20)
"""Of what the largest part would have otherwise."""


class Grain(NamedTuple):
    """Where an axis may be cut.

    Attributes:
        block: Entries that one scale stands for.
        needed: Of how many units each part must be a multiple, also where parts are equal, if the whole is.
    """

    block: int = 1
    needed: int = 1


@lru_cache(maxsize=4096)
def fit(axis: Axis, mesh: Mesh, policy: Uneven, grain: Grain = Grain()) -> Axis:  # noqa: B008 - a constant
    """Return an axis with what the mesh does not divide in the form in which it is divided.

    What is divided over all ranks is cut by its number of units alone, so that all that has as many is cut alike.

    >>> from manifests.expression import parse_axis
    >>> ranks = (("tp", 9),)
    >>> str(fit(parse_axis("(2, 1536*)"), ranks, "ceil")), str(fit(parse_axis("(5*, 64)"), ranks, "pad"))
    ('(2, 96*, 16)', '(5~*, 64)')
    """
    if not policy:
        return axis
    return Axis(tuple(_fit_segment(segment, mesh, policy, grain) for segment in axis.segments))


def _fit_segment(segment: Segment, mesh: Mesh, policy: Uneven, grain: Grain) -> Segment:
    sizes = mesh_sizes(mesh)
    factors: list[Factor] = []
    for at, factor in enumerate(segment.factors):
        parts = sizes.get(factor.on, 1)
        too_fine = factor.size % grain.needed == 0 and factor.size // parts % grain.needed != 0
        if parts == 1 or factor.padded or (factor.size % parts == 0 and not too_fine):
            factors.append(factor)
            continue
        within = Segment(segment.factors[at + 1 :], segment.body).size
        block = lcm(grain.block // gcd(grain.block, within), grain.needed)
        together = _together(factor.size, parts, block, policy) if factor.on in ("tp", "etp") else 1
        factors.append(Factor(factor.size // together, factor.on, policy == "pad"))
        if together > 1:
            factors.append(Factor(together))
    return Segment(tuple(factors), segment.body and fit(segment.body, mesh, policy, grain), segment.name)


def _together(units: int, parts: int, block: int, policy: Uneven) -> int:
    """Return how many units are kept together."""
    least = block if units % block == 0 else 1
    most_wanted = -(-units // (least * parts)) * least * (1 + MUCH)
    together = least
    while together < GRAIN and units % (2 * together) == 0:
        most = -(-units // (2 * together * parts)) * 2 * together
        empty = policy == "ceil" and most * (parts - 1) >= units
        if empty or most > most_wanted:
            break
        together *= 2
    return together


def is_uneven(axis: Axis, mesh: Mesh) -> bool:
    """Tell whether some ranks own less of an axis than others."""
    sizes = mesh_sizes(mesh)
    return any(factor.size % sizes.get(factor.on, 1) for factor in axis.all_factors())
