"""Meeting: whether what is added up over unevenly cut features is cut at the same entries as what makes them.

Parts of equal size cannot fail to meet; parts of other sizes can, where one side of a product is cut by heads and the
other by columns.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from manifests.errors import PlanError
from manifests.layout import Axis, Mesh, Segment, rank_runs
from manifests.natural import kind_of
from manifests.runs import Runs
from reshard.shares import Shares, shares_of
from reshard.uneven import is_uneven


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


def check_meeting(sides: Sequence[Side], ranks: int, label: str) -> None:
    """Refuse uneven parts unless it can be shown that what meets is cut at the same entries.

    Input features that are added up are compared with output features of as many entries: those of their module, or of
    the nearest around it. What has no such counterpart, as a norm of heads, or heads in one axis with others of theirs,
    must be known to be heads, and be shared out as others beside it.

    Raises:
        PlanError: They are cut at others, or it cannot be shown that they are not.
    """
    checked: set[tuple[object, ...]] = set()
    for layer in _layers(sides):
        key = tuple((kind_of(side.name), *side[1:]) for side in layer)
        if key not in checked:
            checked.add(key)
            _Layer(layer, sides, ranks, label).check()


class _Layer:
    """The axes of one layer, and those of all."""

    def __init__(self, sides: list[Side], every: Sequence[Side], ranks: int, label: str) -> None:
        self._sides = sides
        self._every = every
        self._ranks = ranks
        self._label = label
        self._parts = {side: {part.size: part for part in _parts_of(side.axis)} for side in sides}

    def check(self) -> None:
        met: set[Side] = set()
        for side in self._sides:
            if side.summed:
                makers = [self._makers(side, Axis((segment,))) for segment in side.axis.segments]
                met |= {side, *chain.from_iterable(makers)} if all(makers) else set()
        for side in self._sides:
            if side not in met and is_uneven(side.axis, side.mesh) and not self._is_shared_alike(side):
                raise PlanError(
                    f"{self._label}: {side.name} is cut unevenly as {side.axis}, and nothing beside it is cut alike: "
                    "it cannot be shown what it meets; give its rule a layout"
                )

    def _makers(self, side: Side, features: Axis) -> list[Side]:
        """Return the output features that a side's features meet, none if there are none."""
        size = features.size
        possible = [other for other in self._sides if not other.summed and size in self._parts[other]]
        found = _nearest(side, possible, every=side.plain)
        for maker in found:
            axis = self._parts[maker][size]
            if not is_uneven(features, side.mesh) and not is_uneven(axis, maker.mesh):
                continue
            alike = _owned(axis, maker.mesh, self._ranks) == _owned(features, side.mesh, self._ranks)
            permuted = not (side.plain or maker.plain) and self._shares(side) == self._shares(maker) != {}
            if not alike and not permuted:
                raise PlanError(
                    f"{self._label}: {side.name} is cut unevenly as {features}, and {maker.name} as {axis}: "
                    "it cannot be shown that they meet; give both a layout of the same factors"
                )
        return found

    def _is_shared_alike(self, side: Side) -> bool:
        mine = self._shares(side)
        if side.plain or not mine:
            return False
        beside = _nearest(side, [other for other in self._sides if other != side and not other.plain], every=True)
        others = beside or [other for other in self._every if other != side and not other.plain]
        theirs = [self._shares(other) for other in others]
        # Heads over all ranks are those over kv and rep, if as many are on each.
        return any(mine.items() <= shares.items() or mine["tp"] == shares.get("tp") for shares in theirs)

    def _shares(self, side: Side) -> Shares:
        return shares_of([(side.axis, side.mesh)], self._ranks)


def _nearest(side: Side, others: list[Side], *, every: bool) -> list[Side]:
    """Return those in a side's module, or else, if every module is asked for, in the innermost around it with some."""
    module = side.name.rpartition(".")[0].rpartition(".")[0]
    while True:
        inside = [other for other in others if other.name.startswith(f"{module}.") or not module]
        if inside or not module or not every:
            return inside
        module = module.rpartition(".")[0]


def check_joined(modules: Iterable[str], sides: Iterable[Side], label: str) -> None:
    """Refuse modules that join what the ranks have, of which no axis tells how much that is, beside uneven parts.

    Raises:
        PlanError: Something in the layer of one is cut unevenly.
    """
    uneven = {_layer_of(side.name): side for side in sides if is_uneven(side.axis, side.mesh)}
    for module in modules:
        if side := uneven.get(_layer_of(f"{module}.weight")):
            raise PlanError(
                f"{label}: {side.name} is cut unevenly as {side.axis}, and {module} beside it joins the ranks' parts: "
                "it cannot be shown that they are equal"
            )


def _layers(sides: Iterable[Side]) -> Iterator[list[Side]]:
    """Yield the axes of every layer."""
    layers: dict[str, list[Side]] = {}
    for side in sides:
        layers.setdefault(_layer_of(side.name), []).append(side)
    yield from layers.values()


def _layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number of a module with others inside."""
    parts = name.split(".")
    numbers = (at for at, part in enumerate(parts[:-2]) if part.isdecimal())
    return ".".join(parts[: next(numbers, 0) + 1])


def _parts_of(axis: Axis) -> Iterator[Axis]:
    """Yield what of an axis may be features by itself: all of it, a segment, what is repeated in one, what repeats."""
    yield axis
    for segment in axis.segments:
        divided = [at for at, factor in enumerate(segment.factors) if factor.on]
        if not divided:
            continue
        for begin in range(divided[0] + 1):
            yield Axis((Segment(segment.factors[begin:], segment.body),))
            for end in range(divided[-1] + 1, len(segment.factors)):
                yield Axis((Segment(segment.factors[begin:end]),))


@lru_cache(maxsize=4096)
def _owned(axis: Axis, mesh: Mesh, ranks: int) -> tuple[Runs, ...]:
    return tuple(rank_runs(axis, mesh, rank) for rank in range(ranks))
