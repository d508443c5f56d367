"""Shares: how much of what is divided every rank runs, where that is not the same for all."""

from collections.abc import Iterable
from fractions import Fraction
from math import prod

from manifests.layout import Axis, Factor, Mesh, coordinates, mesh_sizes

Shares = dict[str, tuple[Fraction, ...]]
"""By mesh axis, the share that every rank runs of what is divided over it."""


def shares_of(divided: Iterable[tuple[Axis, Mesh]], ranks: int) -> Shares:
    """Return the share that every rank runs of what axes divide over each mesh axis.

    A mesh axis over which two of them have other shares is left out: it is not known what an attribute speaks of. So is
    ``tp`` where a width over all ranks has others than heads over the axes of the mesh.

    >>> from manifests.expression import parse_axis
    >>> heads = parse_axis("(3@kv, 3@rep, 64)"), (("kv", 2), ("rep", 1))
    >>> shares_of([heads], 2)["kv"], shares_of([heads], 2)["tp"]
    ((Fraction(2, 3), Fraction(1, 3)), (Fraction(2, 3), Fraction(1, 3)))
    """
    found: Shares = {}
    unknown: set[str] = set()
    for axis, mesh in divided:
        sizes = mesh_sizes(mesh)
        for factor in axis.all_factors():
            if sizes.get(factor.on, 1) > 1 and factor.size:
                shares = tuple(_share(factor, mesh, sizes, rank) for rank in range(ranks))
                if found.setdefault(factor.on, shares) != shares:
                    unknown.add(factor.on)
    heads = [found[name] for name in found if name != "tp"]
    together = tuple(prod((shares[rank] for shares in heads), start=Fraction(1)) for rank in range(ranks))
    if (unknown and "tp" not in found) or (heads and found.get("tp", together) != together):
        unknown.add("tp")
    found.setdefault("tp", together)
    return {name: shares for name, shares in found.items() if name not in unknown}


def _share(factor: Factor, mesh: Mesh, sizes: dict[str, int], rank: int) -> Fraction:
    at = {"tp": rank, **coordinates(mesh, rank)}[factor.on]
    most = -(-factor.size // sizes[factor.on])
    return Fraction(most if factor.padded else max(0, min(most, factor.size - at * most)), factor.size)
