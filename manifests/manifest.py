"""The manifest: what a split is (`manifests.contents`), in its one encoding (`manifests.wire`).

The manifest alone says what every rank holds and where each of its bytes came from. FORMAT.md beside this file states
the format for readers in other languages. There is no time, host or user in it: the same input gives the same bytes.
"""

import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from manifests.checking import check_manifest
from manifests.columns import TILE_NBYTES as TILE_NBYTES
from manifests.columns import Extent as Extent
from manifests.columns import Extents as Extents
from manifests.columns import SourceTensor as SourceTensor
from manifests.contents import FORMAT, VERSION
from manifests.contents import Input as Input
from manifests.contents import Link as Link
from manifests.contents import Manifest as Manifest
from manifests.contents import Model as Model
from manifests.contents import Module as Module
from manifests.contents import Part as Part
from manifests.contents import PerRank as PerRank
from manifests.contents import Rule as Rule
from manifests.contents import Source as Source
from manifests.contents import SourceFile as SourceFile
from manifests.contents import SplitFile as SplitFile
from manifests.contents import Tensor as Tensor
from manifests.errors import ManifestError
from manifests.opening import read_file
from manifests.runs import Count, Positive
from manifests.wire import ExtentTable, PartTable, TensorTable, WireSource

MANIFEST_NAME = "manifest.json"

Decoded = TypeVar("Decoded")

_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}.*\.safetensors")
_UNPUBLISHED = re.compile(r"\.(.+)\.partial-[0-9a-f]{12}.*")

_END = b'"}\n'
_END_NBYTES = 32 + len(_END)
"""The digest in hexadecimal and what follows it."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`SplitFile`."""

    name: str
    owners: tuple[Count, ...]
    nbytes: Count
    data_offset: Count
    header: str
    tensors: ExtentTable


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`Manifest`, whose members come in this order."""

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: Positive
    layout: str
    model: Model
    source: WireSource
    plan: tuple[Rule, ...]
    sizes: dict[str, int]
    tensors: TensorTable
    parts: PartTable
    files: tuple[_File, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, PerRank]]
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
    return b"".join(encoded(manifest))


def encoded(manifest: Manifest) -> Iterator[bytes]:
    """Yield the bytes of ``manifest.json`` piece by piece, its digest at the end: a large one is in no memory whole."""
    hasher = xxhash.xxh3_128()
    for piece in _pieces(manifest):
        hasher.update(piece)
        yield piece
    hasher.update(b'"}')
    yield hasher.hexdigest().encode() + _END


def _pieces(manifest: Manifest) -> Iterator[bytes]:
    """Yield all but the digest and what follows it."""
    before = b"{"
    for name in _Manifest.__struct_fields__:
        yield before + msgspec.json.encode(name) + b":"
        before = b","
        if name == "source":
            yield from _on_a_line(WireSource.of(manifest.source))
        elif name == "tensors":
            yield msgspec.json.encode(TensorTable.of(manifest.tensors))
        elif name == "parts":
            stored = chain.from_iterable(file.tensors for file in manifest.source.files)
            yield from _on_a_line(PartTable.of(manifest.tensors, stored))
        elif name == "files":
            yield from _files(manifest.files)
        else:
            yield b'"' if name == "digest" else msgspec.json.encode(getattr(manifest, name))


def _files(files: Iterable[SplitFile]) -> Iterator[bytes]:
    before = b"["
    for file in files:
        rest = {name: getattr(file, name) for name in file.__struct_fields__ if name != "tensors"}
        yield before + msgspec.json.encode(rest).removesuffix(b"}") + b',"tensors":'
        yield from _on_a_line(ExtentTable.of(Extents.of(file.tensors)))
        before = b"},"
    yield b"[]" if before == b"[" else b"}]"


def _on_a_line(value: object) -> Iterator[bytes]:
    yield b"\n"
    yield msgspec.json.encode(value)
    yield b"\n"


def decode_manifest(text: bytes, label: str = MANIFEST_NAME) -> Manifest:
    """Return the manifest that the bytes hold.

    Raises:
        ManifestError: Not a manifest, of another version, with an unknown field, or not what was written.
    """
    wire = decode_as(_Manifest, text, label)
    try:
        return _expanded(wire)
    except ManifestError as error:
        raise ManifestError(f"{label}: {error}") from error


def _expanded(wire: _Manifest) -> Manifest:
    members = {name: getattr(wire, name) for name in wire.__struct_fields__}
    stored = [*chain.from_iterable(file.tensors.names for file in wire.source.files)]
    manifest = Manifest(
        **{name: value for name, value in members.items() if name not in ("source", "tensors", "parts", "files")},
        source=wire.source.expand(),
        tensors=wire.tensors.expand(wire.parts.expand(stored)),
        files=tuple(
            SplitFile(file.name, file.owners, file.nbytes, file.data_offset, file.header, file.tensors.expand())
            for file in wire.files
        ),
    )
    check_manifest(manifest, wire.parts)
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


def is_split(folder: Path) -> bool:
    """Tell whether a folder holds a split, of this or another version of the format."""
    return version_of(folder) is not None


def version_of(folder: Path) -> int | None:
    """Return the version of the format of the split that a folder holds; None if it holds none."""
    try:
        stamp = msgspec.json.decode(read_file(folder / MANIFEST_NAME), type=_Stamp)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return stamp.version if stamp.format == FORMAT else None


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
        return read_file(path)
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
