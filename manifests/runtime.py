"""What a loader needs of a manifest: the same file, decoded without its sources.

The manifest of a large model is mostly where its bytes came from, and the tiles of other ranks. Neither is made into
objects here; the digest still covers them.
"""

from pathlib import Path

import msgspec

from manifests.checking import check_extents, check_runtime
from manifests.errors import ManifestError
from manifests.lines import outline
from manifests.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Extent,
    Model,
    Module,
    decode_as,
    read_text,
)
from manifests.placement import REPLICATED, Placement
from manifests.runs import Count, Positive


class RuntimeTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of the running model: `manifests.manifest.Tensor` without its parts."""

    dtype: str
    shape: tuple[Count, ...]
    placement: Placement = REPLICATED
    unused: bool = False


class RuntimeFile(msgspec.Struct, frozen=True):
    """A safetensors file of the split: `manifests.manifest.SplitFile`, its tensors not decoded yet."""

    name: str
    owners: tuple[Count, ...]
    nbytes: Count
    data_offset: Count
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
    world_size: Positive
    layout: str
    model: Model
    tensors: dict[str, RuntimeTensor]
    files: tuple[RuntimeFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, int]]
    carried: dict[str, str]
    lines: tuple[memoryview, ...] = ()

    def extents(self, file: RuntimeFile) -> dict[str, Extent]:
        """Return what a file holds, in order.

        Raises:
            ManifestError: What the manifest says of it does not fit the rest.
        """
        held = bytes(file.tensors)
        try:
            text = self.lines[int(held)] if held.isdigit() else held
            extents = msgspec.json.decode(text, type=dict[str, Extent])
        except (ValueError, IndexError, RecursionError) as error:  # msgspec's errors are values' errors
            raise ManifestError(f"{MANIFEST_NAME}: {file.name}: its tensors are not readable: {error}") from error
        check_extents(extents, file, self.tensors, MANIFEST_NAME)
        return extents


def read_runtime(folder: Path) -> RuntimeManifest:
    """Read what a loader needs of a split's manifest.

    Raises:
        ManifestError: The folder holds no finished split that this version reads.
    """
    label, text = str(folder / MANIFEST_NAME), read_text(folder)
    short, lines = outline(text)
    manifest = decode_as(RuntimeManifest, text, label, short)
    check_runtime(manifest, label)
    return msgspec.structs.replace(manifest, lines=tuple(lines))
