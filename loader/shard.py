"""A rank's shard: its tensors by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from loader.dtypes import torch_dtype, torch_shape
from loader.files import Opening, ShardFile
from loader.filling import filled
from loader.ways import Check, Way, choose_check, choose_way
from manifests.dtypes import nbytes
from manifests.errors import LoadError, ManifestError
from manifests.manifest import Manifest
from manifests.placement import counts, local_shape
from manifests.runtime import RuntimeManifest, read_runtime
from manifests.uses import note_use

AnyManifest = Manifest | RuntimeManifest
"""A manifest, or what a loader needs of one."""


class Shard(Mapping[str, torch.Tensor]):
    """The tensors that one rank needs, each a view made when it is asked for, or a copy if it is filled up with zeros.

    Attributes:
        manifest: What a loader needs of the split's manifest.
        rank: The rank.
        device: Where the tensors are.
    """

    manifest: AnyManifest

    def __init__(self, manifest: RuntimeManifest, rank: int, device: torch.device, opening: Opening) -> None:
        self.manifest = manifest
        self.rank = rank
        self.device = device
        self._opening = opening
        self._homes: dict[str, ShardFile] = {}
        try:
            for file in manifest.files:
                if rank in file.owners:
                    opened = opening.open(file)
                    self._homes |= dict.fromkeys(opened.extents, opened)
            self._names = [name for name, tensor in manifest.tensors.items() if not tensor.unused]
            self._check_homes()
        except BaseException:
            opening.stop()
            raise

    def _check_homes(self) -> None:
        """Refuse a manifest in which a tensor is in none of the rank's files, or has another size there."""
        for name in self._names:
            tensor = self.manifest.tensors[name]
            if not counts(tensor.placement, self.rank):
                continue
            expected = nbytes(tensor.dtype, local_shape(tensor.placement, tensor.dtype, tensor.shape, self.rank))
            held = self._homes[name].extents[name].nbytes if name in self._homes else None
            if held != expected:
                where = "in none of its files" if held is None else f"{held} bytes, {expected} expected"
                raise ManifestError(f"manifest.json: {name}: for rank {self.rank} {where}; split again")

    def finish(self) -> None:
        """Wait until all tensors are there; see `begin_shard`.

        Raises:
            LoadError: A file is not the one that was written.
        """
        self._opening.finish()

    def stop(self) -> None:
        """Give up what is being read; the tensors cannot be used then."""
        self._opening.stop()

    def give_up(self, error: LoadError) -> None:
        """Let `finish` raise an error soon, whatever is still to be read; for another thread."""
        self._opening.give_up(error)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.manifest.tensors[name]
        shape = local_shape(tensor.placement, tensor.dtype, tensor.shape, self.rank)
        if not counts(tensor.placement, self.rank):
            # It is another rank's alone: zeros here, so that the sum over the ranks counts it once.
            zeros = torch.zeros(torch_shape(tensor.dtype, shape), dtype=torch_dtype(tensor.dtype), device=self.device)
            return filled(zeros, tensor, self.rank)
        return filled(self._homes[name].tensor(name, tensor.dtype, shape), tensor, self.rank)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_shard(
    out: str | Path,
    rank: int,
    device: str | torch.device = "cpu",
    *,
    read: Way = "auto",
    verify: Check = "auto",
) -> Shard:
    """Open a rank's files. No process group is needed.

    Args:
        out: The folder of the split.
        rank: The rank, from 0.
        device: Where the tensors shall be.
        read: "mmap" maps the files, and reads no weight before it is used; "read" reads them into memory, one
            allocation for each; "auto" maps what is local and stays on the CPU (`loader.ways`).
        verify: "headers" compares sizes and headers, "full" the hash of every tile before a tensor is given out;
            "auto" compares the hashes of what is read, and the headers of what is mapped.

    Raises:
        ManifestError: The folder holds no finished split.
        LoadError: No such rank, or a file is not the one that was written.
    """
    folder = Path(out)
    manifest = read_runtime(folder)
    shard = begin_shard(folder, manifest, rank, torch.device(device), read, verify)
    shard.finish()
    return shard


def begin_shard(
    folder: Path, manifest: RuntimeManifest, rank: int, device: torch.device, read: Way, verify: Check
) -> Shard:
    """Open a rank's files, and go on while they are read; `Shard.finish` waits for it.

    Raises:
        LoadError: No such rank, or the size or header of a file is not that of the one that was written.
    """
    if not 0 <= rank < manifest.world_size:
        raise LoadError(f"{folder}: was split for {manifest.world_size} ranks; there is no rank {rank}")
    note_use(folder)
    way = choose_way(read, folder, device)
    return Shard(manifest, rank, device, Opening(folder, manifest, device, way, choose_check(verify, way)))
