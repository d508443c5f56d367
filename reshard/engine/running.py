"""Running a flow: its boxes, one after another, as units that any worker takes.

A box is read, cut, hashed and written by one worker. Boxes of one chain hash in their order, so that each tile of an
input or a part is hashed while its bytes are in the cache; a worker that comes early writes first.

A box that is larger than one worker may hold, since a transpose needs all of it at once, is held by all of them
together: first they fill it, band by band of its inputs, then they cut bands from it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from math import prod
from typing import NamedTuple

from manifests.manifest import Link
from manifests.runs import clip, expand, fold
from reshard.engine.boxes import (
    Box,
    Cutter,
    Grain,
    Index,
    Share,
    box_count,
    box_numel,
    boxes,
    invert_links,
    natural_grain,
    whole_box,
)
from reshard.engine.chains import Chain
from reshard.engine.conversion import convert
from reshard.engine.copying import Bytes, copy_strided
from reshard.engine.flows import Fit, Flow, Inlet, all_boxes, fit
from reshard.engine.journal import DONE, Mark
from reshard.engine.machine import Machine
from reshard.engine.pool import Scratch, Unit
from reshard.engine.streams import Stream
from reshard.program import Copy, row_major

Boxes = Iterator[tuple[Box, Mark]]
"""Boxes that are to be run, and where the chain is gone on with after each."""


class Piece(NamedTuple):
    """Bytes of a stored tensor, ``at`` bytes after its start."""

    stream: Stream
    at: int
    buffer: memoryview


def chain_units(machine: Machine, chain: Chain, flows: Sequence[Flow]) -> Iterator[Unit]:
    """Yield the units of flows that share inputs, from where the chain starts."""
    last = max((at for at, flow in enumerate(flows) if all(flow.shape)), default=-1)
    for at, flow in enumerate(flows):
        if at < chain.start.flow:
            machine.finish(prod(flow.shape) * flow.item_nbytes)
            continue
        form = fit(flow, machine.limits)
        ends = [Mark(at, box + 1) for box in range(box_count(flow.shape, form.grain))]
        if at == last:
            ends[-1] = DONE
        todo = islice(zip(all_boxes(flow, form.grain), ends, strict=True), _skip(machine, chain, at, flow, form), None)
        if form.nbytes <= machine.limits.unit:
            yield from _Bands(machine, flow, form.grain, chain).units(todo)
        else:
            yield from _Held(machine, flow, chain, dense=form.dense).units(todo)


def _skip(machine: Machine, chain: Chain, at: int, flow: Flow, form: Fit) -> int:
    """Return how many boxes of a flow were finished by an earlier run, and report them."""
    count = chain.start.box if at == chain.start.flow else 0
    finished = sum(box_numel(box) for box in islice(all_boxes(flow, form.grain), count))
    machine.finish(finished * flow.item_nbytes)
    return count


class _Cutting:
    """Cuts boxes of a flow into its parts, hashes and writes them."""

    def __init__(self, machine: Machine, flow: Flow, grain: Grain, chain: Chain) -> None:
        self.machine = machine
        self.flow = flow
        self.chain = chain
        self.streams = [machine.written[outlet.move, outlet.scatter] for outlet in flow.outlets]
        self.cutters = [Cutter(outlet.links, flow.shape, outlet.shape, grain) for outlet in flow.outlets]
        self.index = Index(self.cutters)

    def cut(self, box: Box, block: Bytes, scratch: Scratch) -> list[Piece]:
        """Return the pieces of parts in a box."""
        item = self.flow.item_nbytes
        pieces: list[Piece] = []
        for at in self.index.find(box):
            share = self.cutters[at].share(box)
            if share is None:
                continue
            if share.plain >= 0:
                begin = share.plain * item
                buffer = block.data[begin : begin + share.extent * item]
                pieces.append(Piece(self.streams[at], share.begin * item, buffer))
            elif share.dense:
                piece = scratch.take(share.extent * item)
                for copy in share.copies:
                    copy_strided(block, piece, copy, item)
                pieces.append(Piece(self.streams[at], share.begin * item, piece.data))
            else:
                pieces += self._scattered(self.streams[at], share, block, scratch)
        return pieces

    def _scattered(self, stream: Stream, share: Share, block: Bytes, scratch: Scratch) -> Iterator[Piece]:
        """Yield the pieces of a share with holes."""
        item = self.flow.item_nbytes
        for copy in share.copies:
            for row, extent in _dense_rows(copy):
                piece = scratch.take(extent * item)
                copy_strided(block, piece, row._replace(dst=0), item)
                yield Piece(stream, (share.begin + row.dst) * item, piece.data)

    def send(self, position: int, read: Sequence[Piece], pieces: Sequence[Piece]) -> None:
        """Hash what was read and what is written, in this unit's turn, and write."""
        turn = self.chain.turn
        early = not turn.is_due(position)
        if early:
            self._write(pieces)
            turn.wait(position)
        for piece in read:
            _hash_read(piece)
        for piece in pieces:
            piece.stream.update(piece.at, piece.buffer)
        self.chain.hashed(position, sum(len(piece.buffer) for piece in pieces))
        turn.pass_on()
        if not early:
            self._write(pieces)
        self.chain.wrote(position)

    def _write(self, pieces: Sequence[Piece]) -> None:
        for stream, at, buffer in pieces:
            self.machine.outputs.write(stream.file, stream.offset + at, buffer)


def _hash_read(piece: Piece) -> None:
    """Hash what was read, and before it what was left out: copies of what another input holds."""
    stream = piece.stream
    if stream.passed < piece.at and not stream.late:
        block = memoryview(bytearray(min(piece.at - stream.passed, 1 << 20)))
        while stream.passed < piece.at and not stream.late:
            gap = block[: piece.at - stream.passed]
            stream.files.read_into(stream.file, stream.offset + stream.passed, gap)
            stream.update(stream.passed, gap)
    stream.update(piece.at, piece.buffer)


def _dense_rows(copy: Copy) -> Iterator[tuple[Copy, int]]:
    """Yield copies that have no holes in their destinations, and their extents."""
    extent = 1 + sum((loop.size - 1) * loop.dst_step for loop in copy.loops)
    if extent == prod(loop.size for loop in copy.loops):
        yield copy, extent
        return
    outer = max(copy.loops, key=lambda loop: loop.dst_step)
    inner = tuple(loop for loop in copy.loops if loop is not outer)
    for i in range(outer.size):
        yield from _dense_rows(Copy(copy.src + i * outer.src_step, copy.dst + i * outer.dst_step, inner))


class _Bands:
    """A flow whose boxes are units of their own."""

    def __init__(self, machine: Machine, flow: Flow, grain: Grain, chain: Chain) -> None:
        self.machine = machine
        self.flow = flow
        self.chain = chain
        self.cutting = _Cutting(machine, flow, grain, chain)
        self.streams = [machine.input_stream(inlet.source) for inlet in flow.inlets]
        self.cutters = [
            Cutter(invert_links(inlet.links), flow.shape, inlet.source.shape, grain) for inlet in flow.inlets
        ]
        self.index = Index(self.cutters)

    def units(self, todo: Boxes) -> Iterator[Unit]:
        """Yield a unit for each box."""
        for box, end in todo:
            yield partial(self._run, box, self.chain.add(end))

    def _run(self, box: Box, position: int, scratch: Scratch) -> None:
        read, block = self._fill(box, scratch)
        pieces = self.cutting.cut(box, block, scratch)
        self.cutting.send(position, read, pieces)
        self.machine.finish(len(block))

    def _fill(self, box: Box, scratch: Scratch) -> tuple[list[Piece], Bytes]:
        item = self.flow.item_nbytes
        nbytes = box_numel(box) * item
        shares = [(at, self.cutters[at].share(box)) for at in self.index.find(box)]
        read: list[Piece] = []
        block: Bytes | None = None
        for at, share in shares:
            if share is None:
                continue
            if share.plain == 0 and share.extent * item == nbytes:
                block = scratch.take(nbytes)
                read.append(self._read(at, share.begin, block, scratch))
                return read, block
            if block is None:
                block = scratch.take(nbytes)
            read += self._fill_share(at, share, block, scratch)
        return read, scratch.take(nbytes) if block is None else block

    def _fill_share(self, at: int, share: Share, block: Bytes, scratch: Scratch) -> Iterator[Piece]:
        item = self.flow.item_nbytes
        if share.plain >= 0:
            begin = share.plain * item
            yield self._read(at, share.begin, block[begin : begin + share.extent * item], scratch)
        elif share.dense:
            source = scratch.take(share.extent * item)
            yield self._read(at, share.begin, source, scratch)
            for copy in share.copies:
                copy_strided(source, block, _back(copy), item)
        else:
            for whole in share.copies:
                for copy, extent in _dense_rows(whole):
                    source = scratch.take(extent * item)
                    yield self._read(at, share.begin + copy.dst, source, scratch)
                    copy_strided(source, block, _back(copy)._replace(src=0), item)

    def _read(self, at: int, begin: int, buffer: Bytes, scratch: Scratch) -> Piece:
        return _read(self.flow, self.streams[at], begin, buffer, scratch)


def _read(flow: Flow, stream: Stream, begin: int, buffer: Bytes, scratch: Scratch) -> Piece:
    """Fill a buffer with an input's atoms from the one at ``begin``, converted if the flow is; return what was read."""
    item = flow.inlets[0].source.item_nbytes
    raw = scratch.take(len(buffer) // flow.item_nbytes * item) if flow.cast else buffer
    stream.files.read_into(stream.file, stream.offset + begin * item, raw.data)
    if flow.cast:
        convert(raw, flow.cast[0], buffer, flow.cast[1])
    return Piece(stream, begin * item, raw.data)


def _back(copy: Copy) -> Copy:
    """Return the copy that goes back."""
    return Copy(
        copy.dst, copy.src, tuple(loop._replace(src_step=loop.dst_step, dst_step=loop.src_step) for loop in copy.loops)
    )


class _Held:
    """A flow whose boxes are held by all workers together."""

    def __init__(self, machine: Machine, flow: Flow, chain: Chain, *, dense: bool) -> None:
        self.machine = machine
        self.flow = flow
        self.chain = chain
        self.band = natural_grain(flow.shape, flow.item_nbytes, machine.limits.band)
        self.cutting = _Cutting(machine, flow, self.band, chain)
        self.streams = [machine.input_stream(inlet.source) for inlet in flow.inlets]
        if not dense:
            # An input is read by the columns that a box takes, so it never passes in order.
            for stream in self.streams:
                stream.late = True

    def units(self, todo: Boxes) -> Iterator[Unit]:
        """Yield units that fill a box, then units that cut it, box by box."""
        item, phases = self.flow.item_nbytes, self.machine.phases
        for box, end in todo:
            block = self.machine.hold(box_numel(box) * item)
            yield from self._phase(phases.begin(), self._fills(box, block))
            yield from self._phase(phases.begin(), self._cuts(box, block), end)

    def _phase(
        self, phase: int, units: Iterator[Callable[[int, Scratch], None]], end: Mark | None = None
    ) -> Iterator[Unit]:
        unit = next(units, None)
        while unit is not None:
            following = next(units, None)
            self.machine.phases.add(phase)
            yield partial(self._in_phase, phase, unit, self.chain.add(end if following is None else None))
            unit = following

    def _in_phase(self, phase: int, unit: Callable[[int, Scratch], None], position: int, scratch: Scratch) -> None:
        self.machine.phases.enter(phase)
        unit(position, scratch)
        self.machine.phases.leave(phase)

    def _fills(self, box: Box, block: Bytes) -> Iterator[Callable[[int, Scratch], None]]:
        item = self.flow.item_nbytes
        shape = tuple(hi - lo for lo, hi in box)
        for inlet, stream in zip(self.flow.inlets, self.streams, strict=True):
            region, links = _region(inlet, box)
            if links is None:
                continue
            inner = tuple(hi - lo for lo, hi in region)
            grain = natural_grain(inner, item, self.machine.limits.band)
            cutter = Cutter(links, inner, shape, grain)
            for part in boxes(whole_box(inner), grain):
                yield partial(self._fill, inlet, stream, region, cutter, part, block)

    def _fill(
        self,
        inlet: Inlet,
        stream: Stream,
        region: Box,
        cutter: Cutter,
        part: Box,
        block: Bytes,
        position: int,
        scratch: Scratch,
    ) -> None:
        item = self.flow.item_nbytes
        buffer = scratch.take(box_numel(part) * item)
        read: list[Piece] = []
        done = 0
        for begin, length in _segments(region, part, inlet.source.shape):
            read.append(_read(self.flow, stream, begin, buffer[done : done + length * item], scratch))
            done += length * item
        share = cutter.share(part)
        if share is not None:
            for copy in share.copies:
                copy_strided(buffer, block, copy._replace(dst=copy.dst + share.begin), item)
        self.cutting.send(position, [] if stream.late else read, [])

    def _cuts(self, box: Box, block: Bytes) -> Iterator[Callable[[int, Scratch], None]]:
        done = 0
        for part in boxes(box, self.band):
            nbytes = box_numel(part) * self.flow.item_nbytes
            yield partial(self._cut, part, block[done : done + nbytes])
            done += nbytes

    def _cut(self, part: Box, block: Bytes, position: int, scratch: Scratch) -> None:
        self.cutting.send(position, [], self.cutting.cut(part, block, scratch))
        self.machine.finish(len(block))


def _region(inlet: Inlet, box: Box) -> tuple[Box, tuple[Link, ...] | None]:
    """Return the least box of an input that holds what a box has of it, and the links from the one to the other.

    The links count from the first entries of the two boxes; None where they have nothing in common.
    """
    region = [(0, size) for size in inlet.source.shape]
    links: list[Link] = []
    for link in inlet.links:
        runs = link.runs if link.dst is None else clip(link.runs, *box[link.dst])
        if not runs:
            return (), None
        spans = expand(runs)
        if link.src is not None:
            lo, hi = min(span[0] for span in spans), max(span[0] + span[2] for span in spans)
            region[link.src] = (lo, hi)
            runs = fold((src - lo, dst, length) for src, dst, length in spans)
        links.append(Link(link.src, link.dst, runs))
    return tuple(region), tuple(links)


def _segments(region: Box, part: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pieces of an input that make up a part of a region, in atoms: where each begins and its length.

    Args:
        region: A box of the input.
        part: A box of the region, counted from its first entries.
        shape: Of the input.
    """
    steps = row_major(shape)
    ranges = [(lo + first, hi + first) for (lo, hi), (first, _) in zip(part, region, strict=True)]
    split = next((d + 1 for d in range(len(shape) - 1, -1, -1) if ranges[d] != (0, shape[d])), 0)
    outer, inner = ranges[: max(split - 1, 0)], ranges[max(split - 1, 0) :]
    length = box_numel(tuple(inner))
    first = sum(lo * step for (lo, _), step in zip(inner, steps[len(outer) :], strict=True))
    for at in product(*(range(lo, hi) for lo, hi in outer)):
        yield first + sum(i * step for i, step in zip(at, steps, strict=False)), length
