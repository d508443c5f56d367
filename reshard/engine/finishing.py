"""The end of a run: what did not pass in order is hashed from the files, and all hashes are put in their places."""

from collections.abc import Iterator
from functools import partial

from reshard.engine.flows import place_of
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.streams import Stream
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


def hashes_of(program: Program, machine: Machine) -> tuple[dict[Input, Tiles], tuple[tuple[Tiles, ...], ...]]:
    """Return the hashes by input, and by move and scatter."""
    read = machine.read_hashes | {place: tuple(stream.hashes) for place, stream in machine.read.items()}
    written = machine.written_hashes | {place: tuple(stream.hashes) for place, stream in machine.written.items()}
    return (
        {gather.source: read[place_of(gather.source)] for move in program.moves for gather in move.gathers},
        tuple(
            tuple(written[position, at] for at in range(len(move.scatters)))
            for position, move in enumerate(program.moves)
        ),
    )
