"""Recipes: the tensors of the running model, against those that transformers makes of the same files."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from manifests.errors import CheckpointError
from manifests.header import StoredTensor
from manifests.manifest import Part
from reshard import merge, plan, split, verify
from reshard.catalogue.architecture import Architecture, Converter, Rename
from reshard.model import RuntimeTensor
from reshard.recipes.recipe import runtime_tensors
from tests.checkpoints import LLAMA, count, mentions, of_rank, raw, save, save_indexed

EXPERTS = 11
"""Enough that expert 10 shows whether the order is that of numbers or that of texts."""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral in several files, as transformers saves it: a tensor for every expert and projection."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("recipe") / "mixtral"
    MixtralForCausalLM(config).save_pretrained(folder, max_shard_size="7KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="module")
def runtime(mixtral: Path) -> dict[str, Tensor]:
    """The parameters of the running model, as transformers loads them."""
    from transformers import MixtralForCausalLM

    return dict(MixtralForCausalLM.from_pretrained(mixtral).state_dict())


def part(name: str, x: Tensor, tp: int, rank: int) -> Tensor:
    """Return a rank's part of a Mixtral parameter; 2 key heads divide by 2 ranks."""
    if name.endswith("experts.gate_up_proj"):
        return torch.cat([half.chunk(tp, 1)[rank] for half in x.chunk(2, 1)], 1)
    if name.endswith("experts.down_proj"):
        return x.chunk(tp, 2)[rank]
    if name.endswith("o_proj.weight"):
        return x.chunk(tp, 1)[rank]
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "embed_tokens.weight", "lm_head.weight")):
        return x.chunk(tp)[rank]
    return x


@pytest.mark.parametrize("tp", [1, 2])
def test_mixtral_is_what_transformers_loads(mixtral: Path, runtime: dict[str, Tensor], tmp_path: Path, tp: int) -> None:
    manifest = split(mixtral, tmp_path / "out", tp=tp)
    assert manifest.tensors.keys() == runtime.keys()
    for rank in range(tp):
        held = of_rank(tmp_path / "out", rank, tp)
        assert held.keys() == runtime.keys()
        for name, whole in runtime.items():
            expected = part(name, whole, tp, rank)
            assert held[name] == ("F32", tuple(expected.shape), raw(expected)), name
    verify(tmp_path / "out")


def test_mixtral_merges_to_its_files(mixtral: Path, tmp_path: Path) -> None:
    split(mixtral, tmp_path / "out", tp=2)
    made = merge(tmp_path / "out", tmp_path / "back")
    files = sorted(path.name for path in mixtral.glob("*.safetensors"))
    assert sorted(made.identical) == files
    for name in (*files, "config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (mixtral / name).read_bytes()
    indexes = [
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (mixtral, tmp_path / "back")
    ]
    assert indexes[0]["weight_map"] == indexes[1]["weight_map"]
    assert indexes[0]["metadata"]["total_size"] == indexes[1]["metadata"]["total_size"]


def test_experts_are_stacked_in_the_order_of_their_numbers(mixtral: Path) -> None:
    tensors = plan(mixtral, tp=1).resolution.tensors
    parts = tensors["model.layers.1.mlp.experts.down_proj"].parts
    assert [p.source for p in parts] == [
        f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight" for i in range(EXPERTS)
    ]
    gate_up = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (EXPERTS, 16, 16)
    assert [p.source.split(".experts.")[1] for p in gate_up.parts] == [
        *(f"{i}.w1.weight" for i in range(EXPERTS)),
        *(f"{i}.w3.weight" for i in range(EXPERTS)),
    ]


def without(mixtral: Path, folder: Path, *gone: str) -> Path:
    """Write a copy of the checkpoint that lacks every tensor whose name contains one of the texts."""
    tensors: dict[str, Tensor] = {}
    for path in mixtral.glob("*.safetensors"):
        tensors |= load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if not any(text in name for text in gone)}
    assert len(kept) < len(tensors)
    return save(folder, kept, json.loads((mixtral / "config.json").read_text()))


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (["layers.0.block_sparse_moe.experts.3.w1"], ("layers.0.mlp.experts.gate_up_proj", 10, 11)),
        (["layers.0.block_sparse_moe.experts.3.w3"], ("layers.0.mlp.experts.gate_up_proj", 10, 11)),
        (["layers.1.block_sparse_moe.experts.0.w1"], ("layers.1.mlp.experts.gate_up_proj", 10, 11)),
        ([f"layers.0.block_sparse_moe.experts.{i}.w1" for i in range(11)], ("layers.0.mlp.experts.gate_up_proj", "w1")),
        # Experts after a missing one must not move up, though all projections have equally many.
        (["layers.0.block_sparse_moe.experts.3.w2"], ("layers.0", "experts")),
        (["layers.0.block_sparse_moe.experts.3."], ("layers.0", "experts")),
        (["layers.0.block_sparse_moe.experts.10."], ("layers.0", "experts")),
        ([".experts.10."], ("experts",)),
        # Stacked ones are there, this one is not at all.
        ([f"layers.0.block_sparse_moe.experts.{i}.w2" for i in range(11)], ("layers.0", "experts")),
    ],
    ids=["w1", "w3", "first", "all w1", "w2", "an expert", "the last expert", "the last everywhere", "all w2"],
)
def test_a_missing_expert_is_an_error(
    mixtral: Path, tmp_path: Path, gone: list[str], words: tuple[object, ...]
) -> None:
    folder = without(mixtral, tmp_path / "m", *gone)
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tp=1)
    assert mentions(caught.value, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"experts.1.w1.weight": torch.zeros(4, 5)}, ("[4, 4]", "[4, 5]")),
        (lambda t: t | {"experts.1.w1.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}, ("BF16", "F32")),
        (lambda t: t | {"experts.1.w3.weight": torch.zeros(8, 4)}, ("[4, 4]", "[8, 4]")),
    ],
    ids=["shape", "dtype", "shape of the other"],
)
def test_experts_that_do_not_fit_together(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: tuple[str, ...]
) -> None:
    experts = change({f"experts.{i}.{w}.weight": torch.zeros(4, 4) for i in range(2) for w in ("w1", "w2", "w3")})
    tensors = {f"model.layers.0.block_sparse_moe.{name}": tensor for name, tensor in experts.items()}
    config = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    heads = {"model.embed_tokens.weight": count(8, 4), "lm_head.weight": count(8, 4)}
    with pytest.raises(CheckpointError) as caught:
        plan(save(tmp_path / "m", tensors | heads, config), tp=1)
    assert mentions(caught.value, "model.layers.0.mlp.experts.gate_up_proj", *words)


def test_of_two_names_for_one_parameter_both_are_named(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate.weight": count(4, 4),
        "model.layers.0.block_sparse_moe.gate.weight": count(4, 4),
    }
    config = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralModel"]}
    with pytest.raises(CheckpointError) as caught:
        plan(save(tmp_path / "m", tensors, config), tp=1)
    assert mentions(caught.value, "layers.0.mlp.gate.weight", "two stored tensors")


STORED = {
    "embed_tokens.weight": count(8, 4),
    "layers.0.mlp.up_proj.weight": count(8, 4, start=50),
    "norm.weight": count(4, start=100),
}


@pytest.mark.parametrize(
    ("name", "stored_prefix", "head", "runtime_prefix"),
    [
        ("LlamaForCausalLM", "model.", True, "model."),
        # Saved from the base model: the head is tied to the embedding.
        ("LlamaForCausalLM", "", False, "model."),
        ("LlamaForCausalLM", "", True, "model."),
        ("LlamaModel", "", False, ""),
        ("LlamaModel", "model.", False, ""),
    ],
)
def test_the_base_models_prefix_is_added_or_removed(
    tmp_path: Path, name: str, stored_prefix: str, head: bool, runtime_prefix: str
) -> None:
    """The names are those of the class, found by transformers' own construction of it."""
    import transformers

    stored = {stored_prefix + stem: tensor for stem, tensor in STORED.items()}
    heads = {"lm_head.weight": count(8, 4, start=200)} if head else {}
    config = LLAMA | {"architectures": [name], "tie_word_embeddings": not head}
    folder = save(tmp_path / "m", stored | heads, config)
    manifest = split(folder, tmp_path / "out", tp=2)
    assert set(manifest.tensors) == {runtime_prefix + stem for stem in STORED} | set(heads)
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers.LlamaConfig(**config))
    assert set(manifest.tensors) <= set(model.state_dict())
    held = of_rank(tmp_path / "out", 1, 2)
    assert held[f"{runtime_prefix}layers.0.mlp.up_proj.weight"][2] == raw(STORED["layers.0.mlp.up_proj.weight"][4:])
    assert held[f"{runtime_prefix}norm.weight"][2] == raw(STORED["norm.weight"])
    assert merge(tmp_path / "out", tmp_path / "back").identical == ("model.safetensors",)


def test_what_the_class_ignores_is_kept_apart(tmp_path: Path) -> None:
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {f"model.{name}": tensor for name, tensor in STORED.items()} | {inverse: count(2)}
    folder = save(tmp_path / "m", tensors, LLAMA | {"tie_word_embeddings": True})
    manifest = split(folder, tmp_path / "out", tp=2)
    assert [name for name, tensor in manifest.tensors.items() if tensor.unused] == [inverse]
    assert [(file.name, file.owners) for file in manifest.files if inverse in file.tensors] == [
        ("unused.safetensors", ())
    ]
    assert merge(tmp_path / "out", tmp_path / "back").dropped == ()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    split(folder, tmp_path / "lean", tp=2, drop_unused=True)
    made = merge(tmp_path / "lean", tmp_path / "lean-back")
    assert (made.dropped, made.rewritten) == ((inverse,), ("model.safetensors",))
    back = load_file(tmp_path / "lean-back" / "model.safetensors")
    assert back.keys() == tensors.keys() - {inverse}
    assert all(tensor.equal(tensors[name]) for name, tensor in back.items())


def architecture(**changed: Any) -> Architecture:
    fields = {"prefix": "", "base_prefix": "", "heads": (), "ties": {}, "defaults": {}, "aliases": {}, "ignored": ()}
    return Architecture("x", "X", **(fields | {"renames": (), "converters": ()} | changed))


def made_of(
    stored: Iterable[str] | dict[str, tuple[int, ...]], sizes: dict[str, int] | None = None, **known: Any
) -> dict[str, RuntimeTensor]:
    """Return the tensors of the running model that these stored ones make, of shape [4, 2] if none is given."""
    shapes = stored if isinstance(stored, dict) else dict.fromkeys(stored, (4, 2))
    tensors = {name: StoredTensor("F32", shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()}
    return runtime_tensors(tensors, architecture(**known), lambda _: (sizes or {}).get)


def test_fp4_experts_are_stacked_by_their_bytes(tmp_path: Path) -> None:
    converter = Converter((".experts.*.w",), (".experts.all",), (("stack", 0),))
    stored = {f"m.experts.{i}.w": StoredTensor("F4", (2, 8), 8 * i, 8 * i + 8) for i in range(3)}
    made = runtime_tensors(stored, architecture(converters=(converter,)), lambda _: {}.get)["m.experts.all"]
    assert (made.dtype, made.shape) == ("F4", (3, 2, 8))
    stored["m.experts.3.w"] = StoredTensor("F4", (2, 7), 24, 31)
    with pytest.raises(CheckpointError) as caught:
        runtime_tensors(stored, architecture(converters=(converter,)), lambda _: {}.get)
    assert mentions(caught.value, "m.experts.3.w", "7 F4")


def test_experts_in_several_files_come_together(tmp_path: Path) -> None:
    """The three projections of an expert lie in three files, the experts in no order."""
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.{w}.weight" for i in (1, 0) for w in ("w1", "w2", "w3")]
    tensors = {name: count(4, 4, start=20 * i) for i, name in enumerate(names)}
    files = [{name: tensors[name] for name in names if f".{w}." in name} for w in ("w3", "w2", "w1")]
    heads = {"model.embed_tokens.weight": count(8, 4), "lm_head.weight": count(8, 4)}
    config = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    split(save_indexed(tmp_path / "m", *files, heads, config=config), tmp_path / "out", tp=2)
    gate, up = (torch.stack([tensors[name] for name in sorted(names) if f".{w}." in name]) for w in ("w1", "w3"))
    for rank in range(2):
        held = of_rank(tmp_path / "out", rank, 2)["model.layers.0.mlp.experts.gate_up_proj"]
        assert held[2] == raw(torch.cat([half.chunk(2, 1)[rank] for half in (gate, up)], 1))


UNFUSE = Converter(("qkv",), ("q", "k", "v"), (("split", 0, ("two", 1, "two - 1")),))


def test_a_tensor_that_is_taken_apart_is_in_every_name() -> None:
    made = made_of({"m.0.qkv.weight": (4, 2), "m.0.qkv.bias": (4,)}, {"two": 2}, converters=(UNFUSE,))
    assert {name: tensor.shape for name, tensor in made.items()} == {
        "m.0.q.weight": (2, 2), "m.0.k.weight": (1, 2), "m.0.v.weight": (1, 2),
        "m.0.q.bias": (2,), "m.0.k.bias": (1,), "m.0.v.bias": (1,),
    }  # fmt: skip
    assert {part.source for part in made["m.0.k.bias"].parts} == {"m.0.qkv.bias"}


def test_sizes_are_those_of_the_sub_model() -> None:
    tensors = {f"m.{part}.qkv": StoredTensor("F32", (size,), 0, 4 * size) for part, size in (("a", 4), ("b", 6))}
    converter = Converter(("qkv",), ("q", "k"), (("split", 0, ("q", "2")),))
    sizes = {"m.a.q": {"q": 2}, "m.b.q": {"q": 4}}
    made = runtime_tensors(tensors, architecture(converters=(converter,)), lambda name: sizes[name].get)
    assert {name: tensor.shape for name, tensor in made.items()} == {
        "m.a.q": (2,), "m.a.k": (2,), "m.b.q": (4,), "m.b.k": (2,),
    }  # fmt: skip


def test_a_converter_that_changes_nothing_leaves_the_tensor_as_it_is() -> None:
    converter = Converter(("w",), ("w",), (("transpose", 0, 1, (4, 2)),))
    assert made_of(["m.w"], converters=(converter,)) == {"m.w": RuntimeTensor("F32", (4, 2))}
    renamed = made_of(["m.w"], converters=(converter._replace(targets=("v",)),))
    assert renamed == {"m.v": RuntimeTensor("F32", (4, 2), (Part("m.w"),))}


def test_rows_that_no_target_takes_are_kept_apart() -> None:
    converter = Converter(("head",), ("head",), (("unpad_vocab", "words"),))
    made = made_of({"head": (8, 2)}, {"words": 5}, converters=(converter,))
    assert (made["head"].shape, made["head"].unused) == ((5, 2), False)
    assert (made["head.unused"].shape, made["head.unused"].unused) == ((3, 2), True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("drop_unused", [False, True])
def test_rows_that_no_target_takes_are_merged_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, *, drop_unused: bool
) -> None:
    """Also without what is unused: the tensor is not the model's alone."""
    from reshard.catalogue import find_architecture

    unpad = Converter(("lm_head.weight",), ("lm_head.weight",), (("unpad_vocab", 6),))
    known = find_architecture(LLAMA)
    assert known is not None
    monkeypatch.setattr("reshard.choosing.find_architecture", lambda _: known._replace(converters=(unpad,)))
    tensors = {f"model.{name}": tensor for name, tensor in STORED.items()} | {"lm_head.weight": count(8, 4, start=300)}
    folder = save(tmp_path / "m", tensors, LLAMA)
    manifest = split(folder, tmp_path / "out", tp=tp, drop_unused=drop_unused)
    assert manifest.tensors["lm_head.weight"].shape == (6, 4)
    held = of_rank(tmp_path / "out", tp - 1, tp)["lm_head.weight"]
    assert held[2] == raw(tensors["lm_head.weight"][6 // tp * (tp - 1) : 6])
    verify(tmp_path / "out")
    assert merge(tmp_path / "out", tmp_path / "back").identical == ("model.safetensors",)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_kept_name_is_not_renamed() -> None:
    rename = Rename((r"\.norm\.",), (".kv_norm.",))
    stored = ["model.norm.weight", "model.layers.0.norm.weight"]
    assert set(made_of(stored, renames=(rename,))) == {"model.kv_norm.weight", "model.layers.0.kv_norm.weight"}
    made = made_of([*stored, "model.norm.bias"], renames=(rename,), kept=("model.norm.weight",))
    # A bias, which only some configurations have, is kept with its weight.
    assert set(made) == {"model.norm.weight", "model.norm.bias", "model.layers.0.kv_norm.weight"}


def test_what_is_ignored_is_looked_for_in_the_models_names() -> None:
    rename = Rename(("^mtp",), ("model.next",))
    made = made_of(["mtp.0.w", "next.w"], renames=(rename,), ignored=(r"^model\.next",))
    assert {name for name, tensor in made.items() if tensor.unused} == {"mtp.0.w"}
    # The sources of what would be joined are kept as they are stored.
    experts = Converter((".experts.*.w",), (".experts.all",), (("stack", 0),))
    stored = [f"layers.{layer}.experts.{i}.w" for layer in (3, 4) for i in range(2)]
    made = made_of(stored, converters=(experts,), ignored=(r"layers\.4\.",))
    assert {name: tensor.unused for name, tensor in made.items()} == {
        "layers.3.experts.all": False, "layers.4.experts.0.w": True, "layers.4.experts.1.w": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "base", "stored", "runtime"),
    [
        ("model", "model", "language_model.w", "model.language_model.w"),
        ("model", "model", "model.language_model.w", "model.language_model.w"),
        ("model", "model", "lm_head.weight", "lm_head.weight"),
        ("", "model", "model.language_model.w", "language_model.w"),
        ("", "model", "language_model.w", "language_model.w"),
    ],
)
def test_every_name_gets_the_prefix_that_it_lacks(prefix: str, base: str, stored: str, runtime: str) -> None:
    """Some names of a composite's checkpoint have it, some do not."""
    beside = "model.x.w"
    made = made_of([stored, beside], prefix=prefix, base_prefix=base, heads=("lm_head",) if prefix else ())
    assert set(made) == {runtime, beside if prefix else "x.w"}


def test_biases_of_experts_may_be_missing_and_weights_may_not() -> None:
    converters = tuple(
        Converter((f"experts.*.{w}",), (f"experts.{w}",), (("stack", 0),)) for w in ("up", "down", "up_bias")
    )
    assert set(made_of(["e.experts.0.up", "e.experts.0.down"], converters=converters)) == {
        "e.experts.up", "e.experts.down",
    }  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        made_of(["e.experts.0.up", "e.experts.0.up_bias"], converters=converters)
    assert mentions(caught.value, "e.experts.down", "none is stored")


def test_a_stored_tensor_beside_those_of_a_converter() -> None:
    """Two converters make one tensor, of other sources: one of them would be lost."""
    converters = (Converter(("a",), ("t",), (("concat", 0),)), Converter(("b",), ("t",), (("concat", 0),)))
    with pytest.raises(CheckpointError) as caught:
        made_of(["m.a", "m.b"], converters=converters)
    assert mentions(caught.value, "m.t", "m.b")


@pytest.mark.parametrize(
    ("pattern", "unused"),
    [
        # Layers after the last predict further tokens.
        (r"(^|\.)layers\.{num_hidden_layers:num_hidden_layers + extra}\.", {3, 4}),
        (r"layers.{num_hidden_layers - shared:num_hidden_layers}.w", {2}),
        # A number as such, of a smaller model: the layer that this one has is its own.
        (r"m\.layers\.1.*", set()),
        (r"m\.layers\.4.*", {4}),
        (r"layers\.\d+\.w", {0, 1, 2, 3, 4}),
        (r"layers.{unknown:num_hidden_layers}.w", set()),
    ],
)
def test_ignored_layers(pattern: str, unused: set[int]) -> None:
    sizes = {"num_hidden_layers": 3, "extra": 2, "shared": 1}
    made = made_of([f"m.layers.{layer}.w" for layer in range(5)], sizes, ignored=(pattern,))
    assert {name for name, tensor in made.items() if tensor.unused} == {f"m.layers.{layer}.w" for layer in unused}


def test_experts_without_weights_may_be_counted() -> None:
    converter = Converter(("experts.*.w",), ("experts.all",), (("stack", 0),))
    sizes = {"n_routed_experts": 2, "zero_expert_num": 1}
    for count_of in (2, 3):
        made = made_of([f"experts.{i}.w" for i in range(count_of)], sizes, converters=(converter,))
        assert made["experts.all"].shape == (count_of, 4, 2)
    with pytest.raises(CheckpointError, match=r"config\.json says 2 or 3"):
        made_of([f"experts.{i}.w" for i in range(4)], sizes, converters=(converter,))


def test_scales_of_experts_are_stacked_and_cut_as_their_weights(tmp_path: Path) -> None:
    """FP8 experts stored one by one, blocks of 4 x 4: what FP8Experts holds, by hand."""
    experts, width, hidden, block = 11, 16, 8, 4
    tensors: dict[str, Tensor] = {}
    for expert in range(experts):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        for at, (name, shape) in enumerate(
            {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}.items()
        ):
            start = 200 * expert + 50 * at
            blocks = [size // block for size in shape]
            tensors[f"{prefix}.{name}.weight"] = count(*shape, start=start, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{prefix}.{name}.weight_scale_inv"] = count(*blocks, start=start)
    tensors |= {"model.embed_tokens.weight": count(8, hidden), "lm_head.weight": count(8, hidden, start=9)}
    config = LLAMA | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]},
    }  # fmt: skip
    folder = save(tmp_path / "m", tensors, config)
    split(folder, tmp_path / "out", tp=2)
    prefix = "model.layers.0.mlp.experts"

    def stacked(name: str) -> Tensor:
        return torch.stack(
            [tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.{name}_scale_inv"] for expert in range(experts)]
        )

    for rank in range(2):
        held = of_rank(tmp_path / "out", rank, 2)
        gate, up, down = (stacked(f"{name}.weight") for name in ("w1", "w3", "w2"))
        gate_up = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        assert held[f"{prefix}.gate_up_proj_scale_inv"][2] == raw(gate_up)
        assert held[f"{prefix}.down_proj_scale_inv"][2] == raw(down.chunk(2, 2)[rank])
        assert held[f"{prefix}.gate_up_proj"][1] == (experts, width, hidden)
    assert merge(tmp_path / "out", tmp_path / "back").rewritten == ()
    del tensors["model.layers.0.block_sparse_moe.experts.7.w3.weight_scale_inv"]
    with pytest.raises(CheckpointError) as caught:
        plan(save(tmp_path / "less", tensors, config), tp=2)
    assert mentions(caught.value, "gate_up_proj_scale_inv", "11 and 10")
