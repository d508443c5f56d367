"""What a loader needs of a manifest: the same file, decoded without its sources.

The manifest of a large model is mostly where its bytes came from, and the tiles of other ranks. Neither is made into
objects here; the digest still covers them.
"""

from pathlib import Path

import msgspec

from manifests.checking import check_extents, check_runtime
from manifests.columns import Extents
from manifests.contents import FORMAT, VERSION, Model, Module, PerRank, Tensor
from manifests.errors import ManifestError
from manifests.manifest import MANIFEST_NAME, check_published, decode_as, read_text
from manifests.runs import Count, Positive
from manifests.wire import ExtentTable, TensorTable, outline


class RuntimeFile(msgspec.Struct, frozen=True):
    """A safetensors file of the split: `manifests.contents.SplitFile`, its tensors not decoded yet."""

    name: str
    owners: tuple[Count, ...]
    nbytes: Count
    data_offset: Count
    header: str
    tensors: msgspec.Raw


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`RuntimeManifest`, as it is in the file."""

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: Positive
    layout: str
    model: Model
    tensors: TensorTable
    files: tuple[RuntimeFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, PerRank]]
    carried: dict[str, str]
    digest: str = ""


class RuntimeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A split, as a loader sees it: fields of `manifests.contents.Manifest`; tensors have no parts.

    Attributes:
        label: How messages name the manifest.
        lines: The lines of the manifest that are not decoded yet.
    """

    format: str
    version: int
    key: str
    world_size: int
    layout: str
    model: Model
    tensors: dict[str, Tensor]
    files: tuple[RuntimeFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, PerRank]]
    carried: dict[str, str]
    digest: str
    label: str
    lines: tuple[memoryview, ...]

    def extents(self, file: RuntimeFile) -> Extents:
        """Return what a file holds, in order.

        Raises:
            ManifestError: What the manifest says of it is not readable, or does not fit the rest.
        """
        held = bytes(file.tensors)
        try:
            text = self.lines[int(held)] if held.isdigit() else held
            extents = msgspec.json.decode(text, type=ExtentTable).expand()
        except (ValueError, IndexError, RecursionError, ManifestError) as error:  # msgspec's errors are values' errors
            raise ManifestError(f"{self.label}: {file.name}: its tensors are not readable: {error}") from error
        try:
            check_extents(extents, file, self.tensors)
        except ManifestError as error:
            raise ManifestError(f"{self.label}: {error}") from error
        return extents


def read_runtime(folder: Path) -> RuntimeManifest:
    """Read what a loader needs of a split's manifest.

    Raises:
        ManifestError: The folder holds no finished split that this version reads.
    """
    check_published(folder)
    label, text = str(folder / MANIFEST_NAME), read_text(folder)
    short, lines = outline(text)
    wire = decode_as(_Manifest, text, label, short)
    members = {name: getattr(wire, name) for name in wire.__struct_fields__ if name != "tensors"}
    try:
        manifest = RuntimeManifest(**members, tensors=wire.tensors.expand({}), label=label, lines=tuple(lines))
        check_runtime(manifest)
    except ManifestError as error:
        raise ManifestError(f"{label}: {error}") from error
    return manifest
