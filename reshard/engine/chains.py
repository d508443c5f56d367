"""Chains: units that share inputs hash in their order, and what they finished is noted in the journal.

What a chain has finished is known at the end of a box, in the turn of its last unit: how far every input and part has
passed. It may be noted once the units up to there have written, which they do in any order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from threading import Lock

from reshard.engine.flows import place_of
from reshard.engine.journal import DONE, RECORD_NBYTES, START, Line, Mark, Passed
from reshard.engine.machine import Machine
from reshard.engine.pool import Turn
from reshard.engine.streams import Stream
from reshard.program import Move


class Chain:
    """The units of flows that share inputs."""

    def __init__(self, machine: Machine, moves: Sequence[Move], positions: Sequence[int]) -> None:
        """Prepare.

        Args:
            machine: What runs them.
            moves: The moves, all that share inputs.
            positions: Where they are in the program.
        """
        self.start = machine.marks.get(positions[0], START)
        """The first flow and box that are not finished."""
        self.turn = Turn(machine.pool)
        self._units = count()
        self._first = positions[0]
        self._journal = machine.journal
        self._read = {
            place_of(gather.source): machine.input_stream(gather.source) for move in moves for gather in move.gathers
        }
        self._written = {
            (position, at): machine.part_stream(move, position, at)
            for move, position in zip(moves, positions, strict=True)
            for at in range(len(move.scatters))
        }
        self._noted: dict[tuple[int, ...], tuple[int, int]] = {
            of: (stream.passed, len(stream.hashes)) for of, stream in (*self._read.items(), *self._written.items())
        }
        self._nbytes = 0
        self._ends: dict[int, Mark] = {}
        self._lines: deque[tuple[int, Line]] = deque()
        self._lock = Lock()
        self._done: set[int] = set()
        self._all_before = 0

    def add(self, end: Mark | None = None) -> int:
        """Return the position of a new unit, in the order in which they hash.

        Args:
            end: Where the chain is gone on with after this unit, if it ends a box.
        """
        position = next(self._units)
        if end is not None and self._journal is not None:
            self._ends[position] = end
        return position

    def hashed(self, position: int, nbytes: int) -> None:
        """Note, in a unit's turn, that it has hashed, and how many bytes of parts."""
        if self._journal is None:
            return
        self._nbytes += nbytes
        end = self._ends.pop(position, None)
        if end is None or (end != DONE and self._nbytes < RECORD_NBYTES):
            return
        if not any(stream.late for stream in self._written.values()):
            self._nbytes = 0
            line = Line(self._first, end, tuple(self._passed(self._read)), tuple(self._passed(self._written)))
            self._lines.append((position, line))

    def _passed(self, streams: dict[tuple[int, int, int], Stream] | dict[tuple[int, int], Stream]) -> Iterator[Passed]:
        """Yield how far the streams that went on since the last line are."""
        for of, stream in streams.items():
            nbytes, tiles = self._noted[of]
            if stream.late:
                yield Passed(of, 0, (), late=True)
            elif stream.passed > nbytes:
                yield Passed(of, stream.passed, tuple(stream.hashes[tiles:]), stream.begun())
                self._noted[of] = stream.passed, len(stream.hashes)

    def wrote(self, position: int) -> None:
        """Note that a unit, which has hashed, has written too."""
        if self._journal is None:
            return
        with self._lock:
            self._done.add(position)
            while self._all_before in self._done:
                self._done.remove(self._all_before)
                self._all_before += 1
            while self._lines and self._lines[0][0] < self._all_before:
                self._journal.append(self._lines.popleft()[1])
