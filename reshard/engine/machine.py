"""The machine: what all units of a run share."""

from collections.abc import Callable

import numpy as np

from manifests.runs import numel
from reshard.engine.copying import Bytes
from reshard.engine.files import Files
from reshard.engine.flows import place_of
from reshard.engine.journal import Journal, Mark
from reshard.engine.limits import Limits
from reshard.engine.pool import Phases, Pool
from reshard.engine.small import Rows, SmallHashes
from reshard.engine.streams import Stream
from reshard.program import Input, Move


class Machine:
    """The files of a run, its limits, and the tensors that pass by.

    Attributes:
        read: Every input that passes by, by its place.
        written: Every part, by the positions of its move and its scatter.
        small: The hashes of moves that are done at once.
        journal: Where it is noted what is finished, if it is.
        marks: How far chains are that an earlier run began, by the position of the first move.
    """

    def __init__(
        self, pool: Pool, inputs: Files, outputs: Files, limits: Limits, progress: Callable[[int], None] | None
    ) -> None:
        self.pool = pool
        self.inputs = inputs
        self.outputs = outputs
        self.limits = limits
        self.progress = progress
        self.phases = Phases(pool)
        self.read: dict[tuple[int, int, int], Stream] = {}
        self.written: dict[tuple[int, int], Stream] = {}
        self.small = SmallHashes(Rows.of(()))
        self.journal: Journal | None = None
        self.marks: dict[int, Mark] = {}
        self._held: Bytes = np.empty(0, np.uint8)

    def hold(self, nbytes: int) -> Bytes:
        """Return the one large buffer. Called where units are made; its users keep apart by phases."""
        if len(self._held) < nbytes:
            self._held = np.empty(nbytes, np.uint8)
        return self._held[:nbytes]

    def finish(self, nbytes: int) -> None:
        """Report progress."""
        if self.progress and nbytes:
            self.progress(nbytes)

    def input_stream(self, source: Input) -> Stream:
        """Return the stream of an input; the same under whatever shape it is seen."""
        place = place_of(source)
        if place not in self.read:
            self.read[place] = Stream(self.inputs, *place)
        return self.read[place]

    def part_stream(self, move: Move, position: int, at: int) -> Stream:
        """Return the stream of a part, the one ``at`` a position among those of the move at a position."""
        if (position, at) not in self.written:
            scatter = move.scatters[at]
            self.written[position, at] = Stream(self.outputs, scatter.file, scatter.offset, part_nbytes(move, at))
        return self.written[position, at]


def part_nbytes(move: Move, at: int) -> int:
    """Return the bytes of a part."""
    nbytes = move.item_nbytes
    for runs in move.scatters[at].runs:
        nbytes *= numel(runs)
    return nbytes
