"""The header of a safetensors file, read strictly and written for mapping.

Reading accepts exactly what the format allows and names the file in every refusal. Writing pads the header so that the
data starts at a multiple of 4096 bytes.

Source: the format section of the safetensors README (https://github.com/huggingface/safetensors#format).
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from manifests.dtypes import BITS
from manifests.errors import CheckpointError

MAX_HEADER_NBYTES = 100_000_000
DATA_ALIGNMENT = 4096
_LFS = b"version https://git-lfs"


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file; ``begin`` and ``end`` are bytes counted from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


class Header(NamedTuple):
    """A parsed header; ``data_offset`` is bytes counted from the start of the file."""

    raw: bytes
    metadata: dict[str, str] | None
    tensors: dict[str, StoredTensor]
    data_offset: int


def read_header(path: Path, label: str = "") -> Header:
    """Read and check the header of a file.

    Args:
        path: The file.
        label: How messages name it; the path if not given.

    Raises:
        CheckpointError: The file is not a whole, valid safetensors file.
    """
    label = label or str(path)
    try:
        with path.open("rb") as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            prefix = file.read(len(_LFS))
            header_nbytes = header_length(prefix, file_nbytes, label)
            file.seek(8)
            raw = file.read(header_nbytes)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror}") from error
    return parse_header(raw, file_nbytes, label)


def header_length(prefix: bytes, file_nbytes: int, label: str) -> int:
    """Return the bytes of the header, from the first bytes of the file.

    Raises:
        CheckpointError: The file is empty, an LFS pointer, or shorter than its header.
    """
    if file_nbytes == 0:
        raise CheckpointError(f"{label}: the file is empty (0 bytes); download it again")
    if prefix.startswith(_LFS):
        raise CheckpointError(
            f"{label}: a Git LFS pointer of {file_nbytes} bytes, not the weights; "
            "run `git lfs pull` there or download it again"
        )
    if file_nbytes < 8:
        raise CheckpointError(f"{label}: {file_nbytes} bytes are too few for a safetensors header; download it again")
    declared = int.from_bytes(prefix[:8], "little")
    if declared > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{label}: declares a header of {declared} bytes, over the format's limit of {MAX_HEADER_NBYTES}; "
            "this is not a safetensors file"
        )
    if declared + 8 > file_nbytes:
        raise CheckpointError(
            f"{label}: cut short inside its header: {file_nbytes} bytes, at least {declared + 8} expected; "
            "download it again"
        )
    return declared


def parse_header(raw: bytes, file_nbytes: int, label: str) -> Header:
    """Return the header that the bytes after the 8-byte length hold.

    Args:
        raw: The JSON text, padding included.
        file_nbytes: Bytes of the whole file.
        label: How messages name the file.

    Raises:
        CheckpointError: The header is not valid, or does not describe a file of this size.
    """
    entries = _load_plain(raw) or _load_object(raw, label)
    metadata = _check_metadata(entries.pop("__metadata__", None), label)
    tensors = {name: _check_tensor(name, entry, label) for name, entry in entries.items()}
    data_offset = 8 + len(raw)
    _check_coverage(tensors, data_offset, file_nbytes, label)
    return Header(raw, metadata, tensors, data_offset)


def _load_plain(raw: bytes) -> dict[str, Any] | None:
    """Return the object that a header holds if it is written as the library writes it, without checking each key.

    A text that is the encoding of what was decoded from it has no key twice and no half of a character.
    """
    text = raw.rstrip(b" ")
    try:
        entries = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return entries if isinstance(entries, dict) and msgspec.json.encode(entries) == text else None


def _load_object(raw: bytes, label: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{label}: the header does not start with '{{'; this is not a safetensors file")
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
        json.dumps(entries, ensure_ascii=False).encode("utf-8")  # an escaped half of a character is no UTF-8 either
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{label}: the header has a duplicate key {error.args[0]!r}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: the header is not JSON in UTF-8: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{label}: the header is not a JSON object")
    return entries


class _DuplicateKeyError(ValueError):
    pass


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return entries


def _check_metadata(metadata: object, label: str) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{label}: __metadata__ is not an object of strings")
    return metadata


def _check_tensor(name: str, entry: object, label: str) -> StoredTensor:
    if not name:
        raise CheckpointError(f"{label}: a tensor has an empty name")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{label}: {name}: an entry needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{label}: {name}: unknown dtype {dtype!r}; known are {', '.join(BITS)}")
    if not _are_counts(shape):
        raise CheckpointError(f"{label}: {name}: the shape {shape!r} is not a list of whole numbers from 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{label}: {name}: data_offsets {offsets!r} are not two ascending whole numbers")
    begin, end = offsets
    nbits = prod(shape) * BITS[dtype]
    if nbits % 8:
        raise CheckpointError(f"{label}: {name}: {dtype} {shape} does not fill whole bytes")
    if end - begin != nbits // 8:
        raise CheckpointError(
            f"{label}: {name}: {dtype} {shape} takes {nbits // 8} bytes, the header gives it {end - begin}"
        )
    if (not nbits or nbits >= 1 << 64) and prod(size for size in shape if size) * BITS[dtype] >= 1 << 64:
        raise CheckpointError(f"{label}: {name}: the shape {shape} is of more elements than can be addressed")
    return StoredTensor(dtype, tuple(shape), begin, end)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_coverage(tensors: Mapping[str, StoredTensor], data_offset: int, file_nbytes: int, label: str) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < end:
            raise CheckpointError(f"{label}: {name}: starts at byte {tensor.begin} of the data, inside another tensor")
        if tensor.begin > end:
            raise CheckpointError(
                f"{label}: {name}: starts at byte {tensor.begin} of the data; "
                f"bytes {end} to {tensor.begin} belong to no tensor"
            )
        end = tensor.end
    actual = file_nbytes - data_offset
    if actual != end:
        state = "cut short" if actual < end else "too long"
        raise CheckpointError(
            f"{label}: {state}: {file_nbytes} bytes, {data_offset + end} expected from its header; download it again"
        )


def encode_header(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None, alignment: int = 8) -> bytes:
    """Return the length and the header, padded with spaces so that the data starts at a multiple of ``alignment``.

    With the default alignment the text is that of the safetensors library: compact JSON, tensors as given.

    >>> encode_header({"a": StoredTensor("F32", (1,), 0, 4)}, None)[8:]
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, tensor in tensors.items():
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [tensor.begin, tensor.end]}
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text
