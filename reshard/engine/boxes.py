"""Boxes: the pieces in which a tensor passes by, and what of another tensor a box holds."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from manifests.manifest import Link
from manifests.runs import Runs, clip, expand, fold, invert
from reshard.program import Copy, row_major, strided

Box = tuple[tuple[int, int], ...]
"""For every dimension the entries [lo, hi)."""


class Grain(NamedTuple):
    """The form of a tensor's boxes: ``rows`` entries of ``dim``, one of those before it, all of those after it."""

    dim: int
    rows: int


def natural_grain(shape: Sequence[int], item_nbytes: int, most_nbytes: int) -> Grain:
    """Return the largest form of at most ``most_nbytes`` bytes.

    >>> natural_grain((4, 2), 4, 16), natural_grain((4, 2), 4, 100), natural_grain((), 4, 1)
    (Grain(dim=0, rows=2), Grain(dim=0, rows=4), Grain(dim=0, rows=1))
    """
    steps = row_major(shape)
    dim = next((d for d, step in enumerate(steps) if step * item_nbytes <= most_nbytes), max(len(shape) - 1, 0))
    if not shape or not all(shape):
        return Grain(0, 1)
    return Grain(dim, max(1, min(shape[dim], most_nbytes // (steps[dim] * item_nbytes))))


def grain_nbytes(grain: Grain, shape: Sequence[int], item_nbytes: int) -> int:
    """Return the bytes of a box."""
    return grain.rows * prod(shape[grain.dim + 1 :]) * item_nbytes if shape else item_nbytes


def boxes(box: Box, grain: Grain) -> Iterator[Box]:
    """Yield the boxes of a form that make up a box, in row-major order.

    >>> list(boxes(((0, 4), (0, 2)), Grain(0, 2)))
    [((0, 2), (0, 2)), ((2, 4), (0, 2))]
    >>> list(boxes((), Grain(0, 1))), list(boxes(((0, 0), (0, 2)), Grain(0, 1)))
    ([()], [])
    """
    if not all(lo < hi for lo, hi in box):
        return
    if not box:
        yield ()
        return
    (first, last), rest = box[grain.dim], box[grain.dim + 1 :]
    for prefix in product(*(range(lo, hi) for lo, hi in box[: grain.dim])):
        outer = tuple((at, at + 1) for at in prefix)
        for lo in range(first, last, grain.rows):
            yield (*outer, (lo, min(lo + grain.rows, last)), *rest)


def box_count(shape: Sequence[int], grain: Grain) -> int:
    """Return how many boxes of a form make up a tensor.

    >>> box_count((4, 5, 2), Grain(1, 2)), box_count((), Grain(0, 1)), box_count((4, 0), Grain(0, 1))
    (12, 1, 0)
    """
    if not shape or not all(shape):
        return int(not shape)
    return prod(shape[: grain.dim]) * -(-shape[grain.dim] // grain.rows)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def box_numel(box: Box) -> int:
    """Return how many atoms a box holds."""
    return prod(hi - lo for lo, hi in box)


class Share(NamedTuple):
    """What a box and another tensor have in common.

    Attributes:
        begin: The first atom of the other tensor that is taken.
        extent: From there to the last one, in atoms.
        dense: Whether all of the extent is taken.
        plain: Where the extent lies in the box, if both are the same bytes in the same order; else -1.
        copies: From the box to the extent, counted from the start of each.
    """

    begin: int
    extent: int
    dense: bool
    plain: int
    copies: tuple[Copy, ...]


class Cutter:
    """Finds the share of another tensor in boxes of one form."""

    def __init__(self, links: Sequence[Link], shape: Sequence[int], other_shape: Sequence[int], grain: Grain) -> None:
        """Prepare.

        Args:
            links: From the dimensions of the tensor that is taken in boxes to those of the other.
            shape: Of the tensor, in atoms.
            other_shape: Of the other, in atoms.
            grain: The form of the boxes.
        """
        steps, other_steps = row_major(shape), row_major(other_shape)
        by_dim = {link.src: link for link in links if link.src is not None}
        self._empty = not all(link.runs for link in links)
        self._base = 0
        for link in links:
            if link.src is None and link.dst is not None and link.runs:
                self._base += link.runs[0].dst * other_steps[link.dst]
        self._grain = grain
        self._outer: list[tuple[Runs, int]] = []
        self._inner: list[tuple[int, int, Runs]] = []
        self._runs: Runs = ()
        self._step = self._other_step = 0
        for dim in range(len(shape)):
            link = by_dim[dim]
            other_step = 0 if link.dst is None else other_steps[link.dst]
            if dim < grain.dim:
                self._outer.append((link.runs, other_step))
            elif dim == grain.dim:
                self._runs, self._step, self._other_step = link.runs, steps[dim], other_step
            else:
                self._inner.append((steps[dim], other_step, link.runs))
        self._scalar = not shape
        self._known: dict[tuple[int, Runs], Share] = {}
        self.first, self.last = (0, 1) if self._scalar or self._empty else _bounds(by_dim[0].runs)

    def share(self, box: Box) -> Share | None:
        """Return what a box of the form has of the other tensor, or None."""
        if self._empty:
            return None
        begin = self._base
        for (runs, other_step), (lo, _) in zip(self._outer, box, strict=False):
            at = _locate(runs, lo)
            if at is None:
                return None
            begin += at * other_step
        if self._scalar:
            lo = hi = first = 0
            kept: Runs = ()
        else:
            lo, hi = box[self._grain.dim]
            kept, first = _keep_sources(self._runs, lo, hi)
            if not kept:
                return None
        share = self._known.get((hi - lo, kept))
        if share is None:
            share = self._known[hi - lo, kept] = self._build(kept)
        return share._replace(begin=begin + first * self._other_step + share.begin)

    def _build(self, kept: Runs) -> Share:
        links = [] if self._scalar else [(self._step, self._other_step, kept), *self._inner]
        copies = list(strided(links))
        begin = min(copy.dst for copy in copies)
        end = max(copy.dst + sum((loop.size - 1) * loop.dst_step for loop in copy.loops) for copy in copies) + 1
        count = sum(prod(loop.size for loop in copy.loops) for copy in copies)
        copies = [copy._replace(dst=copy.dst - begin) for copy in copies]
        one = copies[0]
        plain = len(copies) == 1 and all(
            (loop.src_step, loop.dst_step) == (inner, inner)
            for loop, inner in zip(one.loops, row_major([loop.size for loop in one.loops]), strict=True)
        )
        return Share(begin, end - begin, count == end - begin, one.src if plain else -1, tuple(copies))


class Index:
    """Finds the cutters that have a share of a box, by its first dimension."""

    def __init__(self, cutters: Sequence[Cutter]) -> None:
        self._order = sorted(range(len(cutters)), key=lambda at: cutters[at].first)
        self._firsts = [cutters[at].first for at in self._order]
        self._lasts = list(accumulate((cutters[at].last for at in self._order), max))

    def find(self, box: Box) -> list[int]:
        """Return the positions of those that may have a share."""
        lo, hi = box[0] if box else (0, 1)
        return self._order[bisect_right(self._lasts, lo) : bisect_left(self._firsts, hi)]


@lru_cache(maxsize=16384)
def _bounds(runs: Runs) -> tuple[int, int]:
    """Return the first source entry and the one after the last."""
    spans = expand(runs)
    return min(span[0] for span in spans), max(span[0] + span[2] for span in spans)


@lru_cache(maxsize=16384)
def _locate(runs: Runs, src: int) -> int | None:
    """Return where the runs put a source entry."""
    if len(runs) == 1 and runs[0].repeat == 1:
        at = src - runs[0].src
        return runs[0].dst + at if 0 <= at < runs[0].length else None
    return next((to + src - begin for begin, to, length in expand(runs) if begin <= src < begin + length), None)


def _keep_sources(runs: Runs, lo: int, hi: int) -> tuple[Runs, int]:
    """Return the runs from sources [lo, hi), counted from lo and from their first destination, and that destination."""
    if len(runs) == 1 and runs[0].repeat == 1:
        src, dst, length = runs[0][:3]
        begin, end = max(src, lo), min(src + length, hi)
        return (_single(begin - lo, end - begin), dst + begin - src) if begin < end else ((), 0)
    return _keep_sources_of_many(runs, lo, hi)


@lru_cache(maxsize=1024)
def _single(src: int, length: int) -> Runs:
    return fold([(src, 0, length)])


@lru_cache(maxsize=16384)
def _keep_sources_of_many(runs: Runs, lo: int, hi: int) -> tuple[Runs, int]:
    kept = invert(clip(invert(runs), lo, hi))
    if not kept:
        return (), 0
    first = min(span[1] for span in expand(kept))
    return fold((src, dst - first, length) for src, dst, length in expand(kept)), first


def invert_links(links: Sequence[Link]) -> tuple[Link, ...]:
    """Return the links that go back."""
    return tuple(Link(link.dst, link.src, invert(link.runs)) for link in links)
