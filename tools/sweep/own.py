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
    "big_bird": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    "bigbird_pegasus": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    "bros": {"dim_bbox": 8},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 4},
    "clap_text_model": {"projection_dim": 32},
    "convbert": {"head_ratio": 2},
    "data2vec-vision": {"use_relative_position_bias": True},
    "dpt": {"backbone_out_indices": [0, 1, 2, 2]},
    "fsmt": {"src_vocab_size": 96, "tgt_vocab_size": 88},
    "funnel": {"block_sizes": [1, 2], "num_decoder_layers": 2, "d_head": 24, "d_inner": 96, "pad_token_id": None},
    "jetmoe": {"kv_channels": 24, "num_key_value_heads": 4},
    "layoutlmv3": {"input_size": 16, "coordinate_size": 12, "shape_size": 8, "max_2d_position_embeddings": 32},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "lilt": {"hidden_size": 96, "intermediate_size": 112, "max_2d_position_embeddings": 32, "channel_shrink_ratio": 2},
    "longformer": {"attention_window": 4, "max_position_embeddings": 66},
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 20},
    "mamba2": {"conv_kernel": 4, "num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "mllama_text_model": {"cross_attention_layers": []},
    "mllama_vision_model": {
        "attention_heads": 4,
        "num_global_layers": 2,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [1],
        "vision_output_dim": 128,
        "supported_aspect_ratios": [[1, 1]],
    },
    "mobilebert": {"hidden_size": 64, "intra_bottleneck_size": 32, "embedding_size": 32},
    "moonshine": {
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    },
    "mvp": {},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4, "expert_capacity": 64},
    "nystromformer": {"segment_means_seq_len": 12, "num_landmarks": 4, "conv_kernel_size": 5},
    "parakeet_encoder": {"num_mel_bins": BANDS, "subsampling_conv_channels": 16, "subsampling_factor": 4},
    "prophetnet": {
        "num_encoder_layers": 3,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "relative_max_distance": 16,
        "num_buckets": 8,
    },
    "recurrent_gemma": {"lru_width": 64, "num_key_value_heads": 1, "attention_window_size": 8},
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 24,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "rwkv": {"context_length": 64, "rescale_every": 2},
    "speecht5": {"decoder_attention_heads": 4},
    "timesformer": {"num_frames": 2},
    "vilt": {"max_image_length": -1},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 4, 4]},
    "wav2vec2-bert": {"feature_projection_input_dim": BANDS, "position_embeddings_type": "relative_key"},
    "wav2vec2-conformer": {"position_embeddings_type": "relative", "conv_depthwise_kernel_size": 5},
    "wavlm": {"num_buckets": 8, "max_bucket_distance": 16},
    "xlm": {"emb_dim": 64, "n_heads": 4},
    "xlnet": {"n_head": 4, "d_inner": 96, "n_layer": 3},
    "flaubert": {"emb_dim": 64, "n_heads": 4},
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
    "big_bird+full": ("big_bird", {"attention_type": "original_full"}),
    "deberta+talking_head": ("deberta", {"talking_head": True}),
    "mamba2+one_group": ("mamba2", {"n_groups": 1}),
    "wav2vec2-conformer+rotary": ("wav2vec2-conformer", {"position_embeddings_type": "rotary"}),
    "wav2vec2-bert+rotary": ("wav2vec2-bert", {"position_embeddings_type": "rotary"}),
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
    "align": {"projection_dim": 640},
    "altclip": {},
    "clap": {
        "audio_config": {
            "spec_size": 32,
            "num_mel_bins": BANDS,
            "window_size": 2,
            "depths": [1, 1],
            "num_attention_heads": [4, 4],
            "patch_embeds_hidden_size": 16,
            "hidden_size": 32,
        },
    },
    "flava": {},
    "mllama": {},
    "owlv2": {"projection_dim": 64},
    "owlvit": {"projection_dim": 64},
    "parakeet_ctc": {},
    "chinese_clip": {},
    "clip": {},
    "clipseg": {"extract_layers": [0, 1], "reduce_dim": 16},
    "metaclip_2": {},
    "siglip": {},
    "siglip2": {},
}
"""Types made of two of them, with values of their own."""

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
    """Return the types that have a plan of ours alone."""
    theirs = exported()["types"]
    return sorted(name for name in own_plans() if not {"plan", "ep_plan"} & theirs[name].keys())


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


def first(length: int) -> torch.Tensor:
    """Return a mask of the first token."""
    return torch.eye(1, length, dtype=torch.long).repeat(BATCH, 1)


def tiled(generator: torch.Generator) -> Inputs:
    """One image of one tile a row."""
    return {
        "pixel_values": torch.randn(BATCH, 1, 1, 3, 16, 16, generator=generator),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, 1, dtype=torch.long),
    }


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
            *("bigbird_pegasus", "fsmt", "led", "mvp", "nllb-moe", "pegasus_x", "prophetnet"),
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
            *("altclip_vision_model", "data2vec-vision", "dpt", "flava_image_model", "mlcd_vision_model"),
            "owlv2_vision_model",
        ),
        image,
    ),
    **dict.fromkeys(("align", "altclip", "chinese_clip", "clip", "clipseg", "git", "layoutlmv3", "metaclip_2", "owlv2", "owlvit", "siglip", "vilt"), captioned),
    **dict.fromkeys(("data2vec-audio", "hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer", "wavlm"), waves),
    "bros": lambda generator: {**text(generator), "bbox": torch.rand(BATCH, LENGTH, 4, generator=generator)},
    "clap": lambda generator: {
        **text(generator),
        "input_features": torch.randn(BATCH, 1, 128, BANDS, generator=generator),
        "is_longer": torch.zeros(BATCH, 1, dtype=torch.bool),
    },
    "flava_multimodal_model": lambda generator: {"hidden_states": torch.randn(BATCH, LENGTH, 64, generator=generator)},
    "led": lambda generator: {**translated(generator), "global_attention_mask": first(LENGTH)},
    "longformer": lambda generator: {**text(generator), "global_attention_mask": first(LENGTH)},
    "lxmert": lambda generator: {
        **text(generator),
        "visual_feats": torch.randn(BATCH, 6, 20, generator=generator),
        "visual_pos": torch.rand(BATCH, 6, 4, generator=generator),
    },
    "mllama": lambda generator: {**text(generator), **tiled(generator)},
    "mllama_vision_model": tiled,
    "moonshine": lambda generator: {**waves(generator, 4096), "decoder_input_ids": text(generator)["input_ids"][:, :7]},
    "parakeet_ctc": lambda generator: {"input_features": torch.randn(BATCH, 32, BANDS, generator=generator)},
    "speecht5": lambda generator: {
        "input_values": torch.randn(BATCH, 10, 64, generator=generator),
        "decoder_input_values": torch.randn(BATCH, 6, 64, generator=generator),
    },
    "timesformer": lambda generator: image(generator, 2, 3, 16, 16),
    "vivit": lambda generator: image(generator, 4, 3, 16, 16),
    "wav2vec2-bert": lambda generator: {"input_features": torch.randn(BATCH, 16, BANDS, generator=generator)},
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
