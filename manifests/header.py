"""The header of a safetensors file, read strictly and written for mapping.

Reading accepts exactly what the format allows and names the file in every refusal. Writing pads the header so that the
data starts at a multiple of 4096 bytes.

Source: the format section of the safetensors README (https://github.com/huggingface/safetensors#format).
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from manifests.dtypes import BITS, MAX_DIMS
from manifests.errors import CheckpointError
from manifests.jsontext import load_object
from manifests.names import find_odd_name, tensor_name_problem
from manifests.opening import open_file
from manifests.runs import Count
from manifests.shown import shown, shown_name
from manifests.stored import StoredTensor as StoredTensor
from manifests.stored import StoredTensors, Type

MAX_HEADER_NBYTES = 100_000_000
DATA_ALIGNMENT = 4096
_ENCODED_AT_ONCE = 4096
LFS_POINTER = b"version https://git-lfs"


class Header(NamedTuple):
    """A parsed header; ``data_offset`` is bytes counted from the start of the file, ``digest`` its text's xxh3-128."""

    digest: str
    metadata: dict[str, str] | None
    tensors: StoredTensors
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
    plain = _parse_plain(raw, file_nbytes)
    if plain is not None:
        return plain
    entries = _load_object(raw, label)
    metadata = _check_metadata(entries.pop("__metadata__", None), label)
    tensors = {name: _check_tensor(name, entry, label) for name, entry in entries.items()}
    data_offset = 8 + len(raw)
    _check_coverage(tensors, data_offset, file_nbytes, label)
    return Header(xxhash.xxh3_128_hexdigest(raw), metadata, StoredTensors.of(tensors), data_offset)


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor as the header has it."""

    dtype: Literal[tuple(BITS)]  # type: ignore[valid-type]
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Leading(msgspec.Struct):
    """The metadata of a header, which the library writes first."""

    text: msgspec.Raw = msgspec.field(name="__metadata__", default=msgspec.Raw())


def _parse_plain(raw: bytes, file_nbytes: int) -> Header | None:
    """Return the header that is written as the library writes it: its tensors in the order of their bytes.

    Returns:
        None if it is written otherwise, or is not right; that is for others to find out, tensor by tensor. (A text that
        is the encoding of what was decoded from it has no key twice and no half of a character.)
    """
    text = raw.rstrip(b" ")
    try:
        leading = bytes(msgspec.json.decode(text, type=_Leading).text)
        begin = b'{"__metadata__":' + leading + b"," if leading else b"{"
        metadata = msgspec.json.decode(leading, type=dict[str, str]) if leading else None
        entries = msgspec.json.decode(b"{" + text.removeprefix(begin), type=dict[str, _Entry])
    except (msgspec.MsgspecError, RecursionError):
        return None
    written = b"" if metadata is None else b'{"__metadata__":' + msgspec.json.encode(metadata) + b","
    written += msgspec.json.encode(entries)[1 if written else 0 :]
    if written != text or find_odd_name(entries):
        return None
    rows = [(entry.dtype, entry.shape) for entry in entries.values()]
    nbytes: dict[Type, int] = {}
    known: dict[Type, Type] = {}
    for kind in set(rows):
        dtype, shape = known[kind] = kind
        # Many dimensions are refused before their product is taken.
        nbits = _nbits(dtype, shape) if len(shape) <= MAX_DIMS else None
        if nbits is None or nbits % 8:
            return None
        nbytes[kind] = nbits // 8
    ends = [*accumulate(map(nbytes.__getitem__, rows), initial=0)]
    data_offset = 8 + len(raw)
    if [entry.data_offsets for entry in entries.values()] != [*pairwise(ends)] or data_offset + ends[-1] != file_nbytes:
        return None
    tensors = StoredTensors([*entries], [*map(known.__getitem__, rows)], ends[:-1], ends[1:])
    return Header(xxhash.xxh3_128_hexdigest(raw), metadata, tensors, data_offset)


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


def _nbits(dtype: str, shape: Sequence[int]) -> int | None:
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
    columns = StoredTensors.of(tensors)
    text = b"".join(encoded_text(columns.names, columns.types, columns.begins, columns.ends, metadata))
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def encoded_text(
    names: Sequence[str],
    types: Sequence[Type],
    begins: Sequence[int],
    ends: Sequence[int],
    metadata: Mapping[str, str] | None,
) -> Iterator[bytes]:
    """Yield the text of a header, not padded, piece by piece: that of 100,000 tensors is in no memory whole.

    Args:
        names: The tensors' names.
        types: Their dtypes and shapes; it is quick if equal ones are one object.
        begins: Where each begins, in bytes from the start of the data.
        ends: Where each ends.
        metadata: The ``__metadata__``, if there is one.
    """
    before = "{"
    if metadata is not None:
        yield b'{"__metadata__":' + msgspec.json.encode(metadata)
        before = ","
    forms: dict[int, str] = {}
    for at in range(0, len(names), _ENCODED_AT_ONCE):
        some = slice(at, at + _ENCODED_AT_ONCE)
        kinds = {id(kind): kind for kind in types[some]}
        for key in kinds.keys() - forms.keys():
            forms[key] = _form(kinds[key])
        form = ",".join(map(forms.__getitem__, map(id, types[some])))
        values: list[str | int] = [""] * (3 * len(names[some]))
        values[0::3], values[1::3], values[2::3] = _escaped(names[some]), begins[some], ends[some]
        yield (before + form % tuple(values)).encode()
        before = ","
    yield b"{}" if before == "{" else b"}"


def text_nbytes(
    names: Sequence[str], types: Sequence[Type], ends: Sequence[int], metadata: Mapping[str, str] | None
) -> int:
    """Return the bytes of what `encoded_text` yields for tensors without holes, whose ends ascend.

    >>> text_nbytes(["a"], [("F32", (1,))], [4], None)
    54
    """
    forms = {id(kind): len(_form(kind)) - len("%s%d%d") for kind in {id(kind): kind for kind in types}.values()}
    nbytes = len("{}") + sum(forms[key] * count for key, count in Counter(map(id, types)).items())
    nbytes += len("".join(_escaped(names)).encode()) + max(len(names) - 1, 0)
    if metadata is not None:
        nbytes += len(b'"__metadata__":' + msgspec.json.encode(metadata)) + bool(names)
    # Every end has a digit, and one more from every power of ten on; every end but the last begins a tensor too.
    digits = len(names) + sum(len(ends) - bisect_left(ends, 10**power) for power in range(1, 20))
    first_and_last = bool(names) and len(str(ends[-1])) - len(str(0))
    return nbytes + 2 * digits - first_and_last


def _form(kind: Type) -> str:
    """Return the form of an entry: name, begin and end are left open."""
    return '"%s":' + _encode(_Entry(*kind, (0, 0))).replace("[0,0]}", "[%d,%d]}")


def _escaped(names: Sequence[str]) -> Sequence[str]:
    """Return names as JSON has them between quotes."""
    text = "".join(names)
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return names if plain else [_encode(name)[1:-1] for name in names]


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
