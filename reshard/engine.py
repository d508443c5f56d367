"""The engine: runs a program in constant memory.

A tensor passes through in bands: boxes of it, in row-major order, of at most ``BAND_NBYTES``. Every division keeps the
order of its dimension, so each band's share of a rank's part continues where the last band's ended: a part is written
front to back, and its tiles are hashed on the way. Workers take whole tensors; they share nothing but the files.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manifests.errors import CheckpointError, OutputError, ReshardError
from manifests.manifest import Link
from manifests.runs import Runs, clip, expand, fold, invert, numel, whole
from reshard.program import Copy, Gather, Input, Loop, Move, Program, Scatter, row_major, strided
from reshard.tiles import TileHasher

BAND_NBYTES = 1 << 20
Progress = Callable[[int], None]
"""Called with the number of bytes just finished."""
Box = tuple[tuple[int, int], ...]
"""For every dimension the entries [lo, hi)."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Hashes(NamedTuple):
    """The tile hashes of everything that was read and written, in the order of the program.

    Attributes:
        read: By input tensor.
        written: By position of the move, one for each of its scatters.
    """

    read: dict[Input, tuple[str, ...]]
    written: tuple[tuple[tuple[str, ...], ...], ...]


def run_program(
    program: Program,
    input_paths: Sequence[Path],
    output_paths: Sequence[Path],
    *,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Hashes:
    """Run every move.

    Args:
        program: What to move.
        input_paths: The files that it reads, in its order.
        output_paths: The files that it writes, in its order; they exist and have their headers.
        jobs: Number of worker threads.
        progress: Called from the workers as bytes are finished.

    Raises:
        CheckpointError: A source file cannot be read, or became shorter.
        OutputError: A file cannot be written.
    """
    with (
        _Files(input_paths, os.O_RDONLY, CheckpointError) as inputs,
        _Files(output_paths, os.O_WRONLY, OutputError) as outputs,
    ):
        readers = _build_readers(program, inputs)

        def work(move: Move) -> tuple[tuple[str, ...], ...]:
            written = _run_move(move, readers, outputs)
            if progress:
                progress(move.nbytes)
            return written

        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            futures = [pool.submit(work, move) for move in program.moves]
            try:
                written = tuple(future.result() for future in futures)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return Hashes({source: reader.tiles() for source, reader in readers.items()}, written)


class _Files:
    """Open files by position."""

    def __init__(self, paths: Sequence[Path], flags: int, error_type: type[ReshardError]) -> None:
        self.paths = paths
        self._descriptors: list[int] = []
        for path in paths:
            try:
                self._descriptors.append(os.open(path, flags | os.O_CLOEXEC))
            except OSError as error:
                self.__exit__()
                raise error_type(f"{path}: cannot be opened: {error.strerror}") from error

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        path = self.paths[file]
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._descriptors[file], [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read at byte {offset + done}: {error.strerror}") from error
            if got == 0:
                raise CheckpointError(
                    f"{path}: became shorter while it was read: ends at byte {offset + done}, "
                    f"{offset + len(buffer)} expected"
                )
            done += got

    def write(self, file: int, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                done += os.pwrite(self._descriptors[file], buffer[done:], offset + done)
            except OSError as error:
                raise OutputError(f"{self.paths[file]}: cannot be written: {error.strerror}") from error


class _Reader:
    """One input tensor; hashes its bytes as they are read, or afterwards if they were not read in order."""

    def __init__(self, source: Input, files: _Files, *, shared: bool) -> None:
        self.source = source
        self._files = files
        self._hasher: TileHasher | None = None if shared else TileHasher()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from ``offset`` bytes after the start of the tensor."""
        self._files.read_into(self.source.file, self.source.offset + offset, buffer)
        if self._hasher is not None and self._hasher.nbytes == offset:
            self._hasher.update(buffer)

    def tiles(self) -> tuple[str, ...]:
        """Return the hashes of the whole tensor."""
        if self._hasher is None or self._hasher.nbytes != self.source.nbytes:
            self._hasher = TileHasher()
            block = memoryview(bytearray(min(BAND_NBYTES, self.source.nbytes)))
            while self._hasher.nbytes < self.source.nbytes:
                at = self._hasher.nbytes
                self.read_into(at, block[: self.source.nbytes - at])
        return self._hasher.finish()


def _build_readers(program: Program, files: _Files) -> dict[Input, _Reader]:
    uses: dict[Input, int] = {}
    for move in program.moves:
        for source in {gather.source for gather in move.gathers}:
            uses[source] = uses.get(source, 0) + 1
    return {source: _Reader(source, files, shared=count > 1) for source, count in uses.items()}


class _Sink:
    """One part in an output file, written front to back."""

    def __init__(self, scatter: Scatter, files: _Files) -> None:
        self._scatter = scatter
        self._files = files
        self._hasher = TileHasher()

    def append(self, piece: memoryview) -> None:
        self._files.write(self._scatter.file, self._scatter.offset + self._hasher.nbytes, piece)
        self._hasher.update(piece)

    def tiles(self) -> tuple[str, ...]:
        return self._hasher.finish()


def _run_move(move: Move, readers: dict[Input, _Reader], outputs: _Files) -> tuple[tuple[str, ...], ...]:
    sinks = [_Sink(scatter, outputs) for scatter in move.scatters]
    for box in bands(move.shape, move.item_nbytes):
        block = _gather_band(move, box, readers)
        for scatter, sink in zip(move.scatters, sinks, strict=True):
            piece = _cut_band(block, box, scatter, move.item_nbytes)
            if piece is not None:
                sink.append(piece)
    return tuple(sink.tiles() for sink in sinks)


def bands(shape: Sequence[int], item_nbytes: int, band_nbytes: int = BAND_NBYTES) -> Iterator[Box]:
    """Yield the boxes of at most ``band_nbytes`` that make up a tensor, in row-major order.

    >>> list(bands((4, 2), 4, band_nbytes=16))
    [((0, 2), (0, 2)), ((2, 4), (0, 2))]
    >>> list(bands((), 4)), list(bands((0, 2), 4))
    ([()], [])
    """
    if not all(shape):
        return
    steps = row_major(shape)
    dim = next((d for d, step in enumerate(steps) if step * item_nbytes <= band_nbytes), len(shape) - 1)
    if not shape:
        yield ()
        return
    rows = max(1, band_nbytes // (steps[dim] * item_nbytes))
    rest = tuple((0, size) for size in shape[dim + 1 :])
    for prefix in product(*(range(size) for size in shape[:dim])):
        for lo in range(0, shape[dim], rows):
            yield (*((at, at + 1) for at in prefix), (lo, min(lo + rows, shape[dim])), *rest)


def _gather_band(move: Move, box: Box, readers: dict[Input, _Reader]) -> Bytes:
    shape = [hi - lo for lo, hi in box]
    block = np.empty(prod(shape) * move.item_nbytes, np.uint8)
    steps = row_major(shape)
    for gather in move.gathers:
        links = _clip_links(gather, box)
        if links is None:
            continue
        source_steps = row_major(gather.source.shape)
        clipped = [
            (0 if link.src is None else source_steps[link.src], 0 if link.dst is None else steps[link.dst], link.runs)
            for link in links
        ]
        for copy in strided(clipped):
            _read_copy(readers[gather.source], copy, block, move.item_nbytes)
    return block


def _clip_links(gather: Gather, box: Box) -> tuple[Link, ...] | None:
    links: list[Link] = []
    for link in gather.links:
        if link.dst is None:
            links.append(link)
            continue
        runs = clip(link.runs, *box[link.dst])
        if not runs:
            return None
        links.append(Link(link.src, link.dst, runs))
    return tuple(links)


def _read_copy(reader: _Reader, copy: Copy, block: Bytes, item_nbytes: int) -> None:
    """Read a strided copy: in one piece where its source is dense, otherwise loop by loop."""
    extent = 1 + sum((loop.size - 1) * loop.src_step for loop in copy.loops)
    count = prod(loop.size for loop in copy.loops)
    if extent == count:
        if all(loop.src_step == loop.dst_step for loop in copy.loops):
            begin = copy.dst * item_nbytes
            reader.read_into(copy.src * item_nbytes, block.data[begin : begin + count * item_nbytes])
            return
        dense = np.empty(count * item_nbytes, np.uint8)
        reader.read_into(copy.src * item_nbytes, dense.data)
        copy_strided(dense, block, copy._replace(src=0), item_nbytes)
        return
    outer = max(copy.loops, key=lambda loop: loop.src_step)
    inner = tuple(loop for loop in copy.loops if loop is not outer)
    for i in range(outer.size):
        row = Copy(copy.src + i * outer.src_step, copy.dst + i * outer.dst_step, inner)
        _read_copy(reader, row, block, item_nbytes)


def _cut_band(block: Bytes, box: Box, scatter: Scatter, item_nbytes: int) -> memoryview | None:
    """Return the band's share of a part, or None if it has none."""
    mine = [_keep_sources(runs, lo, hi) for runs, (lo, hi) in zip(scatter.runs, box, strict=True)]
    if not all(mine):
        return None
    shape = [hi - lo for lo, hi in box]
    local_shape = [numel(runs) for runs in mine]
    if all(runs == whole(size) for runs, size in zip(mine[1:], shape[1:], strict=True)) and (
        not mine or (len(mine[0]) == 1 and mine[0][0].repeat == 1)
    ):
        step = prod(shape[1:]) * item_nbytes
        begin = mine[0][0].src * step if mine else 0
        return block.data[begin : begin + prod(local_shape) * item_nbytes]
    piece = np.empty(prod(local_shape) * item_nbytes, np.uint8)
    links = list(zip(row_major(shape), row_major(local_shape), mine, strict=True))
    for copy in strided(links):
        copy_strided(block, piece, copy, item_nbytes)
    return piece.data


@lru_cache(maxsize=4096)
def _keep_sources(runs: Runs, lo: int, hi: int) -> Runs:
    """Return the runs from sources [lo, hi), with both sides counted from their first kept entry."""
    if (lo, runs) == (0, whole(hi)):
        return runs
    kept = invert(clip(invert(runs), lo, hi))
    first = kept[0].dst if kept else 0
    return fold((src, dst - first, length) for src, dst, length in expand(kept))


def copy_strided(src: Bytes, dst: Bytes, copy: Copy, item_nbytes: int) -> None:
    """Copy atoms between two byte arrays.

    Args:
        src: The source's bytes.
        dst: The destination's bytes.
        copy: Offsets and steps, in atoms of ``item_nbytes`` bytes.
        item_nbytes: Bytes of an atom.
    """
    loops = [Loop(size, src_step * item_nbytes, dst_step * item_nbytes) for size, src_step, dst_step in copy.loops]
    loops.append(Loop(item_nbytes, 1, 1))
    shape = [loop.size for loop in loops]
    src_steps, dst_steps = [loop.src_step for loop in loops], [loop.dst_step for loop in loops]
    source = np.ndarray(shape, np.uint8, src.data, copy.src * item_nbytes, src_steps)
    target = np.ndarray(shape, np.uint8, dst.data, copy.dst * item_nbytes, dst_steps)
    target[...] = source
