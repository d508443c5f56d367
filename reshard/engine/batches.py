"""Batches: small tensors that lie beside each other are read at once, and equal ones cut at once.

A unit for each of 100,000 tensors would cost more than their bytes. What lies between two larger tensors is read into
one window; the tensors in it that have one shape and one division are cut together by one strided copy for each part
where they are equally spaced, and parts that lie beside each other are written together.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
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
from reshard.movetable import MoveTable
from reshard.program import Loop, Move, Program, identity_links

SMALL_NBYTES = 64 << 10
_NOTHING = xxhash.xxh3_128_digest(b"")
"""The hash of a part that has no bytes."""


class _Member(NamedTuple):
    """A tensor of a window.

    Attributes:
        position: Of its move in the program.
        begin: Where it begins in the window.
        nbytes: Its bytes.
        form: What tensors that are cut alike have in common.
        targets: File and first byte of every part.
    """

    position: int
    begin: int
    nbytes: int
    form: Hashable
    targets: Sequence[tuple[int, int]]


def program_units(machine: Machine, program: Program) -> Iterator[Unit]:
    """Yield the units of a program, in the order of its moves."""
    windows = _Windows(machine, program.moves)
    for positions in groups(program.moves):
        first = positions[0]
        if machine.marks and machine.marks.get(first) == DONE:
            moves = [program.moves[position] for position in positions]
            Chain(machine, moves, positions)
            machine.finish(sum(move.nbytes for move in moves))
        elif len(positions) == 1 and windows.takes(first):
            yield from windows.add(first)
        else:
            yield from windows.flush()
            moves = [program.moves[position] for position in positions]
            chain = Chain(machine, moves, positions)
            yield from chain_units(machine, chain, join_flows(moves, positions, machine.limits))
    yield from windows.flush()


class _Windows:
    """Collects small tensors that lie beside each other."""

    def __init__(self, machine: Machine, moves: Sequence[Move]) -> None:
        self._machine = machine
        self._moves = moves
        self._table = moves if isinstance(moves, MoveTable) else None
        self._most = min(SMALL_NBYTES, machine.limits.band // 4, tiles.TILE_NBYTES)
        self._members: list[_Member] = []
        self._file = self._begin = self._end = 0
        self._shares: dict[Hashable, tuple[int, tuple[Share | None, ...]]] = {}

    def takes(self, position: int) -> bool:
        """Tell whether a move is small and takes its input as it is."""
        if self._table:
            if self._table.source(position) is None:
                return False
            kind = self._table.kinds[self._table.order[position]]
            return 0 < kind.nbytes <= self._most and kind.cast is None
        move = self._moves[position]
        if len(move.gathers) != 1 or move.cast or not all(move.shape):
            return False
        source, links = move.gathers[0]
        return (
            source.nbytes <= self._most
            and source.item_nbytes == move.item_nbytes
            and source.shape == move.shape
            and all(link.src == link.dst for link in links)
            and links == identity_links(move.shape)
        )

    def add(self, position: int) -> Iterator[Unit]:
        """Add a move; yield the window before it if it does not fit into that."""
        file, offset, item_nbytes, member = self._member(position)
        begin = offset - self._begin
        fits = (file, offset) == (self._file, self._end) and not begin % item_nbytes
        if not self._members or not fits or begin + member.nbytes > self._machine.limits.band:
            yield from self.flush()
            self._file, self._begin, begin = file, offset, 0
        self._members.append(member._replace(begin=begin) if begin else member)
        self._end = offset + member.nbytes

    def _member(self, position: int) -> tuple[int, int, int, _Member]:
        """Return the file and the first byte of a move's source, the bytes of its atom, and the tensor."""
        if self._table and (source := self._table.source(position)):
            form, targets = self._table.form(position), self._table.targets(position)
            return *source, form[0].item_nbytes, _Member(position, 0, form[0].nbytes, form, targets)
        move = self._moves[position]
        first = move.gathers[0].source
        # The runs of equal divisions are one object (`manifests.placement.dim_runs`), and the program keeps it.
        alike = move.shape, move.item_nbytes, *(id(scatter.runs) for scatter in move.scatters)
        targets = [(scatter.file, scatter.offset) for scatter in move.scatters]
        return first.file, first.offset, move.item_nbytes, _Member(position, 0, first.nbytes, alike, targets)

    def flush(self) -> Iterator[Unit]:
        """Yield the window as a unit."""
        if self._members:
            members, self._members = self._members, []
            yield partial(self._run, self._file, self._begin, members)

    def _run(self, file: int, begin: int, members: Sequence[_Member], scratch: Scratch) -> None:
        machine = self._machine
        window = scratch.take(members[-1].begin + members[-1].nbytes)
        machine.inputs.read_into(file, begin, window.data)
        view = window.data
        hashes = {
            member.position: [xxhash.xxh3_128_digest(view[member.begin : member.begin + member.nbytes])]
            for member in members
        }
        by_form: dict[Hashable, list[_Member]] = {}
        for member in members:
            by_form.setdefault(member.form, []).append(member)
        pieces: list[tuple[int, int, memoryview]] = []
        for form, alike in by_form.items():
            for run in _equally_spaced(alike):
                self._cut(form, run, window, scratch, pieces, hashes)
        _write(machine, pieces)
        for position, found in hashes.items():
            machine.small[position] = b"".join(found)
        if machine.journal is not None:
            positions = [member.position for member in members]
            small = Small(positions, [machine.small[position].hex() for position in positions], len(window))
            machine.journal.append_small(Line(small=small), len(window))
        machine.finish(len(window))

    def _cut(
        self,
        form: Hashable,
        run: Sequence[_Member],
        window: Bytes,
        scratch: Scratch,
        pieces: list[tuple[int, int, memoryview]],
        hashes: dict[int, list[bytes]],
    ) -> None:
        """Cut equally spaced tensors of one form into their parts, and hash these."""
        first, spacing = run[0].begin, (run[1].begin - run[0].begin if len(run) > 1 else 0)
        item, shares = self._shares_of(form, run[0].position)
        for at, share in enumerate(shares):
            if share is None:
                for member in run:
                    hashes[member.position].append(_NOTHING)
                continue
            nbytes = share.extent * item
            if share.plain >= 0:
                view, begin, step = window.data, first + share.plain * item, spacing
            else:
                view, begin, step = scratch.take(nbytes * len(run)).data, 0, nbytes
                stack = Loop(len(run), spacing // item, share.extent)
                for copy in share.copies:
                    stacked = copy._replace(src=copy.src + first // item, loops=(stack, *copy.loops))
                    copy_strided(window, np.frombuffer(view, np.uint8), stacked, item)
            for member in run:
                piece = view[begin : begin + nbytes]
                begin += step
                hashes[member.position].append(xxhash.xxh3_128_digest(piece))
                pieces.append((*member.targets[at], piece))

    def _shares_of(self, form: Hashable, position: int) -> tuple[int, tuple[Share | None, ...]]:
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


def _equally_spaced(members: Sequence[_Member]) -> Iterator[Sequence[_Member]]:
    """Yield longest pieces whose members begin at equal distances."""
    begin = 0
    while begin < len(members):
        end = begin + 1
        if end < len(members):
            spacing = members[end].begin - members[begin].begin
            while end < len(members) and members[end].begin - members[end - 1].begin == spacing:
                end += 1
        yield members[begin:end]
        begin = end


def _write(machine: Machine, pieces: list[tuple[int, int, memoryview]]) -> None:
    """Write pieces, those together that lie beside each other."""
    pieces.sort(key=lambda piece: piece[:2])
    begin = 0
    while begin < len(pieces):
        file, offset, piece = pieces[begin]
        buffers, end = [piece], offset + len(piece)
        begin += 1
        while begin < len(pieces) and pieces[begin][0] == file and pieces[begin][1] == end:
            buffers.append(pieces[begin][2])
            end += len(pieces[begin][2])
            begin += 1
        machine.outputs.write_all(file, offset, buffers)
