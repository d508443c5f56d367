"""The header of a safetensors file, read strictly and written for mapping.

Reading accepts exactly what the format allows and names the file in every refusal. Writing pads the header so that the
data starts at a multiple of 4096 bytes.

Source: the format section of the safetensors README (https://github.com/huggingface/safetensors#format).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from manifests.dtypes import BITS, MAX_DIMS
from manifests.errors import CheckpointError
from manifests.jsontext import load_object
from manifests.names import tensor_name_problem
from manifests.opening import open_file
from manifests.shown import shown, shown_name

MAX_HEADER_NBYTES = 100_000_000
DATA_ALIGNMENT = 4096
LFS_POINTER = b"version https://git-lfs"


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
        with open_file(path) as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            prefix = file.read(len(LFS_POINTER))
            header_nbytes = header_length(prefix, file_nbytes, label)
            file.seek(8)
            raw = file.read(header_nbytes)
        if len(raw) != header_nbytes:
            raise CheckpointError(f"{label}: shrank while it was read; its header ended after {len(raw)} bytes")
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
    if prefix.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{label}: a Git LFS pointer of {file_nbytes} bytes, not the file; "
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
        return load_object(raw)
    except ValueError as error:
        raise CheckpointError(f"{label}: its header: {error}") from error


def _check_metadata(metadata: object, label: str) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{label}: __metadata__ is not an object of strings")
    return metadata


def _check_tensor(name: str, entry: object, label: str) -> StoredTensor:
    if problem := tensor_name_problem(name):
        raise CheckpointError(f"{label}: a tensor has {problem}: {shown(name)}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{label}: {shown_name(name)}: an entry needs dtype, shape and data_offsets, and nothing else"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{label}: {shown_name(name)}: unknown dtype {shown(dtype)}; known are {', '.join(BITS)}")
    if not _are_counts(shape):
        raise CheckpointError(
            f"{label}: {shown_name(name)}: the shape {shown(shape)} is not a list of whole numbers from 0"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{label}: {shown_name(name)}: data_offsets {shown(offsets)} are not two ascending whole numbers"
        )
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{label}: {shown_name(name)}: {len(shape)} dimensions; at most {MAX_DIMS} are read")
    begin, end = offsets
    nbits = _nbits(dtype, shape)
    if nbits is None:
        raise CheckpointError(
            f"{label}: {shown_name(name)}: the shape {shape} is of more elements than can be addressed"
        )
    if nbits % 8:
        raise CheckpointError(f"{label}: {shown_name(name)}: {dtype} {shape} does not fill whole bytes")
    if end - begin != nbits // 8:
        raise CheckpointError(
            f"{label}: {shown_name(name)}: {dtype} {shape} takes {nbits // 8} bytes, the header gives it {end - begin}"
        )
    return StoredTensor(dtype, tuple(shape), begin, end)


def _nbits(dtype: str, shape: list[int]) -> int | None:
    """Return the bits of a tensor; None where the sizes that are not 0 overflow the format's counters."""
    nbits = BITS[dtype]
    for size in shape:
        nbits *= size or 1
    return None if nbits >= 1 << 64 else 0 if 0 in shape else nbits


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_coverage(tensors: Mapping[str, StoredTensor], data_offset: int, file_nbytes: int, label: str) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < end:
            raise CheckpointError(
                f"{label}: {shown_name(name)}: starts at byte {tensor.begin} of the data, inside another tensor"
            )
        if tensor.begin > end:
            raise CheckpointError(
                f"{label}: {shown_name(name)}: starts at byte {tensor.begin} of the data; "
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
