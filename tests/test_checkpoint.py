"""The source: which files belong to a checkpoint, and what is none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from manifests.errors import CheckpointError
from reshard import plan
from reshard.sources.checkpoint import Checkpoint, open_checkpoint
from reshard.sources.folder import LocalFolder
from tests.checkpoints import count, mentions, save, save_indexed

A, B = {"model.a.weight": count(4, 4)}, {"model.b.weight": count(4, 4, start=50)}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"


def opened(folder: Path, variant: str = "") -> Checkpoint:
    return open_checkpoint(LocalFolder(folder), variant)


def indexed(folder: Path) -> Path:
    return save_indexed(folder / "m", A, B, config={"model_type": "x"})


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": change(weight_map)}))


def test_one_file(tmp_path: Path) -> None:
    checkpoint = opened(save(tmp_path / "m", A | B, {"model_type": "x"}))
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert {name: tensor.stored.shape for name, tensor in checkpoint.tensors.items()} == dict.fromkeys(A | B, (4, 4))
    assert (checkpoint.index_name, checkpoint.config, checkpoint.ignored) == ("", {"model_type": "x"}, ())


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_an_index_and_its_files(tmp_path: Path, stem: str) -> None:
    checkpoint = opened(save_indexed(tmp_path / "m", A, B, stem=stem))
    assert [file.name for file in checkpoint.files] == [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert {name: tensor.file for name, tensor in checkpoint.tensors.items()} == {
        "model.a.weight": 0,
        "model.b.weight": 1,
    }
    assert checkpoint.index_name == f"{stem}.safetensors.index.json"


def test_the_only_weight_file_may_have_any_name(tmp_path: Path) -> None:
    save_file(A, tmp_path / "unet.safetensors")
    assert [file.name for file in opened(tmp_path).files] == ["unet.safetensors"]


def test_files_that_the_index_does_not_name_are_ignored_and_listed(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    save_file({"model.a.weight": count(4, 4, start=9000), "layers.0.w": count(4)}, folder / "consolidated.safetensors")
    save_file({"x": count(3)}, folder / "model.safetensors")
    checkpoint = opened(folder)
    assert [file.name for file in checkpoint.files] == list(FILES)
    assert checkpoint.ignored == ("consolidated.safetensors", "model.safetensors")
    assert set(checkpoint.tensors) == {"model.a.weight", "model.b.weight"}


def test_without_an_index_it_is_the_model_file_and_nothing_else(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", A)
    for name in ("adapter_model", "training_state", "a"):
        save_file(B, folder / f"{name}.safetensors")
    checkpoint = opened(folder)
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert checkpoint.ignored == ("a.safetensors", "adapter_model.safetensors", "training_state.safetensors")
    assert set(checkpoint.tensors) == set(A)


def test_what_travels_with_a_split(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    carried = (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "vocab.txt",
        "LICENSE",
    )
    left = (
        ".gitattributes",
        "pytorch_model.bin.index.json",
        "README.md",
        "pytorch_model.bin",
        "modeling_x.py",
        "x.png",
    )
    for name in (*carried, *left):
        (folder / name).write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    assert sorted(opened(folder).carried) == sorted((*carried, "config.json"))


def truncated(folder: Path, name: str, nbytes: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:nbytes])


BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a file is gone": (lambda f: (f / FILES[1]).unlink(), (INDEX, FILES[1], "not there")),
    "all files are gone": (lambda f: [(f / name).unlink() for name in FILES], ("2 files", *FILES)),
    "a pointer": (lambda f: (f / FILES[1]).write_bytes(POINTER), (FILES[1], "LFS pointer")),
    "cut in the data": (lambda f: truncated(f, FILES[1], -10), (FILES[1], "cut short")),
    "cut in the header": (lambda f: truncated(f, FILES[1], 40), (FILES[1], "cut short inside its header")),
    "an empty file": (lambda f: truncated(f, FILES[1], 0), (FILES[1], "empty")),
    "a folder of its name": (lambda f: [(f / FILES[1]).unlink(), (f / FILES[1]).mkdir()], (FILES[1],)),
    "a link to nothing": (lambda f: [(f / FILES[1]).unlink(), (f / FILES[1]).symlink_to("x")], (FILES[1],)),
    "a tensor is elsewhere": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": FILES[1]}),
        ("model.a.weight", FILES[1]),
    ),
    "a tensor is nowhere": (
        lambda f: rewrite_index(f, lambda m: m | {"model.c.weight": FILES[1]}),
        ("1 tensors", "model.c.weight", FILES[1]),
    ),
    "a tensor is not named": (
        lambda f: save_file(B | {"model.c.weight": count(2)}, f / FILES[1]),
        ("model.c.weight", FILES[1], "not of one checkpoint"),
    ),
    "a path outside": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": "../x.safetensors"}),
        ("model.a.weight", "../x.safetensors", "not the name of a file"),
    ),
    "a path with a folder": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": "sub/x.safetensors"}),
        ("model.a.weight", "sub/x.safetensors"),
    ),
    "a path from the root": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": "/etc/x.safetensors"}),
        ("model.a.weight", "/etc/x.safetensors"),
    ),
    "a path of Windows": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": "..\\x.safetensors"}),
        ("model.a.weight",),
    ),
    "a pickle in the index": (
        lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": "pytorch_model.bin"}),
        ("model.a.weight", "pytorch_model.bin", "not a safetensors file"),
    ),
    "no name": (lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": ""}), ("model.a.weight",)),
    "a number": (lambda f: rewrite_index(f, lambda m: m | {"model.a.weight": 1}), ("model.a.weight", "1")),
    "an empty weight_map": (lambda f: rewrite_index(f, lambda m: {}), (INDEX, "weight_map")),
    "a list": (lambda f: rewrite_index(f, list), (INDEX, "weight_map")),
    "no weight_map": (lambda f: (f / INDEX).write_text("{}"), (INDEX, "weight_map")),
    "no object": (lambda f: (f / INDEX).write_text("[]"), (INDEX, "not a JSON object")),
    "no JSON": (lambda f: (f / INDEX).write_text('{"weight_map": '), (INDEX, "not JSON")),
    "no UTF-8": (lambda f: (f / INDEX).write_bytes(b'{"\xff": 1}'), (INDEX, "not JSON in UTF-8")),
    "nested too deep": (lambda f: (f / INDEX).write_text("[" * 100_000), (INDEX, "not JSON")),
    "a key twice": (
        lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{FILES[0]}", "a": "{FILES[1]}"}}}}'),
        (INDEX, "'a' twice"),
    ),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json", "not JSON")),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json", "not a JSON object")),
    "config has a key twice": (
        lambda f: (f / "config.json").write_text('{"num_attention_heads": 4, "num_attention_heads": 8}'),
        ("config.json", "'num_attention_heads' twice"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    breaking, words = BROKEN[kind]
    folder = indexed(tmp_path)
    opened(folder)
    breaking(folder)
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert mentions(caught.value, folder, *words)
    assert caught.value.exit_code == 3


def test_of_many_missing_files_some_are_named(tmp_path: Path) -> None:
    folder = save_indexed(tmp_path / "m", *({f"w{i}": count(2)} for i in range(9)))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert mentions(caught.value, "9 files", "model-00005-of-00009", "and 4 more")
    assert "model-00006-of-00009" not in str(caught.value)


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), ("no safetensors files",)),
        (("pytorch_model.bin", "config.json"), ("pytorch_model.bin", "not read", "safe_serialization")),
        (("model.gguf",), ("model.gguf", "not read")),
        (("consolidated.00.pth",), ("consolidated.00.pth",)),
        (("adapter_config.json", "adapter_model.safetensors"), ("adapter", "merge it first")),
        (("manifest.json", "rank-00000-of-00002.safetensors"), ("a split already", "merge")),
        (("a.safetensors", "b.safetensors"), ("2 safetensors files and no index", "a.safetensors, b.safetensors")),
    ],
)
def test_folders_that_hold_no_checkpoint(tmp_path: Path, names: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(touch(tmp_path, *names))
    assert mentions(caught.value, tmp_path, *words)


# Half a model would pass for a whole one.
def test_one_file_of_several_without_its_index(tmp_path: Path) -> None:
    save_file(A, tmp_path / FILES[0])
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert mentions(caught.value, FILES[0])


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(save(tmp_path / "m", {}))
    assert mentions(caught.value, tmp_path / "m", "no tensors")


@pytest.mark.parametrize("model", ["absent", "absent/absent/absent", "file"])
def test_what_is_no_folder(tmp_path: Path, model: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / model, tp=2, plan={"a": "colwise"})
    assert mentions(caught.value, tmp_path / model, "no such folder")


def test_an_empty_text_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes it for the working directory."""
    monkeypatch.chdir(save(tmp_path / "m", A))
    with pytest.raises(CheckpointError) as caught:
        plan("", tp=2, plan={"model.a": "colwise"})
    assert mentions(caught.value, "empty")


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan(indexed(tmp_path), tp=2, plan={"a": "colwise"}, revision="main")
    assert mentions(caught.value, "revision")


FULL, HALF = {"w": count(4, 4)}, {"w": count(4, 4, start=500)}
HALF_TOO = {"v": count(2, start=900)}


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("index", ["{stem}.safetensors.index.fp16.json", "{stem}.fp16.safetensors.index.json"])
def test_variants_are_never_mixed(tmp_path: Path, stem: str, index: str) -> None:
    index = index.format(stem=stem)
    folder = save_indexed(tmp_path / "m", HALF, HALF_TOO, stem=f"{stem}.fp16", index=index)
    save_file(FULL, folder / f"{stem}.safetensors")
    halves = [f"{stem}.fp16-0000{i}-of-00002.safetensors" for i in (1, 2)]
    full, half = opened(folder), opened(folder, "fp16")
    assert [file.name for file in full.files] == [f"{stem}.safetensors"]
    assert full.ignored == tuple(halves)
    assert [file.name for file in half.files] == halves
    assert (set(half.tensors), half.index_name) == ({"w", "v"}, index)
    assert half.ignored == (f"{stem}.safetensors",)
    with pytest.raises(CheckpointError) as caught:
        opened(folder, "bf16")
    assert mentions(caught.value, "'bf16'", *halves)


def test_a_variant_of_one_file(tmp_path: Path) -> None:
    save_file(FULL, tmp_path / "model.safetensors")
    save_file(HALF, tmp_path / "model.fp16.safetensors")
    assert [file.name for file in opened(tmp_path).files] == ["model.safetensors"]
    assert [file.name for file in opened(tmp_path, "fp16").files] == ["model.fp16.safetensors"]


def test_a_component_of_a_pipeline(tmp_path: Path) -> None:
    name = "single_transformer_blocks.0.proj_out.weight"
    save(tmp_path / "pipe" / "transformer", {name: count(4, 16)}, {"_class_name": "FluxTransformer2DModel"})
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    rules = {"single_transformer_blocks.*.proj_out": {"style": "packed_rowwise", "blocks": [4, 12]}}
    made = plan(tmp_path / "pipe", tp=2, plan=rules, subfolder="transformer")
    assert (made.model.library, made.model.architecture) == ("diffusers", "FluxTransformer2DModel")
    assert made.resolution.tensors[name].placement.cuts[0].axis == "(4*) + (12*)"
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "pipe", tp=2, plan=rules)
    assert mentions(caught.value, "pipe")
    with pytest.raises(CheckpointError) as caught:
        plan(tmp_path / "pipe", tp=2, plan=rules, subfolder="vae")
    assert mentions(caught.value, "vae")


def test_linked_files_are_read_through(tmp_path: Path) -> None:
    """A snapshot of the hub's cache is links into a folder of blobs."""
    blobs = indexed(tmp_path).rename(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert [file.nbytes for file in opened(snapshot).files] == [(blobs / name).stat().st_size for name in FILES]
