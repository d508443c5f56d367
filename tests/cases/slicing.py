"""Kinds A, B and C: fused, grouped and packed weights, heads, biases, layer numbers, ties, vocabularies."""

import json
from pathlib import Path

import torch

from manifests.errors import DegreeError
from tests.cases.case import Case, cut, even, of, refused, take
from tests.checkpoints import count, save

MLP, ATTENTION = "model.layers.0.mlp.", "model.layers.0.self_attn."
GATE_UP, DOWN, QKV = f"{MLP}gate_up_proj", f"{MLP}down_proj", f"{ATTENTION}qkv_proj"
FUSED = {f"{GATE_UP}.weight": count(8, 4), f"{DOWN}.weight": count(4, 4, start=100)}
GROUPED = {
    f"{QKV}.weight": count(16, 8, dtype=torch.bfloat16),
    f"{QKV}.bias": count(16, dtype=torch.bfloat16, start=128),
}
BIASED = {f"{DOWN}.weight": count(4, 8) % 5 - 2, f"{DOWN}.bias": torch.tensor([10.0, 20.0, 30.0, 40.0])}
HEADS = {f"{ATTENTION}{name}_proj": style for name, style in zip("qkvo", ("colwise",) * 3 + ("rowwise",), strict=True)}
SINGLE = "single_transformer_blocks.0.proj_out"
FLUX = {f"{SINGLE}.weight": count(4, 16), f"{SINGLE}.bias": count(4, start=500)}


def heads(q: int, kv: int, width: int) -> dict[str, torch.Tensor]:
    rows = {"q": q, "k": kv, "v": kv}
    return {f"{ATTENTION}{name}_proj.weight": count(size, width, start=2000 * at) for at, (name, size) in
            enumerate(rows.items())} | {f"{ATTENTION}o_proj.weight": count(width, q, start=6000)}  # fmt: skip


def copied_heads() -> tuple[dict[str, torch.Tensor], ...]:
    """8 query heads and 2 of keys and values, of 4 rows each, on 4 ranks: a key head goes to two ranks."""
    whole = heads(32, 8, 32)
    q, k, v, o = whole
    kv = [(0, 4), (0, 4), (4, 8), (4, 8)]
    return tuple(
        {
            q: take(whole[q], 0, [(8 * rank, 8 * rank + 8)]),
            k: take(whole[k], 0, [kv[rank]]),
            v: take(whole[v], 0, [kv[rank]]),
            o: take(whole[o], 1, [(8 * rank, 8 * rank + 8)]),
        }
        for rank in range(4)
    )


def flux(folder: Path) -> None:
    config = {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 2, "num_attention_heads": 2}
    made = save(folder / "transformer", FLUX, config) / "model.safetensors"
    made.rename(made.with_name("diffusion_pytorch_model.safetensors"))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))


LAYERS = {f"model.layers.{number}.mlp.up_proj.weight": count(4, 4, start=100 * number) for number in (0, 1, 10, 11)}
TIED = {
    "model.embed_tokens.weight": count(8, 4, dtype=torch.bfloat16),
    "model.norm.weight": count(4, dtype=torch.bfloat16, start=64),
}
VOCABULARY = {"model.embed_tokens.weight": count(11, 4), "lm_head.weight": count(11, 4, start=100)}

SLICING = (
    # Rank 0 needs rows 0 and 1 of the gate and of the up, which are rows 4 and 5.
    Case(
        "a01 gate and up in one",
        of(FUSED, model_type="phi3", hidden_size=4, intermediate_size=4),
        {GATE_UP.replace("0", "*"): {"style": "packed_colwise", "blocks": [4, 4]}, DOWN.replace("0", "*"): "rowwise"},
        tuple(
            {
                f"{GATE_UP}.weight": take(FUSED[f"{GATE_UP}.weight"], 0, rows),
                f"{DOWN}.weight": take(FUSED[f"{DOWN}.weight"], 1, columns),
            }
            for rows, columns in (([(0, 2), (4, 6)], [(0, 2)]), ([(2, 4), (6, 8)], [(2, 4)]))
        ),
    ),
    Case(
        "a01 blocks as proportions, and three of them",
        of({"model.fused.weight": count(24, 3), "model.fused.bias": count(24)}),
        {"model.fused": {"style": "packed_colwise", "blocks": [1, 1, 2]}},
        cut(
            {"model.fused.weight": count(24, 3), "model.fused.bias": count(24)},
            {"model.fused.weight": 0, "model.fused.bias": 0},
            [[(0, 3), (6, 9), (12, 18)], [(3, 6), (9, 12), (18, 24)]],
        ),
    ),
    Case(
        "a02 grouped heads in one, with a bias",
        of(GROUPED, model_type="phi3"),
        {QKV.replace("0", "*"): {"style": "packed_colwise", "blocks": [8, 4, 4]}},
        cut(GROUPED, dict.fromkeys(GROUPED, 0), [[(0, 4), (8, 10), (12, 14)], [(4, 8), (10, 12), (14, 16)]]),
    ),
    Case(
        "a03 the bias of a rowwise module is whole",
        of(BIASED, hidden_size=4),
        {DOWN.replace("0", "*"): "rowwise"},
        cut(BIASED, {f"{DOWN}.weight": 1}, even(8, 2)),
    ),
    Case(
        "a04 two key heads on four ranks",
        of(heads(32, 8, 32), hidden_size=32, num_attention_heads=8, head_dim=4),
        HEADS,
        copied_heads(),
        tp=4,
    ),
    refused(
        "a05 six heads on four ranks",
        of(heads(24, 24, 24), hidden_size=24, num_attention_heads=6, num_key_value_heads=6, head_dim=4),
        HEADS,
        "num_attention_heads 6",
        "tp 4",
        "tp 1, 2, 3, 6 would do",
        refusal=DegreeError,
        tp=4,
    ),
    # 28 heads in 4 groups are 7 in each, which 2 ranks a group do not divide.
    refused(
        "a05 seven query heads to a key head on eight ranks",
        of(heads(56, 8, 56), hidden_size=56, num_attention_heads=28, num_key_value_heads=4, head_dim=2),
        HEADS,
        "num_attention_heads 28",
        "num_key_value_heads 4",
        "tp 8",
        refusal=DegreeError,
        tp=8,
    ),
    Case(
        "a06 columns of attention and of an MLP side by side",
        flux,
        {"single_transformer_blocks.*.proj_out": {"style": "packed_rowwise", "blocks": [4, 12]}},
        cut(FLUX, {f"{SINGLE}.weight": 1}, [[(0, 2), (4, 10)], [(2, 4), (10, 16)]]),
        options=("--subfolder", "transformer"),
    ),
    Case(
        "a07 layer 1 is not layers 10 and 11",
        of(LAYERS, num_hidden_layers=12),
        {"model.layers.1.mlp.up_proj": "colwise", "model.layers.*.mlp.up_proj": "replicate"},
        cut(LAYERS, {"model.layers.1.mlp.up_proj.weight": 0}, even(4, 2)),
    ),
    Case(
        "a07 the rule for all comes first and still does not win",
        of(LAYERS, num_hidden_layers=12),
        {"model.layers.*.mlp.up_proj": "colwise", "model.layers.11.mlp.up_proj": "replicate"},
        cut(LAYERS, {name: 0 for name in LAYERS if ".11." not in name}, even(4, 2)),
    ),
    Case(
        "b01 a tied head is not stored",
        of(TIED, tie_word_embeddings=True, hidden_size=4),
        {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise"},
        cut(TIED, {"model.embed_tokens.weight": 0}, even(8, 2)),
    ),
    refused(
        "c01 eleven rows on two ranks",
        of(VOCABULARY, vocab_size=11, hidden_size=4),
        {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise"},
        "lm_head.weight",
        "dim 0 has 11",
        "2 ranks do not divide it",
        refusal=DegreeError,
    ),
)
