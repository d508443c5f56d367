"""The manifest: one encoding, read strictly."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from manifests.errors import ManifestError
from manifests.manifest import (
    Extent,
    Link,
    Manifest,
    Model,
    Module,
    Part,
    Rule,
    Source,
    SourceFile,
    SourceTensor,
    SplitFile,
    Tensor,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from manifests.placement import Cut, Placement
from manifests.runs import Run
from manifests.runtime import read_runtime
from tests.checkpoints import mentions

HASH = "0123456789abcdef0123456789abcdef"
SMALL = Manifest(
    key=HASH,
    world_size=2,
    layout="runtime",
    model=Model("transformers", "llama", "LlamaForCausalLM"),
    source=Source(
        (
            SourceFile(
                "model.safetensors",
                200,
                HASH,
                {"w": SourceTensor("F32", (4,), 0, (HASH,)), "n": SourceTensor("F32", (), 16, (HASH,))},
                {"format": "pt"},
            ),
        ),
        "model.safetensors.index.json",
    ),
    plan=(Rule("w", "colwise"), Rule("v.*", "packed_colwise", blocks=(1, 2), dim=0)),
    sizes={"H": 4},
    tensors={
        "a.w": Tensor(
            "F32",
            (4, 2),
            Placement((Cut(0, "(4*)"),), (("tp", 2),)),
            (Part("w", (Link(0, 0, (Run(0, 0, 4),)), Link(None, 1, (Run(0, 1, 1),)))),),
        ),
        "n": Tensor("F32", (), unused=True),
    },
    files=(SplitFile("rank-00000-of-00002.safetensors", (0,), 4160, 4096, HASH, {"a.w": Extent(0, 16, (HASH,))}),),
    ties={"lm_head.weight": "a.w"},
    modules={"a": Module("rowwise", after="all_reduce", axis="(4*)")},
    attributes={"a": {"groups": 1}},
    carried={"config.json": HASH},
)
GOLDEN = (
    '{"format":"reshard","version":1,"key":"%s","world_size":2,"layout":"runtime",'
    '"model":{"library":"transformers","type":"llama","architecture":"LlamaForCausalLM"},'
    '"source":\n{"files":[{"name":"model.safetensors","nbytes":200,"header":"%s",'
    '"tensors":{"w":["F32",[4],0,["%s"]],"n":["F32",[],16,["%s"]]},"metadata":{"format":"pt"}}],'
    '"index":"model.safetensors.index.json"}\n,'
    '"plan":[{"pattern":"w","style":"colwise"},'
    '{"pattern":"v.*","style":"packed_colwise","blocks":[1,2],"dim":0}],'
    '"sizes":{"H":4},'
    '"tensors":{"a.w":{"dtype":"F32","shape":[4,2],'
    '"placement":{"cuts":[{"dim":0,"axis":"(4*)"}],"mesh":[["tp",2]]},'
    '"parts":\n[{"source":"w","links":[[0,0,[[0,0,4,1,0,0]]],[null,1,[[0,1,1,1,0,0]]]]}]\n},'
    '"n":{"dtype":"F32","shape":[],"unused":true}},'
    '"files":[{"name":"rank-00000-of-00002.safetensors","owners":[0],"nbytes":4160,"data_offset":4096,"header":"%s",'
    '"tensors":\n{"a.w":[0,16,["%s"]]}\n}],'
    '"ties":{"lm_head.weight":"a.w"},'
    '"modules":{"a":{"style":"rowwise","after":"all_reduce","axis":"(4*)"}},'
    '"attributes":{"a":{"groups":1}},"carried":{"config.json":"%s"},"digest":"%s"}\n'
)


def golden(digest: str) -> bytes:
    return (GOLDEN % (*([HASH] * 7), digest)).encode()


def test_golden_bytes() -> None:
    digest = xxhash.xxh3_128_hexdigest(golden("").removesuffix(b"\n"))
    assert encode_manifest(SMALL) == golden(digest)
    assert digest == DIGEST


DIGEST = "c461d2e7d5f1f478a9f27779b5df16c1"


def test_decoding_gives_back_what_was_encoded() -> None:
    decoded = decode_manifest(encode_manifest(SMALL))
    assert decoded == msgspec.structs.replace(SMALL, digest=DIGEST)
    assert encode_manifest(decoded) == encode_manifest(SMALL)
    assert json.loads(encode_manifest(SMALL))["tensors"]["n"] == {"dtype": "F32", "shape": [], "unused": True}


def changed(**fields: Any) -> bytes:
    return json.dumps(json.loads(encode_manifest(SMALL)) | fields, separators=(",", ":")).encode() + b"\n"


def without(field: str) -> bytes:
    fields = json.loads(encode_manifest(SMALL))
    del fields[field]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ("not a readable manifest",)),
        (b"\xff", ("not a readable manifest",)),
        (b"[]", ("not a readable manifest",)),
        (encode_manifest(SMALL)[:-20], ("not a readable manifest",)),
        (b"{}", ("not a manifest of a split",)),
        (changed(format="other"), ("not a manifest of a split",)),
        (changed(version=2), ("version 2", "reads version 1")),
        (changed(version=0), ("version 0", "reads version 1")),
        (changed(version="1"), ("not a readable manifest", "version")),
        (changed(note="x"), ("unknown field", "note")),
        (changed(model={"library": "", "note": 1}), ("unknown field", "note")),
        (changed(plan=[{"pattern": "a", "style": "b", "note": 1}]), ("unknown field", "note")),
        (changed(world_size="2"), ("world_size",)),
        (changed(world_size=2.5), ("world_size",)),
        (without("key"), ("key",)),
        (without("carried"), ("carried",)),
    ],
)
def test_what_is_no_manifest_of_this_version_is_refused(text: bytes, words: tuple[str, ...]) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(text, "out/manifest.json")
    assert mentions(caught.value, "out/manifest.json: ", *words)


def test_what_is_long_is_on_lines_of_its_own() -> None:
    lines = encode_manifest(SMALL).split(b"\n")
    whole = json.loads(encode_manifest(SMALL))
    long = [whole["source"], whole["tensors"]["a.w"]["parts"], whole["files"][0]["tensors"]]
    assert [json.loads(line) for line in lines[1:6:2]] == long
    # The last line feed is the end.
    assert len(lines) == 8
    assert lines[7] == b""


def test_a_loader_decodes_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(encode_manifest(SMALL))
    whole, part = read_manifest(tmp_path), read_runtime(tmp_path)
    for name in ("key", "world_size", "model", "ties", "modules", "attributes", "carried"):
        assert getattr(part, name) == getattr(whole, name)
    for name, tensor in whole.tensors.items():
        mine = part.tensors[name]
        assert (mine.dtype, mine.shape, mine.placement, mine.unused) == (
            tensor.dtype,
            tensor.shape,
            tensor.placement,
            tensor.unused,
        )
    for mine, file in zip(part.files, whole.files, strict=True):
        assert part.extents(mine) == file.tensors
        for name in ("name", "owners", "nbytes", "data_offset", "header"):
            assert getattr(mine, name) == getattr(file, name)


def test_a_loader_sees_every_flipped_byte(tmp_path: Path) -> None:
    text = encode_manifest(SMALL)
    for at in range(len(text)):
        (tmp_path / "manifest.json").write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(ManifestError):
            read_runtime(tmp_path)


def test_a_text_nested_too_deep_is_refused() -> None:
    with pytest.raises(ManifestError):
        decode_manifest(b'{"format":"reshard","version":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize(
    "text",
    [
        changed(world_size=4),
        changed(digest=""),
        without("digest"),
        changed(sizes={}),
        encode_manifest(SMALL).replace(b"4160", b"4161"),
        encode_manifest(SMALL).replace(b",", b", "),
        encode_manifest(SMALL) + b"\n",
        encode_manifest(SMALL).rstrip(),
        # A default that is spelt out is the same split in other bytes: still not what was written.
        encode_manifest(SMALL).replace(b'"unused":true', b'"unused":true,"parts":[]'),
    ],
)
def test_any_change_is_seen(text: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(text)
    assert mentions(caught.value, "manifest.json: ", "digest", "changed")


def test_every_flipped_byte_is_seen() -> None:
    text = encode_manifest(SMALL)
    for at in range(len(text)):
        with pytest.raises(ManifestError):
            decode_manifest(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])


def test_a_folder_without_a_manifest_is_no_split(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert mentions(caught.value, tmp_path, "holds no manifest.json", "unfinished")
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "absent")
    assert mentions(caught.value, tmp_path / "absent", "no such folder")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert mentions(caught.value, tmp_path / "manifest.json", "cannot be read")


def test_a_manifest_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(encode_manifest(SMALL))
    assert read_manifest(tmp_path).key == HASH
