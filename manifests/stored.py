"""The tensors of a safetensors file as its header has them: in columns, since there may be 100,000."""

from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import NamedTuple

Type = tuple[str, tuple[int, ...]]
"""A dtype, as the header has it, and a shape in elements."""


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file; ``begin`` and ``end`` are bytes counted from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


class StoredTensors(Mapping[str, StoredTensor]):
    """Tensors by name, in the order of the header; each is made when it is asked for.

    Attributes:
        names: Their names, no two alike.
        types: Their dtypes and shapes; equal ones are one object.
        begins: Where each begins, in bytes from the start of the data.
        ends: Where each ends.
    """

    def __init__(self, names: Sequence[str], types: Sequence[Type], begins: Iterable[int], ends: Iterable[int]) -> None:
        self.names = names
        self.types = types
        self.begins = array("Q", begins)
        self.ends = array("Q", ends)

    @staticmethod
    def of(tensors: Mapping[str, StoredTensor]) -> "StoredTensors":
        """Return tensors in columns."""
        if isinstance(tensors, StoredTensors):
            return tensors
        rows = tensors.values()
        known: dict[Type, Type] = {}
        types = [known.setdefault(kind, kind) for kind in ((row.dtype, row.shape) for row in rows)]
        return StoredTensors(list(tensors), types, [row.begin for row in rows], [row.end for row in rows])

    @cached_property
    def _places(self) -> dict[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def at(self, place: int) -> StoredTensor:
        """Return the tensor at a place in the columns."""
        return StoredTensor(*self.types[place], self.begins[place], self.ends[place])

    def __getitem__(self, name: str) -> StoredTensor:
        return self.at(self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(self.made())

    def made(self) -> dict[str, StoredTensor]:
        """Return all of them, made."""
        types = self.types
        rows = zip([kind[0] for kind in types], [kind[1] for kind in types], self.begins, self.ends, strict=True)
        return dict(zip(self.names, map(StoredTensor._make, rows), strict=True))

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return all of them with their names."""
        return self.made().items()

    def values(self) -> ValuesView[StoredTensor]:
        """Return all of them."""
        return self.made().values()
