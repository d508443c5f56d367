"""What a loader needs of a manifest: the same file, decoded without its sources.

The manifest of a large model is mostly where its bytes came from, and the tiles of other ranks. Neither is made into
objects here; the digest still covers them.
"""

from pathlib import Path

import msgspec

from manifests.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Extent,
    Model,
    Module,
    check_names,
    decode_as,
    read_text,
)
from manifests.placement import REPLICATED, Placement


class RuntimeTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of the running model: `manifests.manifest.Tensor` without its parts."""

    dtype: str
    shape: tuple[int, ...]
    placement: Placement = REPLICATED
    unused: bool = False


class RuntimeFile(msgspec.Struct, frozen=True):
    """A safetensors file of the split: `manifests.manifest.SplitFile`, its tensors not decoded yet."""

    name: str
    owners: tuple[int, ...]
    nbytes: int
    data_offset: int
    header: str
    tensors: msgspec.Raw

    def extents(self) -> dict[str, Extent]:
        """Return what the file holds, in order."""
        return msgspec.json.decode(self.tensors, type=dict[str, Extent])


class RuntimeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A split, as a loader sees it: fields of `manifests.manifest.Manifest`."""

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: int
    model: Model
    tensors: dict[str, RuntimeTensor]
    files: tuple[RuntimeFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, int]]
    carried: dict[str, str]


def read_runtime(folder: Path) -> RuntimeManifest:
    """Read what a loader needs of a split's manifest.

    Raises:
        ManifestError: The folder holds no finished split that this version reads.
    """
    label = str(folder / MANIFEST_NAME)
    manifest = decode_as(RuntimeManifest, read_text(folder), label)
    check_names((*(file.name for file in manifest.files), *manifest.carried), label)
    return manifest
