"""Bad input of every kind: refused by name with what was found, before any output, and at little cost."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from loader import open_shard
from loader.models import check_carried
from manifests.errors import CheckpointError, DamageError, LoadError, ManifestError, PlanError, ReshardError
from manifests.header import parse_header, read_header
from manifests.manifest import decode_manifest, read_manifest
from manifests.runtime import read_runtime
from reshard import cli, merge, plan, split, verify
from reshard.planfile import build_plan, read_plan
from reshard.sources import hub
from tests.bounds import check
from tests.checkpoints import LLAMA, count, mentions, save, save_indexed
from tests.fuzz_targets import resealed, sealed
from tests.launching import ROOT

ALL = {"model.*": "colwise"}
A, B = {"model.a.weight": count(4, 4)}, {"model.b.weight": count(4, 4, start=50)}
INDEX = "model.safetensors.index.json"
MODEL = {
    f"model.layers.0.self_attn.{name}_proj.weight": count(rows, 8)
    for name, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8))
}
HEADS = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}


def header(*entries: str) -> bytes:
    return ("{" + ",".join(entries) + "}").encode()


def entry(name: str, shape: str = "[2]", offsets: str = "[0,2]", dtype: str = '"U8"') -> str:
    return f'"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


HEADERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a name that leads out": (header(entry("../../etc/passwd")), ("path out of a folder", "'../../etc/passwd'")),
    "a name in the middle of which it leads out": (header(entry("a/../../b")), ("path out of a folder",)),
    "a name from the root": (header(entry("/etc/passwd")), ("path out of a folder",)),
    "a name of Windows": (header(entry("..\\\\x")), ("path out of a folder",)),
    "a drive of Windows": (header(entry("C:\\\\x")), ("path out of a folder",)),
    "a name of half a character": (header(entry("\\ud800")), ("UTF-8",)),
    "a long name": (header(entry("w" * 1001)), ("1001 characters", "at most 1000")),
    "a name of many parts": (header(entry("a." * 100 + "w")), ("101 parts", "at most 100")),
    "a digit string of a size": (header(entry("w", f"[{'9' * 5000}]")), ("not JSON", "4300 digits")),
    "a float for a size": (header(entry("w", "[2.0]")), ("w", "[2.0]")),
    "infinity for a size": (header(entry("w", "[1e400]")), ("w", "[inf]")),
    "true for a size": (header(entry("w", "[true,2]")), ("w", "[True, 2]")),
    "null for offsets": (header(entry("w", offsets="null")), ("w", "None")),
    "true for an offset": (header(entry("w", offsets="[false,2]")), ("w", "[False, 2]")),
    "a dtype that is a list": (header(entry("w", dtype='["U8"]')), ("w", "unknown dtype ['U8']")),
    "many dimensions": (header(entry("w", "[" + "1," * 40 + "2]")), ("w", "41 dimensions", "at most 32")),
    "a product over all counters": (header(entry("w", f"[{2**62},{2**62},2]")), ("w", "more elements")),
    "unordered and right": (header(entry("b", offsets="[2,4]"), entry("a")), ()),
    "unordered with a hole": (header(entry("b", offsets="[3,5]"), entry("a")), ("b", "bytes 2 to 3", "no tensor")),
    "past the end": (header(entry("a"), entry("b", offsets="[2,4]"), entry("c", offsets="[4,6]")),
                     ("cut short", "bytes", "expected")),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(tmp_path: Path, kind: str) -> None:
    text, words = HEADERS[kind]
    path = save(tmp_path / "m", A) / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    if not words:
        assert set(read_header(path).tensors) == {"a", "b"}
        return
    with pytest.raises(CheckpointError) as caught:
        split(tmp_path / "m", tmp_path / "out", tp=2, plan=ALL, layout="checkpoint")
    assert mentions(caught.value, path, *words)
    assert [name.name for name in tmp_path.iterdir()] == ["m"]


def test_a_message_is_one_line_and_shows_no_control_characters(tmp_path: Path) -> None:
    text = header(entry("a\\n\\u001b[2J", dtype='"' + "x" * 10_000 + '"'))
    with pytest.raises(CheckpointError) as caught:
        parse_header(text, len(text) + 10, "file")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


# What a name of a checkpoint's file may be in place of the file itself.
def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def outside(path: Path) -> None:
    (path.parent.parent / "secret").write_text("{}")
    path.symlink_to("../secret")


def from_the_root(path: Path) -> None:
    (path.parent.parent / "secret").write_text("{}")
    path.symlink_to(path.parent.parent.resolve() / "secret")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.symlink_to("nothing")


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (fifo, "a pipe, a socket or a device"),
    "a loop of links": (loop, "cannot be read"),
    "a link out": (outside, "out of the folder"),
    "a link from the root": (from_the_root, "out of the folder"),
    "a link to a device": (device, "out of the folder"),
    "a link to nothing": (nowhere, "cannot be read"),
}


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", INDEX, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", PLACES)
def test_what_stands_in_place_of_a_file(tmp_path: Path, kind: str, name: str) -> None:
    """None is waited for; what is carried over is looked at before the first byte is written, too."""
    make, words = PLACES[kind]
    path = save_indexed(tmp_path / "m", A, B, config=LLAMA) / name
    path.unlink(missing_ok=True)
    make(path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        split(tmp_path / "m", tmp_path / "out", tp=2, plan=ALL, layout="checkpoint")
    assert mentions(caught.value, path, words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_a_folder_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    path = save_indexed(tmp_path / "m", A, B, config=LLAMA) / name
    path.unlink()
    path.mkdir()
    if name == "config.json":
        assert plan(tmp_path / "m", tp=2, plan=ALL, layout="checkpoint").checkpoint.config == {}
        return
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "m", tp=2, plan=ALL, layout="checkpoint")
    assert mentions(caught.value, name)


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    path = save(tmp_path / "m", A, LLAMA) / "model.safetensors"
    (path.parent / "files").mkdir()
    path.rename(path.parent / "files" / "x")
    path.symlink_to("files/x")
    split(path.parent, tmp_path / "out", tp=2, plan=ALL, layout="checkpoint")


@pytest.mark.parametrize("subfolder", ["", "transformer"])
def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path, subfolder: str) -> None:
    """Also where the cache is reached through a link, and its blobs are links to another disk."""
    repo, disk = tmp_path / "disk" / "models--org--x", tmp_path / "other"
    made = save(tmp_path / "made", A, LLAMA)
    snapshot = repo / "snapshots" / ("ab" * 20) / subfolder
    for place in (snapshot, repo / "blobs", disk):
        place.mkdir(parents=True)
    for path in list(made.iterdir()):
        path.rename(disk / path.name)
        (repo / "blobs" / f"hash-{path.name}").symlink_to(disk / path.name)
        up = "../" * (3 if subfolder else 2)
        (snapshot / path.name).symlink_to(f"{up}blobs/hash-{path.name}")
    (tmp_path / "cache").symlink_to("disk")
    model = tmp_path / "cache" / "models--org--x" / "snapshots" / ("ab" * 20)
    made_by_link = split(model, tmp_path / "out", tp=2, plan=ALL, layout="checkpoint", subfolder=subfolder)
    assert [file.name for file in made_by_link.source.files] == ["model.safetensors"]
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "out" / "config.json")
    with pytest.raises(CheckpointError) as caught:
        plan(model, tp=2, plan=ALL, layout="checkpoint", subfolder=subfolder)
    assert mentions(caught.value, "config.json", "out of the folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as somebody else")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_permission_denied(tmp_path: Path, name: str) -> None:
    save(tmp_path / "m", A, LLAMA)
    (tmp_path / "m" / name).chmod(0)
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    code = (
        "import os, sys; from reshard import cli, lines, report, splitting; "
        "from reshard.torchrun import together; os.setgid(65534); os.setuid(65534); "
        "sys.argv = ['reshard', sys.argv[1], '--tp', '1', '--dry-run', '--plan', '/nowhere']; cli.main()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


INDEXES: dict[str, tuple[object, tuple[str, ...]]] = {
    "half a character": ('{"weight_map":{"model.a.weight":"\\ud800.safetensors"}}', ("UTF-8",)),
    "a nul": ({"model.a.weight": "a\0.safetensors"}, ("is not the name of a file",)),
    "a line feed": ({"model.a.weight": "a\n.safetensors"}, ("is not the name of a file",)),
    "a long name": ({"model.a.weight": "a" * 300 + ".safetensors"}, ("is not the name of a file",)),
    "this folder": ({"model.a.weight": "."}, ("is not the name of a file",)),
    "a file of another kind": ({"model.a.weight": "config.json"}, ("is not a safetensors file",)),
    "a list": ({"model.a.weight": ["x.safetensors"]}, ("is not the name of a file",)),
    "true": ({"model.a.weight": True}, ("is not the name of a file",)),
    "nested": ('{"weight_map":' + '{"a":' * 50_000 + "1" + "}" * 50_001, ("nested too deep",)),
    "a byte order mark": ('\ufeff{"weight_map":{}}', ("not JSON",)),
    "nothing": ("", ("not JSON",)),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_indexes(tmp_path: Path, kind: str) -> None:
    content, words = INDEXES[kind]
    text = content if isinstance(content, str) else json.dumps({"weight_map": content})
    path = save_indexed(tmp_path / "m", A, B, config=LLAMA) / INDEX
    path.write_bytes(text.encode())
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "m", tp=2, plan=ALL, layout="checkpoint")
    assert mentions(caught.value, path, *words)


CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a head count that is a text": ('{"num_attention_heads": "4"}', ("num_attention_heads is '4'",)),
    "null": ('{"num_key_value_heads": null}', ("8 elements",)),
    "negative": ('{"num_attention_heads": -1}', ("num_attention_heads is -1",)),
    "zero": ('{"num_key_value_heads": 0}', ("0 elements",)),
    "a float": ('{"num_attention_heads": 4.0}', ("num_attention_heads is 4.0",)),
    "1e9": ('{"num_attention_heads": 1e9}', ("num_attention_heads is 1000000000.0",)),
    "true": ('{"num_attention_heads": true}', ("num_attention_heads is True",)),
    "a list": ('{"num_attention_heads": [4]}', ("num_attention_heads is [4]",)),
    "an object": ('{"head_dim": {"a": 1}}', ("head_dim is {'a': 1}",)),
    "not a number": ('{"head_dim": NaN}', ("head_dim is nan",)),
    "infinite": ('{"head_dim": 1e400}', ("head_dim is inf",)),
    "huge": (f'{{"head_dim": {10**30}}}', ("head_dim is 1000000000000000000000000000000",)),
    "2^63": ('{"head_dim": 9223372036854775808}', ("head_dim is 9223372036854775808",)),
    "too large for its product": ('{"head_dim": 4611686018427387904}', ("2^63",)),
    "5000 digits": (f'{{"head_dim": {"9" * 5000}}}', ("config.json", "digits")),
    "a key twice": ('{"head_dim": 2, "head_dim": 4}', ("'head_dim' twice",)),
    "not UTF-8": ('{"head_dim": "\udcff"}', ("config.json", "UTF-8")),
    "half a character": ('{"a": "\\ud800"}', ("config.json", "UTF-8")),
    "a byte order mark": ("\ufeff{}", ("config.json", "not JSON")),
    "nested": ('{"a":' * 50_000 + "1" + "}" * 50_000, ("config.json", "nested too deep")),
    "a quantization that is a list": ('{"quantization_config": ["gptq"]}', ("quantized by ['gptq']",)),
    "a method that is a number": ('{"quantization_config": {"quant_method": 8}}', ("quantized by 8",)),
    "blocks that are texts": ('{"quantization_config": {"quant_method": "fp8", "weight_block_size": ["2", 2]}}',
                              ("weight_block_size ['2', 2]",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations(tmp_path: Path, kind: str) -> None:
    text, words = CONFIGS[kind]
    path = save(tmp_path / "m", MODEL) / "config.json"
    whole = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    changed = text if not text.endswith("}") or '":' not in text else f"{json.dumps(whole)[:-1]}, {text[1:]}"
    for key in whole:  # or every text would have a key twice
        if f'"{key}":' in text:
            changed = changed.replace(f'"{key}": {json.dumps(whole[key])}, ', "", 1)
    path.write_bytes(changed.encode("utf-8", "surrogateescape"))
    with pytest.raises((CheckpointError, PlanError)) as caught:
        split(tmp_path / "m", tmp_path / "out", tp=2, plan=HEADS, layout="checkpoint")
    assert mentions(caught.value, *words)
    assert [name.name for name in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": [{}]},
        {"architectures": {"a": 1}},
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"tie_word_embeddings": []},
        {"text_config": 3},
        {"per_layer_config": {"9" * 5000: {"head_dim": 2}}},
        {"_class_name": []},
    ],
    ids=str,
)
def test_wrong_types_in_a_configuration(tmp_path: Path, values: dict[str, Any]) -> None:
    """Whether it can be split or not, nothing but our own errors."""
    save(tmp_path / "m", MODEL, {**LLAMA, **values})
    for given in (None, HEADS):
        try:
            plan(tmp_path / "m", tp=2, plan=given, layout="checkpoint")
        except ReshardError as error:
            assert str(error)


PLANS: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "nested lists": ("p.toml", b"a = " + b"[" * 5000 + b"]" * 5000, ("nested too deep",)),
    "nested tables": ("p.toml", b"a = " + b"{a = " * 5000 + b"1" + b"}" * 5000, ("nested too deep",)),
    "a dotted key without end": ("p.toml", b"a." * 20_000 + b"a = 1", ("dots",)),
    "a number in hexadecimal": ("p.toml", b"[sizes]\nx = 0x" + b"f" * 100_000 + b'\n[plan]\na = "colwise"',
                                ("sizes.x", "digits")),
    "a style that is a number": ("p.toml", b"a = 0x" + b"f" * 100_000, ("a: a style's name",)),
    "a date": ("p.toml", b"a = 2020-01-01", ("a: a style's name",)),
    "infinity": ("p.toml", b"[sizes]\nx = inf\n[plan]\na = 'colwise'", ("sizes.x: inf",)),
    "a table twice": ("p.toml", b'[plan]\na = "colwise"\n[plan]\n', ("not TOML",)),
    "a byte order mark": ("p.toml", b'\xef\xbb\xbfa = "colwise"', ("not TOML",)),
    "not UTF-8": ("p.toml", b'"\xff" = "colwise"', ("not TOML in UTF-8",)),
    "JSON with half a character": ("p.json", b'{"\\ud800": "colwise"}', ("UTF-8",)),
    "JSON of 5000 digits": ("p.json", b'{"sizes": {"x": ' + b"9" * 5000 + b'}, "plan": {"a": "colwise"}}', ("digits",)),
    "JSON nested": ("p.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, ("nested too deep",)),
    "a list": ("p.json", b"[]", ("not a JSON object",)),
    "a huge dim": ("p.json", b'{"a": {"style": "colwise", "dim": 99999999999999999999}}', ("dim 9999999",)),
    "a dim that is true": ("p.json", b'{"a": {"style": "colwise", "dim": true}}', ("dim True",)),
    "blocks that are negative": ("p.json", b'{"a": {"style": "packed_colwise", "blocks": [-1]}}', ("blocks [-1]",)),
    "a pattern of many parts": ("p.json", json.dumps({"*." * 200 + "w": "colwise"}).encode(), ("201 parts",)),
    "a pattern that leads out": ("p.json", b'{"../x": "colwise"}', ("..",)),
    "a large file": ("p.toml", b"#" * 1_000_001, ("1000001 bytes", "1000000")),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_plan_files(tmp_path: Path, kind: str) -> None:
    name, content, words = PLANS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert mentions(caught.value, path, *words)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fifo, "a pipe, a socket or a device"),
        (folder, "Is a directory"),
        (loop, "cannot be read"),
        (device, "a pipe, a socket or a device"),
        (nowhere, "No such file"),
    ],
)
def test_what_stands_in_place_of_a_plan(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path / "plan.toml")
    with pytest.raises(PlanError) as caught:
        read_plan(tmp_path / "plan.toml")
    assert mentions(caught.value, tmp_path / "plan.toml", words)


SIZES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a number of 5000 digits": ({"x": "9" * 5000}, ("2^63",)),
    "a product without end": ({"x": "*".join(["9999999"] * 10_000)}, ("2^63",)),
    "a chain": ({**{f"x{i}": f"x{i + 1}" for i in range(500)}, "x": "x0"}, ("chain",)),
    # Doubled at each of 60 steps, and known at none.
    "alternatives of alternatives": ({**{f"x{i}": f"x{i + 1} | x{i + 1} | x{i + 1}" for i in range(40)}, "x": "x0"},
                                     ("not known",)),
    "a circle": ({"x": "y", "y": "x"}, ("refers to itself",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_without_end(tmp_path: Path, kind: str) -> None:
    sizes, words = SIZES[kind]
    save(tmp_path / "m", A, LLAMA)
    document = {"plan": {"model.a": {"style": "colwise", "layout": "(x*)"}}, "sizes": sizes}
    cost = check(lambda: plan(tmp_path / "m", tp=2, plan=document, layout="checkpoint"), 0)
    assert cost.refusal is not None
    assert mentions(cost.refusal, *words)


LAYOUTS = {
    "deep": "(2, [" * 5000,
    "brackets": "(" * 100_000,
    "many factors": "(" + "1, " * 50_000 + "4*)",
    "many segments": " + ".join(["(0*)"] * 50_000),
    "spaces": "(4*" + " " * 500_000 + "x",
    "more than a segment holds": f"({', '.join(['99999999999'] * 30)}*)",
    "a part of a billion blocks": "(1000000000, 2*)",
    "marks that are none": "(4*)" + "^" * 100_000,
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_without_end(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "m", A, LLAMA)
    document = {"plan": {"model.a": {"style": "colwise", "layout": LAYOUTS[kind]}}}
    cost = check(lambda: plan(tmp_path / "m", tp=2, plan=document, layout="checkpoint"), len(LAYOUTS[kind]))
    assert isinstance(cost.refusal, PlanError)
    assert len(str(cost.refusal)) < 3000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split in a folder of its own, with nothing beside it."""
    work = tmp_path_factory.mktemp("manifests")
    save(work / "in", {**A, **B, "model.norm.weight": count(4)}, LLAMA)
    split(work / "in", work / "split", tp=2, plan={"model.a": "colwise", "model.b": "rowwise"}, layout="checkpoint")
    return work


Change = Callable[[dict[str, Any]], object]
MANIFESTS: dict[str, tuple[Change, str]] = {
    "a file outside": (lambda m: m["files"][0].update(name="../x"), "'../x' is not the name of a file"),
    "a file from the root": (lambda m: m["files"][0].update(name="/etc/passwd"), "'/etc/passwd'"),
    "a file's name with a nul": (lambda m: m["files"][0].update(name="a\0"), "is not the name of a file"),
    "a file of no name": (lambda m: m["files"][0].update(name=""), "is not the name of a file"),
    "the manifest as a file": (lambda m: m["files"][0].update(name="manifest.json"), "two files have"),
    "two files of one name": (lambda m: m["files"][0].update(name=m["files"][1]["name"]), "two files have"),
    "carried from outside": (lambda m: m["carried"].update({"../x": "0" * 32}), "'../x'"),
    "carried as a rank's file": (
        lambda m: m["carried"].update({m["files"][0]["name"]: "0"}),
        "two files have",
    ),
    "a source outside": (lambda m: m["source"]["files"][0].update(name="../x"), "'../x'"),
    "a source as what is carried": (lambda m: m["source"]["files"][0].update(name="config.json"), "two files"),
    "an index outside": (lambda m: m["source"].update(index="../x"), "'../x'"),
    "no ranks": (lambda m: m.update(world_size=0), "world_size"),
    "negative ranks": (lambda m: m.update(world_size=-2), "world_size"),
    "a billion ranks": (lambda m: m.update(world_size=10**9), "world_size"),
    "half a rank": (lambda m: m.update(world_size=2.5), "world_size"),
    "another layout": (lambda m: m.update(layout="x"), "layout"),
    "an owner that is no rank": (lambda m: m["files"][0].update(owners=[2]), "owners"),
    "an owner twice": (lambda m: m["files"][0].update(owners=[0, 0]), "owners"),
    "a negative owner": (lambda m: m["files"][0].update(owners=[-1]), "owners"),
    "data past the file": (lambda m: m["files"][0].update(data_offset=10**6), "starts at byte 1000000"),
    "a negative size": (lambda m: m["files"][0].update(nbytes=-1), "nbytes"),
    "an extent past the file": (lambda m: held(m).update(nbytes=[10**6]), "end at byte"),
    "an extent of nothing": (lambda m: held(m).update(names=["model.a.weight", "model.x"], nbytes=[32, 0]), "model.x"),
    "fewer sizes than names": (lambda m: held(m).update(nbytes=[]), "1 names, but 0 sizes"),
    "too few hashes": (lambda m: held(m).update(tiles=""), "hashes of 0 digits, 32 expected"),
    "an unknown dtype": (lambda m: kind(m).update(dtype="F2"), "unknown dtype 'F2'"),
    "another dtype than the source's": (lambda m: kind(m).update(dtype="I32"), "model.a.weight"),
    "a negative shape": (lambda m: kind(m).update(shape=[-4, 4]), "shape"),
    "a huge shape": (lambda m: kind(m).update(shape=[2**62, 2**62]), "larger than a file"),
    "many dimensions": (lambda m: kind(m).update(shape=[1] * 40), "larger than a file"),
    "a kind that is not in the table": (lambda m: m["tensors"]["kinds"].__setitem__(0, 9), "none of the"),
    "a cut of a dimension that is not there": (lambda m: cut(m).update(dim=2), "cuts dims [2] of 2"),
    "an axis that is none": (lambda m: cut(m).update(axis="(4*"), "(4*"),
    "an axis of another size": (lambda m: cut(m).update(axis="(6*)"), "an axis of 6"),
    "an axis of many blocks": (lambda m: cut(m).update(axis="(1000000000, 2*)"), "blocks"),
    "a unit of nothing": (lambda m: cut(m).update(unit=0), "unit"),
    "a mesh of other ranks": (lambda m: kind(m)["placement"].update(mesh=[["tp", 3]]), "not of 2 ranks"),
    "a mesh of no ranks": (lambda m: kind(m)["placement"].update(mesh=[["tp", 0]]), "mesh"),
    "a mesh axis twice": (lambda m: kind(m)["placement"].update(mesh=[["a", 1], ["a", 2]]), "a mesh of"),
    "a tie to nothing": (lambda m: m["ties"].update(x="y"), "x is tied to y"),
    "a module's axis": (lambda m: m["modules"].update(x={"style": "colwise", "axis": "(("}), "modules: x"),
    "a part of no source": (lambda m: make_from(m, 9, {}), "none of the"),
    "a part of another shape": (lambda m: make_from(m, "model.norm.weight", {}), "made of"),
    "a run out of its source": (
        lambda m: make_from(
            m, "model.a.weight", {"links": [[0, 0, [[0, 0, 5, 1, 0, 0]]], [1, 1, [[0, 0, 4, 1, 0, 0]]]]}
        ),
        "lead out of it",
    ),
    "a run of a billion blocks": (
        lambda m: make_from(
            m, "model.a.weight", {"links": [[0, 0, [[0, 0, 1, 10**9, 0, 0]]], [1, 1, [[0, 0, 4, 1, 0, 0]]]]}
        ),
        "lead out of it",
    ),
    "a source tensor in two files": (
        lambda m: m["source"]["files"].append({**m["source"]["files"][0], "name": "y"}),
        "is there twice",
    ),
    "a number of 5000 digits": (lambda m: m.update(sizes={"x": "@"}), "manifest"),
}


def held(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what the first rank's file holds, which is ``model.a.weight`` alone."""
    table: dict[str, Any] = manifest["files"][0]["tensors"]
    table.update(names=table["names"][:1], nbytes=table["nbytes"][:1], tiles=table["tiles"][:32])
    assert table["names"] == ["model.a.weight"]
    return table


def kind(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of ``model.a.weight``."""
    tensors = manifest["tensors"]
    found: dict[str, Any] = tensors["table"][tensors["kinds"][tensors["names"].index("model.a.weight")]]
    return found


def cut(manifest: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = kind(manifest)["placement"]["cuts"][0]
    return first


def make_from(manifest: dict[str, Any], source: str | int, form: dict[str, Any]) -> None:
    """Let ``model.a.weight`` be made from one source, by its name or its number."""
    names = manifest["source"]["files"][0]["tensors"]["names"]
    number = names.index(source) if isinstance(source, str) else source
    manifest["parts"] = {"forms": [form], "tensors": {"model.a.weight": [[number], [0]]}}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests(made: Path, tmp_path: Path, kind: str) -> None:
    """The digest is right, so that this is all that refuses them; nothing is opened or written outside."""
    change, words = MANIFESTS[kind]
    good = (made / "split" / "manifest.json").read_bytes()
    document = {**json.loads(good), "digest": None}
    change(document)
    text = json.dumps(document, separators=(",", ":")).replace('"@"', "9" * 5000).encode()
    out = tmp_path / "split"
    out.mkdir()
    for path in (made / "split").iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    (out / "manifest.json").write_bytes(sealed(text))
    with pytest.raises(ManifestError) as caught:
        decode_manifest(sealed(text), "split/manifest.json")
    assert mentions(caught.value, "split/manifest.json", words)
    before = sorted(made.iterdir())
    for use in (verify, lambda out: merge(out, tmp_path / "again"), read_manifest):
        cost = check(lambda use=use: use(out), 0)
        assert isinstance(cost.refusal, ManifestError), cost
    for rank in (0, 1):
        check(lambda rank=rank: [*open_shard(out, rank).values()], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["split"]
    assert sorted(made.iterdir()) == before


def test_a_key_twice_in_a_manifest(made: Path, tmp_path: Path) -> None:
    """Readers in other languages may take the other one."""
    good = (made / "split" / "manifest.json").read_bytes()
    out = Path(shutil.copytree(made / "split", tmp_path / "split"))
    for key in (b'"world_size":2', b'"layout":"checkpoint"'):
        assert good.count(key) == 1
        (out / "manifest.json").write_bytes(resealed(good.replace(key, key + b"," + key)))
        with pytest.raises(DamageError) as caught:
            verify(out)
        assert mentions(caught.value, "manifest.json", "not encoded as a writer must")


@pytest.mark.parametrize("name", ["rank-00000-of-00002.safetensors", "config.json"])
def test_pipes_in_a_split(made: Path, tmp_path: Path, name: str) -> None:
    """Neither verifying nor loading waits for somebody to write."""
    out = tmp_path / "split"
    out.mkdir()
    for path in (made / "split").iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    (out / name).unlink()
    fifo(out / name)
    with pytest.raises(DamageError) as caught:
        verify(out)
    assert mentions(caught.value, name)
    if name == "config.json":
        with pytest.raises(LoadError) as refused:
            check_carried(out, read_runtime(out))
    else:
        with pytest.raises(LoadError) as refused:
            open_shard(out, 0)
    assert mentions(refused.value, out / name, "a pipe, a socket or a device")


@pytest.mark.parametrize("module", ["nothing_of_this_name", "tests.nothing"])
def test_a_strategy_that_cannot_be_imported(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text("raise ValueError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (module, "fails_at_import"):
        with pytest.raises(PlanError) as caught:
            build_plan({"a": f"{name}:Own"}, "plan")
        assert mentions(caught.value, f"strategy {name}:Own", "cannot be imported")


def test_no_password_of_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://somebody:hidden@127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
    error = LookupError("GET http://somebody:hidden@127.0.0.1:9/x?X-Signature=abc said hf_" + "s" * 34)
    kind = type("HTTPError", (Exception,), {})(str(error))
    with pytest.raises(CheckpointError) as caught, hub._explained("org/x", "main"):
        raise kind
    assert mentions(caught.value, "127.0.0.1:9")
    assert not [word for word in ("hidden", "somebody", "abc", "ssss") if word in str(caught.value)]


def test_a_manifest_is_no_pipe(tmp_path: Path) -> None:
    fifo(tmp_path / "manifest.json")
    for read in (read_manifest, read_runtime, verify):
        with pytest.raises(ManifestError) as caught:
            read(tmp_path)
        assert mentions(caught.value, tmp_path / "manifest.json", "a pipe, a socket or a device")


# Inputs that are large and take an algorithm at its worst: nothing is quadratic, and little is kept.
def many_tensors(number: int, step: int) -> bytes:
    return header(*(entry(f"w{i}", offsets=f"[{step * i},{step * i + 2}]") for i in range(number)))


LARGE: dict[str, bytes] = {
    "many tensors": many_tensors(5_000, 2),
    "many that overlap": many_tensors(5_000, 1),
    "many over one another": many_tensors(5_000, 0),
    "many names twice": header(*(entry(f"w{i}") for i in range(3_000)), *(entry(f"w{i}") for i in range(3_000))),
    "lists in lists": b'{"a":[' + b"[]," * 100_000 + b"[]]}",
    "a long shape": header(entry("w", "[" + "1," * 500_000 + "2]")),
    "a long shape of large numbers": header(entry("w", "[" + "9223372036854775807," * 50_000 + "2]")),
    "many dots": header(entry("a." * 500_000)),
    "deep": b'{"a":' * 200_000,
    "digits": header(entry("w", "[" + "9" * 1_000_000 + "]")),
    "escapes": header(entry("\\u0041" * 100_000)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_headers_cost_little(kind: str) -> None:
    text = LARGE[kind]
    check(lambda: parse_header(text, 8 + len(text) + 40_000, "x"), len(text))
    check(lambda: parse_header(text, 8 + len(text) + 40_000, "x"), len(text), traced=True)


def test_an_index_with_a_key_twice_at_its_end(tmp_path: Path) -> None:
    """Not looked for one key at a time."""
    path = save_indexed(tmp_path / "m", A, B) / INDEX
    keys = ",".join(f'"w{i}":"x.safetensors"' for i in range(50_000))
    path.write_text(f'{{"weight_map":{{{keys},"w49999":"y.safetensors"}}}}')
    cost = check(lambda: plan(tmp_path / "m", tp=2, plan=ALL), path.stat().st_size, traced=True)
    assert cost.refusal is not None
    assert mentions(cost.refusal, "'w49999' twice")


def test_names_of_many_words_are_matched_at_once(tmp_path: Path) -> None:
    """Tried part by part and never anew: no layer number is in any."""
    names = [".".join(["abcdefghij"] * 80) + f".w{i}" for i in range(20)]
    save(tmp_path / "m", {name: count(2, 2) for name in names}, LLAMA)
    rules = {"*." * 79 + "*": "colwise"}
    check(lambda: plan(tmp_path / "m", tp=2, plan=rules, layout="checkpoint"), 0)


def test_a_pattern_of_brackets_is_read_at_once(tmp_path: Path) -> None:
    save(tmp_path / "m", A, LLAMA)
    cost = check(lambda: plan(tmp_path / "m", tp=2, plan={"[" * 900: "colwise"}, layout="checkpoint"), 0)
    assert isinstance(cost.refusal, PlanError)


def test_a_file_that_is_larger_than_such_files_are(tmp_path: Path) -> None:
    """A hole of 10 GB in place of an index is not read into memory."""
    path = save_indexed(tmp_path / "m", A, B) / INDEX
    os.truncate(path, 10 << 30)
    cost = check(lambda: plan(tmp_path / "m", tp=2, plan=ALL), 0, traced=True)
    assert cost.refusal is not None
    assert mentions(cost.refusal, path, str(10 << 30))


def test_no_pickle_is_read(tmp_path: Path) -> None:
    save(tmp_path / "m", A, LLAMA)
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    result = CliRunner().invoke(cli.main, [str(tmp_path / "m"), "--tp", "2"])
    assert result.exit_code == CheckpointError.exit_code
    assert "pytorch_model.bin, which is not read" in result.output


def test_a_manifest_says_nothing_of_this_machine(made: Path) -> None:
    """What was read is named relative to its folder; there is no path, no user and no host."""
    text = (made / "split" / "manifest.json").read_text()
    words = (str(made), str(made.parent), str(Path.home()), os.uname().nodename)
    assert not [word for word in words if len(word) > 5 and word in text]
