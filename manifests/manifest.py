"""The manifest: what a split is, as types, and their one encoding.

The manifest alone says what every rank holds and where each of its bytes came from. FORMAT.md beside this file states
the format for readers in other languages. There is no time, host or user in it: the same input gives the same bytes.
"""

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
import xxhash

from manifests.errors import ManifestError
from manifests.layout import Mesh
from manifests.lines import encode_in_lines
from manifests.placement import REPLICATED, Placement
from manifests.runs import Run

FORMAT = "reshard"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TILE_NBYTES = 4 << 20

Decoded = TypeVar("Decoded")

_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}.*\.safetensors")
_UNPUBLISHED = re.compile(r"\.(.+)\.partial-[0-9a-f]{12}.*")

_END = b'"}\n'
_END_NBYTES = 32 + len(_END)
"""The digest in hexadecimal and what follows it."""


class Link(msgspec.Struct, frozen=True, array_like=True):
    """How one dimension of a source runs into one dimension of a tensor.

    Attributes:
        src: Dimension of the source, or None where the source has none: it is stacked at the run's ``dst``.
        dst: Dimension of the tensor, or None where only entry ``src`` of the source's dimension is taken.
        runs: The copied entries, in atoms of the dtype.
    """

    src: int | None
    dst: int | None
    runs: tuple[Run, ...]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One source's contribution to a tensor: the product of its links. No links: the whole source as it is.

    Attributes:
        source: The source tensor's name.
        links: From its dimensions to the tensor's.
        shape: What the links take for its shape, of as many elements; its own if empty.
    """

    source: str
    links: tuple[Link, ...] = ()
    shape: tuple[int, ...] = ()


class Tensor(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tensor of the running model.

    Attributes:
        dtype: As in the safetensors header.
        shape: The whole tensor's shape, in elements.
        placement: How it is divided.
        parts: Where it came from; none means the whole source tensor of the same name.
        unused: Whether no rank needs it: it is kept for merging only, under its stored name, with ``.unused`` after it
            if only a part of the stored tensor is not needed.
        cast: The dtype of what it came from, if the split converted it; empty if it did not.
    """

    dtype: str
    shape: tuple[int, ...]
    placement: Placement = REPLICATED
    parts: tuple[Part, ...] = ()
    unused: bool = False
    cast: str = ""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's part in one file.

    Attributes:
        offset: First byte, counted from the start of the file's data.
        nbytes: Bytes of the part.
        tiles: xxh3-128 of every 4 MiB of the part, in hexadecimal.
    """

    offset: int
    nbytes: int
    tiles: tuple[str, ...]


class SplitFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A safetensors file of the split.

    Attributes:
        name: Its name in the folder.
        owners: The ranks that open it; none for tensors that no rank needs.
        nbytes: Bytes of the whole file.
        data_offset: Where the data starts, in bytes from the start of the file.
        header: xxh3-128 of the header text, padding included.
        tensors: What it holds, in order.
    """

    name: str
    owners: tuple[int, ...]
    nbytes: int
    data_offset: int
    header: str
    tensors: dict[str, Extent]


class SourceTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the source.

    Attributes:
        dtype: As in the safetensors header.
        shape: In elements.
        offset: First byte, counted from the start of its file's data.
        tiles: xxh3-128 of every 4 MiB, taken as the split read it, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    tiles: tuple[str, ...]


class SourceFile(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A safetensors file of the source.

    Attributes:
        name: Its name relative to the source folder.
        nbytes: Bytes of the whole file.
        header: xxh3-128 of the header text.
        tensors: What it held, in order of offset.
        metadata: Its ``__metadata__``.
    """

    name: str
    nbytes: int
    header: str
    tensors: dict[str, SourceTensor]
    metadata: dict[str, str] | None = None


class Source(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checkpoint that was split.

    Attributes:
        files: Its safetensors files.
        index: The name of its index file, if it had one.
        repo: The hub id, for a checkpoint of the hub.
        revision: The hub commit.
        dropped: Stored names of tensors that were left out on request.
    """

    files: tuple[SourceFile, ...]
    index: str = ""
    repo: str = ""
    revision: str = ""
    dropped: tuple[str, ...] = ()


class Model(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The model class that the tensors are for.

    Attributes:
        library: "transformers", "diffusers", or "" for any torch module.
        type: The configuration's model type.
        architecture: The class, as ``architectures`` in the configuration names it.
    """

    library: str = ""
    type: str = ""
    architecture: str = ""


class Input(msgspec.Struct, frozen=True, array_like=True):
    """An argument of a module's forward that has entries for all ranks, of which each needs its own.

    Attributes:
        name: The argument's name.
        dim: The dimension that is divided; it has the axis once, or several times, one after the other.
        axis: The axis.
        mesh: What the axis is divided over.
    """

    name: str
    dim: int
    axis: str
    mesh: Mesh


class Module(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What happens around one module's forward.

    Attributes:
        style: The style that the plan gave it.
        before: The step on its inputs.
        after: The step on its output.
        axis: The divided axis that a step refers to: ids for mask_ids, input features for slice_input, output
            features for all_gather, experts for route_local.
        mesh: What the axis is divided over, where that is not all ranks.
        inputs: The arguments of which a rank takes its part, before all else.
    """

    style: str
    before: str = ""
    after: str = ""
    axis: str = ""
    mesh: Mesh = ()
    inputs: tuple[Input, ...] = ()


class Rule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rule of the plan, as it was applied."""

    pattern: str
    style: str
    layout: str = ""
    blocks: tuple[int, ...] = ()
    dim: int | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole split.

    Attributes:
        format: Always "reshard".
        version: Of the format.
        key: xxh3-128 of all that decides the output bytes; every file of the split carries it.
        world_size: Number of ranks.
        layout: "runtime" or "checkpoint": whose names and layout the tensors have.
        model: The class that they are for.
        source: The checkpoint that was split.
        plan: The rules that applied.
        sizes: The numbers that layouts were bound with.
        tensors: Every tensor, by its name in the layout.
        files: Every safetensors file.
        ties: Parameters that are another one: name to name.
        modules: What happens around the forward of modules, by module name.
        attributes: What to set on modules, the same on every rank: module name to attribute to value.
        carried: xxh3-128 of every other file that was carried over.
        digest: xxh3-128 of this manifest, encoded with an empty digest.
    """

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: int
    layout: str
    model: Model
    source: Source
    plan: tuple[Rule, ...]
    sizes: dict[str, int]
    tensors: dict[str, Tensor]
    files: tuple[SplitFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, int]]
    carried: dict[str, str]
    digest: str = ""


class _Stamp(msgspec.Struct):
    format: str = ""
    version: int = 0


def digest_of(value: Any) -> str:  # noqa: ANN401 - anything that msgspec encodes
    """Return the xxh3-128 of a value's JSON encoding, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, its digest filled in."""
    head = encode_in_lines(msgspec.structs.replace(manifest, digest="")).removesuffix(b'"}')
    return head + xxhash.xxh3_128_hexdigest(head + b'"}').encode() + _END


def decode_manifest(text: bytes, label: str = MANIFEST_NAME) -> Manifest:
    """Return the manifest that the bytes hold.

    Raises:
        ManifestError: Not a manifest, of another version, with an unknown field, or not what was written.
    """
    manifest = decode_as(Manifest, text, label)
    source = manifest.source
    read = [file.name for file in source.files]
    check_names(
        (*(file.name for file in manifest.files), *read, *manifest.carried, *filter(None, [source.index])), label
    )
    return manifest


def decode_as(kind: type[Decoded], text: bytes, label: str, part: bytes = b"") -> Decoded:
    """Return the manifest that the bytes hold, or that part of it which a type names, with ``format`` and ``version``.

    The digest is compared with the bytes themselves, so that whatever was left out was checked as well.

    Args:
        kind: The type.
        text: The bytes.
        label: How messages name them.
        part: The part of the bytes that is decoded; all of them if empty.

    Raises:
        ManifestError: As `decode_manifest`; unknown fields are what the type makes of them.
    """
    try:
        with _collector_paused():
            manifest = msgspec.json.decode(part or text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        with suppress(msgspec.MsgspecError, RecursionError):
            _check_stamp(msgspec.json.decode(text, type=_Stamp), label)
        raise ManifestError(f"{label}: not a readable manifest: {error}") from error
    _check_stamp(manifest, label)
    if not _has_its_digest(text):
        raise ManifestError(f"{label}: its content does not match its digest; it was changed")
    return manifest


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Within it, nothing looks for garbage: a large manifest is a million new objects, and none of them is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_stamp(stamp: Any, label: str) -> None:  # noqa: ANN401 - anything with a format and a version
    if stamp.format != FORMAT:
        raise ManifestError(f"{label}: not a manifest of a split")
    if stamp.version != VERSION:
        raise ManifestError(
            f"{label}: format version {stamp.version}; this reshard reads version {VERSION}; split again"
        )


def _has_its_digest(text: bytes) -> bool:
    """Tell whether a text ends with the hash of itself, encoded with an empty digest."""
    digest = text[-_END_NBYTES : -len(_END)]
    if not text.endswith(b'"digest":"' + digest + _END):
        return False
    hasher = xxhash.xxh3_128(memoryview(text)[:-_END_NBYTES])
    hasher.update(_END.removesuffix(b"\n"))
    return hasher.hexdigest().encode() == digest


def check_names(names: Iterable[str], label: str) -> None:
    """Refuse names that would lead out of the folder.

    Raises:
        ManifestError: One would.
    """
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise ManifestError(f"{label}: {name!r} is not the name of a file in its folder")


def is_split(folder: Path) -> bool:
    """Tell whether a folder holds a split, of this or another version of the format."""
    try:
        return msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=_Stamp).format == FORMAT
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a split.

    Raises:
        ManifestError: The folder holds no finished split that this version reads.
    """
    return decode_manifest(read_text(folder), str(folder / MANIFEST_NAME))


def read_text(folder: Path) -> bytes:
    """Return the bytes of a split's manifest.

    Raises:
        ManifestError: The folder has none, or it cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ManifestError(f"{folder}: {_what_it_is(folder)}") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error


def _what_it_is(folder: Path) -> str:
    """Return what a folder without a manifest is, and what would do."""
    if not folder.is_dir():
        return "no such folder; make a split with `reshard MODEL --tp N`"
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in folder.iterdir()]
    missing = "holds no manifest.json"
    if any(_RANK_FILE.match(name) for name in names):
        return f"{missing}: its copy is unfinished, or the manifest was removed; copy it again, or split again"
    if any(name.endswith(".safetensors") for name in names):
        return f"{missing}: it is a checkpoint, no split; make one with `reshard {folder} --tp N`"
    return f"{missing}: it is no split, or an unfinished one; make one with `reshard MODEL --tp N`"


def check_published(folder: Path) -> None:
    """Refuse the hidden folder in which a split is made: it can still change, or go away.

    Raises:
        ManifestError: The folder is one.
    """
    if named := _UNPUBLISHED.fullmatch(folder.resolve().name):
        raise ManifestError(
            f"{folder}: is what a run of reshard writes that has not finished, or was killed; "
            f"run its command again, and use {folder.resolve().with_name(named[1])}"
        )
