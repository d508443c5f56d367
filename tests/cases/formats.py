"""Kind D: what can be wrong with a safetensors file, and what is odd and right."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes

from manifests.errors import DegreeError
from tests.cases.case import Case, cut, even, of, refused, take
from tests.checkpoints import LLAMA, count, save, save_indexed

A, B = {"model.a.weight": count(4, 4)}, {"model.b.weight": count(4, 4, start=50)}
BOTH = {**A, **B}
ALL = {"model.*": "colwise"}
HALVES = cut(BOTH, dict.fromkeys(BOTH, 0), even(4, 2))
SECOND = "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"
TWICE = (
    b'{"model.a.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]},'
    b'"model.a.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[64,128]}}'
)


def second_is(change: Callable[[bytes], bytes], name: str = SECOND) -> Callable[[Path], object]:
    """Return what writes two shards and their index, with one file changed."""

    def write(folder: Path) -> None:
        save_indexed(folder, A, B, config=LLAMA)
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return write


def with_metadata(text: bytes) -> Callable[[Path], object]:
    """Return what writes a checkpoint whose header starts with that."""

    def write(folder: Path) -> None:
        save(folder, BOTH, LLAMA)
        content = to_bytes(BOTH)
        length = int.from_bytes(content[:8], "little")
        header = b"{" + text + content[9 : 8 + length]
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return write


def raw_file(header: bytes, nbytes: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        save(folder, BOTH, LLAMA)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))

    return write


F8 = {
    "model.a.weight": count(4, 8, dtype=torch.float8_e4m3fn),
    "model.b.weight": count(4, 8, dtype=torch.float8_e5m2),
    "model.a.weight_scale": count(4, 2, dtype=torch.float8_e8m0fnu),
    "model.c.weight": count(4, 4, dtype=torch.float4_e2m1fn_x2),
    "model.d.weight": count(4, 4, dtype=torch.float4_e2m1fn_x2),
}
SCALARS = {
    "logit_scale": torch.tensor(4.6052),
    "bn.num_batches_tracked": torch.tensor(7),
    "model.a.weight": count(4, 4, dtype=torch.float8_e4m3fn),
    "model.a.weight_scale": torch.tensor(0.5),
}


def narrow_floats() -> tuple[dict[str, torch.Tensor], ...]:
    """Rows of all but d, of which it is columns: 8 halves of a byte are 4 bytes."""
    return tuple(
        {name: take(tensor, int(name == "model.d.weight"), [(2 * rank, 2 * rank + 2)]) for name, tensor in F8.items()}
        for rank in range(2)
    )


ONE_ENTRY = {"model.a.weight": count(4, 4, dtype=torch.float8_e4m3fn), "model.a.weight_scale": torch.tensor([0.5])}
FORMATS = (
    refused("d01 an LFS pointer", second_is(lambda _: POINTER), ALL, SECOND, "LFS pointer"),
    refused("d01 the index is a pointer", second_is(lambda _: POINTER, "model.safetensors.index.json"), ALL,
            "model.safetensors.index.json", "LFS pointer"),
    refused("d01 the configuration is a pointer", second_is(lambda _: POINTER, "config.json"), ALL, "config.json",
            "LFS pointer"),
    refused("d01 a page in place of the file", second_is(lambda _: b"<!DOCTYPE html><html></html>"), ALL, SECOND,
            "not a safetensors file"),
    refused("d02 ten bytes short", second_is(lambda content: content[:-10]), ALL, SECOND, "cut short", "176", "166"),
    refused("d02 a byte too long", second_is(lambda content: content + b"\0"), ALL, SECOND, "too long", "176", "177"),
    refused("d02 half of it", second_is(lambda content: content[: len(content) // 2 + 40]), ALL, SECOND, "cut short"),
    refused("d03 ends in its header", second_is(lambda content: content[:40]), ALL, SECOND, "inside its header",
            "40 bytes"),
    refused("d04 empty", second_is(lambda _: b""), ALL, SECOND, "empty", "0 bytes"),
    refused("d04 zeros of the right length", second_is(lambda content: bytes(len(content))), ALL, SECOND),
    refused("d05 a name twice", raw_file(TWICE, 128), ALL, "model.safetensors", "'model.a.weight' twice", "duplicate"),
    Case("d06 empty metadata", with_metadata(b'"__metadata__":{},'), ALL, HALVES),
    Case("d07 no metadata", of(BOTH), ALL, HALVES),
    Case("d08 metadata is null", with_metadata(b'"__metadata__":null,'), ALL, HALVES),
    refused("d08 metadata is a list", with_metadata(b'"__metadata__":[],'), ALL, "model.safetensors", "__metadata__"),
    Case("d09 narrow floats", of(F8), {"model.d": "rowwise", **ALL}, narrow_floats()),
    refused(
        "d09 a dtype of tomorrow",
        raw_file(b'{"model.a.weight":{"dtype":"F2","shape":[4,4],"data_offsets":[0,4]}}', 4),
        ALL, "model.safetensors", "model.a.weight", "unknown dtype 'F2'",
    ),
    Case("d11 scalars", of(SCALARS), {"model.a": "colwise"}, cut(SCALARS, {"model.a.weight": 0}, even(4, 2))),
    Case(
        "d11 a scale of one entry",
        of(ONE_ENTRY),
        {"model.a": "rowwise"},
        cut(ONE_ENTRY, {"model.a.weight": 1}, even(4, 2)),
    ),
    # Three bytes of six halves: the boundary would be in a byte.
    refused(
        "d09 a row of an odd number of bytes",
        of({"model.a.weight": count(4, 3, dtype=torch.float4_e2m1fn_x2)}),
        {"model.a": "rowwise"},
        "model.a.weight",
        "dim 1 has 6",
        "1, 3 do",
        refusal=DegreeError,
    ),
    Case(
        "d11 nothing at all in a dimension",
        lambda folder: save(folder, {**BOTH, "model.empty": torch.zeros(0, 4)}, LLAMA),
        ALL, cut({**BOTH, "model.empty": torch.zeros(0, 4)}, dict.fromkeys(BOTH, 0), even(4, 2)),
    ),
)  # fmt: skip
