"""Columns: the tensors of one file, as a list for each property instead of an object for each tensor.

A large checkpoint has 100,000 tensors, and most readers of a manifest ask for few of them: an entry is made when it is
asked for. Tensors follow each other without holes, so that their bytes say where each begins, and how many hashes of
the common text are its own.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import msgspec

from manifests.dtypes import BITS, nbytes
from manifests.errors import ManifestError

TILE_NBYTES = 4 << 20
HASH_LENGTH = 32
"""Hexadecimal digits of a hash."""

Row = TypeVar("Row")
Value = TypeVar("Value")


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A tensor's part in one file.

    Attributes:
        offset: First byte, counted from the start of the file's data.
        nbytes: Bytes of the part.
        tiles: xxh3-128 of every 4 MiB of the part, in hexadecimal.
    """

    offset: int
    nbytes: int
    tiles: tuple[str, ...]


class SourceTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of the source.

    Attributes:
        dtype: As in the safetensors header.
        shape: In elements.
        offset: First byte, counted from the start of its file's data.
        tiles: xxh3-128 of every 4 MiB, taken as the split read it, in hexadecimal; none if it was not read.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    tiles: tuple[str, ...]


class Columns(Mapping[str, Row]):
    """The tensors of a file, in the order of their bytes.

    Attributes:
        names: Their names.
        tiles: The hashes of all of them, one after another.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], tiles: str, unread: Collection[str] = ()) -> None:
        if len(names) != len(sizes):
            raise ManifestError(f"the tensors of a file: {len(names)} names, but {len(sizes)} sizes")
        self.names = names
        self.tiles = tiles
        self._sizes = sizes
        self._unread = set(unread).intersection(names) if unread else set()
        if sum(sizes) >= 1 << 63:
            raise ManifestError("the tensors of a file: their bytes are more than can be addressed")
        counts = {size: -(-size // TILE_NBYTES) for size in set(sizes)}
        expected = sum(map(counts.__getitem__, sizes))
        expected -= sum(counts[sizes[self._places[name]]] for name in self._unread)
        if len(tiles) != HASH_LENGTH * expected:
            raise ManifestError(
                f"the tensors of a file: hashes of {len(tiles)} digits, {HASH_LENGTH * expected} expected"
            )

    @cached_property
    def _places(self) -> dict[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def _begins(self) -> "array[int]":
        return array("Q", accumulate(self._sizes, initial=0))

    @cached_property
    def _tiles_begin(self) -> "array[int]":
        counts = (
            0 if name in self._unread else -(-size // TILE_NBYTES)
            for name, size in zip(self.names, self._sizes, strict=True)
        )
        return array("Q", accumulate(counts, initial=0))

    def _at(self, name: str) -> tuple[int, int, tuple[str, ...]]:
        """Return where a tensor stands, where it begins, and its hashes."""
        place = self._places[name]
        first, last = self._tiles_begin[place : place + 2]
        digits = range(first * HASH_LENGTH, last * HASH_LENGTH, HASH_LENGTH)
        return place, self._begins[place], tuple(self.tiles[at : at + HASH_LENGTH] for at in digits)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class Extents(Columns[Extent]):
    """What a file of the split holds.

    Args:
        names: The tensors' names.
        sizes: The bytes of every part.
        tiles: All hashes.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], tiles: str) -> None:
        super().__init__(names, sizes, tiles)
        self.sizes = sizes

    def __getitem__(self, name: str) -> Extent:
        place, begin, tiles = self._at(name)
        return Extent(begin, self.sizes[place], tiles)

    @staticmethod
    def of(extents: Mapping[str, Extent]) -> "Extents":
        """Return extents, which follow each other without holes, as columns."""
        if isinstance(extents, Extents):
            return extents
        rows = extents.values()
        return Extents(list(extents), [row.nbytes for row in rows], "".join(tile for row in rows for tile in row.tiles))


class SourceTensors(Columns[SourceTensor]):
    """What a file of the source held.

    Args:
        names: The tensors' names.
        types: The different dtypes with their shapes.
        kinds: Which of them each tensor has.
        tiles: All hashes.
        dropped: Names of tensors without hashes, since the split left them out.
    """

    def __init__(
        self,
        names: Sequence[str],
        types: Sequence[tuple[str, tuple[int, ...]]],
        kinds: Sequence[int],
        tiles: str,
        dropped: Collection[str] = (),
    ) -> None:
        if unknown := [dtype for dtype, _ in types if dtype not in BITS]:
            raise ManifestError(f"the tensors of a file: the dtype {unknown[0]!r} is not known")
        super().__init__(names, pick([nbytes(*kind) for kind in types], kinds), tiles, dropped)
        self.types = types
        self.kinds = kinds

    def __getitem__(self, name: str) -> SourceTensor:
        place, begin, tiles = self._at(name)
        return SourceTensor(*self.types[self.kinds[place]], begin, tiles)

    @staticmethod
    def of(tensors: Mapping[str, SourceTensor], dropped: Collection[str] = ()) -> "SourceTensors":
        """Return tensors, which follow each other without holes, as columns."""
        if isinstance(tensors, SourceTensors):
            return tensors
        types = Numbers[tuple[str, tuple[int, ...]]]()
        kinds = [types[row.dtype, row.shape] for row in tensors.values()]
        tiles = "".join(tile for row in tensors.values() for tile in row.tiles)
        return SourceTensors(list(tensors), list(types), kinds, tiles, dropped)


class Numbers(dict[Value, int]):
    """Numbers different values in the order in which they are asked for.

    >>> numbers = Numbers[str]()
    >>> [numbers[value] for value in "abac"], list(numbers)
    ([0, 1, 0, 2], ['a', 'b', 'c'])
    """

    def __missing__(self, value: Value) -> int:
        number = self[value] = len(self)
        return number


def pick(values: Sequence[Value], numbers: Iterable[int]) -> list[Value]:
    """Return the values at the numbers, which are not negative.

    Raises:
        ManifestError: There are not so many values.
    """
    try:
        return [values[number] for number in numbers]
    except IndexError as error:
        raise ManifestError(f"a number is none of the {len(values)} values of its table") from error
