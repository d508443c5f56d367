"""A rank's shard: its tensors by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from loader.mapping import MappedFile, torch_dtype, torch_shape
from manifests.errors import LoadError
from manifests.manifest import Manifest, read_manifest
from manifests.placement import local_shape


class Shard(Mapping[str, torch.Tensor]):
    """The tensors that one rank needs, each a view made when it is asked for.

    Attributes:
        manifest: The split's manifest.
        rank: The rank.
        device: Where the tensors are.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int, device: torch.device) -> None:
        self.manifest = manifest
        self.rank = rank
        self.device = device
        mine = [file for file in manifest.files if rank in file.owners]
        files = [MappedFile(folder, file, manifest, device) for file in mine]
        self._homes = {name: file for file in files for name in file.file.tensors}
        self._names = [name for name, tensor in manifest.tensors.items() if not tensor.unused]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.manifest.tensors[name]
        shape = local_shape(tensor.placement, tensor.dtype, tensor.shape, self.rank)
        if tensor.placement.partial and self.rank != 0:
            # It is rank 0's alone: zeros here, so that the sum over the ranks counts it once.
            return torch.zeros(torch_shape(tensor.dtype, shape), dtype=torch_dtype(tensor.dtype), device=self.device)
        home = self._homes[name]
        return home.tensor(tensor.dtype, shape, home.file.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_shard(out: str | Path, rank: int, device: str | torch.device = "cpu") -> Shard:
    """Open a rank's files. No process group is needed, and on a CPU no weight is read.

    Args:
        out: The folder of the split.
        rank: The rank, from 0.
        device: Where the tensors shall be.

    Raises:
        ManifestError: The folder holds no finished split.
        LoadError: No such rank, or a file is not the one that was written.
    """
    folder = Path(out)
    manifest = read_manifest(folder)
    if not 0 <= rank < manifest.world_size:
        raise LoadError(f"{folder}: was split for {manifest.world_size} ranks; there is no rank {rank}")
    return Shard(folder, manifest, rank, torch.device(device))
