"""The program: every byte that a split, a merge or a re-split moves, as strided copies, before one of them moves.

A move makes one tensor. Its parts say which stored tensors it is gathered from, its outputs which files it is scattered
to; both are runs along dimensions, so their composition is again a set of strided copies from stored bytes to stored
bytes, which can be printed (`copies`) and checked (`reshard.proof`) without reading anything.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from manifests.manifest import Link
from manifests.runs import Runs, compose, invert, numel, whole


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


class Moves(Sequence[Move]):
    """Moves that are not kept as objects."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        raise NotImplementedError


class Program(NamedTuple):
    """Moves in the order in which their sources lie, with the names of the files that they refer to."""

    input_files: tuple[str, ...]
    output_files: tuple[str, ...]
    moves: Sequence[Move]

    @property
    def nbytes_read(self) -> int:
        """Bytes that are read."""
        return self.moves.nbytes if isinstance(self.moves, Moves) else sum(move.nbytes for move in self.moves)


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
