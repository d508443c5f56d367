"""The manifest: one encoding, read strictly."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from manifests.errors import ManifestError
from manifests.manifest import (
    TILE_NBYTES,
    Extent,
    Extents,
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
    encoded,
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
    '{"format":"reshard","version":2,"key":"%s","world_size":2,"layout":"runtime",'
    '"model":{"library":"transformers","type":"llama","architecture":"LlamaForCausalLM"},'
    '"source":\n{"files":[{"name":"model.safetensors","nbytes":200,"header":"%s",'
    '"tensors":{"names":["w","n"],"kinds":[0,1],"types":[["F32",[4]],["F32",[]]],"tiles":"%s%s"},'
    '"metadata":{"format":"pt"}}],'
    '"index":"model.safetensors.index.json"}\n,'
    '"plan":[{"pattern":"w","style":"colwise"},'
    '{"pattern":"v.*","style":"packed_colwise","blocks":[1,2],"dim":0}],'
    '"sizes":{"H":4},'
    '"tensors":{"names":["a.w","n"],"kinds":[0,1],"table":[{"dtype":"F32","shape":[4,2],'
    '"placement":{"cuts":[{"dim":0,"axis":"(4*)"}],"mesh":[["tp",2]]}},'
    '{"dtype":"F32","shape":[],"unused":true}]},'
    '"parts":\n{"forms":[{"links":[[0,0,[[0,0,4,1,0,0]]],[null,1,[[0,1,1,1,0,0]]]]}],'
    '"tensors":{"a.w":[[0],[0]]}}\n,'
    '"files":[{"name":"rank-00000-of-00002.safetensors","owners":[0],"nbytes":4160,"data_offset":4096,"header":"%s",'
    '"tensors":\n{"names":["a.w"],"nbytes":[16],"tiles":"%s"}\n}],'
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


DIGEST = "c96e828b3523f654862fbe5a245129aa"


def test_decoding_gives_back_what_was_encoded() -> None:
    decoded = decode_manifest(encode_manifest(SMALL))
    assert decoded == msgspec.structs.replace(SMALL, digest=DIGEST)
    assert encode_manifest(decoded) == encode_manifest(SMALL)
    assert decoded.tensors["a.w"].parts == SMALL.tensors["a.w"].parts
    assert json.loads(encode_manifest(SMALL))["tensors"]["table"][1] == {"dtype": "F32", "shape": [], "unused": True}


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
        (changed(version=3), ("version 3", "reads version 2")),
        (changed(version=1), ("version 1", "reads version 2", "split again")),
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
    long = [whole["source"], whole["parts"], whole["files"][0]["tensors"]]
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
        decode_manifest(b'{"format":"reshard","version":2,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


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
        encode_manifest(SMALL).replace(b'"unused":true', b'"unused":true,"cast":""'),
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


def sealed(text: bytes) -> bytes:
    """Return a changed manifest with the digest that it should have."""
    head = text[: text.rindex(b'"digest":"') + len(b'"digest":"')]
    return head + xxhash.xxh3_128_hexdigest(head + b'"}').encode() + b'"}\n'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"names":["a.w","n"]', '"names":["a.w"]', ("tensors", "1 names", "2 kinds")),
        ('"names":["a.w","n"]', '"names":["n","n"]', ("tensors", "one name")),
        ('"names":["a.w","n"],"kinds":[0,1]', '"names":["a.w","n"],"kinds":[0,2]', ("2 values",)),
        ('"names":["a.w","n"],"kinds":[0,1]', '"names":["a.w","n"],"kinds":[0,-1]', ("kinds", ">= 0")),
        ('"names":["w","n"],"kinds":[0,1]', '"names":["w","n"],"kinds":[0,9]', ("2 values",)),
        ('"names":["w","n"],"kinds":[0,1]', '"names":["w","n"],"kinds":[0]', ("2 names", "1 sizes")),
        ('"names":["w","n"]', '"names":["w","w"]', ("source: w", "twice")),
        ('["F32",[4]]', '["F32",[-4]]', ("types", ">= 0")),
        ('["F32",[4]]', '["F31",[4]]', ("'F31'", "not known")),
        ('["F32",[4]]', f'["F32",[{1 << 62},{1 << 62}]]', ("more than can be addressed",)),
        ('"index":"model.safetensors.index.json"', '"index":"i.json","dropped":["w"]', ("64 digits", "32 expected")),
        ('"nbytes":[16]', f'"nbytes":[{1 << 64}]', ("nbytes", f"<= {(1 << 63) - 1}")),
        ('"tensors":{"a.w":[[0],[0]]}', '"tensors":{"a.w":[[2],[0]]}', ("2 values",)),
        ('"tensors":{"a.w":[[0],[0]]}', '"tensors":{"a.w":[[0],[1]]}', ("1 values",)),
        ('"tensors":{"a.w":[[0],[0]]}', '"tensors":{"a.w":[[0],[]]}', ("a.w", "1 sources and 0 forms")),
        ('"tensors":{"a.w":[[0],[0]]}', '"tensors":{"x":[[0],[0]]}', ("x", "no tensor")),
        ('"nbytes":[16]', '"nbytes":[4194305]', ("32 digits", "64 expected")),
        ('"nbytes":[16]', '"nbytes":[65]', ("rank-00000", "byte 65 of 64")),
        ('"tensors":{"a.w":[[0],[0]]}', '"tensors":{"a.w":[[1],[0]]}', ("a.w", "links lead out")),
        ('"names":["a.w"],"nbytes":[16]', '"names":["a.w","a.w"],"nbytes":[16,0]', ("rank-00000", "a.w twice")),
        ('"nbytes":[16]', '"nbytes":[16,0]', ("1 names", "2 sizes")),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(old: str, new: str, words: tuple[str, ...]) -> None:
    text = encode_manifest(SMALL).decode()
    assert text.count(old) == 1
    with pytest.raises(ManifestError) as caught:
        decode_manifest(sealed(text.replace(old, new).encode()), "out/manifest.json")
    assert mentions(caught.value, "out/manifest.json: ", *words)


def test_a_large_manifest_is_written_in_pieces_and_shares_what_is_alike() -> None:
    count = 1000
    names = [f"m.{number}.weight" for number in range(count)]
    hashes = [xxhash.xxh3_128_hexdigest(name.encode()) for name in names]
    tensor = Tensor("F32", (4, 2), Placement((Cut(0, "(4*)"),), (("tp", 2),)))
    rows = {name: SourceTensor("F32", (4, 2), 32 * at, (hashes[at],)) for at, name in enumerate(names)}
    parts = {name: Extent(16 * at, 16, (hashes[at],)) for at, name in enumerate(names)}
    manifest = msgspec.structs.replace(
        SMALL,
        source=Source((SourceFile("model.safetensors", 40000, HASH, rows),)),
        tensors=dict.fromkeys(names, tensor),
        files=(SplitFile("rank-00000-of-00002.safetensors", (0,), 20096, 4096, HASH, parts),),
        ties={},
    )
    text = b"".join(encoded(manifest))
    decoded = decode_manifest(text)
    assert decoded == msgspec.structs.replace(manifest, digest=decoded.digest)
    assert decoded.source.files[0].tensors[names[7]] == rows[names[7]]
    assert list(decoded.files[0].tensors.items()) == list(parts.items())
    assert len({id(tensor) for tensor in decoded.tensors.values()}) == 1
    # Names three times, hashes twice, and a number or two: little else is there a tensor.
    assert len(text) < count * (3 * (len(names[-1]) + 3) + 2 * 32 + 10) + 2000


def test_a_tensor_over_tiles_has_its_own_hashes() -> None:
    hashes = [f"{number:032x}" for number in range(6)]
    extents = {
        "a": Extent(0, TILE_NBYTES + 1, tuple(hashes[:2])),
        "empty": Extent(TILE_NBYTES + 1, 0, ()),
        "b": Extent(TILE_NBYTES + 1, 2 * TILE_NBYTES, tuple(hashes[2:4])),
        "c": Extent(3 * TILE_NBYTES + 1, 1, (hashes[4],)),
    }
    columns = Extents.of(extents)
    assert columns == extents
    assert columns["c"].tiles == (hashes[4],)
    assert columns.tiles == "".join(hashes[:5])
    assert (len(columns), "b" in columns, "d" in columns) == (4, True, False)


def test_a_tensor_that_was_left_out_has_no_hashes() -> None:
    rows = {"a": SourceTensor("F32", (2,), 0, ()), "b": SourceTensor("F32", (2,), 8, (HASH,))}
    file = SourceFile("model.safetensors", 100, HASH, rows)
    manifest = msgspec.structs.replace(SMALL, source=Source((file,), dropped=("a",)), tensors={}, files=(), ties={})
    assert decode_manifest(encode_manifest(manifest)).source.files[0].tensors == rows
