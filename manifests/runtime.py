"""What a loader needs of a manifest: the same file, decoded without its sources.

The manifest of a large model is mostly where its bytes came from, and the tiles of other ranks. Neither is made into
objects here; the digest still covers them.
"""

from pathlib import Path

import msgspec

from manifests.lines import outline
from manifests.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Extent,
    Model,
    Module,
    check_names,
    check_published,
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


class RuntimeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A split, as a loader sees it: fields of `manifests.manifest.Manifest`.

    Attributes:
        lines: The lines of the manifest that are not decoded yet.
    """

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: int
    layout: str
    model: Model
    tensors: dict[str, RuntimeTensor]
    files: tuple[RuntimeFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, int]]
    carried: dict[str, str]
    digest: str = ""
    lines: tuple[memoryview, ...] = ()

    def extents(self, file: RuntimeFile) -> dict[str, Extent]:
        """Return what a file holds, in order."""
        held = bytes(file.tensors)
        text = self.lines[int(held)] if held.isdigit() else held
        return msgspec.json.decode(text, type=dict[str, Extent])


def read_runtime(folder: Path) -> RuntimeManifest:
    """Read what a loader needs of a split's manifest.

    Raises:
        ManifestError: The folder holds no finished split that this version reads.
    """
    check_published(folder)
    label, text = str(folder / MANIFEST_NAME), read_text(folder)
    short, lines = outline(text)
    manifest = decode_as(RuntimeManifest, text, label, short)
    check_names((*(file.name for file in manifest.files), *manifest.carried), label)
    return msgspec.structs.replace(manifest, lines=tuple(lines))
