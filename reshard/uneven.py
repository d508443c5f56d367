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
from manifests.natural import kind_of
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
        plain: Whether nothing is known of it but its size.
    """

    name: str
    axis: Axis
    mesh: Mesh
    summed: bool
    plain: bool


def check_meeting(sides: Iterable[Side], ranks: int, label: str) -> None:
    """Refuse uneven parts unless it can be shown that what meets is cut at the same entries.

    Input features that are added up are compared with the output features of as many entries in the nearest module
    around both that has some. What has no counterpart, as a norm of heads or heads in one axis with others of theirs,
    must say of what it consists, and be shared out as the rest of its module.

    Raises:
        PlanError: They are cut at others, or it cannot be shown that they are not.
    """
    checked: set[tuple[object, ...]] = set()
    for layer in _layers(sides):
        key = tuple((kind_of(side.name), *side[1:]) for side in layer)
        if key not in checked:
            checked.add(key)
            _Layer(layer, ranks, label).check()


class _Layer:
    """The axes of one layer."""

    def __init__(self, sides: list[Side], ranks: int, label: str) -> None:
        self._sides = sides
        self._ranks = ranks
        self._label = label
        self._parts = {side: {part.size: part for part in _parts_of(side.axis)} for side in sides}

    def check(self) -> None:
        met: set[Side] = set()
        for side in self._sides:
            if side.summed:
                makers = self._makers(side)
                met |= {side, *makers} if makers else set()
        for side in self._sides:
            if side not in met and is_uneven(side.axis, side.mesh):
                self._check_alone(side)

    def _makers(self, side: Side) -> list[Side]:
        """Return the output features that a side meets, none if there are none."""
        size, owned = side.axis.size, _owned(side.axis, side.mesh, self._ranks)
        found = self._nearest(side, [other for other in self._sides if not other.summed and size in self._parts[other]])
        for maker in found:
            axis = self._parts[maker][size]
            if _owned(axis, maker.mesh, self._ranks) != owned:
                raise PlanError(
                    f"{self._label}: {side.name} is cut unevenly as {side.axis}, and {maker.name} as {axis}: "
                    "it cannot be shown that they meet; give both a layout of the same factors"
                )
        return found

    def _nearest(self, side: Side, others: list[Side]) -> list[Side]:
        """Return those of the innermost module around a side that has some."""
        module = side.name
        while module:
            module = module.rpartition(".")[0]
            inside = [other for other in others if other.name.startswith(f"{module}.") or not module]
            if inside:
                return inside
        return []

    def _check_alone(self, side: Side) -> None:
        shares = shares_of([(side.axis, side.mesh)], self._ranks)
        others = [other for other in self._sides if other != side and not other.plain]
        beside = shares_of([(other.axis, other.mesh) for other in self._nearest(side, others)], self._ranks)
        if side.plain or not shares.items() <= beside.items():
            raise PlanError(
                f"{self._label}: {side.name} is cut unevenly as {side.axis}, and nothing beside it is cut alike: "
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
