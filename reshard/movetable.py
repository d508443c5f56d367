"""The moves of a split in columns: what differs between tensors that are alike is a few numbers.

A move is made when it is asked for. Of 100,000 tensors the moves as objects, each with its inputs and its parts, would
be most of what a split holds in memory, and most of the time that planning takes.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple, overload

import msgspec
import xxhash

from manifests.manifest import Link, Tensor
from manifests.placement import dim_runs
from manifests.runs import Runs, numel, whole
from reshard.addressing import storage
from reshard.program import Gather, Input, Move, Moves, Scatter, identity_links


class Place(NamedTuple):
    """Where a rank's part of a tensor lies.

    Attributes:
        file: Position of the file.
        offset: First byte, counted from the start of the file.
        rank: A rank whose part it is.
    """

    file: int
    offset: int
    rank: int


class FilePlaces(NamedTuple):
    """Where the parts in one file lie.

    Attributes:
        rank: The rank whose parts they are.
        names: Their tensors' names.
        offsets: Where each begins, counted from the start of the file; there may be one more.
    """

    rank: int
    names: Sequence[str]
    offsets: Iterable[int]


class Places:
    """Where the parts of tensors lie: those of the tensor at a position are ``starts[position : position + 2]``."""

    def __init__(
        self, counts: Iterable[int], files: Iterable[int], offsets: Iterable[int], ranks: Iterable[int]
    ) -> None:
        self.starts = array("Q", accumulate(counts, initial=0))
        self.files = array("I", files)
        self.offsets = array("Q", offsets)
        self.ranks = array("I", ranks)

    @staticmethod
    def in_files(names: Iterable[str], files: Sequence[FilePlaces]) -> "Places":
        """Return the places of tensors, those of each in the order of the files."""
        positions = {name: position for position, name in enumerate(names)}
        held: dict[int, list[int]] = {}  # files of one list of names hold the same tensors
        counts = [0] * len(positions)
        for file in files:
            mine = held.setdefault(id(file.names), [])
            if not mine:
                mine += map(positions.__getitem__, file.names)
            for position in mine:
                counts[position] += 1
        free = [*accumulate(counts, initial=0)]
        numbers, ranks = (array("I", bytes(free[-1] * 4)) for _ in range(2))
        offsets = array("Q", bytes(free[-1] * 8))
        for number, file in enumerate(files):
            mine = held[id(file.names)]
            places = [*map(free.__getitem__, mine)]
            for position, at, offset in zip(mine, places, file.offsets, strict=False):
                offsets[at] = offset
                free[position] = at + 1
            for at in places if number else ():
                numbers[at] = number
            for at in places if file.rank else ():
                ranks[at] = file.rank
        return Places(counts, numbers, offsets, ranks)

    @staticmethod
    def listed(places: Iterable[Iterable[Place]]) -> "Places":
        """Return places that are given tensor by tensor."""
        rows = [list(row) for row in places]
        files, offsets, ranks = ([place[at] for row in rows for place in row] for at in range(3))
        return Places(map(len, rows), files, offsets, ranks)

    def of(self, position: int) -> range:
        """Return the positions of a tensor's parts in the columns."""
        return range(self.starts[position], self.starts[position + 1])


class Kind:
    """What moves of tensors that are alike have in common.

    Attributes:
        shape: In atoms.
        item_nbytes: Bytes of an atom.
        nbytes: Bytes of the whole tensor.
        source: The shape and the bytes of an atom of a source that is taken as it is.
        links: From such a source.
        cast: As of a move.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.item_nbytes = storage(tensor.dtype, tensor.shape)
        self.source = storage(tensor.cast or tensor.dtype, tensor.shape)
        self.links: tuple[Link, ...] = identity_links(self.shape)
        self.nbytes = prod(self.shape) * self.item_nbytes
        self.cast = (tensor.cast, tensor.dtype) if tensor.cast else None
        self._tensor = tensor
        self._parts: dict[int, tuple[tuple[Runs, ...], int]] = {}

    def part(self, rank: int) -> tuple[tuple[Runs, ...], int]:
        """Return the runs from the tensor into a rank's part, and its bytes."""
        if rank not in self._parts:
            runs = part_runs(self._tensor, rank)
            self._parts[rank] = runs, prod(map(numel, runs)) * self.item_nbytes
        return self._parts[rank]


class MoveTable(Moves):
    """The moves of a split, in the order in which their sources lie.

    Attributes:
        names: The tensors' names; this and what follows in the order of the tensors.
        kinds: What each has in common with others.
        gathers: Of those that are not one source tensor of their name as it is, what they are gathered from.
        files: The file of each tensor's first source.
        offsets: Where that begins.
        places: Where the parts lie.
        order: The positions of the tensors in the order of the moves.
    """

    def __init__(
        self, names: Sequence[str], kinds: Sequence[Kind], gathers: Mapping[int, tuple[Gather, ...]], places: Places
    ) -> None:
        self.names = names
        self.kinds = kinds
        self.gathers = gathers
        self.places = places
        self.files = array("I")
        self.offsets = array("Q")
        self.order = array("I")

    def sort(self) -> None:
        """Put the moves in the order in which their first sources lie."""
        keys = [*zip(self.files, self.offsets, strict=True)]
        positions = range(len(keys))
        self.order = array("I", positions if keys == sorted(keys) else sorted(positions, key=keys.__getitem__))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(kind.nbytes for kind in self.kinds)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Move: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Move, ...]: ...

    def __getitem__(self, at: int | slice) -> Move | tuple[Move, ...]:
        if isinstance(at, slice):
            return tuple(map(self.move_at, self.order[at]))
        return self.move_at(self.order[at])

    def __iter__(self) -> Iterator[Move]:
        return map(self.move_at, self.order)

    def move_at(self, position: int) -> Move:
        """Return the move of the tensor at a position."""
        kind, places = self.kinds[position], self.places
        scatters = [
            Scatter(places.files[at], places.offsets[at], kind.part(places.ranks[at])[0]) for at in places.of(position)
        ]
        return Move(
            self.names[position],
            kind.shape,
            kind.item_nbytes,
            self.gathers_at(position),
            tuple(scatters),
            kind.cast,
        )

    def gathering(self) -> list[int]:
        """Return the moves that do not take one source as it is, which nothing else takes."""
        return [at for at, position in enumerate(self.order) if position in self.gathers] if self.gathers else []

    def targets(self, at: int) -> list[tuple[int, int]]:
        """Return the file and the first byte of every part of a move."""
        places = self.places
        return [(places.files[place], places.offsets[place]) for place in places.of(self.order[at])]

    def source(self, at: int) -> tuple[int, int] | None:
        """Return the file and the first byte of the source of a move that takes one as it is; None if it does not."""
        position = self.order[at]
        return None if position in self.gathers else (self.files[position], self.offsets[position])

    def form(self, at: int) -> tuple[Kind, bytes]:
        """Return what moves that take equal sources and divide them alike have in common."""
        position = self.order[at]
        begin, end = self.places.starts[position : position + 2]
        return self.kinds[position], self.places.ranks[begin:end].tobytes()

    @property
    def digest(self) -> str:
        """A hash of all of it, but for what tensors of equal name, shape and place are gathered from."""
        hasher = xxhash.xxh3_128(msgspec.json.encode(self.names))
        different = {id(kind): kind for kind in self.kinds}
        hasher.update(msgspec.json.encode([(kind.shape, kind.item_nbytes, kind.cast) for kind in different.values()]))
        numbers = {key: number for number, key in enumerate(different)}
        hasher.update(array("I", [numbers[id(kind)] for kind in self.kinds]).tobytes())
        places = self.places
        for column in (self.files, self.offsets, places.starts, places.files, places.offsets, places.ranks):
            hasher.update(column.tobytes())
        return hasher.hexdigest()

    def gathers_at(self, position: int) -> tuple[Gather, ...]:
        """Return what the tensor at a position is gathered from."""
        if position in self.gathers:
            return self.gathers[position]
        kind = self.kinds[position]
        source = Input(self.names[position], self.files[position], self.offsets[position], *kind.source)
        return (Gather(source, kind.links),)


def targets_of(moves: Sequence[Move]) -> Iterator[list[tuple[int, int]]]:
    """Yield the file and the first byte of every part, for every move."""
    if isinstance(moves, MoveTable):
        yield from map(moves.targets, range(len(moves)))
        return
    for move in moves:
        yield [(scatter.file, scatter.offset) for scatter in move.scatters]


def gathers_of(moves: Sequence[Move], at: int) -> tuple[Gather, ...]:
    """Return the gathers of a move."""
    return moves.gathers_at(moves.order[at]) if isinstance(moves, MoveTable) else moves[at].gathers


def part_runs(tensor: Tensor, rank: int) -> tuple[Runs, ...]:
    """Return, for every dimension, the runs from a whole tensor into a rank's part, in atoms."""
    if tensor.placement.cuts and (runs := dim_runs(tensor.placement, tensor.dtype, tensor.shape, rank)) is not None:
        return runs
    return whole_runs(storage(tensor.dtype, tensor.shape)[0])


@lru_cache(maxsize=4096)
def whole_runs(shape: tuple[int, ...]) -> tuple[Runs, ...]:
    """Return the runs that copy every dimension as it is."""
    return tuple(whole(size) for size in shape)
