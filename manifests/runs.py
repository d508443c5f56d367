"""Runs: which entries of one dimension go where, as strided copies of integers.

A run copies ``repeat`` blocks of ``length`` entries: block ``i`` goes from ``src + i * src_step`` to
``dst + i * dst_step``. The division of an axis among ranks, the stacking of experts and the joining of projections are
all tuples of runs, and they compose: a tensor's part in a rank file is known as runs from its source without either
being read.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number of a manifest: whole, from 0."""
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
"""A number of a manifest: whole, from 1."""


class Run(NamedTuple):
    """``repeat`` blocks of ``length`` entries, all positions counted from the start of their dimension."""

    src: Count
    dst: Count
    length: Positive
    repeat: Positive = 1
    src_step: Count = 0
    dst_step: Count = 0


Runs = tuple[Run, ...]
Span = tuple[int, int, int]
"""One block: (src, dst, length)."""


def whole(size: int) -> Runs:
    """Return the runs that copy a dimension of ``size`` entries as it is.

    >>> whole(4)
    (Run(src=0, dst=0, length=4, repeat=1, src_step=0, dst_step=0),)
    >>> whole(0)
    ()
    """
    return (Run(0, 0, size),) if size else ()


def numel(runs: Runs) -> int:
    """Return how many entries the runs copy."""
    return sum(run.length * run.repeat for run in runs)


def expand(runs: Runs) -> list[Span]:
    """Return every block as (src, dst, length), ordered by destination.

    >>> expand((Run(0, 0, 2, repeat=2, src_step=4, dst_step=2),))
    [(0, 0, 2), (4, 2, 2)]
    """
    spans = [
        (run.src + i * run.src_step, run.dst + i * run.dst_step, run.length) for run in runs for i in range(run.repeat)
    ]
    spans.sort(key=lambda span: span[1])
    return spans


def fold(spans: Iterable[Span]) -> Runs:
    """Join blocks that continue each other, then gather equally spaced equal blocks into runs.

    >>> fold([(0, 0, 2), (2, 2, 2), (8, 4, 4), (16, 8, 4)])
    (Run(src=0, dst=0, length=4, repeat=3, src_step=8, dst_step=4),)
    """
    joined: list[Span] = []
    for src, dst, length in spans:
        if joined:
            last_src, last_dst, last_length = joined[-1]
            if last_src + last_length == src and last_dst + last_length == dst:
                joined[-1] = (last_src, last_dst, last_length + length)
                continue
        if length:
            joined.append((src, dst, length))
    runs: list[Run] = []
    for src, dst, length in joined:
        if runs:
            last = runs[-1]
            src_step, dst_step = (src - last.src) // last.repeat, (dst - last.dst) // last.repeat
            spaced = last.repeat == 1 or (src_step, dst_step) == (last.src_step, last.dst_step)
            exact = src - last.src == src_step * last.repeat and dst - last.dst == dst_step * last.repeat
            if length == last.length and spaced and exact:
                runs[-1] = last._replace(repeat=last.repeat + 1, src_step=src_step, dst_step=dst_step)
                continue
        runs.append(Run(src, dst, length))
    return tuple(runs)


@lru_cache(maxsize=16384)
def invert(runs: Runs) -> Runs:
    """Return the runs that copy back.

    >>> invert((Run(8, 0, 4),))
    (Run(src=0, dst=8, length=4, repeat=1, src_step=0, dst_step=0),)
    """
    return fold(sorted(((dst, src, length) for src, dst, length in expand(runs)), key=lambda span: span[1]))


@lru_cache(maxsize=4096)
def compose(first: Runs, second: Runs) -> Runs:
    """Return the runs from ``first``'s source to ``second``'s destination, through the dimension between them.

    Entries of the dimension between that either side lacks are left out.

    >>> compose((Run(0, 4, 4),), (Run(6, 0, 2),))
    (Run(src=2, dst=0, length=2, repeat=1, src_step=0, dst_step=0),)
    """
    incoming = expand(first)
    spans: list[Span] = []
    for between, dst, length in sorted(expand(second)):
        for src, mid, mid_length in incoming[_first_reaching(incoming, between) :]:
            if mid >= between + length:
                break
            lo, hi = max(mid, between), min(mid + mid_length, between + length)
            if lo < hi:
                spans.append((src + lo - mid, dst + lo - between, hi - lo))
    spans.sort(key=lambda span: span[1])
    return fold(spans)


def _first_reaching(spans: list[Span], position: int) -> int:
    lo, hi = 0, len(spans)
    while lo < hi:
        middle = (lo + hi) // 2
        if spans[middle][1] + spans[middle][2] <= position:
            lo = middle + 1
        else:
            hi = middle
    return lo


def clip(runs: Runs, lo: int, hi: int) -> Runs:
    """Return the runs into destinations [lo, hi), with destinations counted from ``lo``.

    >>> clip((Run(10, 0, 4),), 1, 3)
    (Run(src=11, dst=0, length=2, repeat=1, src_step=0, dst_step=0),)
    """
    return compose(runs, (Run(lo, 0, hi - lo),))


def without(runs: Runs, taken: Runs) -> Runs:
    """Return the runs less those entries whose destinations are destinations of ``taken``.

    >>> expand(without((Run(10, 0, 8),), (Run(0, 2, 3),)))
    [(10, 0, 2), (15, 5, 3)]
    """
    spans: list[Span] = []
    holes = expand(taken)
    for src, dst, length in expand(runs):
        start = dst
        for _, hole, hole_length in holes[_first_reaching(holes, dst) :]:
            if hole >= dst + length:
                break
            if hole > start:
                spans.append((src + start - dst, start, hole - start))
            start = max(start, hole + hole_length)
        if start < dst + length:
            spans.append((src + start - dst, start, dst + length - start))
    return fold(spans)


def covers(runs: Runs, size: int) -> bool:
    """Tell whether the destinations are [0, size), each exactly once.

    >>> covers((Run(0, 0, 2), Run(5, 2, 2)), 4), covers((Run(0, 0, 3), Run(5, 2, 2)), 4)
    (True, False)
    """
    end = 0
    for _, dst, length in expand(runs):
        if dst != end:
            return False
        end += length
    return end == size


def divide_unit(runs: Runs, unit: int, size: int) -> Runs | None:
    """Return the runs for a dimension whose entry ``j`` stands for entries [j * unit, (j + 1) * unit).

    Args:
        runs: Runs in single entries.
        unit: How many entries one stands for.
        size: Size of the source dimension in single entries; its last unit may be partial.

    Returns:
        The runs in units, or None where a boundary lies inside a unit.

    >>> divide_unit((Run(128, 0, 128),), 64, 256)
    (Run(src=2, dst=0, length=2, repeat=1, src_step=0, dst_step=0),)
    >>> divide_unit((Run(96, 0, 96),), 64, 192) is None
    True
    """
    if unit == 1:
        return runs
    spans: list[Span] = []
    for src, dst, length in expand(runs):
        ends_at_size = src + length == size
        if src % unit or dst % unit or (length % unit and not ends_at_size):
            return None
        spans.append((src // unit, dst // unit, -(-length // unit)))
    return fold(spans)
