"""Batches: small tensors that lie beside each other are read at once, and equal ones cut at once.

A unit for each of 100,000 tensors would cost more than their bytes. What lies between two larger tensors is read into
one window; the tensors in it that have one shape and one division are cut together by one strided copy for each part
where they are equally spaced, and parts that lie beside each other are written together.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash

from reshard import tiles
from reshard.engine.boxes import Cutter, Grain, Share, whole_box
from reshard.engine.chains import Chain
from reshard.engine.copying import Bytes, copy_strided
from reshard.engine.flows import flow_of, groups, join_flows, place_of
from reshard.engine.journal import DONE, Line, Small
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.running import chain_units
from reshard.program import Loop, Move, Program, identity_links

SMALL_NBYTES = 64 << 10


class _Member(NamedTuple):
    """A tensor of a window: the position of its move, the move, and where it begins in the window."""

    position: int
    move: Move
    begin: int


Form = tuple[object, ...]
"""What tensors that are cut alike have in common."""


def program_units(machine: Machine, program: Program) -> Iterator[Unit]:
    """Yield the units of a program, in the order of its moves."""
    windows = _Windows(machine)
    for positions in groups(program.moves):
        moves = [program.moves[position] for position in positions]
        if machine.marks.get(positions[0]) == DONE:
            Chain(machine, moves, positions)
            machine.finish(sum(move.nbytes for move in moves))
        elif len(moves) == 1 and windows.takes(moves[0]):
            yield from windows.add(positions[0], moves[0])
        else:
            yield from windows.flush()
            chain = Chain(machine, moves, positions)
            yield from chain_units(machine, chain, join_flows(moves, positions, machine.limits))
    yield from windows.flush()


class _Windows:
    """Collects small tensors that lie beside each other."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._most = min(SMALL_NBYTES, machine.limits.band // 4, tiles.TILE_NBYTES)
        self._members: list[_Member] = []
        self._file = self._begin = self._end = 0
        self._shares: dict[Form, tuple[Share | None, ...]] = {}

    def takes(self, move: Move) -> bool:
        """Tell whether a move is small and takes its input as it is."""
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

    def add(self, position: int, move: Move) -> Iterator[Unit]:
        """Add a move; yield the window before it if it does not fit into that."""
        source = move.gathers[0].source
        begin = source.offset - self._begin
        fits = (source.file, source.offset) == (self._file, self._end) and not begin % source.item_nbytes
        if not self._members or not fits or begin + source.nbytes > self._machine.limits.band:
            yield from self.flush()
            self._file, self._begin, begin = source.file, source.offset, 0
        self._members.append(_Member(position, move, begin))
        self._end = source.offset + source.nbytes

    def flush(self) -> Iterator[Unit]:
        """Yield the window as a unit."""
        if self._members:
            members, self._members = self._members, []
            yield partial(self._run, self._file, self._begin, members)

    def _run(self, file: int, begin: int, members: Sequence[_Member], scratch: Scratch) -> None:
        machine = self._machine
        window = scratch.take(members[-1].begin + members[-1].move.nbytes)
        machine.inputs.read_into(file, begin, window.data)
        view = window.data
        by_form: dict[Form, list[_Member]] = {}
        digests: list[str] = []
        for member in members:
            source = member.move.gathers[0].source
            digest = xxhash.xxh3_128_hexdigest(view[member.begin : member.begin + source.nbytes])
            machine.read_hashes[place_of(source)] = (digest,)
            digests.append(digest)
            by_form.setdefault(_form(member.move), []).append(member)
        pieces: list[tuple[int, int, memoryview]] = []
        for form, alike in by_form.items():
            for run in _equally_spaced(alike):
                self._cut(form, run, window, scratch, pieces)
        _write(machine, pieces)
        if machine.journal is not None:
            machine.journal.append_small(self._line(members, digests), len(window))
        machine.finish(len(window))

    def _line(self, members: Sequence[_Member], digests: Sequence[str]) -> Line:
        """Return what the journal says of a window, whose inputs have these hashes."""
        written = self._machine.written_hashes
        parts = [written[position, at][0] for position, move, _ in members for at in range(len(move.scatters))]
        last = members[-1]
        return Line(small=Small([member.position for member in members], digests, parts, last.begin + last.move.nbytes))

    def _cut(
        self,
        form: Form,
        run: Sequence[_Member],
        window: Bytes,
        scratch: Scratch,
        pieces: list[tuple[int, int, memoryview]],
    ) -> None:
        """Cut equally spaced tensors of one form into their parts, and hash these."""
        move, item = run[0].move, run[0].move.item_nbytes
        first, spacing = run[0].begin, (run[1].begin - run[0].begin if len(run) > 1 else 0)
        written = self._machine.written_hashes
        for at, share in enumerate(self._shares_of(form, move)):
            if share is None:
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
                scatter = member.move.scatters[at]
                written[member.position, at] = (xxhash.xxh3_128_hexdigest(piece),)
                pieces.append((scatter.file, scatter.offset, piece))

    def _shares_of(self, form: Form, move: Move) -> tuple[Share | None, ...]:
        """Return what each part takes of a tensor; None for nothing."""
        known = self._shares.get(form)
        if known is None:
            grain = Grain(0, move.shape[0] if move.shape else 1)
            known = self._shares[form] = tuple(
                Cutter(outlet.links, move.shape, outlet.shape, grain).share(whole_box(move.shape))
                for outlet in flow_of(move, 0).outlets
            )
        return known


def _form(move: Move) -> Form:
    # The runs of equal divisions are one object (`manifests.placement.dim_runs`), and the program keeps it.
    return move.shape, move.item_nbytes, *(id(scatter.runs) for scatter in move.scatters)


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
