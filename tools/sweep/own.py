"""Types for which transformers has no plan and we have one: what their tiny models need, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch

from reshard.catalogue import exported, own_plans
from tools.sweep.sizes import SIZES, Values

Inputs = dict[str, Any]

BATCH, LENGTH = 2, 12
BANDS = 8
"""Bands of a sound."""

OWN_SIZES: Values = {
    **SIZES,
    # Other names of the sizes.
    "d_model": 64,
    "dim": 64,
    "hidden_dim": 96,
    "d_ff": 96,
    "dff": 96,
    "d_kv": 24,
    "ffn_dim": 96,
    "n_heads": 4,
    "n_layers": 3,
    "num_heads": 4,
    "attention_heads": 4,
    "embedding_size": 32,
    "word_embed_proj_dim": 64,
    "max_seq_len": 64,
    "state_size": 8,
    # Encoders with decoders: other numbers of heads and widths in the two.
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 112,
    "num_decoder_layers": 3,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "begin_suppress_tokens": None,
    "num_mel_bins": BANDS,
    "max_source_positions": 8,
    "max_target_positions": 64,
    # Images of 16 points a side.
    "image_size": 16,
    "patch_size": 4,
    # Sounds.
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
"""A type takes those that its configuration has."""

CONVOLUTION: Values = {"conv_kernel": 4}

OWN_TYPES: dict[str, Values] = {
    "audio-spectrogram-transformer": {"max_length": 16, "frequency_stride": 4, "time_stride": 4},
    "blip_text_model": {"encoder_hidden_size": 64, "is_decoder": True},
    "clip_text_model": {"projection_dim": 32},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    "falcon_mamba": CONVOLUTION,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 8},
    "layoutlm": {"max_2d_position_embeddings": 32},
    "longt5": {"local_radius": 4, "global_block_size": 4},
    "luke": {"entity_vocab_size": 48, "entity_emb_size": 32},
    "mamba": CONVOLUTION,
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "modernbert-decoder": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 48},
    "owlvit_text_model": {"max_position_embeddings": 16},
    "siglip2_vision_model": {"num_patches": 16},
    "stablelm": {"qk_layernorm": False},
    "speech_to_text": {"input_feat_per_channel": BANDS, "conv_channels": 32, "max_source_positions": 16},
    "videomae": {"num_frames": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yolos": {"image_size": [16, 16], "num_detection_tokens": 4},
}
"""What a type needs beside them, or otherwise."""

OWN_VARIANTS: dict[str, tuple[str, Values]] = {
    "deberta-v2+shared": ("deberta-v2", {"share_att_key": True, "position_biased_input": False}),
    "dinov2+gated": ("dinov2", {"use_swiglu_ffn": True}),
    "falcon+multi_query": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon+slopes": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4, "alibi": True},
    ),
    "gpt_bigcode+heads": ("gpt_bigcode", {"multi_query": False}),
    "beit+distances": ("beit", {"use_relative_position_bias": True}),
    "beit+shared_distances": ("beit", {"use_shared_relative_position_bias": True}),
    "dinov3_vit+gated": ("dinov3_vit", {"use_gated_mlp": True}),
    "longt5+global": ("longt5", {"encoder_attention_type": "transient-global"}),
    "stablelm+norms": ("stablelm", {"qk_layernorm": True}),
    "t5+gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
"""Types whose layers are others with other values of the configuration."""

OWN_COMPOSITES: dict[str, Values] = {
    "chinese_clip": {},
    "clip": {},
    "clipseg": {"extract_layers": [0, 1], "reduce_dim": 16},
    "metaclip_2": {},
    "siglip": {},
    "siglip2": {},
}
"""Types made of two of them, with values of their own."""

OWN_PARTS = {
    "glm4v_moe_vision": "glm4v_moe",
    "glm4v_vision": "glm4v",
    "glm_ocr_vision": "glm_ocr",
    "paddleocr_vl_vision": "paddleocr_vl",
    "qwen3_5_moe_vision": "qwen3_5_moe",
    "qwen3_5_vision": "qwen3_5",
    "qwen3_vl_moe_vision": "qwen3_vl_moe",
    "qwen3_vl_vision": "qwen3_vl",
    "voxtral_encoder": "voxtral",
    "voxtral_realtime_encoder": "voxtral_realtime",
}
"""Types that are run as a part of a composite with a language model: that composite."""

KINDS = (
    *("ForConditionalGeneration", "MTModel", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForCTC"),
    *(
        "ForImageClassification",
        "ForAudioClassification",
        "ForVideoClassification",
        "ForObjectDetection",
        "Decoder",
        "Model",
    ),
)
"""Ends of the names of classes, of which the first that a type has is run."""


def own_types() -> list[str]:
    """Return the types that have a plan of ours alone, but for those that are run as a part of a composite."""
    theirs = exported()["types"]
    names = own_plans().keys() - OWN_PARTS
    return sorted(name for name in names if not {"plan", "ep_plan"} & theirs[name].keys())


def own_class(model_type: str) -> str:
    """Return the name of the class of such a type, or of a composite of them, that is run."""
    classes = sorted(exported()["types"][model_type]["classes"], key=lambda name: (len(name), name))
    return next(name for kind in KINDS for name in classes if name.endswith(kind))


def text(generator: torch.Generator) -> Inputs:
    """Ordinary tokens."""
    return {"input_ids": torch.randint(5, 90, (BATCH, LENGTH), generator=generator)}


def translated(generator: torch.Generator) -> Inputs:
    """A prompt for the encoder, and one for the decoder."""
    return {**text(generator), "decoder_input_ids": text(generator)["input_ids"][:, :7]}


def image(generator: torch.Generator, *shape: int) -> Inputs:
    """One image of 16 x 16 points a row."""
    return {"pixel_values": torch.randn(BATCH, *(shape or (3, 16, 16)), generator=generator)}


def patches(generator: torch.Generator) -> Inputs:
    """The same as 16 patches of 4 x 4 points, all of which count."""
    return {
        "pixel_values": torch.randn(BATCH, 16, 48, generator=generator),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def captioned(generator: torch.Generator) -> Inputs:
    """Images, and as many texts."""
    return {**text(generator), **image(generator)}


def transcribed(generator: torch.Generator, *shape: int) -> Inputs:
    """16 frames of 8 bands a row, and the text so far."""
    sounds = torch.randn(BATCH, *(shape or (BANDS, 16)), generator=generator)
    return {"input_features": sounds, "decoder_input_ids": text(generator)["input_ids"][:, :7]}


def waves(generator: torch.Generator, *shape: int) -> Inputs:
    """256 samples a row."""
    return {"input_values": torch.randn(BATCH, *(shape or (256,)), generator=generator)}


OWN_INPUTS: dict[str, Callable[[torch.Generator], Inputs]] = {
    **dict.fromkeys(
        (
            *(
                "bart",
                "blenderbot",
                "blenderbot-small",
                "longt5",
                "m2m_100",
                "marian",
                "mbart",
                "mt5",
                "pegasus",
                "plbart",
            ),
            *("switch_transformers", "t5", "umt5"),
        ),
        translated,
    ),
    **dict.fromkeys(
        (
            *(
                "blip_vision_model",
                "beit",
                "chinese_clip_vision_model",
                "clip_vision_model",
                "clipseg_vision_model",
                "deit",
                "dinov3_vit",
                "owlvit_vision_model",
                "dinov2",
                "dinov2_with_registers",
                "ijepa",
            ),
            *("metaclip_2_vision_model", "siglip_vision_model", "vit", "vit_msn", "yolos"),
        ),
        image,
    ),
    **dict.fromkeys(("chinese_clip", "clip", "clipseg", "metaclip_2", "siglip"), captioned),
    **dict.fromkeys(("data2vec-audio", "hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2"), waves),
    "audio-spectrogram-transformer": lambda generator: waves(generator, 16, BANDS),
    "siglip2": lambda generator: {**text(generator), **patches(generator)},
    "siglip2_vision_model": patches,
    "speech_to_text": lambda generator: transcribed(generator, 16, BANDS),
    "videomae": lambda generator: image(generator, 4, 3, 16, 16),
    # It hides patches by chance, or by the order of these numbers.
    "vit_mae": lambda generator: {**image(generator), "noise": torch.rand(BATCH, 16, generator=generator)},
    "whisper": transcribed,
}
"""Of the types that take something else than text, or more."""
