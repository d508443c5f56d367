"""The proof that a program makes what it should, from integers alone: every byte is read once, and written once."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

from manifests.errors import ReshardError
from manifests.manifest import Link
from manifests.runs import Run, Runs, compose, covers, expand, invert, numel, whole, without
from reshard.movetable import MoveTable
from reshard.program import Input, Move, Program, Scatter, invert_links

Box = tuple[Runs, ...]
"""For every dimension the entries that are taken, as the destinations of runs."""


def check_program(
    program: Program, output_nbytes: Sequence[int], data_offsets: Sequence[int], *, whole_inputs: bool = True
) -> None:
    """Prove that the program writes every output byte exactly once and reads every input byte exactly once.

    Args:
        program: The program.
        output_nbytes: Bytes of every output file.
        data_offsets: Where the data of every output file starts, in bytes from its start.
        whole_inputs: Whether inputs must be read whole; copies of what another input holds may be left out otherwise.

    Raises:
        ReshardError: It does not; this is a fault of this program, never of the input.
    """
    read: dict[Input, list[Box]] = {}
    if isinstance(program.moves, MoveTable):
        begins, ends, divisions = _check_table(program, program.moves, read)
    else:
        begins, ends, divisions = _check_moves(program, program.moves, read)
    for source, boxes in read.items():
        _check_tiling(boxes, source.shape, source.name, fill=whole_inputs)
    for file, name in enumerate(program.output_files):
        _check_filled(name, begins[file], ends[file], data_offsets[file], output_nbytes[file])
    for move in divisions:
        _check_parts([tuple(invert(runs) for runs in scatter.runs) for scatter in move.scatters], move)


Written = tuple[list[list[int]], list[list[int]], list[Move]]
"""Where the parts in every file begin and end, in bytes from its start; and moves, one for each way to divide one."""


def _check_moves(program: Program, moves: Iterable[Move], read: dict[Input, list[Box]]) -> Written:
    begins: list[list[int]] = [[] for _ in program.output_files]
    ends: list[list[int]] = [[] for _ in program.output_files]
    divisions: dict[tuple[object, ...], tuple[Move, list[int]]] = {}
    for move in moves:
        _check_gathers(move, read)
        # The program keeps the runs, so that equal ones are one object and no other has its address.
        key = (move.shape, *(id(scatter.runs) for scatter in move.scatters))
        if key not in divisions:
            divisions[key] = move, [_check_written(scatter, move, program) for scatter in move.scatters]
        for scatter, atoms in zip(move.scatters, divisions[key][1], strict=True):
            begins[scatter.file].append(scatter.offset)
            ends[scatter.file].append(scatter.offset + atoms * move.item_nbytes)
    return begins, ends, [move for move, _ in divisions.values()]


def _check_table(program: Program, table: MoveTable, read: dict[Input, list[Box]]) -> Written:
    """Check moves in columns: those that are alike once."""
    begins: list[list[int]] = [[] for _ in program.output_files]
    ends: list[list[int]] = [[] for _ in program.output_files]
    divisions: dict[tuple[int, bytes], Move] = {}
    sizes: dict[tuple[int, bytes], list[int]] = {}
    places = table.places
    for move in map(table.move_at, table.gathers):
        _check_gathers(move, read)
    # Of sources that are taken as they are no two have one name; neither may another tensor take a part of one.
    taken = {source.name for source in read}
    whole = (name for position, name in enumerate(table.names) if position not in table.gathers) if taken else ()
    if twice := taken.intersection(whole):
        raise ReshardError(f"{min(twice)}: two of its parts overlap")
    nbytes: list[int] = []
    ranks = places.ranks.tobytes()
    width = places.ranks.itemsize
    bounds = pairwise(at * width for at in places.starts)
    for position, (kind, (begin, end)) in enumerate(zip(table.kinds, bounds, strict=True)):
        key = id(kind), ranks[begin:end]
        if key not in divisions:
            move = divisions[key] = table.move_at(position)
            if position not in table.gathers:
                _check_gathers(move, {})
            for scatter in move.scatters:
                _check_written(scatter, move, program)
            sizes[key] = [kind.part(places.ranks[at])[1] for at in places.of(position)]
        nbytes += sizes[key]
    for file, offset, size in zip(places.files, places.offsets, nbytes, strict=True):
        begins[file].append(offset)
        ends[file].append(offset + size)
    return begins, ends, [*divisions.values()]


def _check_gathers(move: Move, read: dict[Input, list[Box]]) -> None:
    """Check that the gathers fill a tensor; add what they take of their sources."""
    _check_tiling([_box(gather.links, len(move.shape)) for gather in move.gathers], move.shape, move.name)
    for gather in move.gathers:
        read.setdefault(gather.source, []).append(_box(_back(gather.links), len(gather.source.shape)))


def _check_filled(name: str, begins: list[int], ends: list[int], begin: int, end: int) -> None:
    """Check that parts fill a file from its data's begin to its end, once.

    They do if each begins where another ends, but for the first: at every byte, of the parts that begin before it one
    more than end before it.
    """
    begins.sort()
    ends.sort()
    if begins == [begin, *ends[:-1]] and ends[-1] == end if ends else begin == end:
        return
    at = begin
    for first, last in zip(begins, ends, strict=True):
        if first != at:
            raise ReshardError(f"{name}: bytes {at} to {first} are not written once")
        at = last
    raise ReshardError(f"{name}: written up to {at} of {end} bytes")


def _check_written(scatter: Scatter, move: Move, program: Program) -> int:
    """Check that each entry of a part is written once; return how many atoms it has."""
    if not all(covers(runs, numel(runs)) for runs in scatter.runs):
        raise ReshardError(f"{move.name}: a part in {program.output_files[scatter.file]} is not written once")
    return prod(numel(runs) for runs in scatter.runs)


@lru_cache(maxsize=4096)
def _back(links: tuple[Link, ...]) -> tuple[Link, ...]:
    return invert_links(links)


@lru_cache(maxsize=4096)
def _box(links: tuple[Link, ...], ndim: int) -> Box:
    return tuple(next((link.runs for link in links if link.dst == dim), ()) for dim in range(ndim))


@lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is a whole tensor; the usual one, so it is known before the others are looked at."""
    return tuple(whole(size) for size in shape)


def _check_parts(parts: list[Box], move: Move) -> None:
    """Check that the parts, over all ranks, hold the whole tensor; entries may be copied to several."""
    boxes = list(dict.fromkeys(parts))
    differing = [dim for dim in range(len(move.shape)) if len({box[dim] for box in boxes}) > 1]
    if len(differing) == 1:
        dim = differing[0]
        taken: Runs = ()
        for position, box in enumerate(boxes):
            left = without(box[dim], taken)
            taken = (*taken, *left)
            boxes[position] = (*box[:dim], left, *box[dim + 1 :])
    _check_tiling(boxes, move.shape, move.name)


def _check_tiling(boxes: list[Box], shape: tuple[int, ...], name: str, *, fill: bool = True) -> None:
    """Check that boxes lie in a tensor, do not overlap, and fill it."""
    if len(boxes) == 1 and boxes[0] == _whole_box(shape):
        return
    boxes = [box for box in boxes if all(box)]
    filled = sum(prod(map(numel, box)) for box in boxes)
    if filled != prod(shape) and fill:
        raise ReshardError(f"{name}: its parts make up {filled} atoms of {prod(shape)}")
    for box in boxes:
        for runs, size in zip(box, shape, strict=True):
            lowest, highest = _bounds(runs)
            if lowest < 0 or highest > size:
                raise ReshardError(f"{name}: a part reaches from {lowest} to {highest} of a dimension of {size}")
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: _bounds(box[0]) if box else (0, 1)):
        open_boxes = [other for other in open_boxes if not box or _bounds(other[0])[1] > _bounds(box[0])[0]]
        if any(all(_overlap(a, b) for a, b in zip(box, other, strict=True)) for other in open_boxes):
            raise ReshardError(f"{name}: two of its parts overlap")
        open_boxes.append(box)


@lru_cache(maxsize=4096)
def _bounds(runs: Runs) -> tuple[int, int]:
    """Return the first destination and the one after the last."""
    spans = expand(runs)
    return spans[0][1], spans[-1][1] + spans[-1][2]


def _overlap(one: Runs, other: Runs) -> bool:
    if len(one) == len(other) == 1 and one[0].repeat == other[0].repeat == 1:
        a, b = one[0], other[0]
        return a.dst < b.dst + b.length and b.dst < a.dst + a.length
    return bool(compose(tuple(Run(dst, dst, length) for _, dst, length in expand(one)), invert(other)))
