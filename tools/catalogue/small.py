"""Small models of every type, without memory for their parameters.

A type's plan, names and conversions do not depend on its widths, but they do depend on which kinds of layers there are,
so every configuration here has one of each kind.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.timm_wrapper import modeling_timm_wrapper

SIZES = {
    "vocab_size": 128,
    "unpadded_vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "zero_expert_num": 2,
    "n_group": 1,
    "topk_group": 1,
    # A dense layer before one with experts.
    "first_k_dense_replace": 1,
    "mlp_only_layers": [0],
    "moe_layer_start_index": 1,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 128,
    "pad_token_id": 0,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "rotary_dim": 8,
}
"""Values by name; a type takes those that it has."""

LATENT = {"num_key_value_heads": 4}
"""Latent attention has no groups."""

ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

TYPES: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROTARY, "full_attention": ROTARY},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], **LATENT},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "emu3": {"vocabulary_map": {}},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    },
    "glm5_next_text": {**LATENT, "num_hidden_layers": 4, "qk_rope_head_dim": 0},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_vision_layer": 0,
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "hunyuan_vl_text": {"rope_parameters": {**ROTARY, "mrope_section": [2, 2, 2, 2]}},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    "longcat_flash": {**LATENT, "num_layers": 1, "head_dim": 8},
    "nemotron_h": {"num_hidden_layers": None},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 64}}},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 64}}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
}
"""What a type needs beside them, or otherwise; None leaves a value at the type's own."""


WRONG = (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError)
"""What classes raise on sizes that do not fit together."""


RESNET = {"backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}}
"""Instead of one of timm, which need not be installed."""

OWN: dict[str, dict[str, Any]] = {
    "conditional_detr": RESNET,
    "deformable_detr": RESNET,
    "detr": RESNET,
    "table-transformer": RESNET,
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
        }
    },
    "chameleon": {"vocabulary_map": {}},
    "instructblip": {"text_config": {"model_type": "llama"}},
    "instructblipvideo": {"text_config": {"model_type": "llama"}},
}
"""What a type needs to have a configuration of its own, or one in which a part has a plan."""

CLASSES: dict[str, dict[str, Any]] = {
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "ViltForImagesAndTextClassification": {"num_images": 2},
}
"""What a class needs beside that."""


class BuildError(Exception):
    """A type has no configuration with which its class can be built."""


def build_small(cls: type[PreTrainedModel], model_type: str) -> PreTrainedModel:
    """Return a model of a class, on the meta device.

    Raises:
        BuildError: Neither a small configuration nor the type's own one builds it.
    """
    errors = []
    for make in (small_config, own_config):
        try:
            with torch.device("meta"), without_timm():
                return cls(make(model_type, **CLASSES.get(cls.__name__, {})))
        except (*WRONG, StrictDataclassError) as error:
            errors.append(f"{make.__name__}: {type(error).__name__}: {str(error)[:200]}")
    raise BuildError(f"{model_type}: {cls.__name__}: " + "; ".join(errors))


def small_config(model_type: str, **values: Any) -> PreTrainedConfig:
    """Return a configuration of a type with small sizes, and such sub-models where they have a plan."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    given = (
        {name: value for name, value in SIZES.items() if name in fields}
        | OWN.get(model_type, {})
        | TYPES.get(model_type, {})
        | values
    )
    for name, inner in _planned_parts(model_type).items():
        given.setdefault(name, small_config(inner).to_dict())
    return config_class(**{name: value for name, value in given.items() if value is not None})


def _planned_parts(model_type: str) -> dict[str, str]:
    if not CONFIG_MAPPING[model_type].sub_configs:
        return {}
    own = own_config(model_type)
    parts = {name: getattr(own, name, None) for name in own.sub_configs}
    return {
        name: part.model_type
        for name, part in parts.items()
        if isinstance(part, PreTrainedConfig) and (part.base_model_tp_plan or part.base_model_ep_plan)
    }


def own_config(model_type: str, **values: Any) -> PreTrainedConfig:
    """Return the configuration that the type's class gives, without arguments if that is one."""
    return CONFIG_MAPPING[model_type](**{**OWN.get(model_type, {}), **values})


@contextmanager
def without_timm() -> Iterator[None]:
    """Leave the vision towers of timm empty: no plan concerns them, and timm need not be installed."""

    def initialize(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.timm_model = torch.nn.Module()
        self.post_init()

    with patch.object(modeling_timm_wrapper.TimmWrapperModel, "__init__", initialize):
        yield
