"""Flows: a program as the engine runs it.

A flow is a tensor that passes by in boxes: filled from inputs, and cut into parts. Usually it is the tensor of a move.
Where several moves take strided pieces of one input, the input itself is the tensor that passes by, and the moves'
parts are cut from it, so that it is read once. Flows that read the same inputs make a chain; chains share nothing.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from manifests.manifest import Link
from manifests.runs import Runs, compose, expand, numel
from reshard.engine.boxes import Box, Cutter, Grain, boxes, grain_nbytes, invert_links, natural_grain, whole_box
from reshard.engine.limits import Limits
from reshard.movetable import MoveTable
from reshard.program import Input, Move, identity_links


class Inlet(NamedTuple):
    """An input of a flow; the links go from the input to the flow's tensor."""

    source: Input
    links: tuple[Link, ...]


class Outlet(NamedTuple):
    """A part that a flow writes.

    Attributes:
        move: Position of the move in the program.
        scatter: Position of the part among the move's.
        file: Position of the file among the program's output files.
        offset: First byte of the part, counted from the start of the file.
        shape: In atoms.
        links: From the flow's tensor to the part.
    """

    move: int
    scatter: int
    file: int
    offset: int
    shape: tuple[int, ...]
    links: tuple[Link, ...]


class Flow(NamedTuple):
    """A tensor that passes by.

    Attributes:
        shape: In atoms of ``item_nbytes`` bytes.
        item_nbytes: Bytes of an atom.
        inlets: What fills it.
        outlets: What is cut from it.
        cast: The dtypes of its inputs and its own, if its numbers are converted.
    """

    shape: tuple[int, ...]
    item_nbytes: int
    inlets: tuple[Inlet, ...]
    outlets: tuple[Outlet, ...]
    cast: tuple[str, str] | None = None


class Fit(NamedTuple):
    """The form of a flow's boxes.

    Attributes:
        grain: The form.
        nbytes: Bytes of a box.
        dense: Whether a box holds inputs in one piece, so that reading boxes in order reads inputs in order.
    """

    grain: Grain
    nbytes: int
    dense: bool


def place_of(source: Input) -> tuple[int, int, int]:
    """Return what tells an input from another, under whatever shape it is seen."""
    return source.file, source.offset, source.nbytes


def flow_of(move: Move, position: int) -> Flow:
    """Return the flow whose tensor is the move's."""
    inlets = tuple(Inlet(gather.source, gather.links) for gather in move.gathers)
    outlets = tuple(
        Outlet(position, at, scatter.file, scatter.offset, tuple(map(numel, scatter.runs)), _links_of(scatter.runs))
        for at, scatter in enumerate(move.scatters)
    )
    return Flow(move.shape, move.item_nbytes, inlets, outlets, move.cast)


@lru_cache(maxsize=1024)
def _links_of(runs: tuple[Runs, ...]) -> tuple[Link, ...]:
    return tuple(Link(dim, dim, dim_runs) for dim, dim_runs in enumerate(runs))


def join_flows(moves: Sequence[Move], positions: Sequence[int], limits: Limits) -> tuple[Flow, ...]:
    """Return the flows of moves that share inputs: one, if each alone would read its one input in strided pieces."""
    flows = tuple(flow_of(move, position) for move, position in zip(moves, positions, strict=True))
    if len(flows) == 1 or all(fit(flow, limits).dense for flow in flows):
        return flows
    joined = _joined(moves, positions)
    if joined is None:
        return flows
    form = fit(joined, limits)
    return (joined,) if form.dense and form.nbytes <= limits.unit else flows


def groups(moves: Sequence[Move]) -> dict[int, list[int]]:
    """Return, by the position of the first, the positions of moves that share inputs; none for those of the others.

    Moves that take a source as it is are left out where they are known to be alone in that.
    """
    members: dict[int, list[int]] = {}
    group_of: dict[int, int] = {}
    first_use: dict[tuple[int, int, int], int] = {}
    for position in moves.gathering() if isinstance(moves, MoveTable) else range(len(moves)):
        members[position], group_of[position] = [position], position
        for gather in moves[position].gathers:
            other = group_of[first_use.setdefault(place_of(gather.source), position)]
            mine = group_of[position]
            if other == mine:
                continue
            small, large = sorted((other, mine), key=lambda at: len(members[at]))
            for at in members[small]:
                group_of[at] = large
            members[large] += members.pop(small)
    found: dict[int, list[int]] = {position: [] for position in group_of}
    found.update((min(group), sorted(group)) for group in members.values())
    return found


def _joined(moves: Sequence[Move], positions: Sequence[int]) -> Flow | None:
    """Return the flow whose tensor is the one input of all moves, or None if they have several."""
    inputs = {gather.source for move in moves for gather in move.gathers}
    if len(inputs) != 1 or any(len(move.gathers) != 1 for move in moves):
        return None
    (source,) = inputs
    kinds = {(move.item_nbytes, move.cast) for move in moves}
    if sum(prod(move.shape) for move in moves) != prod(source.shape) or len(kinds) > 1:
        return None
    outlets = tuple(
        Outlet(
            position,
            at,
            scatter.file,
            scatter.offset,
            tuple(map(numel, scatter.runs)),
            tuple(_through(link, scatter.runs) for link in move.gathers[0].links),
        )
        for move, position in zip(moves, positions, strict=True)
        for at, scatter in enumerate(move.scatters)
    )
    ((item_nbytes, cast),) = kinds
    return Flow(source.shape, item_nbytes, (Inlet(source, identity_links(source.shape)),), outlets, cast)


def _through(link: Link, runs: tuple[Runs, ...]) -> Link:
    return link if link.dst is None else Link(link.src, link.dst, compose(link.runs, runs[link.dst]))


def fit(flow: Flow, limits: Limits) -> Fit:
    """Return the form of a flow's boxes: the smallest from a band up that holds inputs and parts in one piece."""
    natural = natural_grain(flow.shape, flow.item_nbytes, limits.band)
    as_it_is = len(flow.inlets) == 1 and flow.inlets[0].links == identity_links(flow.inlets[0].source.shape)
    if as_it_is and _in_order(flow):
        return Fit(natural, grain_nbytes(natural, flow.shape, flow.item_nbytes), dense=True)
    for dim in range(natural.dim, -1, -1):
        rows = natural.rows if dim == natural.dim else 1
        closed = max((_closed(runs) for runs in _runs_of(flow, dim)), default=1)
        for grain in dict.fromkeys((Grain(dim, rows), Grain(dim, max(closed, rows // closed * closed)))):
            nbytes = grain_nbytes(grain, flow.shape, flow.item_nbytes)
            if nbytes <= max(limits.held, limits.band) and _is_dense(flow, grain):
                return Fit(grain, nbytes, dense=True)
    whole = Grain(0, max(flow.shape[0], 1)) if flow.shape else Grain(0, 1)
    nbytes = grain_nbytes(whole, flow.shape, flow.item_nbytes)
    if nbytes <= limits.held and _is_dense(flow, whole):
        return Fit(whole, nbytes, dense=True)
    grain = natural_grain(flow.shape, flow.item_nbytes, limits.held)
    return Fit(grain, grain_nbytes(grain, flow.shape, flow.item_nbytes), dense=False)


def _in_order(flow: Flow) -> bool:
    """Tell whether every part is divided along the tensor's own dimensions in their order, as a placement does it."""
    return all(
        all(link.src == link.dst and _closed(link.runs) == 1 for link in outlet.links) for outlet in flow.outlets
    )


def _runs_of(flow: Flow, dim: int) -> Iterator[Runs]:
    """Yield how a dimension of the flow's tensor runs into inputs and parts."""
    for inlet in flow.inlets:
        yield from (link.runs for link in invert_links(inlet.links) if link.src == dim and link.dst is not None)
    for outlet in flow.outlets:
        yield from (link.runs for link in outlet.links if link.src == dim and link.dst is not None)


@lru_cache(maxsize=4096)
def _closed(runs: Runs) -> int:
    """Return the least n of which the first n entries, the next n and so on go to consecutive ones, in any order.

    >>> from manifests.runs import Run
    >>> _closed((Run(0, 0, 8),)), _closed((Run(0, 1, 1, 4, 2, 2), Run(1, 0, 1, 4, 2, 2)))
    (1, 2)
    """
    spans = sorted(expand(runs))
    if all(one[1] < other[1] for one, other in pairwise(spans)):
        return 1
    size = spans[-1][0] + spans[-1][2]
    points: set[int] = set()
    count, lowest, highest = 0, spans[0][1], 0
    for src, dst, length in spans:
        count += length
        lowest, highest = min(lowest, dst), max(highest, dst + length)
        if highest - lowest == count:
            points.add(src + length)
    return next((n for n in sorted(points) if points.issuperset(range(n, size + 1, n))), size)


def _is_dense(flow: Flow, grain: Grain) -> bool:
    """Tell whether boxes of a form hold inputs and parts in one piece, by the first and the last box of each."""
    others = [(invert_links(inlet.links), inlet.source.shape) for inlet in flow.inlets]
    others += [(outlet.links, outlet.shape) for outlet in flow.outlets]
    for links, shape in others:
        if not all(link.runs for link in links):
            continue
        cutter = Cutter(links, flow.shape, shape, grain)
        for box in _first_and_last(links, flow.shape, grain):
            share = cutter.share(box)
            if share is not None and not share.dense:
                return False
    return True


def _first_and_last(links: Sequence[Link], shape: tuple[int, ...], grain: Grain) -> Iterator[Box]:
    if not shape:
        return
    spans = {link.src: expand(link.runs) for link in links if link.src is not None}
    lows = [min(span[0] for span in spans[dim]) for dim in range(len(shape))]
    highs = [max(span[0] + span[2] - 1 for span in spans[dim]) for dim in range(len(shape))]
    for corner in (lows, highs):
        outer = tuple((at, at + 1) for at in corner[: grain.dim])
        lo = corner[grain.dim] // grain.rows * grain.rows
        yield (*outer, (lo, min(lo + grain.rows, shape[grain.dim])), *whole_box(shape)[grain.dim + 1 :])


def all_boxes(flow: Flow, grain: Grain) -> Iterator[Box]:
    """Yield the boxes of a flow's tensor, in row-major order."""
    yield from boxes(whole_box(flow.shape), grain)
