"""The files of a split: which tensors go into which file, and at which offsets.

Every tensor of at least 64 bytes and a multiple of 64 lies on a multiple of 64 bytes, every other on its item size, and
there are no holes: tensors whose bytes are a multiple of 64 come first, in the natural order of their names, then the
others, widest item first. The data starts at a multiple of 4096.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, pairwise
from typing import NamedTuple

import xxhash

from manifests.belonging import belonging
from manifests.columns import Numbers
from manifests.dtypes import atom, nbytes
from manifests.errors import ReshardError
from manifests.header import DATA_ALIGNMENT, StoredTensor, encoded_text, text_nbytes
from manifests.manifest import Tensor
from manifests.natural import natural_order
from manifests.placement import counts, local_shape
from manifests.stored import Type
from reshard.movetable import FilePlaces

ALIGNMENT = 64
COMMON_NAME = "common.safetensors"
UNUSED_NAME = "unused.safetensors"


class Shard(NamedTuple):
    """A rank's part of a tensor, without its name: tensors that are alike have the same one.

    Attributes:
        dtype: As in the safetensors header.
        shape: Of the part, in elements.
        nbytes: Bytes of the part.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def order(self) -> int:
        """What sorts the parts of a file: the aligned first, then the widest items."""
        if self.nbytes % ALIGNMENT == 0:
            return -ALIGNMENT
        item_nbytes = atom(self.dtype)[1]
        return -(item_nbytes & -item_nbytes)


class PlannedFile:
    """A file before it is written.

    Attributes:
        name: Its name.
        owners: The ranks that open it.
        metadata: The ``__metadata__`` of its header.
        names: The tensors that it holds parts of, in order.
        shards: The parts.
        ends: Where each ends, in bytes from the start of the data.
        data_offset: Where its data starts, in bytes from its start.
    """

    def __init__(
        self,
        name: str,
        owners: tuple[int, ...],
        metadata: Mapping[str, str],
        names: Sequence[str],
        shards: Sequence[Shard],
    ) -> None:
        self.name = name
        self.owners = owners
        self.metadata = metadata
        self.names = names
        self.shards = shards
        self.ends = array("Q", accumulate([shard.nbytes for shard in shards]))
        unpadded = 8 + text_nbytes(names, self._types(), self.ends, metadata)
        self.data_offset = unpadded + -unpadded % DATA_ALIGNMENT
        self._digest = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.data_nbytes

    def header(self) -> Iterator[bytes]:
        """Yield all bytes before its data, which are many and needed once.

        Raises:
            ReshardError: They are more or less than was planned; this is a fault of this program.
        """
        yield (self.data_offset - 8).to_bytes(8, "little")
        hasher, nbytes = xxhash.xxh3_128(), 8
        begins = array("Q", [0]) + self.ends[:-1] if self.ends else self.ends
        for piece in encoded_text(self.names, self._types(), begins, self.ends, self.metadata):
            hasher.update(piece)
            nbytes += len(piece)
            yield piece
        padding = b" " * (-nbytes % DATA_ALIGNMENT)
        if nbytes + len(padding) != self.data_offset:
            raise ReshardError(f"{self.name}: its header takes {nbytes} bytes, {self.data_offset} planned")
        hasher.update(padding)
        self._digest = hasher.hexdigest()
        yield padding

    def _types(self) -> list[Type]:
        types = {key: (shard.dtype, shard.shape) for key, shard in {id(shard): shard for shard in self.shards}.items()}
        return [*map(types.__getitem__, map(id, self.shards))]

    @property
    def digest(self) -> str:
        """xxh3-128 of the header's text; what was hashed when it was written is not hashed again."""
        if not self._digest:
            deque(self.header(), maxlen=0)
        return self._digest

    @property
    def data_nbytes(self) -> int:
        """Bytes of all parts."""
        return self.ends[-1] if self.ends else 0

    @property
    def places(self) -> FilePlaces:
        """Where the parts lie."""
        begins = chain((0,), self.ends)
        return FilePlaces(self.owners[0] if self.owners else 0, self.names, (self.data_offset + at for at in begins))

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The parts by name, their offsets counted from the start of the data."""
        begins = chain((0,), self.ends)
        return {
            name: StoredTensor(shard.dtype, shard.shape, begin, end)
            for name, shard, begin, end in zip(self.names, self.shards, begins, self.ends, strict=False)
        }


class FileOptions(NamedTuple):
    """How tensors are gathered into files.

    Attributes:
        self_contained: Whether every rank's file holds its own copy of the replicated tensors.
        max_file_nbytes: The most data bytes in one file, or 0 for no limit; a single larger tensor has its own file.
    """

    self_contained: bool = False
    max_file_nbytes: int = 0


def rank_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file.

    >>> rank_name(0, 4)
    'rank-00000-of-00004.safetensors'
    """
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def plan_files(
    tensors: Mapping[str, Tensor], world_size: int, key: str, options: FileOptions
) -> tuple[PlannedFile, ...]:
    """Return the files that hold the tensors: one a rank, then the common one, then the unused one."""
    names = natural_order(tensors)
    # Tensors that are alike are one object, and what is in the same files has one number.
    keys = [*map(id, map(tensors.__getitem__, names))]
    different = {id(tensor): tensor for tensor in tensors.values()}
    homes = {key: _homes(tensor, world_size, options) for key, tensor in different.items()}
    numbers = Numbers[frozenset[int]]()
    number_of = {key: numbers[frozenset(mine)] for key, mine in homes.items()}
    together = [*map(number_of.__getitem__, keys)]
    known: dict[frozenset[int], tuple[list[str], list[int]]] = {}
    files: list[PlannedFile] = []
    for home, (name, owners) in enumerate(_kinds_of_file(world_size)):
        held = frozenset(number for groups, number in numbers.items() if home in groups)
        if held not in known:
            chosen = [number in held for number in together]
            known[held] = [*compress(names, chosen)], [*compress(keys, chosen)]
        held_names, held_keys = known[held]
        shards = {key: mine[home] for key, mine in homes.items() if home in mine}
        group = _Group(held_names, [*map(shards.__getitem__, held_keys)])
        files += _build_files(
            name, owners, group, world_size, key, options.max_file_nbytes, keep_empty=home < world_size
        )
    return tuple(files)


def _kinds_of_file(world_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of the files, not limited in size, and their owners."""
    for rank in range(world_size):
        yield rank_name(rank, world_size), (rank,)
    yield COMMON_NAME, tuple(range(world_size))
    yield UNUSED_NAME, ()


def _homes(tensor: Tensor, world_size: int, options: FileOptions) -> dict[int, Shard]:
    """Return the parts of a tensor by the position of their file in `_kinds_of_file`."""
    common, unused = world_size, world_size + 1
    if tensor.unused:
        return {unused: _shard(tensor, 0)}
    if not (tensor.placement.cuts or tensor.placement.partial or options.self_contained):
        return {common: _shard(tensor, 0)}
    ranks = [rank for rank in range(world_size) if options.self_contained or counts(tensor.placement, rank)]
    return {rank: _shard(tensor, rank) for rank in ranks}


class _Group(NamedTuple):
    """Parts on their way into files, in the natural order of their names."""

    names: list[str]
    shards: list[Shard]


def _shard(tensor: Tensor, rank: int) -> Shard:
    """Return a rank's part; an unused tensor and a partial one, which have no cuts, are whole on any."""
    shape = local_shape(tensor.placement, tensor.dtype, tensor.shape, rank)
    return Shard(tensor.dtype, shape, nbytes(tensor.dtype, shape))


def _build_files(
    name: str,
    owners: tuple[int, ...],
    group: _Group,
    world_size: int,
    key: str,
    limit: int,
    *,
    keep_empty: bool = False,
) -> Iterator[PlannedFile]:
    """Yield the files of a kind."""
    if not group.names and not keep_empty:
        return
    bounds = _bounds(group.shards, limit)
    for position, (begin, end) in enumerate(pairwise(bounds)):
        stem = name.removesuffix(".safetensors")
        part = name if len(bounds) == 2 else f"{stem}-part-{position + 1:05d}-of-{len(bounds) - 1:05d}.safetensors"
        metadata = belonging(key, world_size, owners)
        whole = len(bounds) == 2
        names, shards = group if whole else (group.names[begin:end], group.shards[begin:end])
        yield build_file(part, owners, names, shards, metadata)


def _bounds(shards: Sequence[Shard], limit: int) -> list[int]:
    """Return where files begin among the parts, and where the last one ends."""
    bounds = [0]
    filled = 0
    for position, shard in enumerate(shards if limit else ()):
        if position > bounds[-1] and filled + shard.nbytes > limit:
            bounds.append(position)
            filled = 0
        filled += shard.nbytes
    return [*bounds, len(shards)]


def build_file(
    name: str, owners: tuple[int, ...], names: Sequence[str], shards: Sequence[Shard], metadata: Mapping[str, str]
) -> PlannedFile:
    """Return the file that holds parts, which come in the natural order of their names, in aligned order."""
    different = {id(shard): shard for shard in shards}
    orders = {key: shard.order for key, shard in different.items()}
    if len(set(orders.values())) > 1:
        order = sorted(range(len(shards)), key=lambda position: orders[id(shards[position])])
        names, shards = [names[position] for position in order], [shards[position] for position in order]
    return PlannedFile(name, owners, metadata, names, shards)
