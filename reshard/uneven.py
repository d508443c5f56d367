"""Uneven division: what becomes of an axis that the number of ranks does not divide, where that is asked for.

``ceil`` gives the ranks parts as ``torch.chunk`` makes them: as large as must be, the last shorter, none empty. ``pad``
does the same in the files, and fills the shorter parts up with zeros where they run, so that all ranks have equal
shapes; a rank may have nothing but zeros. Heads stay whole, and so do blocks of scales; a width is cut at multiples of
16 entries where it has so many. Both are exact if all that meets is cut at the same entries, which is checked here.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod
from typing import Literal, NamedTuple

from manifests.errors import PlanError
from manifests.layout import Axis, Factor, Mesh, Segment, coordinates, mesh_sizes, rank_runs
from manifests.runs import Runs

Uneven = Literal["", "ceil", "pad"]
POLICIES: tuple[Uneven, ...] = ("ceil", "pad")
GRAIN = 16
"""Entries of a width that are kept together where its size allows: kernels want rows of 16 or 32 bytes."""


class Grain(NamedTuple):
    """Where a width may be cut.

    Attributes:
        size: Parts are multiples of so many entries, if the whole is.
        needed: The same, of parts that are equal; 1 leaves them alone.
    """

    size: int = GRAIN
    needed: int = 1


@lru_cache(maxsize=4096)
def fit(axis: Axis, mesh: Mesh, policy: Uneven, grain: Grain = Grain()) -> Axis:  # noqa: B008 - a constant
    """Return an axis with what the mesh does not divide in the form in which it is divided.

    >>> from manifests.expression import parse_axis
    >>> ranks = (("tp", 9),)
    >>> str(fit(parse_axis("(2, 1536*)"), ranks, "ceil")), str(fit(parse_axis("(5*, 64)"), ranks, "pad"))
    ('(2, 96*, 16)', '(5~*, 64)')
    """
    if not policy:
        return axis
    sizes = mesh_sizes(mesh)
    return Axis(tuple(_fit_segment(segment, mesh, sizes, policy, grain) for segment in axis.segments))


def _fit_segment(segment: Segment, mesh: Mesh, sizes: dict[str, int], policy: Uneven, grain: Grain) -> Segment:
    factors: list[Factor] = []
    for factor in segment.factors:
        parts = sizes.get(factor.on, 1)
        is_width = factor is segment.factors[-1] and segment.body is None
        fits = factor.size % parts == 0 and not (is_width and _is_too_fine(factor.size, parts, grain.needed))
        if factor.padded or fits:
            factors.append(factor)
            continue
        together = _together(factor.size, parts, grain.size, policy) if is_width else 1
        factors.append(Factor(factor.size // together, factor.on, policy == "pad"))
        if together > 1:
            factors.append(Factor(together))
    return Segment(tuple(factors), segment.body and fit(segment.body, mesh, policy, grain), segment.name)


def _is_too_fine(size: int, parts: int, needed: int) -> bool:
    return parts > 1 and size % needed == 0 and size // parts % needed != 0


def _together(size: int, parts: int, grain: int, policy: Uneven) -> int:
    """Return how many entries of a width are kept together: as many as leave no rank without any."""
    together = gcd(size, grain)
    while policy == "ceil" and together > 1 and _is_empty(size // together, parts):
        together = together // 2 if together % 2 == 0 else 1
    return together


def _is_empty(units: int, parts: int) -> bool:
    """Tell whether the last of the parts has nothing."""
    return -(-units // parts) * (parts - 1) >= units


class Side(NamedTuple):
    """A divided axis, and on which side of a product it is.

    Attributes:
        name: The tensor's name.
        axis: The axis, as it is divided.
        mesh: What it is divided over.
        summed: Whether the ranks' products along it are added up: input features, not output features.
    """

    name: str
    axis: Axis
    mesh: Mesh
    summed: bool


def check_meeting(sides: Iterable[Side], ranks: int, label: str) -> None:
    """Refuse what is added up over unevenly cut features unless all that makes them is cut at the same entries.

    Compared are the axes of one layer that have equal numbers of entries.

    Raises:
        PlanError: They are cut at others, or nothing else in the layer has such an axis.
    """
    checked: set[tuple[object, ...]] = set()
    for layer in _layers(sides):
        key = tuple(side[1:] for side in layer)
        if key in checked:
            continue
        checked.add(key)
        made: dict[int, list[tuple[Side, Axis]]] = {}
        for side in layer:
            if not side.summed:
                for part in _parts_of(side.axis):
                    made.setdefault(part.size, []).append((side, part))
        for side in layer:
            if side.summed and is_uneven(side.axis, side.mesh):
                _check_side(side, made.get(side.axis.size, []), ranks, label)


def _check_side(side: Side, makers: list[tuple[Side, Axis]], ranks: int, label: str) -> None:
    owned = _owned(side.axis, side.mesh, ranks)
    for maker, axis in makers:
        if _owned(axis, maker.mesh, ranks) != owned:
            raise PlanError(
                f"{label}: {side.name} is cut unevenly as {side.axis}, and {maker.name} as {axis}: "
                "it cannot be shown that they meet; give both a layout of the same factors"
            )
    if not makers and sum(len(segment.factors) for segment in side.axis.segments) == 1:
        raise PlanError(
            f"{label}: {side.name} is cut unevenly as {side.axis}, and no output in its layer has as many entries: "
            "it cannot be shown what it meets; give its rule a layout"
        )


def _layers(sides: Iterable[Side]) -> Iterator[list[Side]]:
    """Yield the axes of every layer: of names that are equal up to their first number."""
    layers: dict[str, list[Side]] = {}
    for side in sides:
        parts = side.name.split(".")
        numbers = (at for at, part in enumerate(parts) if part.isdecimal())
        layers.setdefault(".".join(parts[: next(numbers, 0) + 1]), []).append(side)
    yield from layers.values()


def _parts_of(axis: Axis) -> Iterator[Axis]:
    """Yield what of an axis may be features by itself: all of it, a segment, what is repeated in one."""
    yield axis
    for segment in axis.segments:
        rest = segment
        while rest.factors:
            if rest != segment or len(axis.segments) > 1:
                yield Axis((rest,))
            if rest.factors[0].on:
                break
            rest = rest._replace(factors=rest.factors[1:])


def is_uneven(axis: Axis, mesh: Mesh) -> bool:
    """Tell whether some ranks own less of an axis than others."""
    sizes = mesh_sizes(mesh)
    return any(factor.size % sizes.get(factor.on, 1) for factor in axis.all_factors())


@lru_cache(maxsize=4096)
def _owned(axis: Axis, mesh: Mesh, ranks: int) -> tuple[Runs, ...]:
    return tuple(rank_runs(axis, mesh, rank) for rank in range(ranks))


Shares = dict[str, tuple[Fraction, ...]]
"""By mesh axis, the share that every rank runs of what is divided over it."""


def shares_of(divided: Iterable[tuple[Axis, Mesh]], ranks: int) -> Shares:
    """Return the share that every rank runs of what axes divide over each mesh axis.

    A mesh axis over which two of them have other shares is left out: it is not known what an attribute speaks of.

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
            if factor.on and factor.size:
                shares = tuple(_share(factor, mesh, sizes, rank) for rank in range(ranks))
                if found.setdefault(factor.on, shares) != shares:
                    unknown.add(factor.on)
    if "tp" not in found:
        found["tp"] = tuple(prod((found[name][rank] for name in found), start=Fraction(1)) for rank in range(ranks))
        unknown |= {"tp"} if unknown else set()
    return {name: shares for name, shares in found.items() if name not in unknown}


def _share(factor: Factor, mesh: Mesh, sizes: dict[str, int], rank: int) -> Fraction:
    at = {"tp": rank, **coordinates(mesh, rank)}[factor.on]
    most = -(-factor.size // sizes[factor.on])
    return Fraction(most if factor.padded else max(0, min(most, factor.size - at * most)), factor.size)
