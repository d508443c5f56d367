"""Pulling back: placements of the running model's tensors, said of the stored tensors that they are made of.

A stored tensor is divided so that every rank holds, in the stored order, those of its entries that the rank has at run
time. A link says which entries of a stored dimension become which of a running one, so the stored dimension's axis is
the running one's, or the concatenation of those pieces of it that the links lead to. An axis found so is a guess:
it is taken only if it gives every rank exactly the entries that the links give it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, permutations
from typing import NamedTuple

from manifests.dtypes import atom, atoms
from manifests.errors import PlanError
from manifests.header import StoredTensor
from manifests.layout import Axis, Factor, Mesh, Segment
from manifests.manifest import Link, Part, Rule, Tensor
from manifests.placement import Cut, Placement, bound_axis, dim_runs
from manifests.runs import Runs, compose, expand
from reshard.model import RuntimeTensor
from reshard.moves import parts_of
from reshard.movetable import part_runs
from reshard.placing import Resolution
from reshard.plans import modules_of

NOTE = (
    "stored names or layouts are not the running model's: this split is for other consumers, and loader.load_model "
    "needs --layout runtime"
)

Blocks = tuple[tuple[int, int], ...]
"""Entries of a dimension, in atoms: (first, number), ascending, no two adjacent."""


class _Use(NamedTuple):
    """What a tensor of the running model takes of a stored one.

    Attributes:
        tensor: The tensor, without its parts.
        links: Of its part, from the stored tensor.
        view: The shape that the links take the stored tensor for; its own if empty.
    """

    tensor: Tensor
    links: tuple[Link, ...]
    view: tuple[int, ...]

    def runs(self, dim: int) -> Runs:
        """Return the runs from a dimension of the stored tensor."""
        return next(link.runs for link in self.links if link.src == dim)

    def cut(self, dim: int) -> Cut | None:
        """Return how the tensor is divided along a dimension of the stored one, if it is."""
        to = next(link.dst for link in self.links if link.src == dim)
        return next((cut for cut in self.tensor.placement.cuts if cut.dim == to), None)


def in_stored_order(
    tensors: Mapping[str, RuntimeTensor], stored: Mapping[str, StoredTensor]
) -> dict[str, RuntimeTensor]:
    """Return the tensors of the running model in the order of the stored tensors that they begin with."""
    position = {name: at for at, name in enumerate(stored)}
    return dict(sorted(tensors.items(), key=lambda item: position[(item[1].parts or (Part(item[0]),))[0].source]))


def is_as_stored(tensors: Mapping[str, RuntimeTensor] | Mapping[str, Tensor]) -> bool:
    """Tell whether the tensors of the running model have their stored names and layout."""
    return not any(tensor.parts for tensor in tensors.values())


def pull_back(resolution: Resolution, stored: Mapping[str, StoredTensor], world_size: int, label: str) -> Resolution:
    """Return what a plan of the running model makes of the stored tensors.

    Steps and attributes of modules, and ties, stay where the stored names have what they speak of.

    Args:
        resolution: What the plan makes of the running model.
        stored: The stored tensors by name.
        world_size: Number of ranks.
        label: The plan, for messages.

    Raises:
        PlanError: No placement gives the ranks those entries of a stored tensor that they have at run time.
    """
    if is_as_stored(resolution.tensors):
        return resolution
    uses: dict[str, dict[str, list[_Use]]] = {name: {} for name in stored}
    for name, tensor in resolution.tensors.items():
        if not tensor.unused:
            whole = Tensor(tensor.dtype, tensor.shape, tensor.placement)
            for part in parts_of(name, tensor):
                use = _Use(whole, _that_matter(part.links, tensor.placement), part.shape)
                uses[part.source].setdefault(name, []).append(use)
    tensors: dict[str, Tensor] = {}
    rules: dict[str, Rule] = {}
    for name, (dtype, shape, *_) in stored.items():
        if not uses[name]:
            tensors[name] = Tensor(dtype, shape, unused=True)
            continue
        try:
            placement = _placed(tuple(use for taken in uses[name].values() for use in taken), dtype, shape, world_size)
        except PlanError as error:
            raise PlanError(f"{label}: {name}, of which {' and '.join(uses[name])} is made: {error}") from error
        tensors[name] = Tensor(dtype, shape, placement)
        taken = [resolution.rules[taker] for taker in uses[name] if taker in resolution.rules]
        rules |= {name: taken[0]} if taken else {}
    modules = set(modules_of(tensors))
    return resolution._replace(
        tensors=tensors,
        rules=rules,
        modules={name: module for name, module in resolution.modules.items() if name in modules},
        attributes={name: values for name, values in resolution.attributes.items() if name in modules},
        ties={name: source for name, source in resolution.ties.items() if source in tensors and name not in tensors},
        notes=(*resolution.notes, NOTE),
    )


def _that_matter(links: tuple[Link, ...], placement: Placement) -> tuple[Link, ...]:
    """Return the links without those that place a source in a dimension of a stack that every rank has whole."""
    cut = {cut.dim for cut in placement.cuts}
    return tuple(link for link in links if link.src is not None or link.dst in cut)


@lru_cache(maxsize=4096)
def _placed(uses: tuple[_Use, ...], dtype: str, shape: tuple[int, ...], world_size: int) -> Placement:
    """Return the placement that gives every rank those entries that the uses give it."""
    placements = {use.tensor.placement for use in uses}
    if len(placements) == 1 and not uses[0].tensor.placement.cuts:
        return placements.pop()
    if any(placement.partial for placement in placements):
        raise PlanError("a part of it counts on rank 0 alone, another on every rank; use --layout runtime")
    mesh = _common_mesh(placements)
    view = uses[0].view or shape
    sizes = atoms(dtype, view) or ()
    extents = [tuple(_joined(_sources(use.runs(dim))) for dim in range(len(sizes))) for use in uses]
    apart = [dim for dim in range(len(sizes)) if len({extent[dim] for extent in extents}) > 1]
    if len(apart) > 1:
        raise PlanError(f"it is taken apart along dims {apart[0]} and {apart[1]}; use --layout runtime")
    free = [
        _gaps(_joined(block for extent in extents for block in extent[dim]), size) for dim, size in enumerate(sizes)
    ]
    wanted = [_entries(uses, apart, free, rank) for rank in range(world_size)]
    cuts: list[Cut] = []
    for dim, size in enumerate(sizes):
        per_atom = atom(dtype)[0] if dim == len(sizes) - 1 else 1
        for cut in _candidates(uses if dim in apart else uses[:1], dim, size, per_atom):
            placement = Placement((cut,) if cut else (), mesh)
            if all(_held(placement, dtype, view, dim, rank) == wanted[rank][dim] for rank in range(world_size)):
                break
        else:
            raise PlanError(
                f"no layout gives every rank those of the {size} entries of dim {dim} that it has at run time "
                f"({_shown(wanted[0][dim])} on rank 0); use --layout runtime"
            )
        if cut and view[: dim + 1] != shape[: dim + 1]:
            raise PlanError(f"it is divided when seen as {list(view)}, along dim {dim}; use --layout runtime")
        cuts += [cut] if cut else []
    return Placement(tuple(cuts), mesh)


def _common_mesh(placements: Iterable[Placement]) -> Mesh:
    """Return the mesh of all that is divided; over any mesh the axis tp is all ranks."""
    meshes = {placement.mesh for placement in placements if placement.cuts}
    meshes = {mesh for mesh in meshes if mesh[0][0] != "tp"} or meshes
    if len(meshes) > 1:
        shown = " and ".join(" x ".join(f"{name} {size}" for name, size in mesh) for mesh in sorted(meshes))
        raise PlanError(f"parts of it are divided over {shown}; use --layout runtime")
    return meshes.pop()


def _entries(uses: Sequence[_Use], apart: list[int], free: list[Blocks], rank: int) -> list[Blocks]:
    """Return the entries of every dimension that a rank needs; those that no use takes are on every rank.

    Args:
        uses: The uses of the stored tensor.
        apart: The dimension of which the uses take different entries, if there is one.
        free: For every dimension what no use takes.
        rank: The rank.
    """
    boxes = [box for use in uses if (box := _box(use, len(free), rank)) is not None]
    if not boxes:
        raise PlanError(
            f"rank {rank} has nothing of it at run time, and in the stored layout every rank has a part of every "
            "tensor; use --layout runtime, or leave --ep out"
        )
    for dim in range(len(free)):
        if dim not in apart and len({box[dim] for box in boxes}) > 1:
            raise PlanError(f"rank {rank} needs unlike entries of dim {dim} for each; use --layout runtime")
    return [
        _joined([*(block for box in boxes for block in box[dim]), *gaps])
        if dim in apart
        else _joined([*boxes[0][dim], *gaps])
        for dim, gaps in enumerate(free)
    ]


def _box(use: _Use, ndim: int, rank: int) -> tuple[Blocks, ...] | None:
    """Return the entries of every dimension of a stored tensor that a rank has in a use, or None if it has none."""
    mine = part_runs(use.tensor, rank)
    box: list[Blocks] = [()] * ndim
    for link in use.links:
        runs = link.runs if link.dst is None else compose(link.runs, mine[link.dst])
        if link.runs and not runs:
            return None
        if link.src is not None:
            box[link.src] = _joined(_sources(runs))
    return tuple(box)


def _held(placement: Placement, dtype: str, shape: tuple[int, ...], dim: int, rank: int) -> Blocks | None:
    """Return the entries of a dimension that a placement gives a rank, or None where it would cut inside of one."""
    runs = dim_runs(placement, dtype, shape, rank)
    return None if runs is None else _joined(_sources(runs[dim]))


def _candidates(uses: Sequence[_Use], dim: int, size: int, per_atom: int) -> Iterator[Cut | None]:
    """Yield the cuts of a stored dimension that may be right.

    Args:
        uses: The uses that together take the dimension.
        dim: The dimension.
        size: Its size in atoms.
        per_atom: Elements of an atom.
    """
    cuts = {use.cut(dim) for use in uses}
    units = {cut.unit for cut in cuts if cut}
    if len(units) != 1:
        yield None
        return
    unit = units.pop()
    first = next(cut for cut in cuts if cut)
    axis = bound_axis(first.axis)
    if len(cuts) == 1 and -(-axis.size // unit) == size * per_atom:
        yield Cut(dim, first.axis, unit)
        if len(axis.segments) == 1 and not axis.segments[0].body:
            # A transpose within the dimension, as of (gate, up) pairs to gates and ups.
            for factors in permutations(axis.segments[0].factors):
                yield Cut(dim, str(Axis((Segment(factors),))), unit)
    if segments := _concatenated(uses, dim, size, unit * per_atom):
        yield Cut(dim, str(Axis(tuple(_gathered(segments)))), unit)


def _concatenated(uses: Sequence[_Use], dim: int, size: int, per_entry: int) -> list[Segment] | None:
    """Return those segments of the tensors' axes that a stored dimension consists of, in the stored order.

    Args:
        uses: The uses that together take the dimension.
        dim: The dimension.
        size: Its size in atoms.
        per_entry: Elements of an axis that an atom stands for.

    Returns:
        None where an axis would be taken apart within what it divides.
    """
    spans: list[tuple[int, int, int, Cut | None]] = []
    for use in uses:
        runs, cut = use.runs(dim), use.cut(dim)
        sources = _joined(_sources(runs))
        targets = _joined((dst, length) for _, dst, length in expand(runs))
        if len(sources) == len(targets) == 1:
            spans.append((*sources[0], targets[0][0], cut))
        else:
            spans += [(src, length, dst, cut) for src, dst, length in expand(runs)]
    spans += [(src, length, 0, None) for src, length in _gaps(_joined(span[:2] for span in spans), size)]
    segments: list[Segment] = []
    for _, length, dst, cut in sorted(spans, key=lambda span: span[0]):
        if cut is None:
            segments.append(Segment((Factor(length * per_entry),)))
            continue
        axis = bound_axis(cut.axis)
        found = _within(axis, dst * per_entry, min((dst + length) * per_entry, axis.size))
        if found is None:
            return None
        segments += found
    return segments


def _within(axis: Axis, lo: int, hi: int) -> list[Segment] | None:
    """Return the segments that entries [lo, hi) of an axis are, or None where they are a part of what is divided."""
    found: list[Segment] = []
    for segment in axis.segments:
        if lo < segment.size and hi > 0:
            inner = _within_segment(segment, max(lo, 0), min(hi, segment.size))
            if inner is None:
                return None
            found += inner
        lo, hi = lo - segment.size, hi - segment.size
    return found


def _within_segment(segment: Segment, lo: int, hi: int) -> list[Segment] | None:
    if not _is_divided(segment):
        return [Segment((Factor(hi - lo),))]
    if not segment.factors:
        return _within(segment.body or Axis(()), lo, hi)
    if (lo, hi) == (0, segment.size):
        return [segment]
    first, rest = segment.factors[0], segment._replace(factors=segment.factors[1:])
    if first.on:
        return None
    found: list[Segment] = []
    while lo < hi:
        start = lo % rest.size
        end = min(start + hi - lo, rest.size)
        inner = _within_segment(rest, start, end)
        if inner is None:
            return None
        found += inner
        lo += end - start
    return found


def _gathered(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the segments with equal neighbours as one, and with undivided neighbours as one.

    >>> both = [Segment((Factor(4, "tp"),))] * 2 + [Segment((Factor(2),)), Segment((Factor(3),))]
    >>> [str(segment) for segment in _gathered(both)]
    ['(2, 4*)', '(5)']
    """
    for divided, neighbours in groupby(segments, key=_is_divided):
        if not divided:
            yield Segment((Factor(sum(segment.size for segment in neighbours)),))
            continue
        for segment, equal in groupby(neighbours):
            count = sum(1 for _ in equal)
            yield segment._replace(factors=(Factor(count), *segment.factors)) if count > 1 else segment


def _is_divided(segment: Segment) -> bool:
    return any(factor.on for factor in segment.all_factors())


def _sources(runs: Runs) -> list[tuple[int, int]]:
    return [(src, length) for src, _, length in expand(runs)]


def _joined(spans: Iterable[tuple[int, int]]) -> Blocks:
    """Return spans (first, number) in order, with those joined that continue each other.

    >>> _joined([(4, 2), (0, 2), (2, 1)])
    ((0, 3), (4, 2))
    """
    joined: list[tuple[int, int]] = []
    for start, length in sorted(spans):
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((start, length))
    return tuple(joined)


def _gaps(blocks: Blocks, size: int) -> Blocks:
    """Return what a dimension has between blocks.

    >>> _gaps(((2, 3),), 8)
    ((0, 2), (5, 3))
    """
    ends = [0, *(start + length for start, length in blocks)]
    starts = [*(start for start, _ in blocks), size]
    return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)


def _shown(blocks: Blocks, most: int = 4) -> str:
    """Return entries for a message.

    >>> _shown(((0, 2), (4, 1)))
    '0 to 1, 4'
    """
    ranges = [f"{start} to {start + length - 1}" if length > 1 else str(start) for start, length in blocks[:most]]
    return ", ".join(ranges) + (", \N{HORIZONTAL ELLIPSIS}" if len(blocks) > most else "") or "none"
