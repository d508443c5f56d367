"""Resuming: what an earlier run's journal says is finished is compared with the files before it counts.

Every finished tile of every part is read again and hashed, and so is what was begun of the next one, whose hash goes
on from there. A chain of which anything differs starts anew. Of the sources, which the key proves to be the same, only
what was begun of a tile is read again.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from manifests.columns import HASH_LENGTH
from reshard import tiles
from reshard.engine.flows import place_of
from reshard.engine.journal import DONE, START, Head, Journal, Line, Mark, Passed, Small, read_journal
from reshard.engine.machine import Machine, part_nbytes
from reshard.engine.pool import Scratch, Unit
from reshard.engine.streams import Stream
from reshard.movetable import MoveTable
from reshard.program import Move, Program


class _Tile(NamedTuple):
    """A finished tile of a part, by its place in the output files, and the first move of its chain."""

    file: int
    offset: int
    nbytes: int
    digest: str
    first: int


class _Earlier:
    """How far a chain is, as the journal says."""

    def __init__(self) -> None:
        self.mark: Mark = START
        self._read: dict[tuple[int, ...], Passed] = {}
        self._written: dict[tuple[int, ...], Passed] = {}

    def add(self, mark: Mark, read: Iterable[Passed], written: Iterable[Passed]) -> None:
        """Add what a line says."""
        self.mark = mark
        for known, more in ((self._read, read), (self._written, written)):
            for passed in more:
                before = known.get(passed.of)
                hashes = (*before.hashes, *passed.hashes) if before else passed.hashes
                known[passed.of] = msgspec.structs.replace(passed, hashes=hashes)

    def line(self, first: int) -> Line:
        """Return all of it as one line."""
        return Line(first, self.mark, tuple(self._read.values()), tuple(self._written.values()))

    def read(self, machine: Machine) -> Iterator[tuple[Stream, Passed]]:
        """Yield the streams of the inputs, which are the machine's from now on."""
        for (file, offset, nbytes), passed in self._read.items():
            stream = machine.read[file, offset, nbytes] = Stream(machine.inputs, file, offset, nbytes)
            yield stream, passed

    def written(self, machine: Machine, program: Program) -> Iterator[tuple[Stream, Passed]]:
        """Yield the same of the parts."""
        for (position, at), passed in self._written.items():
            yield machine.part_stream(program.moves[position], position, at), passed

    def forget(self, machine: Machine) -> None:
        """Take the streams from the machine again."""
        for file, offset, nbytes in self._read:
            del machine.read[file, offset, nbytes]
        for position, at in self._written:
            del machine.written[position, at]


def head_of(program: Program, key: str, limits: Sequence[int]) -> Head:
    """Return what the journal of a program begins with."""
    facts = msgspec.json.encode([tiles.TILE_NBYTES, program.input_files, program.output_files, _facts(program.moves)])
    return Head(key, xxhash.xxh3_128_hexdigest(facts), tuple(limits))


def _facts(moves: Sequence[Move]) -> object:
    """Return what tells moves from others."""
    if isinstance(moves, MoveTable):
        return moves.digest
    return [
        (
            (move.name, move.shape, move.item_nbytes, move.cast),
            [(gather.source.file, gather.source.offset) for gather in move.gathers],
            [(scatter.file, scatter.offset) for scatter in move.scatters],
        )
        for move in moves
    ]


def resume(machine: Machine, program: Program, path: Path, key: str) -> None:
    """Take up what a journal says is finished, as far as it is, and begin a new journal in its place.

    Args:
        machine: What will run the program; its files are those that the earlier run wrote.
        program: What it will run.
        path: The journal; there need be none.
        key: What decides the bytes that the program writes.

    Raises:
        CheckpointError: A source file cannot be read.
        OutputError: A file that was written cannot be read.
    """
    head = head_of(program, key, machine.limits)
    chains = _chains(program, path, head)
    differing: set[int] = set()
    found: list[_Tile] = []
    begun: list[Unit] = []
    for first, earlier in chains.items():
        machine.marks[first] = earlier.mark
        for stream, passed in earlier.written(machine, program):
            found += _tiles(stream, passed, first)
            begun += _take_up(machine, stream, passed, first, differing)
        for stream, passed in earlier.read(machine):
            begun += _take_up(machine, stream, passed, first, differing)
    machine.pool.run(chain(_tile_units(machine, sorted(found), differing), begun))
    for first in differing:
        del machine.marks[first]
        chains.pop(first).forget(machine)
    machine.journal = Journal(path, head, [earlier.line(first) for first, earlier in chains.items()])


def _chains(program: Program, path: Path, head: Head) -> dict[int, _Earlier]:
    """Return what the journal of an equal run says, by the position of each chain's first move."""
    found, lines = read_journal(path)
    if found is None or (found.key, found.program) != (head.key, head.program):
        return {}
    chains: dict[int, _Earlier] = {}
    for line in lines:
        if line.small is None:
            chains.setdefault(line.chain, _Earlier()).add(line.mark, line.read, line.written)
        else:
            chains.update(_small_chains(program, line.small))
    # In other boxes only what is finished is of use.
    return {first: earlier for first, earlier in chains.items() if found == head or earlier.mark == DONE}


def _small_chains(program: Program, small: Small) -> Iterator[tuple[int, _Earlier]]:
    read, parts = _hashes(small.read), _hashes(small.written)
    for position in range(small.first, small.first + small.count):
        move, earlier = program.moves[position], _Earlier()
        place = place_of(move.gathers[0].source)
        nbytes = [part_nbytes(move, at) for at in range(len(move.scatters))]
        mine = [*islice(parts, len(nbytes))]
        written = [Passed((position, at), nbytes[at], (part,)) for at, part in enumerate(mine) if nbytes[at]]
        earlier.add(DONE, [Passed(place, place[2], (next(read),))], written)
        yield position, earlier


def _hashes(text: str) -> Iterator[str]:
    return (text[at : at + HASH_LENGTH] for at in range(0, len(text), HASH_LENGTH))


def _tiles(stream: Stream, passed: Passed, first: int) -> Iterator[_Tile]:
    for tile, digest in enumerate(passed.hashes):
        at = tile * tiles.TILE_NBYTES
        yield _Tile(stream.file, stream.offset + at, min(tiles.TILE_NBYTES, stream.nbytes - at), digest, first)


def _tile_units(machine: Machine, found: Sequence[_Tile], differing: set[int]) -> Iterator[Unit]:
    """Yield units that compare tiles with the files; small ones that lie beside each other are read at once."""
    begin = 0
    while begin < len(found):
        end, stop = begin + 1, found[begin].offset + machine.limits.band
        while (
            end < len(found)
            and (found[end].file, found[end].offset)
            == (found[end - 1].file, found[end - 1].offset + found[end - 1].nbytes)
            and found[end].offset + found[end].nbytes <= stop
        ):
            end += 1
        yield partial(_compare, machine, found[begin:end], differing)
        begin = end


def _compare(machine: Machine, found: Sequence[_Tile], differing: set[int], scratch: Scratch) -> None:
    span = found[-1].offset + found[-1].nbytes - found[0].offset
    block = scratch.take(min(span, machine.limits.band)).data
    for tile in found:
        at = tile.offset - found[0].offset
        if span <= len(block):
            if not at:
                machine.outputs.read_into(tile.file, tile.offset, block[:span])
            digest = xxhash.xxh3_128_hexdigest(block[at : at + tile.nbytes])
        else:
            hasher = xxhash.xxh3_128()
            machine.outputs.hash_into(hasher, tile.file, tile.offset, tile.nbytes, block)
            digest = hasher.hexdigest()
        if digest != tile.digest:
            differing.add(tile.first)


def _take_up(machine: Machine, stream: Stream, passed: Passed, first: int, differing: set[int]) -> Iterator[Unit]:
    """Let a stream go on where it stopped; yield a unit that reads what was begun of a tile."""
    stream.hashes[:] = passed.hashes
    stream.passed, stream.late = passed.nbytes, passed.late
    if passed.begun:
        yield partial(_begin, stream, passed.begun, first, differing, machine.limits.band)


def _begin(stream: Stream, digest: str, first: int, differing: set[int], nbytes: int, scratch: Scratch) -> None:
    if stream.take_up(scratch.take(nbytes).data) != digest:
        differing.add(first)
