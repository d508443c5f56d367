"""Recipes: the tensors of the running model, against those that transformers makes of the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from manifests.errors import CheckpointError
from manifests.header import StoredTensor
from manifests.manifest import Link, Part
from manifests.runs import Run
from reshard import merge, plan, split, verify
from reshard.catalogue import Architecture, Converter
from reshard.recipe import Lazy, concatenate, runtime_tensors, stack
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
    config = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
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


def carried_out(lazy: Lazy, sources: dict[str, Tensor]) -> Tensor:
    """Carry a recipe out one entry at a time, on torch tensors."""
    made = torch.full(lazy.shape, -1.0)
    for piece in lazy.parts:
        source = sources[piece.source]
        for at in torch.cartesian_prod(*[torch.arange(len(entries(link))) for link in piece.links]).reshape(
            -1, len(piece.links)
        ):
            src, dst = [0] * source.ndim, [0] * made.ndim
            for link, i in zip(piece.links, at.tolist(), strict=True):
                pair = entries(link)[i]
                if link.src is not None:
                    src[link.src] = pair[0]
                if link.dst is not None:
                    dst[link.dst] = pair[1]
            assert made[tuple(dst)] == -1
            made[tuple(dst)] = source[tuple(src)]
    return made


def entries(link: Link) -> list[tuple[int, int]]:
    return [
        (run.src + b * run.src_step + i, run.dst + b * run.dst_step + i)
        for run in link.runs
        for b in range(run.repeat)
        for i in range(run.length)
    ]


def lazily(name: str, x: Tensor) -> Lazy:
    links = tuple(Link(dim, dim, (Run(0, 0, size),)) for dim, size in enumerate(x.shape))
    return Lazy("F32", tuple(x.shape), (Part(name, links),))


A, B, C = count(2, 3), count(2, 3, start=10), count(2, 3, start=20)
SOURCES = {"a": A, "b": B, "c": C}
LAZY = [lazily(name, x) for name, x in SOURCES.items()]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stack_is_torch_stack(dim: int) -> None:
    made = stack(LAZY, dim, "t")
    assert carried_out(made, SOURCES).equal(torch.stack([A, B, C], dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_concatenate_is_torch_cat(dim: int) -> None:
    made = concatenate(LAZY, dim, "t")
    assert carried_out(made, SOURCES).equal(torch.cat([A, B, C], dim))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("stacked", [0, 1, 2])
def test_stacks_may_be_joined_and_joins_stacked(stacked: int, dim: int) -> None:
    joined = concatenate([stack(LAZY[:2], stacked, "t"), stack(LAZY[1:], stacked, "t")], dim, "t")
    parts = [torch.stack([A, B], stacked), torch.stack([B, C], stacked)]
    assert carried_out(joined, SOURCES).equal(torch.cat(parts, dim))
    if dim < 2:
        both = stack([concatenate(LAZY[:2], dim, "t"), concatenate(LAZY[1:], dim, "t")], stacked, "t")
        assert carried_out(both, SOURCES).equal(torch.stack([torch.cat([A, B], dim), torch.cat([B, C], dim)], stacked))


def test_a_stack_of_scalars_is_a_vector() -> None:
    scalars = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    made = stack([lazily(name, x) for name, x in scalars.items()], 0, "t")
    assert carried_out(made, scalars).tolist() == [1.0, 2.0]


def architecture(**changed: Any) -> Architecture:
    fields = {"prefix": "", "base_prefix": "", "heads": (), "ties": {}, "defaults": {}, "aliases": {}, "ignored": ()}
    return Architecture("x", "X", **(fields | {"renames": (), "converters": ()} | changed))


@pytest.mark.parametrize(
    ("renames", "stored", "runtime"),
    [
        ([(".block_sparse_moe.", ".mlp.")], "m.0.block_sparse_moe.w", "m.0.mlp.w"),
        # A pattern that ends with a letter or digit ends at the end of a word.
        ([("m.1", "n")], "m.11.w", "m.11.w"),
        ([("m.1", "n")], "m.1.w", "n.w"),
        ([("^embed_out\\.", "lm_head.")], "embed_out.weight", "lm_head.weight"),
        ([("^embed_out\\.", "lm_head.")], "x.embed_out.weight", "x.embed_out.weight"),
        ([("a", "b"), ("b", "c")], "x.a.w", "x.c.w"),
        ([("a.*.b", "c")], "a.1.b.w", "c.w"),
    ],
)
def test_renames_are_those_of_transformers(renames: list[tuple[str, str]], stored: str, runtime: str) -> None:
    from transformers.core_model_loading import WeightRenaming

    theirs = stored
    for source, target in renames:
        theirs, _ = WeightRenaming(source_patterns=source, target_patterns=target).rename_source_key(theirs)
    assert theirs == runtime
    made = runtime_tensors({stored: StoredTensor("F32", (1,), 0, 4)}, architecture(renames=tuple(renames)))
    assert {name: tensor.parts for name, tensor in made.items()} == {
        runtime: () if runtime == stored else (Part(stored),)
    }


def test_fp4_experts_are_stacked_by_their_bytes(tmp_path: Path) -> None:
    converter = Converter((".experts.*.w",), ".experts.all", (("stack", 0),))
    stored = {f"m.experts.{i}.w": StoredTensor("F4", (2, 8), 8 * i, 8 * i + 8) for i in range(3)}
    made = runtime_tensors(stored, architecture(converters=(converter,)))["m.experts.all"]
    assert (made.dtype, made.shape) == ("F4", (3, 2, 8))
    stored["m.experts.3.w"] = StoredTensor("F4", (2, 7), 24, 31)
    with pytest.raises(CheckpointError) as caught:
        runtime_tensors(stored, architecture(converters=(converter,)))
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
