"""The end of a run: what did not pass in order is hashed from the files, and all hashes are put in their places."""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import overload

import xxhash

from manifests.columns import HASH_LENGTH
from reshard.engine.flows import place_of
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.streams import Stream
from reshard.movetable import gathers_of
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


class Written(Sequence[tuple[Tiles, ...]]):
    """The hashes of what was written: for every move, for every part, those of its tiles."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self._moves = program.moves
        self._machine = machine

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[tuple[Tiles, ...]]:
        for position in range(len(self)):
            small = self._machine.small.get(position)
            if small is None or _NO_BYTES in small:
                yield self[position]
            else:
                _, *parts = _digits(small)
                yield tuple([(part,) for part in parts])

    @overload
    def __getitem__(self, at: int) -> tuple[Tiles, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Tiles, ...], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[Tiles, ...] | tuple[tuple[Tiles, ...], ...]:
        if isinstance(at, slice):
            return tuple(self[position] for position in range(len(self))[at])
        position = range(len(self))[at]
        small = self._machine.small.get(position)
        if small is not None:
            _, *parts = _digits(small)
            return tuple(() if part == _NO_BYTES.hex() else (part,) for part in parts)
        written = self._machine.written
        return tuple(tuple(written[position, at].hashes) for at in range(len(self._moves[position].scatters)))


class Read(Mapping[Input, Tiles]):
    """The hashes of what was read: of every source, those of its tiles."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self._moves = program.moves
        self._machine = machine

    @cached_property
    def _small(self) -> dict[tuple[int, int, int], int]:
        """Moves that were done at once, by the place of their source."""
        return {place_of(self._moves[position].gathers[0].source): position for position in self._machine.small}

    def __getitem__(self, source: Input) -> Tiles:
        place = place_of(source)
        if place in self._machine.read:
            return tuple(self._machine.read[place].hashes)
        return (_digits(self._machine.small[self._small[place]])[0],)

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
            small = self._machine.small.get(position)
            if small is not None:
                yield gathers[0].source, (small[: HASH_LENGTH // 2].hex(),)
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


def _digits(hashes: bytes) -> list[str]:
    text = hashes.hex()
    return [text[at : at + HASH_LENGTH] for at in range(0, len(text), HASH_LENGTH)]
