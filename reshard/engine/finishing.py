"""The end of a run: what did not pass in order is hashed from the files, and all hashes are put in their places."""

from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, overload

import numpy as np
import xxhash

from reshard import tiles
from reshard.engine.flows import place_of
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.small import HASH_NBYTES, Column
from reshard.engine.streams import Stream
from reshard.movetable import gathers_of, targets_of
from reshard.program import Input, Program

Tiles = tuple[str, ...]


def late_units(machine: Machine) -> Iterator[Unit]:
    """Yield units that hash what did not pass in order, tile by tile, from the files."""
    for stream in (*machine.read.values(), *machine.written.values()):
        if not stream.whole:
            for tile in range(stream.begin_again()):
                yield partial(_hash_tile, stream, tile, machine.limits.band)


def _hash_tile(stream: Stream, tile: int, nbytes: int, scratch: Scratch) -> None:
    stream.hash_tile(tile, scratch.take(nbytes).data)


def written_in_files(program: Program, written: Sequence[tuple[Tiles, ...]]) -> list[str]:
    """Return the hashes of all that every output file holds, in the order of its bytes."""
    if isinstance(written, Written):
        return written.in_files()
    targets = targets_of(program.moves)
    rows = (row for places, parts in zip(targets, written, strict=True) for row in zip(places, parts, strict=True))
    return _listed_in_files(len(program.output_files), rows)


def read_in_files(program: Program, read: Mapping[Input, Tiles]) -> list[str]:
    """Return the hashes of all that was read of every input file, in the order of its bytes."""
    if isinstance(read, Read):
        return read.in_files()
    rows = (((source.file, source.offset), hashes) for source, hashes in read.items())
    return _listed_in_files(len(program.input_files), rows)


class _Hashed(NamedTuple):
    """Tiles in columns: the file of each, its first byte, and its hash."""

    files: Column
    offsets: Column
    digests: Column

    def only(self, chosen: Column) -> "_Hashed":
        """Return what is chosen of them."""
        return self if chosen.all() else _Hashed(*(column[chosen] for column in self))

    def and_those_of(self, streams: Sequence[Stream]) -> "_Hashed":
        """Return them and the tiles of streams."""
        counts = [len(stream.hashes) for stream in streams]
        first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        tile = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        files = np.repeat(np.array([stream.file for stream in streams], np.int64), counts)
        begins = np.repeat(np.array([stream.offset for stream in streams], np.int64), counts)
        hashed = b"".join(bytes.fromhex("".join(stream.hashes)) for stream in streams)
        more = files, begins + tile * tiles.TILE_NBYTES, _digests(hashed)
        return _Hashed(*map(np.concatenate, zip(self, more, strict=True)))


class Written(Sequence[tuple[Tiles, ...]]):
    """The hashes of what was written: for every move, for every part, those of its tiles."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self._moves = program.moves
        self._machine = machine
        self._files = len(program.output_files)

    def in_files(self) -> list[str]:
        """Return the hashes of all that every output file holds, in the order of its bytes."""
        small = self._machine.small
        done = np.repeat(np.frombuffer(small.done, bool), np.diff(small.rows.starts))
        digests = _digests(small.written)
        done &= digests.view("V16")[:, 0] != np.void(_NO_BYTES)
        hashed = _Hashed(small.rows.part_files, small.rows.part_offsets, digests).only(done)
        return _in_files(self._files, hashed, self._machine.written.values())

    def __len__(self) -> int:
        return len(self._moves)

    @overload
    def __getitem__(self, at: int) -> tuple[Tiles, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Tiles, ...], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[Tiles, ...] | tuple[tuple[Tiles, ...], ...]:
        if isinstance(at, slice):
            return tuple(self[position] for position in range(len(self))[at])
        position = range(len(self))[at]
        if self._machine.small.done[position]:
            parts = self._machine.small.written_of(position)
            return tuple(() if part == _NO_BYTES else (part.hex(),) for part in parts)
        written = self._machine.written
        return tuple(tuple(written[position, at].hashes) for at in range(len(self._moves[position].scatters)))


class Read(Mapping[Input, Tiles]):
    """The hashes of what was read: of every source, those of its tiles."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self._moves = program.moves
        self._machine = machine
        self._files = len(program.input_files)

    def in_files(self) -> list[str]:
        """Return the hashes of all that was read of every input file, in the order of its bytes."""
        small = self._machine.small
        done = np.frombuffer(small.done, bool)
        hashed = _Hashed(small.rows.files, small.rows.offsets, _digests(small.read)).only(done)
        return _in_files(self._files, hashed, self._machine.read.values())

    @cached_property
    def _small(self) -> dict[tuple[int, int, int], int]:
        """Moves that were done at once, by the place of their source."""
        rows = self._machine.small.rows
        done = np.flatnonzero(np.frombuffer(self._machine.small.done, bool))
        places = (column[done].tolist() for column in (rows.files, rows.offsets, rows.nbytes))
        return dict(zip(zip(*places, strict=True), done.tolist(), strict=True))

    def __getitem__(self, source: Input) -> Tiles:
        place = place_of(source)
        if place in self._machine.read:
            return tuple(self._machine.read[place].hashes)
        return (self._machine.small.read_of(self._small[place]),)

    def __iter__(self) -> Iterator[Input]:
        return (source for source, _ in self.pairs())

    def __len__(self) -> int:
        return sum(1 for _ in self.pairs())

    def items(self) -> "ItemsView[Input, Tiles]":
        """Return the sources with their hashes."""
        return _Items(self)

    def pairs(self) -> Iterator[tuple[Input, Tiles]]:
        """Yield the sources with their hashes."""
        seen: set[Input] = set()
        for position in range(len(self._moves)):
            gathers = gathers_of(self._moves, position)
            if self._machine.small.done[position]:
                yield gathers[0].source, (self._machine.small.read_of(position),)
                continue
            for gather in gathers:
                if gather.source not in seen:
                    seen.add(gather.source)
                    yield gather.source, tuple(self._machine.read[place_of(gather.source)].hashes)


class _Items(ItemsView[Input, Tiles]):
    def __init__(self, read: Read) -> None:
        super().__init__(read)
        self._read = read

    def __iter__(self) -> Iterator[tuple[Input, Tiles]]:
        return self._read.pairs()


_NO_BYTES = xxhash.xxh3_128_digest(b"")


def _listed_in_files(count: int, rows: Iterable[tuple[tuple[int, int], Tiles]]) -> list[str]:
    """Return what `_in_files` does for tensors that are given one by one: file and first byte, and hashes."""
    files, offsets, hashed = array("Q"), array("Q"), bytearray()
    for (file, offset), hashes in rows:
        hashed += bytes.fromhex("".join(hashes))
        for tile in range(len(hashes)):
            files.append(file)
            offsets.append(offset + tile * tiles.TILE_NBYTES)
    return _in_files(count, _Hashed(np.array(files, np.int64), np.array(offsets, np.int64), _digests(hashed)), ())


def _in_files(count: int, small: _Hashed, streams: Iterable[Stream]) -> list[str]:
    """Return the hashes of the tiles in each of so many files, in the order of their bytes.

    Args:
        count: Number of files.
        small: The small tensors.
        streams: The larger ones.
    """
    large = [*streams]
    files, offsets, digests = small.and_those_of(large) if large else small
    order = np.lexsort((offsets, files))
    ends = np.searchsorted(files[order], np.arange(count), "right").tolist()
    return [digests[order[begin:end]].tobytes().hex() for begin, end in zip([0, *ends], ends, strict=False)]


def _digests(hashed: bytes | bytearray) -> Column:
    """Return hashes that follow each other as rows of bytes."""
    return np.frombuffer(hashed, np.uint8).reshape(-1, HASH_NBYTES)
