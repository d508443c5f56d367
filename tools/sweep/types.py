"""What single types need beside the sizes that all take: layers of every kind, values that fit each other, classes."""

from typing import Any

from tools.sweep.sizes import Values

LATENT: Values = {"num_key_value_heads": 4}
"""Latent attention has no groups."""

SLIDING: Values = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOW: Values = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
LINEAR: Values = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID: Values = {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
WIDE: Values = {"global_head_dim": 32, "num_global_key_value_heads": 2}
SPARSE: Values = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SHARED: Values = {"indexer_types": ["full", "shared", "full"]}
"""Layers of every kind; three, so that their number is odd."""


def rotary(**values: Any) -> Values:
    """Return rotary embeddings of the plain kind."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **values}}


def rotary_by_layer(layers: Values, **values: Any) -> Values:
    """Return layers, with rotary embeddings of each kind of layer."""
    return {**layers, "rope_parameters": {kind: rotary(**values)["rope_parameters"] for kind in layers["layer_types"]}}


MROPE = rotary(mrope_section=[2, 4, 6])
"""Over time, height and width: 12 frequencies of a head of 24."""

# Queries grow with their position.
GROWING = rotary(llama_4_scaling_beta=0.1, original_max_position_embeddings=8)

TYPES: dict[str, Values] = {
    "afmoe": SLIDING,
    "apertus": rotary(),
    "apertus1p5_text": rotary(),
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {**LATENT, **LINEAR, "head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {**SLIDING, **SPARSE},
    "cohere2": SLIDING,
    "cohere2_moe": {**SLIDING, **SPARSE},
    "cohere_compass_text": rotary_by_layer(WINDOW, mrope_section=[2, 2, 4]),
    "cosmos3_edge_text": rotary(mrope_section=[2, 4, 6]),
    "cwm": rotary(),
    "deepseek_ocr2_encoder": {"num_key_value_heads": 2},
    "deepseek_ocr2_text": {**LATENT, **SPARSE},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    # Two halves of the heads belong together.
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "diffusion_gemma_text": {**WINDOW, **WIDE},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, **WINDOW},
    "dots3_note_text": LATENT,
    "dots3_note_vision_encoder": {"mlp_bias": False, "mlp_layer_types": ["dense", "sparse"]},
    # One group of heads for keys and values in layers of full attention.
    "embedding_gemma2_text": {**WINDOW, "global_head_dim": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 32], **rotary(mrope_section=[2, 2, 4])},
    # Its heads are as wide as the model.
    "esmc": {**LATENT, "head_dim": 16},
    "exaone4": SLIDING,
    "exaone_moe": SLIDING,
    "flint": WINDOW,
    "gemma3_text": SLIDING,
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*SLIDING["layer_types"], "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**WINDOW, **WIDE},
    "gemma4_unified_text": {**WINDOW, **WIDE},
    "glm4_moe_lite": LATENT,
    "glm4v_moe_text": rotary(mrope_section=[2, 3, 3], partial_rotary_factor=1.0),
    "glm4v_text": rotary(mrope_section=[2, 3, 3], partial_rotary_factor=1.0),
    "glm5_next_text": {
        **LATENT,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        **SPARSE,
    },
    "glm_image_text": rotary(mrope_section=[2, 3, 3], partial_rotary_factor=1.0),
    "glm_moe_dsa": {**LATENT, **SHARED},
    "glm_ocr_text": rotary(mrope_section=[2, 3, 3], partial_rotary_factor=1.0),
    "gpt_oss": rotary(),
    "granitemoehybrid": LINEAR,
    # Its o_proj is square.
    "helium": {"head_dim": 16},
    "higgs_audio_v2": {
        "num_codebooks": 4,
        "codebook_size": 24,
        "audio_stream_bos_id": 24,
        "audio_stream_eos_id": 25,
        "audio_bos_token_id": 93,
        "audio_delay_token_id": 95,
        **rotary(),
    },
    "hunyuan_vl_text": rotary(mrope_section=[2, 2, 4, 4]),
    "hy_v4": {**LATENT, **SHARED},
    "hy_v4_vl_text": {**LATENT, **SHARED, **rotary(mrope_section=[1, 1, 2])},
    "inkling2_loop_text": HYBRID,
    "inkling2_text": HYBRID,
    "inkling_text": {**HYBRID, **SPARSE},
    "kimi_linear": {**LATENT, **LINEAR},
    "kolibri1": SLIDING,
    "laguna": SLIDING,
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    # A token is 4 patches.
    "llama4_vision_model": {"intermediate_size": 128},
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
    },
    "longcat_flash": {**LATENT, "num_layers": 3, "num_hidden_layers": 6, "head_dim": 8},
    "mellum": {**SLIDING, **SPARSE},
    "minicpm3": LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        **SPARSE,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": SLIDING,
    "ministral3": GROWING,
    "mistral4": {**LATENT, **GROWING, "head_dim": 8},
    "mistral_large4_text": {**LATENT, **rotary(), **SHARED, "no_rope_layers": [1, 0, 1]},
    "muse_glimmer_assistant": {"block_size": 4, "target_layer_ids": [0, 1]},
    "muse_glimmer_text": {**SLIDING, "layer_rope_theta": [10000.0, 0.0, 10000.0]},
    "muse_spark_text": {**SLIDING, **SPARSE, "layer_rope_theta": [10000.0, 0.0, 10000.0]},
    "neomme": {**WINDOW, "head_dim": 16},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "num_hidden_layers": 5},
    "olmo3": SLIDING,
    "olmo_hybrid": LINEAR,
    "paddleocr_vl_text": MROPE,
    "phi4_multimodal": {"audio_config": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}},
    "qwen2": SLIDING,
    "qwen2_5_omni_text": {**SLIDING, **rotary(mrope_section=[2, 3, 3])},
    "qwen2_5_vl_text": {**SLIDING, **rotary(mrope_section=[2, 3, 3])},
    "qwen2_moe": SLIDING,
    "qwen2_vl_text": {**SLIDING, **rotary(mrope_section=[2, 3, 3])},
    "qwen3": SLIDING,
    "qwen3_5_moe_text": {**LINEAR, **rotary(mrope_section=[1, 1, 1], partial_rotary_factor=0.25)},
    "qwen3_5_text": {**LINEAR, **rotary(mrope_section=[1, 1, 1], partial_rotary_factor=0.25)},
    "qwen3_next": LINEAR,
    "qwen3_omni_moe_talker_code_predictor": {"num_code_groups": 12, "layer_types": ["full_attention"] * 3},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 80, **MROPE},
    "qwen3_omni_moe_text": MROPE,
    "qwen3_vl_moe_text": MROPE,
    "qwen3_vl_text": MROPE,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 100,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "sarvam_mla": LATENT,
    "smollm3": {**WINDOW, "no_rope_layers": [1, 0, 1]},
    "step3p5": {**SLIDING, **SPARSE},
    "unlimited_ocr_text": {**LATENT, **SPARSE},
    # In one process transformers clears the embedding's row of the pad token.
    "youtu": {**LATENT, "pad_token_id": None},
    "zaya": {"num_experts_per_tok": 1, **HYBRID},
}
"""What a type needs beside them, or otherwise."""

VARIANTS: dict[str, tuple[str, Values]] = {
    "deepseek_v2+plain_query": ("deepseek_v2", {"q_lora_rank": None}),
    "doge+experts": ("doge", {"is_moe": True, "num_experts": 16}),
    "gemma4_text+dense": (
        "gemma4_text",
        {"enable_moe_block": False, "attention_k_eq_v": True, "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
    ),
    "minicpm3+plain_query": ("minicpm3", {"q_lora_rank": None}),
}
"""Types with layers of so many kinds that one model cannot have them all: a type, and values beside its own."""

COMPOSITES: dict[str, Values] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "deepseek_ocr2": {"vision_config": {"sam_config": {"output_channels": 16, "downsample_channels": [16, 32]}}},
    "ernie4_5_vl_moe": {},
    "gemma3": {},
    "gemma4": {"audio_config": None},
    "glm4v": {},
    "glm4v_moe": {},
    "glm_ocr": {},
    "internvl": {},
    "llava": {"vision_config": {"patch_size": 8}},
    "llama4": {},
    "minimax_m3_vl": {},
    "mistral3": {},
    "mistral_large4": {},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "out_hidden_size": 128,
        "audio_config": {"hidden_sizes": [8, 16], "patch_sizes": [4, 2], "depths": [1, 1]},
    },
    "paddleocr_vl": {},
    "qwen2_5_vl": {},
    "qwen2_vl": {"vision_config": {"hidden_size": 64}},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "t5gemma": {},
    "t5gemma2": {},
    # A token is 4 frames of the encoder.
    "voxtral": {"audio_config": {"intermediate_size": 128}},
    "voxtral_realtime": {},
}
"""Types made of several, with values of their own; a sub-model takes those of its type."""

STANDS = {
    "deepseek_ocr2_encoder": "deepseek_ocr2",
    "t5_gemma_module": "t5gemma",
    "t5gemma2_decoder": "t5gemma2",
    "t5gemma2_text": "t5gemma2",
    "voxtral_realtime_text": "voxtral_realtime",
}
"""Types that have no public class: the composite whose part they are."""

CLASSES = {
    "llama4": "Llama4ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "voxtral_realtime": "VoxtralRealtimeForConditionalGeneration",
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "diffusion_gemma_text": "DiffusionGemmaEncoderTextModel",
    "dots3_note_vision_encoder": "Dots3NoteVisionModel",
    "emu3_text_model": "Emu3ForCausalLM",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "llama4_vision_model": "Llama4VisionModel",
    "granite4_vision_text": "Granite4VisionTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
    "qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
    "unlimited_ocr_text": "UnlimitedOcrTextModel",
}
"""Classes of types that transformers' tables of classes leave out."""
