"""The files of a split: which tensors go into which file, and at which offsets.

Every tensor of at least 64 bytes and a multiple of 64 lies on a multiple of 64 bytes, every other on its item size, and
there are no holes: tensors whose bytes are a multiple of 64 come first, in the natural order of their names, then the
others, widest item first. The data starts at a multiple of 4096.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from manifests.belonging import belonging
from manifests.dtypes import atom, nbytes
from manifests.header import DATA_ALIGNMENT, StoredTensor, encode_header
from manifests.manifest import Tensor
from manifests.natural import natural_key
from manifests.placement import counts, local_shape

ALIGNMENT = 64
COMMON_NAME = "common.safetensors"
UNUSED_NAME = "unused.safetensors"


class Shard(NamedTuple):
    """One rank's part of one tensor, on its way into a file. ``rank`` is any of the ranks that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return nbytes(self.dtype, self.shape)


class PlannedFile(NamedTuple):
    """A file before it is written; ``tensors`` in order, with offsets from the start of the data."""

    name: str
    owners: tuple[int, ...]
    shards: tuple[Shard, ...]
    header: bytes
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        last = next(reversed(self.tensors.values()), None)
        return len(self.header) + (last.end if last else 0)


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
    ranks: list[list[Shard]] = [[] for _ in range(world_size)]
    common: list[Shard] = []
    unused: list[Shard] = []
    for name in sorted(tensors, key=natural_key):
        tensor = tensors[name]
        whole = Shard(name, tensor.dtype, tensor.shape, 0)
        if tensor.unused:
            unused.append(whole)
        elif tensor.placement.cuts or tensor.placement.partial or options.self_contained:
            for rank in range(world_size):
                if options.self_contained or counts(tensor.placement, rank):
                    shape = local_shape(tensor.placement, tensor.dtype, tensor.shape, rank)
                    ranks[rank].append(Shard(name, tensor.dtype, shape, rank))
        else:
            common.append(whole)
    limit = options.max_file_nbytes
    files: list[PlannedFile] = []
    for rank, shards in enumerate(ranks):
        files += _build_files(rank_name(rank, world_size), (rank,), shards, world_size, key, limit, keep_empty=True)
    files += _build_files(COMMON_NAME, tuple(range(world_size)), common, world_size, key, limit)
    files += _build_files(UNUSED_NAME, (), unused, world_size, key, limit)
    return tuple(files)


def _build_files(
    name: str,
    owners: tuple[int, ...],
    shards: list[Shard],
    world_size: int,
    key: str,
    limit: int,
    *,
    keep_empty: bool = False,
) -> Iterator[PlannedFile]:
    """Yield the files of a kind; the shards come in the natural order of their names."""
    if not shards and not keep_empty:
        return
    groups = _group(shards, limit)
    for position, group in enumerate(groups):
        stem = name.removesuffix(".safetensors")
        part = name if len(groups) == 1 else f"{stem}-part-{position + 1:05d}-of-{len(groups):05d}.safetensors"
        yield build_file(part, owners, group, belonging(key, world_size, owners))


def _group(shards: list[Shard], limit: int) -> list[list[Shard]]:
    groups: list[list[Shard]] = [[]]
    filled = 0
    if not limit:
        return [shards]
    for shard in shards:
        if groups[-1] and filled + shard.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(shard)
        filled += shard.nbytes
    return groups


def build_file(name: str, owners: tuple[int, ...], shards: list[Shard], metadata: Mapping[str, str]) -> PlannedFile:
    """Return the file that holds the shards, which come in the natural order of their names, in aligned order."""
    ordered = tuple(sorted(shards, key=_file_order))
    stored: dict[str, StoredTensor] = {}
    offset = 0
    for shard in ordered:
        end = offset + shard.nbytes
        stored[shard.name] = StoredTensor(shard.dtype, shard.shape, offset, end)
        offset = end
    return PlannedFile(name, owners, ordered, encode_header(stored, metadata, DATA_ALIGNMENT), stored)


def _file_order(shard: Shard) -> int:
    """Return what sorts the aligned first, then the widest items."""
    if shard.nbytes % ALIGNMENT == 0:
        return -ALIGNMENT
    item_nbytes = atom(shard.dtype)[1]
    return -(item_nbytes & -item_nbytes)
