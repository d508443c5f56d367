"""Tiny random models of the catalogue's types, built by transformers, which is imported only where one is built."""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # gptj and codegen
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 64,
    "n_ctx": 64,
    "rotary_dim": 8,
    # mixtral
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # youtu
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Everything that is off by default and adds parameters.
    "attention_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_post_norm": True,
    # Multipliers other than one, windows that a prompt of 12 tokens leaves, layers of every kind.
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logit_scale": 0.5,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
"""Configuration values by name; a type takes those that it has."""

TYPES: dict[str, dict[str, Any]] = {
    # Its o_proj is square.
    "helium": {"head_dim": 16},
    # Its latent attention has no groups. In one process transformers clears the embedding's row of the pad token.
    "youtu": {"num_key_value_heads": 4, "pad_token_id": None},
}
"""What a type needs beside them, or otherwise."""


def tiny_config(model_type: str, values: Mapping[str, Any]) -> Any:
    """Return a configuration of a type: 2 layers, 4 heads in 2 groups where it has groups."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in SIZES.items() if name in fields}
    return config_class(**{**given, **TYPES.get(model_type, {}), **values})


def tiny_model(model_type: str, values: Mapping[str, Any]) -> Any:
    """Return a model of a type with random parameters, no two alike."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model, seed=zlib.crc32(model_type.encode()))
    # Generation shall not stop early.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, *, seed: int) -> None:
    """Draw matrices anew by their fan-in and biases around zero; move norms and stored buffers off their values."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif isinstance(tensor, torch.nn.Parameter):
            tensor.add_(0.1 * noise)
        else:
            tensor.mul_(1 + 0.1 * noise)
