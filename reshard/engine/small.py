"""Small tensors in columns: which of a program's moves are small, which lie beside each other, and their hashes.

Of 100,000 tensors an object each would take longer to make than their bytes to move.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from reshard.movetable import MoveTable
from reshard.program import Move, identity_links

HASH_NBYTES = 16

Column = np.ndarray[Any, np.dtype[Any]]


class Rows(NamedTuple):
    """Moves that take their one input as it is, by position; of others the columns of the input say nothing.

    Attributes:
        nbytes: Bytes of the input; 0 where a move takes more than that.
        files: Its file.
        offsets: Its first byte, counted from the start of the file.
        items: Bytes of an atom.
        forms: Equal numbers where inputs of one shape are divided alike.
        starts: The parts of the move at a position are those at ``starts[position : position + 2]`` in what follows.
        part_files: The file of every part.
        part_offsets: Its first byte, counted from the start of the file.
    """

    nbytes: Column
    files: Column
    offsets: Column
    items: Column
    forms: Column
    starts: Column
    part_files: Column
    part_offsets: Column

    @staticmethod
    def of(moves: Sequence[Move]) -> "Rows":
        """Return the columns of moves."""
        return _rows_of_table(moves) if isinstance(moves, MoveTable) else _rows_of_moves(moves)

    def windows(self, taken: Column, most_nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first of every longest piece of moves that can be read at once, and the one after its last.

        Args:
            taken: For every move whether it may be in one.
            most_nbytes: The most bytes that are read at once.
        """
        ends = self.offsets + self.nbytes
        beside = taken[1:] & taken[:-1] & (self.files[1:] == self.files[:-1]) & (self.offsets[1:] == ends[:-1])
        firsts = np.flatnonzero(taken & ~np.concatenate(([False], beside)))
        lasts = np.flatnonzero(taken & ~np.concatenate((beside, [False])))
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            begin = first
            while begin <= last:
                at = self.offsets[begin]
                end = begin + int(np.searchsorted(ends[begin : last + 1], at + most_nbytes, "right"))
                # A copy counts in atoms from the begin of the window.
                odd = np.flatnonzero((self.offsets[begin:end] - at) % self.items[begin:end])
                end = begin + int(odd[0]) if len(odd) else end
                yield begin, end
                begin = end


def _rows_of_table(table: MoveTable) -> Rows:
    places = table.places
    starts = np.frombuffer(places.starts, np.int64)
    counts = np.diff(starts)
    files, offsets = np.frombuffer(table.files, np.int32), np.frombuffer(table.offsets, np.int64)
    kinds = list({id(kind): kind for kind in table.kinds}.values())
    numbers = {id(kind): number for number, kind in enumerate(kinds)}
    kind = np.fromiter(map(numbers.__getitem__, map(id, table.kinds)), np.int32, len(table))
    parts = [np.frombuffer(column, np.int32) for column in (places.files, places.ranks)]
    part_files, ranks, part_offsets = *parts, np.frombuffer(places.offsets, np.int64)
    order = np.frombuffer(table.order, np.int32)
    if (order[1:] < order[:-1]).any():
        # The parts in the order of the moves, from those in the order of the tensors.
        files, offsets, kind = files[order], offsets[order], kind[order]
        back, counts = starts[:-1][order], counts[order]
        starts = np.concatenate(([0], np.cumsum(counts)))
        back = np.arange(starts[-1]) + np.repeat(back - starts[:-1], counts)
        part_files, ranks, part_offsets = part_files[back], ranks[back], part_offsets[back]
    nbytes = np.array([0 if kind.cast else kind.nbytes for kind in kinds], np.int64)[kind]
    nbytes[table.gathering()] = 0
    items = np.array([kind.item_nbytes for kind in kinds], np.int32)[kind]
    forms = _forms(table, kind, counts, ranks)
    return Rows(nbytes, files, offsets, items, forms, starts, part_files, part_offsets)


def _forms(table: MoveTable, kinds: Column, counts: Column, ranks: Column) -> Column:
    """Return the numbers of the forms of a table's moves: what is asked is only where one follows another."""
    if not len(kinds):
        return kinds
    differs = np.concatenate(([True], (kinds[1:] != kinds[:-1]) | (counts[1:] != counts[:-1])))
    if differs[1:].any():
        of_part = np.repeat(np.arange(len(kinds)), counts)
        before = np.maximum(np.arange(len(ranks)) - np.concatenate(([0], counts[:-1]))[of_part], 0)
        differs[of_part[ranks != ranks[before]]] = True
    else:
        rows = ranks.reshape(len(kinds), -1)
        differs[1:] |= (rows[1:] != rows[:-1]).any(axis=1)
    numbers: dict[Hashable, int] = {}
    firsts = np.flatnonzero(differs)
    found = [numbers.setdefault(table.form(at), len(numbers)) for at in firsts.tolist()]
    return np.repeat(np.array(found, np.int32), np.diff(np.append(firsts, len(kinds))))


def _rows_of_moves(moves: Sequence[Move]) -> Rows:
    numbers: dict[Hashable, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for move in moves:
        if not _takes_all(move):
            rows.append((0, 0, 0, 1, 0))
            continue
        source = move.gathers[0].source
        # The runs of equal divisions are one object (`manifests.placement.dim_runs`), and the program keeps it.
        form = move.shape, move.item_nbytes, *(id(scatter.runs) for scatter in move.scatters)
        number = numbers.setdefault(form, len(numbers))
        rows.append((source.nbytes, source.file, source.offset, move.item_nbytes, number))
    nbytes, files, offsets, items, forms = np.array(rows, np.int64).reshape(-1, 5).T
    scatters = [scatter for move in moves for scatter in move.scatters]
    return Rows(
        nbytes,
        files,
        offsets,
        items,
        forms,
        np.array([*accumulate((len(move.scatters) for move in moves), initial=0)]),
        np.array([scatter.file for scatter in scatters], np.int64),
        np.array([scatter.offset for scatter in scatters], np.int64),
    )


def _takes_all(move: Move) -> bool:
    """Tell whether a move takes its one input as it is."""
    if len(move.gathers) != 1 or move.cast:
        return False
    source, links = move.gathers[0]
    return (
        source.item_nbytes == move.item_nbytes
        and source.shape == move.shape
        and all(link.src == link.dst for link in links)
        and links == identity_links(move.shape)
    )


class SmallHashes:
    """The hashes of moves that were done at once: of the one tile of the input, and of that of every part.

    Attributes:
        rows: The moves.
        done: For every move whether its hashes are here.
        read: By position of the move.
        written: By position of the part.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.done = bytearray(len(rows.nbytes))
        self.read = bytearray(len(rows.nbytes) * HASH_NBYTES)
        self.written = bytearray(len(rows.part_files) * HASH_NBYTES)

    def add(self, first: int, end: int, read: bytes, written: bytes) -> None:
        """Add the hashes of moves that follow each other."""
        begin, stop = self.rows.starts[first].item(), self.rows.starts[end].item()
        self.read[first * HASH_NBYTES : end * HASH_NBYTES] = read
        self.written[begin * HASH_NBYTES : stop * HASH_NBYTES] = written
        self.done[first:end] = b"\1" * (end - first)

    def read_of(self, position: int) -> str:
        """Return the hash of a move's input, in hexadecimal."""
        return self.read[position * HASH_NBYTES : (position + 1) * HASH_NBYTES].hex()

    def written_of(self, position: int) -> list[bytes]:
        """Return the hashes of a move's parts."""
        begin, end = self.rows.starts[position : position + 2].tolist()
        return [bytes(self.written[at * HASH_NBYTES : (at + 1) * HASH_NBYTES]) for at in range(begin, end)]
