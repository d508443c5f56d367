"""The program: every byte that a split, a merge or a re-split moves, as strided copies, before one of them moves.

A move makes one tensor. Its parts say which stored tensors it is gathered from, its outputs which files it is scattered
to; both are runs along dimensions, so their composition is again a set of strided copies from stored bytes to stored
bytes, which can be printed (`copies`) and checked (`check_program`) without reading anything.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from manifests.errors import ReshardError
from manifests.manifest import Link
from manifests.runs import Run, Runs, compose, covers, expand, invert, numel, whole, without


class Input(NamedTuple):
    """A stored tensor that is read.

    Attributes:
        name: Its name in the source.
        file: Position of its file among the program's input files.
        offset: First byte, counted from the start of the file.
        shape: In atoms.
        item_nbytes: Bytes of an atom.
    """

    name: str
    file: int
    offset: int
    shape: tuple[int, ...]
    item_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.item_nbytes


class Gather(NamedTuple):
    """A part of a tensor: the product of the links, from one input."""

    source: Input
    links: tuple[Link, ...]


class Scatter(NamedTuple):
    """A part of a tensor that is written.

    Attributes:
        file: Position of the file among the program's output files.
        offset: First byte of the part, counted from the start of the file.
        runs: For every dimension, from the whole tensor into the part, in atoms.
    """

    file: int
    offset: int
    runs: tuple[Runs, ...]


class Move(NamedTuple):
    """One tensor: gathered from parts, scattered to files. ``shape`` is in atoms of ``item_nbytes`` bytes.

    ``cast`` is the dtype of its inputs and its own, if its numbers are converted between them.
    """

    name: str
    shape: tuple[int, ...]
    item_nbytes: int
    gathers: tuple[Gather, ...]
    scatters: tuple[Scatter, ...]
    cast: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.item_nbytes


class Program(NamedTuple):
    """Moves in the order in which their sources lie, with the names of the files that they refer to."""

    input_files: tuple[str, ...]
    output_files: tuple[str, ...]
    moves: tuple[Move, ...]

    @property
    def nbytes_read(self) -> int:
        """Bytes that are read."""
        return sum(move.nbytes for move in self.moves)


class Loop(NamedTuple):
    """One level of a strided copy; steps are in atoms."""

    size: int
    src_step: int
    dst_step: int


class Copy(NamedTuple):
    """An N-d strided copy, outermost loop first; offsets are in atoms from the start of the two tensors."""

    src: int
    dst: int
    loops: tuple[Loop, ...]


@lru_cache(maxsize=4096)
def identity_links(shape: tuple[int, ...]) -> tuple[Link, ...]:
    """Return the links of a source that is taken as it is."""
    return tuple(Link(dim, dim, whole(size)) for dim, size in enumerate(shape))


@lru_cache(maxsize=16384)
def invert_links(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return the links that copy back."""
    return tuple(Link(link.dst, link.src, invert(link.runs)) for link in links)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the steps of a row-major tensor, in atoms.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def strided(
    links: Sequence[tuple[int, int, Runs]],
) -> Iterator[Copy]:
    """Yield the strided copies of a product of runs.

    Args:
        links: For every dimension its step in the source, its step in the destination (0 where one side lacks the
            dimension), and its runs.
    """
    for runs in product(*(link_runs for _, _, link_runs in links)):
        loops: list[Loop] = []
        src = dst = 0
        for (src_step, dst_step, _), run in zip(links, runs, strict=True):
            src += run.src * src_step
            dst += run.dst * dst_step
            loops.append(Loop(run.repeat, run.src_step * src_step, run.dst_step * dst_step))
            loops.append(Loop(run.length, src_step, dst_step))
        yield Copy(src, dst, _merge_loops(loops))


def _merge_loops(loops: list[Loop]) -> tuple[Loop, ...]:
    merged: list[Loop] = []
    for loop in loops:
        if loop.size == 1:
            continue
        if merged and _continues(merged[-1], loop):
            merged[-1] = Loop(merged[-1].size * loop.size, loop.src_step, loop.dst_step)
        else:
            merged.append(loop)
    return tuple(merged)


def _continues(outer: Loop, inner: Loop) -> bool:
    return outer.src_step == inner.src_step * inner.size and outer.dst_step == inner.dst_step * inner.size


def copies(move: Move) -> Iterator[tuple[Gather, Scatter, Copy]]:
    """Yield every strided copy of a move, from an input tensor straight to a part in an output file."""
    for scatter in move.scatters:
        steps = row_major([numel(runs) for runs in scatter.runs])
        for gather in move.gathers:
            source_steps = row_major(gather.source.shape)
            links = [
                (
                    0 if link.src is None else source_steps[link.src],
                    0 if link.dst is None else steps[link.dst],
                    link.runs if link.dst is None else compose(link.runs, scatter.runs[link.dst]),
                )
                for link in gather.links
            ]
            for copy in strided(links):
                yield gather, scatter, copy


def check_program(
    program: Program, output_nbytes: Sequence[int], data_offsets: Sequence[int], *, whole_inputs: bool = True
) -> None:
    """Prove that the program writes every output byte exactly once and reads every input byte exactly once.

    Args:
        program: The program.
        output_nbytes: Bytes of every output file.
        data_offsets: Where the data of every output file starts, in bytes from its start.
        whole_inputs: Whether inputs must be read whole; copies of what another input holds may be left out otherwise.

    Raises:
        ReshardError: It does not; this is a fault of this program, never of the input.
    """
    written: list[list[tuple[int, int]]] = [[] for _ in program.output_files]
    read: dict[Input, list[Box]] = {}
    divisions: dict[tuple[object, ...], tuple[Move, list[int]]] = {}
    for move in program.moves:
        _check_tiling([_box(gather.links, len(move.shape)) for gather in move.gathers], move.shape, move.name)
        for gather in move.gathers:
            back = _box(_back(gather.links), len(gather.source.shape))
            read.setdefault(gather.source, []).append(back)
        # The program keeps the runs, so that equal ones are one object and no other has its address.
        key = (move.shape, *(id(scatter.runs) for scatter in move.scatters))
        if key not in divisions:
            divisions[key] = move, [_check_written(scatter, move, program) for scatter in move.scatters]
        for scatter, atoms in zip(move.scatters, divisions[key][1], strict=True):
            written[scatter.file].append((scatter.offset, scatter.offset + atoms * move.item_nbytes))
    for source, boxes in read.items():
        _check_tiling(boxes, source.shape, source.name, fill=whole_inputs)
    for file, extents in enumerate(written):
        end = data_offsets[file]
        for begin, stop in sorted(extents):
            if begin != end:
                raise ReshardError(f"{program.output_files[file]}: bytes {end} to {begin} are not written once")
            end = stop
        if end != output_nbytes[file]:
            raise ReshardError(f"{program.output_files[file]}: written up to {end} of {output_nbytes[file]} bytes")
    for move, _ in divisions.values():
        _check_parts([tuple(invert(runs) for runs in scatter.runs) for scatter in move.scatters], move)


def _check_written(scatter: Scatter, move: Move, program: Program) -> int:
    """Check that each entry of a part is written once; return how many atoms it has."""
    if not all(covers(runs, numel(runs)) for runs in scatter.runs):
        raise ReshardError(f"{move.name}: a part in {program.output_files[scatter.file]} is not written once")
    return prod(numel(runs) for runs in scatter.runs)


@lru_cache(maxsize=4096)
def _back(links: tuple[Link, ...]) -> tuple[Link, ...]:
    return invert_links(links)


Box = tuple[Runs, ...]
"""For every dimension the entries that are taken, as the destinations of runs."""


@lru_cache(maxsize=4096)
def _box(links: tuple[Link, ...], ndim: int) -> Box:
    return tuple(next((link.runs for link in links if link.dst == dim), ()) for dim in range(ndim))


@lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is a whole tensor; the usual one, so it is known before the others are looked at."""
    return tuple(whole(size) for size in shape)


def _check_parts(parts: list[Box], move: Move) -> None:
    """Check that the parts, over all ranks, hold the whole tensor; entries may be copied to several."""
    boxes = list(dict.fromkeys(parts))
    differing = [dim for dim in range(len(move.shape)) if len({box[dim] for box in boxes}) > 1]
    if len(differing) == 1:
        dim = differing[0]
        taken: Runs = ()
        for position, box in enumerate(boxes):
            left = without(box[dim], taken)
            taken = (*taken, *left)
            boxes[position] = (*box[:dim], left, *box[dim + 1 :])
    _check_tiling(boxes, move.shape, move.name)


def _check_tiling(boxes: list[Box], shape: tuple[int, ...], name: str, *, fill: bool = True) -> None:
    """Check that boxes lie in a tensor, do not overlap, and fill it."""
    if len(boxes) == 1 and boxes[0] == _whole_box(shape):
        return
    boxes = [box for box in boxes if all(box)]
    filled = sum(prod(map(numel, box)) for box in boxes)
    if filled != prod(shape) and fill:
        raise ReshardError(f"{name}: its parts make up {filled} atoms of {prod(shape)}")
    for box in boxes:
        for runs, size in zip(box, shape, strict=True):
            lowest, highest = _bounds(runs)
            if lowest < 0 or highest > size:
                raise ReshardError(f"{name}: a part reaches from {lowest} to {highest} of a dimension of {size}")
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: _bounds(box[0]) if box else (0, 1)):
        open_boxes = [other for other in open_boxes if not box or _bounds(other[0])[1] > _bounds(box[0])[0]]
        if any(all(_overlap(a, b) for a, b in zip(box, other, strict=True)) for other in open_boxes):
            raise ReshardError(f"{name}: two of its parts overlap")
        open_boxes.append(box)


@lru_cache(maxsize=4096)
def _bounds(runs: Runs) -> tuple[int, int]:
    """Return the first destination and the one after the last."""
    spans = expand(runs)
    return spans[0][1], spans[-1][1] + spans[-1][2]


def _overlap(one: Runs, other: Runs) -> bool:
    if len(one) == len(other) == 1 and one[0].repeat == other[0].repeat == 1:
        a, b = one[0], other[0]
        return a.dst < b.dst + b.length and b.dst < a.dst + a.length
    return bool(compose(tuple(Run(dst, dst, length) for _, dst, length in expand(one)), invert(other)))
