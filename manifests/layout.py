"""The layout algebra: how one axis of a tensor is divided among ranks.

An axis is a concatenation of segments. A segment is a product of factors, row-major; a factor may be divided over a
mesh axis; the last factor may be a nested axis. Every way in which models pack their weights is one of these:

    plain                                 (N*)
    gate|up fused                         (2, I*)
    q|k|v fused, grouped heads            q:(KV@kv, g@rep, hd) + k:(KV@kv, hd) + v:(KV@kv, hd)
    per-head interleaved qkv              (H*, 3*hd)
    grouped qkv                           (KV@kv, [(g@rep, hd) + (hd) + (hd)])
    experts, then their inner width       (E@ep, F@tp)

A mesh factors the world: ``(("kv", 3), ("rep", 2))`` places rank ``r`` at kv ``r // 2``, rep ``r % 2``. A factor that
is not divided over a mesh axis is copied along it, which is all that there is to key and value heads fewer than ranks.
``*`` divides over all ranks. ``~`` before either marks a factor whose shorter parts are filled up with zeros where they
run, so that all ranks have as many units: ``(5~*)`` is 3, 3 at 2 ranks, the last of them zero. Files hold no zeros.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from manifests.runs import Positive, Runs, Span, fold


class Factor(NamedTuple):
    """``size`` units, divided over the mesh axis ``on`` if one is named; ``padded`` if shorter parts get zeros."""

    size: int
    on: str = ""
    padded: bool = False

    def __str__(self) -> str:
        if not self.on:
            return str(self.size)
        return f"{self.size}{'~' if self.padded else ''}{'*' if self.on == 'tp' else f'@{self.on}'}"


class Segment(NamedTuple):
    """A row-major product of factors; ``body`` is a nested axis as the last of them."""

    factors: tuple[Factor, ...]
    body: "Axis | None" = None
    name: str = ""

    @property
    def size(self) -> int:
        """Elements of the segment."""
        return prod(factor.size for factor in self.factors) * (self.body.size if self.body else 1)

    def all_factors(self) -> Iterator[Factor]:
        """Yield the factors, those of a nested axis included."""
        yield from self.factors
        if self.body:
            yield from self.body.all_factors()

    def __str__(self) -> str:
        items = [*map(str, self.factors), *([f"[{self.body}]"] if self.body else [])]
        return f"{self.name}:({', '.join(items)})" if self.name else f"({', '.join(items)})"


class Axis(NamedTuple):
    """A concatenation of segments."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Elements of the whole axis."""
        return sum(segment.size for segment in self.segments)

    def all_factors(self) -> Iterator[Factor]:
        """Yield every factor of every segment."""
        for segment in self.segments:
            yield from segment.all_factors()

    def mesh_axes(self) -> frozenset[str]:
        """Return the names of the mesh axes over which some factor is divided."""
        return frozenset(factor.on for factor in self.all_factors() if factor.on)

    @property
    def is_padded(self) -> bool:
        """Whether parts may be filled up with zeros."""
        return any(factor.padded for factor in self.all_factors())

    def __str__(self) -> str:
        return " + ".join(map(str, self.segments))


@lru_cache(maxsize=4096)
def plain_axis(size: int) -> Axis:
    """Return the axis that is divided evenly into contiguous parts.

    >>> str(plain_axis(8))
    '(8*)'
    """
    return Axis((Segment((Factor(size, "tp"),)),))


def packed_axis(blocks: tuple[int, ...]) -> Axis:
    """Return the axis of blocks that are each divided by themselves; sizes in elements.

    >>> str(packed_axis((4, 4))), str(packed_axis((4, 12)))
    ('(2, 4*)', '(4*) + (12*)')
    """
    if len(set(blocks)) == 1 and len(blocks) > 1:
        return Axis((Segment((Factor(len(blocks)), Factor(blocks[0], "tp"))),))
    return Axis(tuple(Segment((Factor(size, "tp"),)) for size in blocks))


Mesh = tuple[tuple[str, Positive], ...]
"""The mesh axes in order, outermost first, with their sizes. Their product is the world size."""


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Return a rank's position along every mesh axis.

    >>> coordinates((("kv", 3), ("rep", 2)), 3)
    {'kv': 1, 'rep': 1}
    """
    position = {}
    for name, size in reversed(mesh):
        rank, position[name] = divmod(rank, size)
    return dict(reversed(position.items()))


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Return the size of every mesh axis; ``tp`` is all ranks, unless the mesh has an axis of that name.

    >>> mesh_sizes((("kv", 3), ("rep", 2)))
    {'tp': 6, 'kv': 3, 'rep': 2}
    """
    return {"tp": prod(size for _, size in mesh), **dict(mesh)}


def misfits(axis: Axis, mesh: Mesh) -> list[Factor]:
    """Return the factors that the mesh does not divide evenly."""
    sizes = mesh_sizes(mesh)
    return [factor for factor in axis.all_factors() if factor.size % sizes.get(factor.on, 1) and not factor.padded]


@lru_cache(maxsize=4096)
def rank_runs(axis: Axis, mesh: Mesh, rank: int) -> Runs:
    """Return the part of the axis that a rank owns: runs from the whole axis into the rank's own.

    A factor that does not divide (see `misfits`) is divided as ``torch.chunk`` does it: the last parts are shorter, or
    empty. The local order is the order of the axis.

    >>> rank_runs(packed_axis((4, 4)), (("tp", 2),), 1)
    (Run(src=2, dst=0, length=2, repeat=2, src_step=4, dst_step=2),)
    >>> rank_runs(plain_axis(5), (("tp", 2),), 1)
    (Run(src=3, dst=0, length=2, repeat=1, src_step=0, dst_step=0),)
    """
    spans, _ = _axis_part(axis, _place(mesh, rank), fill=False)
    return fold(spans)


@lru_cache(maxsize=4096)
def running_part(axis: Axis, mesh: Mesh, rank: int) -> tuple[Runs, int]:
    """Return the same runs into the part as it runs, and its size: where none reaches, a padded one has zeros.

    >>> gate_and_up = Axis((Segment((Factor(2), Factor(5, "tp", padded=True))),))
    >>> [(run.src, run.dst, run.length, run.repeat) for run in running_part(gate_and_up, (("tp", 2),), 1)[0]]
    [(3, 0, 2, 2)]
    >>> running_part(gate_and_up, (("tp", 2),), 1)[0][0].dst_step, running_part(gate_and_up, (("tp", 2),), 1)[1]
    (3, 6)
    """
    spans, size = _axis_part(axis, _place(mesh, rank), fill=True)
    return fold(spans), size


_Place = Mapping[str, tuple[int, int]]
"""A rank's position and the number of parts along every mesh axis."""


def _place(mesh: Mesh, rank: int) -> _Place:
    sizes = mesh_sizes(mesh)
    return {name: (at, sizes[name]) for name, at in {"tp": rank, **coordinates(mesh, rank)}.items()}


def _axis_part(axis: Axis, place: _Place, *, fill: bool) -> tuple[list[Span], int]:
    """Return the spans of a rank's part, and its size, with what fills it up if asked for."""
    spans: list[Span] = []
    src = dst = 0
    for segment in axis.segments:
        inner, size = _segment_part(segment, place, fill=fill)
        spans += [(src + inner_src, dst + inner_dst, length) for inner_src, inner_dst, length in inner]
        src += segment.size
        dst += size
    return spans, dst


def _segment_part(segment: Segment, place: _Place, *, fill: bool) -> tuple[list[Span], int]:
    if not any(factor.on in place for factor in segment.all_factors()):
        return [(0, 0, segment.size)], segment.size
    if not segment.factors:
        return _axis_part(segment.body or Axis(()), place, fill=fill)
    first, rest = segment.factors[0], Segment(segment.factors[1:], segment.body)
    at, parts = place.get(first.on, (0, 1))
    most = -(-first.size // parts)
    begin = min(at * most, first.size)
    mine = min(most, first.size - begin)
    inner, size = _segment_part(rest, place, fill=fill)
    numel = (most if fill and first.padded else mine) * size
    if inner == [(0, 0, rest.size)]:
        # Nothing below is divided: one block, however many entries it has.
        return [(begin * rest.size, 0, mine * rest.size)] if mine else [], numel
    spans = [
        ((begin + i) * rest.size + inner_src, i * size + inner_dst, length)
        for i in range(mine)
        for inner_src, inner_dst, length in inner
    ]
    return spans, numel
