"""The program: every byte that a split, a merge or a re-split moves, as strided copies, before one of them moves.

A move makes one tensor. Its parts say which stored tensors it is gathered from, its outputs which files it is scattered
to; both are runs along dimensions, so their composition is again a set of strided copies from stored bytes to stored
bytes, which can be printed (`copies`) and checked (`check_program`) without reading anything.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from manifests.errors import ReshardError
from manifests.manifest import Link
from manifests.runs import Run, Runs, compose, covers, expand, invert, numel, whole


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
    """One tensor: gathered from parts, scattered to files. ``shape`` is in atoms of ``item_nbytes`` bytes."""

    name: str
    shape: tuple[int, ...]
    item_nbytes: int
    gathers: tuple[Gather, ...]
    scatters: tuple[Scatter, ...]

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


def identity_links(shape: Sequence[int]) -> tuple[Link, ...]:
    """Return the links of a source that is taken as it is."""
    return tuple(Link(dim, dim, whole(size)) for dim, size in enumerate(shape))


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


def check_program(program: Program, output_nbytes: Sequence[int], data_offsets: Sequence[int]) -> None:
    """Prove that the program writes every output byte exactly once and reads every input byte exactly once.

    Args:
        program: The program.
        output_nbytes: Bytes of every output file.
        data_offsets: Where the data of every output file starts, in bytes from its start.

    Raises:
        ReshardError: It does not; this is a fault of this program, never of the input.
    """
    written: list[list[tuple[int, int]]] = [[] for _ in program.output_files]
    read: dict[Input, int] = {}
    for move in program.moves:
        _check_gathers(move)
        for gather in move.gathers:
            read[gather.source] = read.get(gather.source, 0) + _box_numel(gather.links)
        for scatter in move.scatters:
            if not all(covers(runs, numel(runs)) for runs in scatter.runs):
                raise ReshardError(f"{move.name}: a part in {program.output_files[scatter.file]} is not written once")
            nbytes = prod(numel(runs) for runs in scatter.runs) * move.item_nbytes
            written[scatter.file].append((scatter.offset, scatter.offset + nbytes))
    for source, atoms in read.items():
        if atoms != prod(source.shape):
            raise ReshardError(f"{source.name}: {atoms} atoms are read, it has {prod(source.shape)}")
    for file, extents in enumerate(written):
        end = data_offsets[file]
        for begin, stop in sorted(extents):
            if begin != end:
                raise ReshardError(f"{program.output_files[file]}: bytes {end} to {begin} are not written once")
            end = stop
        if end != output_nbytes[file]:
            raise ReshardError(f"{program.output_files[file]}: written up to {end} of {output_nbytes[file]} bytes")


def _box_numel(links: tuple[Link, ...]) -> int:
    return prod(numel(link.runs) for link in links)


def _check_gathers(move: Move) -> None:
    """Check that the parts are disjoint boxes that fill the tensor."""
    filled = sum(_box_numel(gather.links) for gather in move.gathers)
    if filled != prod(move.shape):
        raise ReshardError(f"{move.name}: its parts fill {filled} atoms of {prod(move.shape)}")
    boxes = [
        tuple(next(link.runs for link in gather.links if link.dst == dim) for dim in range(len(move.shape)))
        for gather in move.gathers
        if _box_numel(gather.links)
    ]
    open_boxes: list[tuple[Runs, ...]] = []
    for box in sorted(boxes, key=_bounds):
        open_boxes = [other for other in open_boxes if _bounds(other)[1] > _bounds(box)[0]]
        if any(all(_overlap(a, b) for a, b in zip(box, other, strict=True)) for other in open_boxes):
            raise ReshardError(f"{move.name}: two of its parts overlap")
        open_boxes.append(box)


def _bounds(box: tuple[Runs, ...]) -> tuple[int, int]:
    """Return where the box starts and ends along the first dimension."""
    spans = expand(box[0]) if box else [(0, 0, 1)]
    return spans[0][1], spans[-1][1] + spans[-1][2]


def _overlap(one: Runs, other: Runs) -> bool:
    if len(one) == len(other) == 1 and one[0].repeat == other[0].repeat == 1:
        a, b = one[0], other[0]
        return a.dst < b.dst + b.length and b.dst < a.dst + a.length
    return bool(compose(tuple(Run(dst, dst, length) for _, dst, length in expand(one)), invert(other)))
