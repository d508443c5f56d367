"""Meeting: whether what is added up over unevenly cut features is cut at the same entries as what makes them.

Parts of equal size cannot fail to meet; parts of other sizes can, where one side of a product is cut by heads and the
other by columns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from manifests.errors import PlanError
from manifests.layout import Axis, Mesh, Segment, mesh_sizes, rank_runs
from manifests.manifest import Module
from manifests.natural import kind_of
from manifests.placement import bound_axis
from manifests.runs import Runs, expand
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


def check_meeting(sides: Iterable[Side], ranks: int, label: str) -> None:
    """Refuse uneven parts unless it can be shown that what meets is cut at the same entries.

    Every segment is looked at by itself. Input features that are added up are compared with output features of as many
    entries: those of their module, or of the nearest around it. What has no such counterpart, as keys and values of
    fewer heads, a norm of heads, or heads in one axis with others of theirs, must be known to be heads, and be shared
    out as those are that have one.

    Raises:
        PlanError: They are cut at others, or it cannot be shown that they are not.
    """
    layers: dict[tuple[object, ...], _Layer] = {}
    for layer in _layers(chain.from_iterable(map(_segments, sides))):
        key = tuple((kind_of(side.name), *side[1:]) for side in layer)
        if key not in layers:
            layers[key] = _Layer(layer, ranks, label)
    shown = [side for layer in layers.values() for side in layer.compare()]
    for checked in layers.values():
        checked.check(shown)


def taken_sides(modules: Mapping[str, Module], plain_mesh: Mesh) -> Iterator[Side]:
    """Yield what modules take their part of when they run: arguments, and buffers that are no stored tensors."""
    for name, module in modules.items():
        for entry in module.inputs:
            yield Side(f"{name}.{entry.name}.input", bound_axis(entry.axis), entry.mesh, summed=False, plain=False)
        if module.before == "cut_buffers":
            axis = bound_axis(module.axis)
            yield Side(f"{name}.buffers.cut", axis, module.mesh or plain_mesh, summed=False, plain=False)


def check_joined(sides: Iterable[Side], modules: Mapping[str, Module], label: str) -> None:
    """Refuse to join what is cut unevenly where no axis says how much of it a rank has.

    That is so of what a module gives whose insides are divided, and of what comes into a module.

    Raises:
        PlanError: There is such a module.
    """
    given = [name for name, module in modules.items() if module.after == "all_gather" and not module.axis]
    taken = [name for name, module in modules.items() if module.before == "gather_input"]
    for side in sides if given or taken else ():
        if not is_uneven(side.axis, side.mesh):
            continue
        layer = _layer_of(side.name)
        inside = (name for name in given if side.name.startswith(f"{name}."))
        beside = (name for name in taken if _layer_of(f"{name}.weight") == layer)
        for name in chain(inside, beside):
            raise PlanError(
                f"{label}: {name}: joins the ranks' features, of which {side.name} is cut unevenly as {side.axis}; "
                "colwise_gather_output on the module that gives them would do"
            )


class _Layer:
    """The axes of one layer, a segment each."""

    def __init__(self, sides: list[Side], ranks: int, label: str) -> None:
        self._sides = sides
        self._ranks = ranks
        self._label = label
        self._parts = {side: [*_parts_of(side.axis)] for side in sides}
        self._met: set[Side] = set()

    def compare(self) -> list[Side]:
        """Compare what is added up with what makes it, and return both."""
        for side in self._sides:
            if side.summed and (makers := self._makers(side)):
                self._met |= {side, *makers}
        return self._shown()

    def _shown(self) -> list[Side]:
        return [side for side in self._sides if side.summed or side in self._met]

    def check(self, shown: Sequence[Side]) -> None:
        """Refuse what has no counterpart and is shared out otherwise than what is shown, in this layer or any."""
        mine = self._shown()
        for side in self._sides:
            if side in self._met:
                continue
            others = [other for other in self._sides if not other.summed] if side.summed else mine
            beside = _nearest(side, [other for other in others if other != side and not other.plain], every=True)
            # What divides as well, if it is known to be heads that are divided, beside others that do not.
            heads = not (side.plain or side.summed) and self._shares_by_axis(side) != {}
            doubtful = (side, *beside) if heads else (side,)
            if not any(is_uneven(other.axis, other.mesh) for other in doubtful):
                continue
            compared = beside or [other for other in shown if other != side and not other.plain]
            if not self._is_shared_alike(side, compared):
                evenly = "unevenly" if is_uneven(side.axis, side.mesh) else "evenly"
                raise PlanError(
                    f"{self._label}: {side.name} is cut {evenly} as {side.axis}, and nothing beside it is cut alike: "
                    "it cannot be shown what it meets; give its rule a layout"
                )

    def _makers(self, side: Side) -> list[Side]:
        """Return the output features that a side's features meet, none if there are none."""
        possible = [other for other in self._sides if not other.summed and self._parts_met(side, other)]
        found = _nearest(side, possible, every=side.plain)
        for maker in found:
            parts = self._parts_met(side, maker)
            if not is_uneven(side.axis, side.mesh) and not any(is_uneven(part, maker.mesh) for part in parts):
                continue
            mine = _owned(side.axis, side.mesh, self._ranks)
            alike = any(_owned(part, maker.mesh, self._ranks) == mine for part in parts)
            permuted = not (side.plain or maker.plain) and self._shares(side) == self._shares(maker) != {}
            if not alike and not permuted:
                raise PlanError(
                    f"{self._label}: {side.name} is cut unevenly as {side.axis}, and {maker.name} as {parts[-1]}: "
                    "it cannot be shown that they meet; give both a layout of the same factors"
                )
        return found

    def _parts_met(self, side: Side, maker: Side) -> list[Axis]:
        """Return what of a maker's axis may be a side's features: it has as many entries."""
        return [part for part in self._parts[maker] if part.size == side.axis.size]

    def _is_shared_alike(self, side: Side, others: Sequence[Side]) -> bool:
        mine = self._shares_by_axis(side)
        if side.plain or not mine:
            return False
        # Those over kv alone are those of queries over kv and rep; heads over all ranks, those over both.
        heads = _heads(side.axis, side.mesh, self._ranks)
        return any(
            mine.items() <= self._shares_by_axis(other).items()
            or heads == _heads(other.axis, other.mesh, self._ranks) != ()
            for other in others
        )

    def _shares(self, side: Side) -> Shares:
        return shares_of([(side.axis, side.mesh)], self._ranks)

    def _shares_by_axis(self, side: Side) -> Shares:
        named = side.axis.mesh_axes()
        return {name: shares for name, shares in self._shares(side).items() if name in named}


def _nearest(side: Side, others: list[Side], *, every: bool) -> list[Side]:
    """Return those in a side's module, or else, if every module is asked for, in the innermost around it with some."""
    module = side.name.rpartition(".")[0].rpartition(".")[0]
    while True:
        inside = [other for other in others if other.name.startswith(f"{module}.") or not module]
        if inside or not module or not every:
            return inside
        module = module.rpartition(".")[0]


def _segments(side: Side) -> Iterator[Side]:
    """Yield the divided segments of a side, each as one."""
    for segment in side.axis.segments:
        axis = Axis((segment._replace(name=""),))
        if axis.mesh_axes():
            yield side._replace(axis=axis)


def _layers(sides: Iterable[Side]) -> Iterator[list[Side]]:
    """Yield the axes of every layer."""
    layers: dict[str, list[Side]] = {}
    for side in sides:
        layers.setdefault(_layer_of(side.name), []).append(side)
    yield from layers.values()


def _layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number of a module with others inside.

    Without such a number it is up to the first part; modules of the model itself are one layer.
    """
    *above, _, _ = ("", *name.split("."))
    numbers = (at for at, part in enumerate(above) if part.isdecimal())
    return ".".join(above[: next(numbers, 1) + 1])


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
def _heads(axis: Axis, mesh: Mesh, ranks: int) -> tuple[tuple[tuple[Fraction, Fraction], ...], ...]:
    """Return which stretches of one segment's divided factors every rank has, of the whole; none if it is not so."""
    sizes = mesh_sizes(mesh)
    (segment,) = axis.segments
    divided = [at for at, factor in enumerate(segment.factors) if sizes.get(factor.on, 1) > 1]
    inside = segment.body.all_factors() if segment.body else ()
    if not divided or any(sizes.get(factor.on, 1) > 1 for factor in inside):
        return ()
    begin = next(at for at, factor in enumerate(segment.factors) if factor.on)
    heads = Axis((Segment(segment.factors[begin : divided[-1] + 1]),))
    return tuple(
        tuple((Fraction(first, heads.size), Fraction(end, heads.size)) for first, end in _stretches(runs))
        for runs in _owned(heads, mesh, ranks)
    )


def _stretches(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield where what runs take begins and ends, what is adjacent as one."""
    begin = end = 0
    for src, _, length in sorted(expand(runs)):
        if src != end:
            if end > begin:
                yield begin, end
            begin = src
        end = src + length
    if end > begin:
        yield begin, end


@lru_cache(maxsize=4096)
def _owned(axis: Axis, mesh: Mesh, ranks: int) -> tuple[Runs, ...]:
    return tuple(rank_runs(axis, mesh, rank) for rank in range(ranks))
