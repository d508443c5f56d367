"""Headers: whatever can be broken in a file is refused with its name, and valid files read as the library does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from manifests.errors import CheckpointError
from manifests.header import StoredTensor, encode_header, encoded_text, parse_header, read_header, text_nbytes
from tests.checkpoints import count, mentions, stored

NAME = "model-00002-of-00002.safetensors"


def entry(dtype: str = "U8", shape: object = (2,), offsets: object = (0, 2), **more: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def encoded(header: object, data: bytes = b"\1\2") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = encoded({"w": entry()})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"
TWICE = b'{"model.a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"model.a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'  # noqa: E501

BROKEN: dict[str, tuple[bytes, tuple[object, ...]]] = {
    # the file
    "LFS pointer": (POINTER, ("LFS pointer", len(POINTER), "git lfs pull")),
    "empty": (b"", ("empty", "0 bytes")),
    "shorter than a length": (b"\1\2\3", ("3 bytes", "too few")),
    "cut in the header": (GOOD[:20], ("cut short inside its header", "20 bytes", len(GOOD) - 2)),
    "only a length": (GOOD[:8], ("cut short inside its header", "8 bytes")),
    "cut in the data": (GOOD[:-1], ("cut short", f"{len(GOOD) - 1} bytes", f"{len(GOOD)} expected")),
    "too long": (GOOD + b"\0", ("too long", f"{len(GOOD) + 1} bytes", f"{len(GOOD)} expected")),
    "header too large": ((100_000_001).to_bytes(8, "little") + b"{}", (100_000_001, 100_000_000)),
    "HTML page": (b"<!DOCTYPE html><html></html>", ("not a safetensors file",)),
    # the text
    "no object": (encoded(b"[]", b""), ("does not start with '{'",)),
    "byte order mark": (encoded(b"\xef\xbb\xbf{}", b""), ("does not start with '{'",)),
    "not JSON": (encoded(b"{'w': 1}"), ("not JSON",)),
    "not UTF-8": (encoded(b'{"\xff": 1}'), ("not JSON in UTF-8",)),
    "zero padding": (encoded(b"{}\0\0", b""), ("not JSON",)),
    "two objects": (encoded(b"{}{}", b""), ("not JSON",)),
    "nested too deep": (encoded(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), ("not JSON",)),
    "duplicate name": (encoded(TWICE, b"1234"), ("duplicate", "model.a")),
    "duplicate dtype": (encoded(b'{"w":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}'), ("duplicate",)),
    # __metadata__
    "metadata of numbers": (encoded({"__metadata__": {"step": 1}, "w": entry()}), ("__metadata__", "strings")),
    "metadata list": (encoded({"__metadata__": [], "w": entry()}), ("__metadata__", "strings")),
    "metadata text": (encoded({"__metadata__": "pt", "w": entry()}), ("__metadata__", "strings")),
    "metadata nested": (encoded({"__metadata__": {"a": {"b": "c"}}, "w": entry()}), ("__metadata__", "strings")),
    # an entry
    "empty name": (encoded({"": entry()}), ("empty name",)),
    "a further key": (encoded({"w": entry(note="x")}), ("w", "dtype, shape and data_offsets", "nothing else")),
    "no entry": (encoded({"w": 3}), ("w", "dtype, shape and data_offsets")),
    "no shape": (encoded({"w": {"dtype": "U8", "data_offsets": [0, 2]}}), ("w", "dtype, shape and data_offsets")),
    "unknown dtype": (encoded({"w": entry("F5")}), ("w", "unknown dtype 'F5'", "BF16", "F4")),
    "dtype in small letters": (encoded({"w": entry("u8")}), ("w", "unknown dtype 'u8'")),
    "dtype of no text": (encoded({"w": entry(8)}), ("w", "unknown dtype 8")),  # type: ignore[arg-type]
    "shape of no list": (encoded({"w": entry(shape=2)}), ("w", "shape 2")),
    "negative size": (encoded({"w": entry(shape=[-2])}), ("w", "[-2]")),
    "fractional size": (encoded({"w": entry(shape=[2.0])}), ("w", "[2.0]")),
    "size as text": (encoded({"w": entry(shape=["2"])}), ("w", "['2']")),
    "size true": (encoded({"w": entry(shape=[True, 2])}), ("w", "[True, 2]")),
    "huge size": (encoded({"w": entry(shape=[10**30])}), ("w", 10**30)),
    "huge size of an empty tensor": (encoded({"w": entry(shape=[2**64, 0], offsets=[0, 0])}, b""), ("w", 2**64)),
    "size not a number": (encoded(b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}'), ("w", "nan")),
    "wrong size for the shape": (encoded({"w": entry("F32", [2])}), ("w", "F32 [2]", "8 bytes", "gives it 2")),
    "huge product": (encoded({"w": entry(shape=[2**62, 2**62])}), ("w", 2**62, "more elements than")),
    "one offset": (encoded({"w": entry(offsets=[2])}), ("w", "data_offsets [2]")),
    "descending offsets": (encoded({"w": entry(offsets=[2, 0])}), ("w", "data_offsets [2, 0]")),
    "negative offset": (encoded({"w": entry(offsets=[-1, 1])}), ("w", "data_offsets [-1, 1]")),
    "fractional offset": (encoded({"w": entry(offsets=[0, 2.0])}), ("w", "data_offsets [0, 2.0]")),
    # coverage
    "overlap": (encoded({"v": entry(), "w": entry(offsets=[1, 3])}, b"123"), ("w", "byte 1", "inside another tensor")),
    "the same bytes twice": (encoded({"v": entry(), "w": entry()}), ("w", "byte 0", "inside another tensor")),
    "hole": (encoded({"v": entry(), "w": entry(offsets=[3, 5])}, b"12345"), ("w", "bytes 2 to 3", "no tensor")),
    "hole at the start": (encoded({"w": entry(offsets=[1, 3])}, b"123"), ("w", "bytes 0 to 1", "no tensor")),
    "out of range": (encoded({"w": entry(offsets=[10**6, 10**6 + 2])}), ("w", f"byte {10**6}")),
    "empty tensor inside another": (encoded({"v": entry(), "w": entry(shape=[0], offsets=[1, 1])}), ("w", "byte 1")),
    "empty tensor past the end": (encoded({"v": entry(), "w": entry(shape=[0], offsets=[9, 9])}), ("w", "byte 9")),
}  # fmt: skip


def opens(path: Path) -> bool:
    """Tell whether the safetensors library takes the file."""
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, words = BROKEN[kind]
    path = tmp_path / NAME
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert mentions(caught.value, path, *words)
    with pytest.raises(CheckpointError) as caught:
        read_header(path, "the label")
    assert str(caught.value).startswith("the label: ")
    # As strict as the library, and stricter only where a name or a key would be lost.
    assert opens(path) == (kind in ("empty name", "a further key"))


# What Python's json and arithmetic would take, and the library does not.
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encoded(b'{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'), ("UTF-8",)),
        (encoded(b'{"__metadata__":{"a":"\\ud800"},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'), ("UTF-8",)),
        (encoded({"w": entry("F4", [3])}), ("w", "F4 [3]")),
        (encoded({"w": entry("F6_E2M3", [2])}), ("w", "F6_E2M3 [2]")),
        (encoded({"w": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, b""), ("w", 2**62)),
    ],
    ids=[
        "half a character in a name",
        "half a character in metadata",
        "half a byte",
        "12 bits",
        "overflow by an empty tensor",
    ],
)
def test_what_the_library_refuses_is_refused(tmp_path: Path, content: bytes, words: tuple[object, ...]) -> None:
    path = tmp_path / NAME
    path.write_bytes(content)
    assert not opens(path)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert mentions(caught.value, path, *words)


@pytest.mark.parametrize("name", ["absent", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / name)
    assert mentions(caught.value, tmp_path / name, "cannot be read")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("header", "metadata"),
    [
        ({"__metadata__": {}, "w": entry()}, {}),
        ({"__metadata__": None, "w": entry()}, None),
        ({"w": entry()}, None),
        ({"__metadata__": {"format": "pt", "é": "\n"}, "w": entry()}, {"format": "pt", "é": "\n"}),
    ],
    ids=["empty", "null", "absent", "texts"],
)
def test_metadata_may_be_empty_null_or_absent(
    tmp_path: Path, header: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    path = tmp_path / NAME
    path.write_bytes(encoded(header))
    assert opens(path)
    assert read_header(path).metadata == metadata
    assert read_header(path).tensors == {"w": StoredTensor("U8", (2,), 0, 2)}


TENSORS = {
    "scalar": torch.tensor(4.6052),
    "empty": torch.zeros(0, 3),
    "empty too": torch.zeros(2, 0, dtype=torch.int8),
    "model.layers.10.w": count(3, 5, dtype=torch.bfloat16),
    "model.layers.2.w": count(3, 5, dtype=torch.float16),
    "quote\" back\\slash \x7f\x01\n é 漢 \U0001f600": count(7, dtype=torch.int8),
    "fp8": count(2, 3, dtype=torch.float8_e5m2),
    "scale": count(2, 1, dtype=torch.float8_e8m0fnu),
    "fp4": count(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex": count(2, 2, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "u64": torch.tensor([2**63 - 1]).view(torch.uint64),
}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"b": "1", "a": 'é "\\\t\x00', "": ""}])
def test_valid_files_read_as_the_library_reads_them(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / NAME
    save_file(TENSORS, path, metadata=metadata)
    header = read_header(path)
    content = path.read_bytes()
    expected = stored(path)
    assert header.tensors.keys() == expected.keys() == TENSORS.keys()
    for name, (dtype, shape, data) in expected.items():
        tensor = header.tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, shape, len(data))
        assert content[header.data_offset + tensor.begin : header.data_offset + tensor.end] == data
    with safe_open(path, "pt") as file:
        assert (header.metadata or None) == (file.metadata() or None)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"b": "1", "a": 'é "\\\t\x00', "": ""}])
def test_an_encoded_header_is_that_of_the_library(metadata: dict[str, str] | None) -> None:
    content = save(TENSORS, metadata)
    nbytes = 8 + int.from_bytes(content[:8], "little")
    header = parse_header(content[8:nbytes], len(content), "x")
    assert encode_header(header.tensors, header.metadata) == content[:nbytes]


ODD_NAMES = ('quote"', "back\\slash", "é", "\u2028", "tab\t", "\x7f", "%d%s", ",", '","', "\U0001f600")


@pytest.mark.parametrize("names", [(), ODD_NAMES, tuple(f"w.{at}" for at in range(5000))], ids=["none", "odd", "many"])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_length_of_a_header_is_known_before_it_is_made(
    names: tuple[str, ...], metadata: dict[str, str] | None
) -> None:
    tensors = {
        name: torch.zeros(at % 3, at % 2 + 1, dtype=(torch.uint8, torch.int16)[at % 2]) for at, name in enumerate(names)
    }
    content = save(tensors, metadata)
    text = content[8 : 8 + int.from_bytes(content[:8], "little")]
    columns = parse_header(text, len(content), "x").tensors
    assert columns.names == list(json.loads(text))[metadata is not None :]
    made = b"".join(encoded_text(columns.names, columns.types, columns.begins, columns.ends, metadata))
    assert made == text.rstrip(b" ")
    assert text_nbytes(columns.names, columns.types, columns.ends, metadata) == len(made)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
@pytest.mark.parametrize("names", [0, 1, 60])
def test_padding_puts_the_data_on_the_alignment(tmp_path: Path, names: int, alignment: int) -> None:
    tensors = {f"w{i}": StoredTensor("U8", (2,), 2 * i, 2 * i + 2) for i in range(names)}
    header = encode_header(tensors, {"format": "pt"}, alignment)
    assert len(header) % alignment == 0
    assert header[8:].rstrip(b" ").endswith(b"}")
    path = tmp_path / NAME
    path.write_bytes(header + bytes(range(2 * names)))
    assert {name: data for name, (_, _, data) in stored(path).items()} == {
        f"w{i}": bytes((2 * i, 2 * i + 1)) for i in range(names)
    }
