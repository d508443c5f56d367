"""The loader in one process: mapped shards, attaching, models of transformers, and everything that is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import FNetConfig, FNetForMaskedLM

from loader import Shard, attach, install_hooks, load_model, mapping, open_shard
from loader.attaching import LocalView
from loader.meta import parameters_on_meta
from manifests.errors import LoadError, ManifestError
from manifests.manifest import read_manifest
from reshard import split
from reshard.catalogue import model_types
from tests.checkpoints import LLAMA, count, mentions, save
from tools.sweep.tiny import tiny_model

F4 = torch.float4_e2m1fn_x2
MIB = 1 << 20

TENSORS = {
    "scalar": torch.tensor(0.25),
    "empty": torch.zeros(0, 4),
    "up.weight": count(8, 6, dtype=torch.bfloat16),
    "up.bias": count(8, start=3),
    "up.i8": count(8, 3, dtype=torch.int8),
    "up.fp8": count(8, 5, dtype=torch.float8_e4m3fn),
    "up.f4": count(8, 3, dtype=F4),
    "up.none": torch.zeros(8, 0),
    "down.weight": count(5, 8, start=1),
    "down.f4": count(5, 4, dtype=F4, start=9),
    "down.bias": count(5, dtype=torch.bfloat16, start=2),
    "flags": torch.tensor([True, False, True]),
}
PLAN = {"up": "colwise", "down": "rowwise", "down.f4": "rowwise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    split(save(root / "source", TENSORS), root / "split", tp=2, plan=PLAN)
    return root / "split"


def part(name: str, rank: int, world_size: int = 2) -> torch.Tensor:
    """Return a rank's part of a tensor, by torch; F4 and FP8, which it moves as bytes only, as bytes."""
    whole = in_bytes(TENSORS[name])
    if name.startswith("up"):
        return whole.chunk(world_size)[rank]
    if name == "down.bias":
        return whole if rank == 0 else torch.zeros_like(whole)
    return whole.chunk(world_size, 1)[rank] if name.startswith("down") else whole


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_slices_of_the_source(folder: Path, name: str, rank: int):
    tensor, expected = open_shard(folder, rank)[name], part(name, rank)
    assert tensor.dtype == TENSORS[name].dtype
    assert tensor.shape == expected.shape
    assert torch.equal(in_bytes(tensor), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_are_those_that_safetensors_reads(folder: Path, rank: int):
    shard = open_shard(str(folder), rank)
    stored = load_file(folder / f"rank-{rank:05d}-of-00002.safetensors") | load_file(folder / "common.safetensors")
    assert set(shard) == set(TENSORS)
    assert set(stored) == (set(TENSORS) if rank == 0 else set(TENSORS) - {"down.bias"})
    for name, expected in stored.items():
        assert (shard[name].dtype, shard[name].shape) == (expected.dtype, expected.shape)
        assert torch.equal(in_bytes(shard[name]), in_bytes(expected))


def test_a_shard_is_a_mapping(folder: Path):
    shard = open_shard(folder, 1)
    assert (len(shard), shard.rank, shard.device) == (len(TENSORS), 1, torch.device("cpu"))
    assert shard.manifest.key == read_manifest(folder).key
    assert "up.weight" in shard
    assert "nothing" not in shard
    with pytest.raises(KeyError):
        shard["nothing"]


def test_files_in_parts_and_of_one_rank_alone(tmp_path: Path, folder: Path):
    source = save(tmp_path / "source", TENSORS)
    split(source, tmp_path / "parts", tp=2, plan=PLAN, max_file_nbytes=64, self_contained=True)
    for rank in (0, 1):
        shard = open_shard(tmp_path / "parts", rank)
        assert all(torch.equal(in_bytes(shard[name]), part(name, rank)) for name in TENSORS)
    # A rank opens no other rank's file.
    for path in (tmp_path / "parts").glob("rank-00000-*"):
        path.unlink()
    assert torch.equal(open_shard(tmp_path / "parts", 1)["up.weight"], part("up.weight", 1))


def test_unused_tensors_are_in_no_shard(tmp_path: Path):
    tensors = {"model.norm.weight": count(8), "model.layers.0.self_attn.rotary_emb.inv_freq": count(2)}
    out = tmp_path / "out"
    split(save(tmp_path / "source", tensors, LLAMA), out, tp=1, plan={"model.norm": "replicate"})
    assert list(open_shard(out, 0)) == ["model.norm.weight"]


def test_writing_to_a_tensor_leaves_the_file_alone(folder: Path):
    before = (folder / "rank-00000-of-00002.safetensors").read_bytes()
    open_shard(folder, 0)["down.weight"].fill_(-1)
    assert (folder / "rank-00000-of-00002.safetensors").read_bytes() == before
    assert torch.equal(open_shard(folder, 0)["down.weight"], part("down.weight", 0))


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bytes_read() -> int:
    """Return the bytes that this process got from read calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_nothing_is_read_before_it_is_used(tmp_path: Path, folder: Path):
    out = tmp_path / "out"
    split(save(tmp_path / "source", {"a.weight": torch.ones(4096, 4096)}), out, tp=1, plan={"a": "colwise"})
    open_shard(folder, 0)["up.weight"].sum()
    before = memory("RssAnon"), memory("RssFile"), bytes_read()
    shard = open_shard(out, 0)
    module = nn.ModuleDict({"a": nn.Linear(4096, 4096, bias=False, device="meta")})
    attach(module, shard)
    after = memory("RssAnon"), memory("RssFile"), bytes_read()
    assert [now - then < MIB for now, then in zip(after, before, strict=True)] == [True, True, True]
    with torch.inference_mode():
        assert module["a"].weight.sum() == 16 * MIB
    # The pages are the file's own, shared with other processes.
    assert memory("RssFile") - before[1] > 60 * MIB
    assert memory("RssAnon") - before[0] < 8 * MIB


@pytest.mark.parametrize("rank", [-1, 2])
def test_no_such_rank(folder: Path, rank: int):
    with pytest.raises(LoadError) as caught:
        open_shard(folder, rank)
    assert mentions(caught.value, folder, "2 ranks", f"no rank {rank}")
    assert caught.value.exit_code == 8


def test_no_manifest(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "manifest.json").unlink()
    for open_it in (lambda path: open_shard(path, 0), load_model):
        with pytest.raises(ManifestError) as caught:
            open_it(tmp_path / "unfinished")
        assert mentions(caught.value, tmp_path / "unfinished", "no manifest.json")
        with pytest.raises(ManifestError) as caught:
            open_it(tmp_path / "nowhere")
        assert mentions(caught.value, tmp_path / "nowhere", "no such folder")


RANK_FILE = "rank-00000-of-00002.safetensors"


def truncate(path: Path) -> list[object]:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return [f"{size // 2} bytes", f"{size} expected"]


def lengthen(path: Path) -> list[object]:
    size = path.stat().st_size
    os.truncate(path, size + 1)
    return [f"{size + 1} bytes", f"{size} expected"]


def empty(path: Path) -> list[object]:
    size = path.stat().st_size
    os.truncate(path, 0)
    return ["0 bytes", f"{size} expected"]


def remove(path: Path) -> list[object]:
    path.unlink()
    return ["missing", "copy it"]


def take_from_other_split(path: Path) -> list[object]:
    """Put the file of a split of the same names and shapes, with other values, in its place."""
    other = path.parent.parent / "other"
    tensors = {name: in_bytes(x) ^ 1 if x.dtype == torch.int8 else x for name, x in TENSORS.items()}
    manifest = split(save(other.with_name("other source"), tensors), other, tp=2, plan=PLAN)
    assert (other / path.name).stat().st_size == path.stat().st_size
    shutil.copy(other / path.name, path)
    return ["another split", manifest.key, read_manifest(path.parent).key]


def take_from_other_rank(path: Path) -> list[object]:
    """Put rank 1's file in place of rank 0's; of a plan that gives both the same size."""
    source = save(path.parent.parent / "even", {"up.weight": TENSORS["up.weight"]})
    shutil.rmtree(path.parent)
    split(source, path.parent, tp=2, plan={"up": "colwise"})
    other = path.with_name("rank-00001-of-00002.safetensors")
    assert other.stat().st_size == path.stat().st_size
    shutil.copy(other, path)
    return ["its header is not the one that was written"]


def change_header(path: Path) -> list[object]:
    content = path.read_bytes()
    assert content.count(b'"I8"') == 1
    path.write_bytes(content.replace(b'"I8"', b'"U8"'))
    return ["its header is not the one that was written"]


def fill_with_noise(path: Path) -> list[object]:
    path.write_bytes(b"\xff" * path.stat().st_size)
    return ["cannot be used", "not a safetensors file"]


DAMAGES: list[Callable[[Path], list[object]]] = [
    truncate,
    lengthen,
    empty,
    remove,
    take_from_other_split,
    take_from_other_rank,
    change_header,
    fill_with_noise,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_refused_before_mapping(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], list[object]]
):
    out = tmp_path / "split"
    shutil.copytree(folder, out)
    words = damage(out / RANK_FILE)
    assert open_shard(out, 1).rank == 1

    def map_nothing(*_: object, **__: object) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr(mapping.mmap, "mmap", map_nothing)
    with pytest.raises(LoadError) as caught:
        open_shard(out, 0)
    assert mentions(caught.value, out / RANK_FILE, *words)


class Attention(nn.Module):
    """Reads its number of heads from a configuration that others share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.groups = 4
        self.o_proj = nn.Linear(8, 4)


class Block(nn.Module):
    """A small model: parameters, a buffer in the file, and one that is computed."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or SimpleNamespace(num_attention_heads=4, hidden_size=8)
        self.attn = Attention(self.config)
        self.up = nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("table", torch.full((2,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn.o_proj(self.up(x).relu()) * self.table[0] * self.scale[0]


BLOCK_PLAN = {
    "plan": {"up": "colwise", "attn.o_proj": "rowwise"},
    "attributes": {"attn": {"config.num_attention_heads": "num_attention_heads / tp", "groups": "4 / tp"}},
}


def block_values() -> dict[str, torch.Tensor]:
    names = {name: x.shape for name, x in Block().state_dict().items()}
    return {name: count(*shape, start=position) for position, (name, shape) in enumerate(names.items())}


def split_block(folder: Path, tp: int, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    source = save(folder / f"source{tp}", tensors or block_values(), {"num_attention_heads": 4})
    split(source, folder / f"tp{tp}", tp=tp, plan=BLOCK_PLAN | changes)
    return folder / f"tp{tp}"


def block_on_meta(config: Any = None) -> Block:
    with parameters_on_meta():
        return Block(config)


def test_attach_a_whole_model(tmp_path: Path):
    module, whole = block_on_meta(), Block()
    whole.load_state_dict(block_values())
    shard = open_shard(split_block(tmp_path, 1), 0)
    attach(module, shard)
    assert install_hooks(module, shard.manifest) == []
    assert all(torch.equal(x, whole.state_dict()[name]) for name, x in module.state_dict().items())
    assert all(type(x) is nn.Parameter and not x.requires_grad for x in module.parameters())
    assert (module.table.tolist(), module.scale.tolist()) == ([3.0, 3.0], whole.scale.tolist())
    assert not any(x.is_meta for x in (*module.parameters(), *module.buffers()))
    # Nothing to set where a rank has all the heads.
    assert type(module.attn.config) is SimpleNamespace
    x = count(2, 4)
    assert torch.equal(module(x), whole(x))


def test_attach_a_rank(tmp_path: Path):
    config = SimpleNamespace(num_attention_heads=4, hidden_size=8)
    module, other = block_on_meta(config), block_on_meta(config)
    values = block_values()
    attach(module, open_shard(split_block(tmp_path, 2), 1))
    assert torch.equal(module.up.weight, values["up.weight"][4:])
    assert torch.equal(module.up.bias, values["up.bias"][4:])
    assert torch.equal(module.attn.o_proj.weight, values["attn.o_proj.weight"][:, 4:])
    assert module.attn.o_proj.bias.tolist() == [0] * 4
    assert torch.equal(module.scale, values["scale"])
    # The heads are those of the rank in this module, and those of the model everywhere else.
    assert (module.attn.groups, other.attn.groups) == (2, 4)
    assert module.attn.config.num_attention_heads == 2
    assert {config.num_attention_heads, module.config.num_attention_heads, other.attn.config.num_attention_heads} == {4}
    # What others change later is seen here, and the other way round.
    config.hidden_size = 16
    module.attn.config.dropout = 0.5
    assert (module.attn.config.hidden_size, config.dropout) == (16, 0.5)
    with pytest.raises(AttributeError):
        _ = module.attn.config.nothing


def test_a_view_with_several_local_values():
    whole = SimpleNamespace(heads=4, groups=2)
    view = LocalView(whole)
    view.set_local("heads", 2)
    view.set_local("groups", 1)
    assert (view.heads, view.groups, whole.heads, whole.groups) == (2, 1, 4, 2)


def test_attach_converts(tmp_path: Path):
    module = block_on_meta()
    shard = open_shard(split_block(tmp_path, 1), 0)
    attach(module, shard, convert=lambda name, x: x.double() if name.startswith("up") else x)
    assert (module.up.weight.dtype, module.attn.o_proj.weight.dtype) == (torch.float64, torch.float32)


def test_ties_share_a_parameter(tmp_path: Path):
    tensors = {"model.embed_tokens.weight": count(8, 8)}
    plan = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    source = save(tmp_path / "source", tensors, LLAMA | {"tie_word_embeddings": True})
    split(source, tmp_path / "out", tp=2, plan=plan)
    with parameters_on_meta():
        module = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.Embedding(8, 8)})})
        module["lm_head"] = nn.Linear(8, 8, bias=False)
    attach(module, open_shard(tmp_path / "out", 1))
    assert module["lm_head"].weight is module["model"]["embed_tokens"].weight
    assert torch.equal(module["lm_head"].weight, tensors["model.embed_tokens.weight"][4:])
    with parameters_on_meta():
        headless = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": nn.Embedding(8, 8)})})
    with pytest.raises(LoadError) as caught:
        attach(headless, open_shard(tmp_path / "out", 1))
    assert mentions(caught.value, "lm_head.weight", "tied")


class Tied(nn.Module):
    """A class of a user's own, whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.up(self.words(ids))))


TIED = {
    "words.weight": count(8, 6),
    "up.weight": count(12, 6, start=1),
    "up.bias": count(12),
    "down.weight": count(6, 12, start=2),
    "down.bias": count(6),
}
MLP = {"up": "colwise", "down": "rowwise"}


def test_what_a_class_ties_needs_no_word(tmp_path: Path):
    split(save(tmp_path / "source", TIED), tmp_path / "out", tp=1, plan=MLP)
    with parameters_on_meta():
        module = Tied()
    attach(module, open_shard(tmp_path / "out", 0))
    install_hooks(module, read_manifest(tmp_path / "out"))
    assert module.out.weight is module.words.weight
    whole = Tied()
    whole.load_state_dict(TIED | {"out.weight": TIED["words.weight"]})
    assert torch.equal(module(torch.arange(8)), whole(torch.arange(8)))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_class_ties_and_a_plan_divides(tmp_path: Path, rank: int):
    """Without its own rule the output layer would compute with the rank's rows alone, as if they were all."""
    words = {"words": "embedding_rowwise", **MLP}
    source = save(tmp_path / "source", TIED)
    split(source, tmp_path / "cut", tp=2, plan=words)
    with parameters_on_meta():
        module = Tied()
    with pytest.raises(LoadError) as caught:
        attach(module, open_shard(tmp_path / "cut", rank))
    assert mentions(caught.value, "out.weight: is words.weight in the model", "[ties]")
    plan = {"plan": {**words, "out": "colwise_gather_output"}, "ties": {"out.weight": "words.weight"}}
    manifest = split(source, tmp_path / "tied", tp=2, plan=plan)
    assert manifest.modules["out"].after == "all_gather"
    attach(module, open_shard(tmp_path / "tied", rank))
    assert module.out.weight is module.words.weight
    assert torch.equal(module.out.weight, TIED["words.weight"].chunk(2)[rank])


def test_a_class_of_transformers_that_the_catalogue_does_not_know(tmp_path: Path):
    """FNet's output layer is its embedding, and not stored."""
    assert "fnet" not in model_types()
    values = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 10}
    config = FNetConfig(**values, max_position_embeddings=8)
    FNetForMaskedLM(config).save_pretrained(tmp_path / "source")
    rules = {"fnet.encoder.layer.*.intermediate.dense": "colwise", "fnet.encoder.layer.*.output.dense": "rowwise"}
    split(tmp_path / "source", tmp_path / "out", tp=1, plan=rules)
    ids = torch.arange(6)[None]
    whole = FNetForMaskedLM.from_pretrained(tmp_path / "source").eval()
    model = load_model(tmp_path / "out")
    assert model.cls.predictions.decoder.weight is model.fnet.embeddings.word_embeddings.weight
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, whole(ids).logits)


def values_without(*names: str, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: x for name, x in block_values().items() if name not in names} | others


def leave_table_on_meta(module: Block) -> None:
    module.table = module.table.to("meta")


def nothing(_: Block) -> None:
    pass


def lose_groups(module: Block) -> None:
    del module.attn.groups


def lose_heads(module: Block) -> None:
    module.attn.config = SimpleNamespace(hidden_size=8)


def lose_config(module: Block) -> None:
    del module.attn.config


Change = Callable[[Block], None]

MISFITS: dict[str, tuple[dict[str, torch.Tensor], Change, list[str]]] = {
    "missing parameter": (values_without("up.bias"), nothing, ["Block", "up.bias: a parameter", "in no file"]),
    "missing buffer": (values_without("scale"), nothing, ["scale: a parameter of the model, but in no file"]),
    "unused tensor": (values_without(extra=count(2)), nothing, ["extra: in the split, but no parameter"]),
    "shape": (values_without(scale=count(4)), nothing, ["scale: [3] in the model, [4] in the split"]),
    "buffer on meta": (values_without(), leave_table_on_meta, ["table: a buffer without values (on meta)"]),
    "all at once": (
        values_without("up.bias", extra=count(2), scale=count(4)),
        leave_table_on_meta,
        ["up.bias: a parameter", "extra: in the split", "scale: [3]", "table: a buffer"],
    ),
}

# On one rank there is nothing to set: it has all the heads.
WITHOUT_ATTRIBUTE: dict[Change, str] = {
    lose_groups: "attn: Attention has no attribute groups",
    lose_heads: "attn: Attention has no attribute config.num_attention_heads",
    lose_config: "attn: Attention has no attribute config.num_attention_heads",
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_refused_and_changes_nothing(tmp_path: Path, kind: str, tp: int):
    tensors, change, words = MISFITS[kind]
    check_refused(change, open_shard(split_block(tmp_path, tp, tensors), tp - 1), *words)


@pytest.mark.parametrize("change", WITHOUT_ATTRIBUTE, ids=lambda change: change.__name__)
def test_an_attribute_that_is_not_there_is_refused_and_changes_nothing(tmp_path: Path, change: Change):
    check_refused(change, open_shard(split_block(tmp_path, 2), 1), WITHOUT_ATTRIBUTE[change])


def check_refused(change: Change, shard: Shard, *words: str) -> None:
    module = block_on_meta()
    change(module)
    before = contents(module)
    with pytest.raises(LoadError) as caught:
        attach(module, shard)
    assert mentions(caught.value, *words)
    assert contents(module) == before


def contents(module: nn.Module) -> dict[str, int]:
    """Return which objects a module and its sub-modules have."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    attributes = {
        f"{name}.{attribute}": value
        for name, child in module.named_modules()
        for attribute, value in vars(child).items()
        if not attribute.startswith("_")
    }
    return {name: id(value) for name, value in (state | attributes).items()}


@pytest.mark.parametrize(("stored", "allowed"), [(torch.bfloat16, True), (torch.float64, True), (torch.int32, False)])
def test_other_dtypes_are_refused(tmp_path: Path, stored: torch.dtype, allowed: bool):
    shard = open_shard(split_block(tmp_path, 2, block_values() | {"up.bias": count(8, dtype=stored)}), 1)
    check_refused(nothing, shard, f"up.bias: torch.float32 in the model, {stored} in the split")
    module = block_on_meta()
    if allowed:
        attach(module, shard, any_float=True)
        assert module.up.bias.dtype == stored
    else:
        with pytest.raises(LoadError, match=r"up\.bias"):
            attach(module, shard, any_float=True)
    attach(block_on_meta(), shard, convert=lambda _, x: x.float())


def test_many_misfits_are_counted(tmp_path: Path):
    extra = {f"extra.{position}": count(1) for position in range(25)}
    with pytest.raises(LoadError) as caught:
        attach(block_on_meta(), open_shard(split_block(tmp_path, 1, block_values() | extra), 0))
    assert mentions(caught.value, "extra.19", "and 5 more")


def test_a_module_of_the_split_is_not_there(tmp_path: Path):
    manifest = read_manifest(split_block(tmp_path, 1))
    module = block_on_meta()
    del module.attn
    with pytest.raises(LoadError) as caught:
        install_hooks(module, manifest)
    assert mentions(caught.value, "Block", "attn.o_proj")


def test_a_module_with_attributes_is_not_there(tmp_path: Path):
    shard = open_shard(split_block(tmp_path, 2), 0)
    module = block_on_meta()
    del module.attn
    with pytest.raises(LoadError) as caught:
        attach(module, shard)
    assert mentions(caught.value, "attn.o_proj.weight")


def test_hooks_are_installed_once(tmp_path: Path):
    shard = open_shard(split_block(tmp_path, 1), 0)
    module = block_on_meta()
    attach(module, shard)
    install_hooks(module, shard.manifest)
    with pytest.raises(LoadError) as caught:
        install_hooks(module, shard.manifest)
    assert mentions(caught.value, "Block", "hooks already")


def test_hooks_need_a_group(tmp_path: Path):
    with pytest.raises(LoadError) as caught:
        install_hooks(block_on_meta(), read_manifest(split_block(tmp_path, 2)))
    assert mentions(caught.value, "2 ranks", "torchrun")


def compile_all(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def compile_a_part(module: nn.Module) -> nn.Module:
    module.up = torch.compile(module.up, backend="eager")
    return module


def compile_a_part_in_place(module: nn.Module) -> nn.Module:
    module.up.compile(backend="eager")
    return module


@pytest.mark.parametrize("compiled", [compile_all, compile_in_place, compile_a_part, compile_a_part_in_place])
def test_a_compiled_module_is_refused(tmp_path: Path, compiled: Callable[[nn.Module], nn.Module]):
    manifest = read_manifest(split_block(tmp_path, 1))
    with pytest.raises(LoadError) as caught:
        install_hooks(compiled(Block()), manifest)
    assert mentions(caught.value, "compile", "load first")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as transformers saves it, in bfloat16 and float32, and their splits for one rank."""
    root = tmp_path_factory.mktemp("llama")
    model = tiny_model("llama", {"tie_word_embeddings": True})
    model.generation_config.temperature = 0.75
    model.generation_config.do_sample = True
    model.save_pretrained(root / "f32")
    model.to(torch.bfloat16).save_pretrained(root / "bf16")
    for name in ("f32", "bf16"):
        split(root / name, root / f"{name}-tp1", tp=1)
    split(root / "f32", root / "f32-tp2", tp=2)
    return root


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


PROMPT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logits_and_tokens_are_those_of_transformers(llama: Path, dtype: str):
    from transformers import AutoModelForCausalLM

    mine = load_model(llama / f"{dtype}-tp1")
    theirs = AutoModelForCausalLM.from_pretrained(llama / dtype)
    assert type(mine) is type(theirs)
    assert not mine.training
    assert mine.dtype == theirs.dtype == {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert {name: x.dtype for name, x in mine.state_dict().items()} == {
        name: x.dtype for name, x in theirs.state_dict().items()
    }
    with torch.inference_mode():
        assert torch.equal(mine(PROMPT).logits, theirs(PROMPT).logits)
        assert generate(mine) == generate(theirs)
        assert generate(mine, do_sample=False) == generate(theirs, do_sample=False)


def generate(model: Any, **options: Any) -> list[list[int]]:
    torch.manual_seed(0)
    tokens: list[list[int]] = model.generate(PROMPT, max_new_tokens=6, **options).tolist()
    return tokens


def test_buffers_ties_and_configurations(llama: Path):
    from transformers import AutoModelForCausalLM

    mine, theirs = load_model(llama / "f32-tp1"), AutoModelForCausalLM.from_pretrained(llama / "f32")
    assert dict(mine.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    for name, buffer in theirs.named_buffers():
        assert torch.equal(mine.get_buffer(name), buffer)
    inv_freq = mine.model.rotary_emb.inv_freq
    assert torch.equal(inv_freq, 1 / 10000 ** (torch.arange(0, 24, 2).float() / 24))
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (mine.generation_config.temperature, mine.generation_config.do_sample) == (0.75, True)
    assert mine.config.to_dict() | {"_name_or_path": ""} == theirs.config.to_dict() | {"_name_or_path": ""}


def test_dtype_converts(llama: Path):
    from transformers import AutoModelForCausalLM

    mine = load_model(llama / "bf16-tp1", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(llama / "bf16", dtype=torch.float32)
    assert {x.dtype for x in mine.parameters()} == {torch.float32}
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert mine.config.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(mine(PROMPT).logits, theirs(PROMPT).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_values_of_the_configuration(llama: Path, implementation: str):
    model = load_model(llama / "f32-tp1", attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    assert model.model.layers[0].self_attn.config._attn_implementation == implementation


def test_a_value_of_the_configuration_replaces_its_own(llama: Path):
    assert load_model(llama / "f32-tp1", use_cache=False).config.use_cache is False


def test_a_value_that_the_configuration_has_not(llama: Path):
    with pytest.raises(LoadError) as caught:
        load_model(llama / "f32-tp1", atention="eager")
    assert mentions(caught.value, "LlamaConfig", "atention")


REFUSED = {
    "save_pretrained": ("reshard merge {folder} DEST",),
    "push_to_hub": ("reshard merge {folder} DEST",),
    "load_state_dict": ("split it again",),
    "load_adapter": ("merge it into the checkpoint", "split that"),
    "add_adapter": ("merge it into the checkpoint", "split that"),
    "resize_token_embeddings": ("in the checkpoint", "split that"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_needs_whole_weights_is_refused(llama: Path, tmp_path: Path, method: str):
    model = load_model(llama / "f32-tp1")
    with pytest.raises(LoadError) as caught:
        getattr(model, method)(tmp_path / "saved")
    assert mentions(caught.value, method, *(words.format(folder=llama / "f32-tp1") for words in REFUSED[method]))
    assert not (tmp_path / "saved").exists()


def test_another_number_of_processes(llama: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(LoadError) as caught:
        load_model(llama / "f32-tp2")
    assert mentions(caught.value, "2 ranks", "1 processes", "torchrun --nproc-per-node 2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LoadError) as caught:
        load_model(llama / "f32-tp2")
    assert mentions(caught.value, "2 ranks", "3 processes", "torchrun --nproc-per-node 2", "--tp 3")
    with pytest.raises(LoadError) as caught:
        load_model(llama / "f32-tp1")
    assert mentions(caught.value, "1 ranks", "3 processes")


def test_not_a_model_of_transformers(tmp_path: Path):
    with pytest.raises(LoadError) as caught:
        load_model(split_block(tmp_path, 1))
    assert mentions(caught.value, tmp_path / "tp1", "not a split of a model of transformers or", "loader.attach")


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"architectures": ["LlamaForNothing"]}, "no class LlamaForNothing"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_that_is_not_built(tmp_path: Path, kind: str):
    config, words = UNKNOWN[kind]
    source = save(tmp_path / "source", {"model.norm.weight": count(8)}, LLAMA | config)
    split(source, tmp_path / "out", tp=1, plan={"model.norm": "replicate"})
    with pytest.raises(LoadError) as caught:
        load_model(tmp_path / "out")
    assert mentions(caught.value, tmp_path / "out", words)


def test_a_model_with_another_configuration(llama: Path, tmp_path: Path):
    """The carried config.json was changed after the split, to fewer layers and another width."""
    shutil.copytree(llama / "f32-tp1", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 1, "intermediate_size": 48}
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError) as caught:
        load_model(tmp_path / "out")
    assert mentions(caught.value, path, "was changed after the split")
