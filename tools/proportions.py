"""What types are given beside the defaults of their configuration, where those make no model or one of odd sizes.

Every entry says where its values are from, so that no proportion of docs/shares.md is anybody's guess:

    defaults    they follow from the type's other defaults: the width of a head is the model's divided by the heads, as
                many key heads as query heads, the length of a vocabulary that is a list
    layers      kinds of layers and rotary embeddings, which the type must be told: every kind that it knows
    like TYPE   they are the defaults of another type
    of MODEL    they are in the published config.json of that model
    smallest    a size that the class must be told, of a part that is no hundredth of the model
"""

from typing import Any, NamedTuple

from tools.sweep.types import rotary, rotary_by_layer

Values = dict[str, Any]


class Given(NamedTuple):
    """Values beside the defaults, and where they are from."""

    values: Values
    source: str


OCR: Values = {"mlp_layer_types": ["dense"] + ["sparse"] * 31, "moe_intermediate_size": 1408}

BACKBONE: Values = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet"}}

PROPORTIONS: dict[str, Given] = {
    "chameleon": Given({"vocabulary_map": {}}, "smallest"),
    "cohere_compass_text": Given(
        rotary_by_layer({"layer_types": ["full_attention", "sliding_attention"] * 20}), "layers"
    ),
    # The default is the same of a package that is not needed otherwise.
    "conditional_detr": Given(BACKBONE, "like resnet"),
    # 1407, the default, is odd.
    "deepseek_ocr2": Given({"text_config": OCR}, "layers, of DeepSeek-V2-Lite"),
    "deepseek_ocr2_text": Given(OCR, "layers, of DeepSeek-V2-Lite"),
    "deepseek_v2": Given({"moe_intermediate_size": 1408}, "of DeepSeek-V2-Lite"),
    "detr": Given(BACKBONE, "like resnet"),
    "diffusion_gemma_text": Given(
        {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}, "of diffusiongemma-26B-A4B-it"
    ),
    "dots1": Given(
        {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        "of dots.llm1.inst",
    ),
    "esm": Given({"vocab_size": 33, "pad_token_id": 1}, "defaults"),
    # 4096 by 96 heads is no whole number.
    "glm4_moe": Given({"head_dim": 128}, "of GLM-4.5-Air"),
    "glm4v_moe": Given({"text_config": {"head_dim": 128}}, "of GLM-4.5V"),
    "glm4v_moe_text": Given({"head_dim": 128}, "of GLM-4.5V"),
    "hunyuan_v1_dense": Given({"head_dim": 128, **rotary()}, "defaults, layers"),
    "hunyuan_v1_moe": Given(
        {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "intermediate_size": 3072, **rotary()},
        "of Hunyuan-A13B-Instruct, layers",
    ),
    "hunyuan_vl_text": Given({"head_dim": 128, **rotary()}, "defaults, layers"),
    "lfm2_moe": Given({"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}, "layers"),
    "ministral": Given({"head_dim": 128}, "defaults"),
    "nanochat": Given(
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 32},
        "of nanochat-d32",
    ),
    "nemotron": Given({"num_key_value_heads": 48, "head_dim": 128}, "defaults"),
    "qwen3_omni_moe_talker_text": Given({"shared_expert_intermediate_size": 768}, "of Qwen3-Omni-30B-A3B-Instruct"),
    # 2048 by 28 heads is no whole number.
    "qwen3_omni_moe_text": Given({"num_attention_heads": 32, "head_dim": 128}, "like qwen3_moe"),
    "qwen4_exp_text": Given(
        {
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
        },
        "smallest",
    ),
    "table-transformer": Given(BACKBONE, "like resnet"),
    "wav2vec2-bert": Given({"vocab_size": 32}, "like wav2vec2"),
    "wav2vec2-conformer": Given({"vocab_size": 32}, "like wav2vec2"),
}
"""By type."""
