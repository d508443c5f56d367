"""Batches: small tensors that lie beside each other are read at once, and equal ones cut at once.

A unit for each of 100,000 tensors would cost more than their bytes. What lies between two larger tensors is read into
one window; the tensors in it that have one shape and one division are cut together by one strided copy for each part
where they are equally spaced, and parts that lie beside each other are written together.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from reshard import tiles
from reshard.engine.boxes import Cutter, Grain, Share, whole_box
from reshard.engine.chains import Chain
from reshard.engine.copying import Bytes, copy_strided
from reshard.engine.flows import flow_of, groups, join_flows
from reshard.engine.journal import DONE, Line, Small
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.running import chain_units
from reshard.engine.small import Column, Rows, SmallHashes
from reshard.program import Loop, Move, Program

SMALL_NBYTES = 64 << 10
NOTHING = xxhash.xxh3_128_digest(b"")
"""The hash of a part that has no bytes."""


def program_units(machine: Machine, program: Program) -> Iterator[Unit]:
    """Yield the units of a program, in the order of its moves."""
    moves = program.moves
    rows = Rows.of(moves)
    batches = _Batches(machine, moves, rows)
    chains = groups(moves)
    at = 0
    for first, end in [*rows.windows(batches.taken(chains), machine.limits.band), (len(moves), len(moves))]:
        for position in range(at, first):
            if positions := chains.get(position, [position]):
                yield from _chain(machine, moves, positions)
        if first < end:
            yield partial(batches.run, first, end)
        at = end


def _chain(machine: Machine, moves: Sequence[Move], positions: Sequence[int]) -> Iterator[Unit]:
    """Yield the units of moves that share inputs."""
    own = [moves[position] for position in positions]
    chain = Chain(machine, own, positions)
    if chain.start == DONE:
        machine.finish(sum(move.nbytes for move in own))
    else:
        yield from chain_units(machine, chain, join_flows(own, positions, machine.limits))


class _Cut(NamedTuple):
    """Parts of a window that are cut.

    Attributes:
        pieces: Their bytes; nothing for those that have none.
        hashes: The hash of each.
    """

    pieces: list[memoryview]
    hashes: list[bytes]


class _Batches:
    """Runs windows: small tensors that lie beside each other."""

    def __init__(self, machine: Machine, moves: Sequence[Move], rows: Rows) -> None:
        self._machine = machine
        self._moves = moves
        self._rows = rows
        self._most = min(SMALL_NBYTES, machine.limits.band // 4, tiles.TILE_NBYTES)
        self._shares: dict[int, tuple[int, tuple[Share | None, ...]]] = {}
        machine.small = SmallHashes(rows)

    def taken(self, chains: dict[int, list[int]]) -> Column:
        """Return for every move whether it is small, takes its input as it is and alone, and is not finished."""
        taken = (self._rows.nbytes > 0) & (self._rows.nbytes <= self._most)
        shared = [at for at, positions in chains.items() if len(positions) != 1]
        taken[np.array([*shared, *self._machine.marks], np.int64)] = False
        return taken

    def run(self, first: int, end: int, scratch: Scratch) -> None:
        """Read, cut, hash and write the moves of a window."""
        machine, rows = self._machine, self._rows
        offsets = rows.offsets[first:end]
        begins = (offsets - offsets[0]).tolist()
        ends = (offsets - offsets[0] + rows.nbytes[first:end]).tolist()
        window = scratch.take(ends[-1])
        machine.inputs.read_into(rows.files[first].item(), offsets[0].item(), window.data)
        view = window.data
        read = b"".join([xxhash.xxh3_128_digest(view[at:to]) for at, to in zip(begins, ends, strict=True)])
        starts = (rows.starts[first : end + 1] - rows.starts[first]).tolist()
        cut = _Cut([view[:0]] * starts[-1], [NOTHING] * starts[-1])
        forms = rows.forms[first:end]
        for form in np.unique(forms).tolist():
            alike = np.flatnonzero(forms == form).tolist()
            item, shares = self._shares_of(form, first + alike[0])
            for run in _equally_spaced(alike, begins):
                self._cut(item, shares, [begins[at] for at in run], [starts[at] for at in run], window, scratch, cut)
        self._write(first, end, cut.pieces)
        written = b"".join(cut.hashes)
        machine.small.add(first, end, read, written)
        if machine.journal is not None:
            small = Small(first, end - first, read.hex(), written.hex(), len(window))
            machine.journal.append_small(Line(small=small), len(window))
        machine.finish(len(window))

    def _cut(
        self,
        item: int,
        shares: Sequence[Share | None],
        begins: Sequence[int],
        starts: Sequence[int],
        window: Bytes,
        scratch: Scratch,
        cut: _Cut,
    ) -> None:
        """Cut equally spaced tensors of one form into their parts, and hash these.

        Args:
            item: Bytes of an atom.
            shares: What each part takes of a tensor.
            begins: Where the tensors begin in the window.
            starts: Where their parts are among those of the window.
            window: What was read.
            scratch: Memory to cut into.
            cut: Takes the parts.
        """
        first, spacing = begins[0], begins[1] - begins[0] if len(begins) > 1 else window.nbytes
        for at, share in enumerate(shares):
            if share is None:
                continue
            nbytes = share.extent * item
            if share.plain >= 0:
                view, begin, step = window.data, first + share.plain * item, spacing
            else:
                view, begin, step = scratch.take(nbytes * len(begins)).data, 0, nbytes
                stack = Loop(len(begins), spacing // item, share.extent)
                for copy in share.copies:
                    stacked = copy._replace(src=copy.src + first // item, loops=(stack, *copy.loops))
                    copy_strided(window, np.frombuffer(view, np.uint8), stacked, item)
            for start in starts:
                piece = view[begin : begin + nbytes]
                cut.pieces[start + at] = piece
                cut.hashes[start + at] = xxhash.xxh3_128_digest(piece)
                begin += step

    def _shares_of(self, form: int, position: int) -> tuple[int, tuple[Share | None, ...]]:
        """Return the bytes of an atom, and what each part takes of a tensor; None for nothing."""
        known = self._shares.get(form)
        if known is None:
            move = self._moves[position]
            grain = Grain(0, move.shape[0] if move.shape else 1)
            known = self._shares[form] = (
                move.item_nbytes,
                tuple(
                    Cutter(outlet.links, move.shape, outlet.shape, grain).share(whole_box(move.shape))
                    for outlet in flow_of(move, 0).outlets
                ),
            )
        return known

    def _write(self, first: int, end: int, pieces: Sequence[memoryview]) -> None:
        """Write the parts of a window, those together that lie beside each other."""
        begin, stop = self._rows.starts[first], self._rows.starts[end]
        files, offsets = self._rows.part_files[begin:stop], self._rows.part_offsets[begin:stop]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        order = np.lexsort((offsets, files))
        order = order[sizes[order] > 0]
        files, offsets, ends = files[order], offsets[order], (offsets + sizes)[order]
        breaks = np.flatnonzero((files[1:] != files[:-1]) | (offsets[1:] != ends[:-1])) + 1
        sorted_pieces = [pieces[at] for at in order.tolist()]
        for one, other in pairwise([0, *breaks.tolist(), len(order)] if len(order) else ()):
            self._machine.outputs.write_all(files[one].item(), offsets[one].item(), sorted_pieces[one:other])


def _equally_spaced(members: Sequence[int], begins: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield longest pieces of members that begin at equal distances."""
    begin = 0
    while begin < len(members):
        end = begin + 1
        if end < len(members):
            spacing = begins[members[end]] - begins[members[begin]]
            while end < len(members) and begins[members[end]] - begins[members[end - 1]] == spacing:
                end += 1
        yield members[begin:end]
        begin = end
