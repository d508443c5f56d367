"""The record of a split pipeline: which of its parts are splits, and the bytes of everything else.

It is written last, as ``pipeline.json``, so a folder that has it is whole. Each split part has a manifest of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from manifests.errors import ManifestError
from manifests.names import is_file_name
from manifests.opening import open_file, read_file
from manifests.shown import shown

PIPELINE_NAME = "pipeline.json"
FORMAT = "reshard-pipeline"
VERSION = 1
MAX_NBYTES = 10_000_000

_BLOCK_NBYTES = 1 << 20


class CarriedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that is the source's: its size in bytes and the xxh3-128 of its content."""

    nbytes: int
    hash: str


class PipelineRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline of which some parts were split.

    Attributes:
        format: Always "reshard-pipeline".
        version: Of this format.
        pipeline: The pipeline's class in diffusers.
        world_size: Number of ranks.
        variant: The variant in the names of carried weight files, or empty.
        splits: The folders of the split parts, each with the key of its split.
        whole: The folders of the models that every rank loads whole, each with the reason.
        carried: Every other file, by its path relative to the pipeline.
        digest: The xxh3-128 of this record's encoding with an empty digest.
    """

    format: str = FORMAT
    version: int = VERSION
    pipeline: str
    world_size: int
    variant: str = ""
    splits: dict[str, str]
    whole: dict[str, str]
    carried: dict[str, CarriedFile]
    digest: str = ""


class _Stamp(msgspec.Struct):
    format: str = ""
    version: int = 0


def encode_record(record: PipelineRecord) -> bytes:
    """Return the bytes of ``pipeline.json``, its digest filled in."""
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(record, digest=_digest(record)))) + b"\n"


def _digest(record: PipelineRecord) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(record, digest="")))


def holds_pipeline(folder: Path) -> bool:
    """Tell whether a folder holds a split pipeline, of this or another version of the format."""
    try:
        return msgspec.json.decode(read_file(folder / PIPELINE_NAME, MAX_NBYTES), type=_Stamp).format == FORMAT
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False


def read_pipeline(folder: Path) -> PipelineRecord:
    """Read the record of a split pipeline.

    Raises:
        ManifestError: The folder holds no finished one that this version reads, or one that was changed.
    """
    path = folder / PIPELINE_NAME
    try:
        text = read_file(path, MAX_NBYTES)
    except FileNotFoundError as error:
        raise ManifestError(
            f"{folder}: holds no {PIPELINE_NAME}: it is no split pipeline, or an unfinished one; "
            "make one with `reshard PIPELINE --tp N`"
        ) from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        stamp = msgspec.json.decode(text, type=_Stamp)
        if stamp.format != FORMAT or stamp.version != VERSION:
            raise ManifestError(
                f"{path}: format {stamp.format!r} version {stamp.version}; this reshard reads {FORMAT!r} "
                f"version {VERSION}; split again"
            )
        record = msgspec.json.decode(text, type=PipelineRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"{path}: not a readable record: {error}") from error
    if record.digest != _digest(record):
        raise ManifestError(f"{path}: its content does not match its digest; it was changed")
    for name in (*record.splits, *record.whole, *record.carried):
        if name.count("/") > (name in record.carried) or not all(map(is_file_name, name.split("/"))):
            raise ManifestError(f"{path}: {shown(name)} does not lie in the pipeline")
    return record


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's content.

    Raises:
        OSError: It cannot be read.
    """
    hasher = xxhash.xxh3_128()
    with open_file(path) as file:
        while block := file.read(_BLOCK_NBYTES):
            hasher.update(block)
    return hasher.hexdigest()


def check_carried_file(folder: Path, name: str, expected: CarriedFile, *, content: bool) -> Iterator[str]:
    """Yield what is wrong with a carried file: its size, and its content if that is asked for."""
    path = folder / name
    try:
        actual = path.stat().st_size
        if actual != expected.nbytes:
            yield f"{name}: {actual} bytes, {expected.nbytes} expected"
        elif content and hash_file(path) != expected.hash:
            yield f"{name}: its content is not what was carried over"
    except OSError as error:
        yield f"{name}: {error.strerror}"
