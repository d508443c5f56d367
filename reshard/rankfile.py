"""The files of a split: which tensors go into which file, and at which offsets.

Every tensor of at least 64 bytes and a multiple of 64 lies on a multiple of 64 bytes, every other on its item size, and
there are no holes: tensors whose bytes are a multiple of 64 come first, in the natural order of their names, then the
others, widest item first. The data starts at a multiple of 4096.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import xxhash

from manifests.belonging import belonging
from manifests.dtypes import atom, nbytes
from manifests.header import DATA_ALIGNMENT, StoredTensor, encode_columns
from manifests.manifest import Tensor
from manifests.natural import natural_order
from manifests.placement import counts, local_shape
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


class PlannedFile(NamedTuple):
    """A file before it is written.

    Attributes:
        name: Its name.
        owners: The ranks that open it.
        metadata: The ``__metadata__`` of its header.
        data_offset: Where its data starts, in bytes from its start.
        digest: xxh3-128 of the header's text.
        names: The tensors that it holds parts of, in order.
        shards: The parts.
        ends: Where each ends, in bytes from the start of the data.
    """

    name: str
    owners: tuple[int, ...]
    metadata: Mapping[str, str]
    data_offset: int
    digest: str
    names: Sequence[str]
    shards: Sequence[Shard]
    ends: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.data_nbytes

    def encode(self) -> bytes:
        """Return all bytes before its data, which are many and needed once."""
        return _encode(self.names, self.shards, self.ends, self.metadata)

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
    ranks = [_Group([], []) for _ in range(world_size)]
    common, unused = _Group([], []), _Group([], [])
    known: dict[int, list[tuple[_Group, Shard]]] = {}
    for name in natural_order(tensors):
        tensor = tensors[name]
        homes = known.get(id(tensor))
        if homes is None:
            homes = known[id(tensor)] = []
            if tensor.unused:
                homes.append((unused, _shard(tensor, 0)))
            elif tensor.placement.cuts or tensor.placement.partial or options.self_contained:
                homes += [
                    (ranks[rank], _shard(tensor, rank))
                    for rank in range(world_size)
                    if options.self_contained or counts(tensor.placement, rank)
                ]
            else:
                homes.append((common, _shard(tensor, 0)))
        for group, shard in homes:
            group.names.append(name)
            group.shards.append(shard)
    limit = options.max_file_nbytes
    files: list[PlannedFile] = []
    for rank, group in enumerate(ranks):
        files += _build_files(rank_name(rank, world_size), (rank,), group, world_size, key, limit, keep_empty=True)
    files += _build_files(COMMON_NAME, tuple(range(world_size)), common, world_size, key, limit)
    files += _build_files(UNUSED_NAME, (), unused, world_size, key, limit)
    return tuple(files)


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
        yield build_file(part, owners, group.names[begin:end], group.shards[begin:end], metadata)


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
    ends = array("Q", accumulate([shard.nbytes for shard in shards]))
    header = _encode(names, shards, ends, metadata)
    digest = xxhash.xxh3_128_hexdigest(memoryview(header)[8:])
    return PlannedFile(name, owners, metadata, len(header), digest, names, shards, ends)


def _encode(names: Sequence[str], shards: Sequence[Shard], ends: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    types = ((shard.dtype, shard.shape) for shard in shards)
    return encode_columns(names, types, ends, metadata, DATA_ALIGNMENT)
