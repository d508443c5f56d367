"""Types for which transformers has no plan and we have one: what their tiny models need."""

from reshard.catalogue import exported, own_plans
from tools.sweep.sizes import SIZES, Values

BANDS = 8
"""Bands of a sound."""

DESCRIBED = 90
"""Stands for a part of an image, for florence2."""

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

STAGES: Values = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "window_size": 2}
"""Of an image, wider from one to the next."""

BACKBONE: Values = {
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
    "num_queries": 5,
}
"""A small one of convolutions, for types that find objects."""

OWN_TYPES: dict[str, Values] = {
    "conditional_detr": BACKBONE,
    "detr": BACKBONE,
    "table-transformer": BACKBONE,
    "aimv2_text_model": {"eos_token_id": 2},
    "blip_2_qformer": {"encoder_hidden_size": 64, "use_qformer_text_input": False},
    "chameleon": {"vocabulary_map": {}, "vq_config": {"embed_dim": 8, "base_channels": 32, "latent_channels": 8}},
    "csm": {
        "num_codebooks": 4,
        "text_vocab_size": 96,
        "codebook_pad_token_id": 3,
        "codec_config": {"upsample_groups": 64},
    },
    "csm_depth_decoder_model": {"num_codebooks": 4, "backbone_hidden_size": 64},
    "dia": {
        "encoder_config": {"vocab_size": 96, "num_key_value_heads": 4},
        "decoder_config": {
            "cross_hidden_size": 64,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "cross_head_dim": 24,
            "vocab_size": 96,
        },
    },
    "donut-swin": STAGES,
    "idefics": {
        "use_resampler": False,
        "cross_layer_interval": 2,
        "num_hidden_layers": 4,
        "vision_config": {
            "embed_dim": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "image_size": 16,
            "patch_size": 4,
            "intermediate_size": 96,
        },
    },
    "instructblip_qformer": {"encoder_hidden_size": 64},
    "kosmos-2": {
        "latent_query_num": 4,
        "text_config": {
            "vocab_size": 96,
            "embed_dim": 64,
            "layers": 2,
            "ffn_dim": 96,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "image_size": 16,
            "num_attention_heads": 4,
            "patch_size": 4,
        },
    },
    "musicgen_decoder": {"num_codebooks": 2, "bos_token_id": 96, "pad_token_id": 96},
    "musicgen_melody_decoder": {"num_codebooks": 2, "bos_token_id": 96, "pad_token_id": 96},
    "pix2struct_text_model": {"d_kv": 16},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 48, "seq_len": 16},
    "sam_hq_vision_model": {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 96},
    "sam_vision_model": {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 96},
    "seamless_m4t": {"speech_encoder_layers": 2, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1},
    "seamless_m4t_v2": {"speech_encoder_layers": 2, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1},
    "segformer": {
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "hidden_sizes": [32, 64],
        "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [4, 4],
    },
    "sew-d": {
        "squeeze_factor": 2,
        "max_position_embeddings": 64,
        "position_buckets": 8,
        "feature_layer_norm_eps": 1e-5,
    },
    "swin": STAGES,
    "swinv2": STAGES,
    "udop": {"max_2d_position_embeddings": 64},
    "vitdet": {"pretrain_image_size": 16, "window_size": 2, "window_block_indices": [0]},
    "vitpose_backbone": {"num_experts": 1, "image_size": [16, 16], "patch_size": [8, 8]},
    "vjepa2": {
        "crop_size": 16,
        "frames_per_clip": 4,
        "pred_hidden_size": 48,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
        "num_pooler_layers": 1,
    },
    "big_bird": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    "bigbird_pegasus": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    "bros": {"dim_bbox": 8},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 4},
    "clap_text_model": {"projection_dim": 32},
    "convbert": {"head_ratio": 2},
    "data2vec-vision": {"use_relative_position_bias": True},
    "dpt": {"backbone_config": None, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
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
    "xclip_vision_model": {"num_frames": 2},
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

POSES: Values = {
    "model_type": "vitpose_backbone",
    "image_size": [16, 16],
    "patch_size": [8, 8],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "out_indices": [2],
    "num_experts": 2,
    "part_features": 16,
}
"""Two kinds of poses, each with an expert."""

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
    "vitpose+experts": ("vitpose", {"backbone_config": POSES}),
    "t5+gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
"""Types whose layers are others with other values of the configuration."""

MASKS: Values = {
    "vision_config": {"output_channels": 32, "num_pos_feats": 16},
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 32, "iou_head_hidden_dim": 32, "mlp_dim": 48, "num_attention_heads": 4},
}

OWN_COMPOSITES: dict[str, Values] = {
    "xclip": {
        "projection_dim": 64,
        "vision_config": {"mit_hidden_size": 64, "mit_intermediate_size": 96, "mit_num_attention_heads": 4},
    },
    "aimv2": {},
    "blip": {},
    "blip-2": {"num_query_tokens": 4, "image_token_index": 90, "text_config": {"model_type": "opt"}},
    "depth_anything": {
        "backbone_config": {
            "model_type": "dinov2",
            "num_hidden_layers": 4,
            "out_indices": [1, 2, 3, 4],
            "reshape_hidden_states": False,
        },
        "patch_size": 4,
        "reassemble_hidden_size": 64,
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "head_hidden_size": 8,
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "embed_dim": [32, 64],
            "num_heads": [2, 4],
            "num_groups": [2, 4],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "window_size": 2,
            "projection_dim": 64,
        },
        "text_config": {"model_type": "bart"},
        "image_token_id": DESCRIBED,
    },
    "gpt-sw3": {},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "musicgen": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}},
    "musicgen_melody": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}},
    "pix2struct": {},
    "sam": MASKS,
    "sam_hq": {**MASKS, "mask_decoder_config": {**MASKS["mask_decoder_config"], "vit_dim": 64}},
    "vitpose": {"backbone_config": {"model_type": "vitpose_backbone", "out_indices": [3]}},
    "align": {"projection_dim": 640, "vision_config": {"image_size": 128, "num_block_repeats": [1] * 7}},
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

OWN_PARTS = {
    "clap_audio_model": "clap",
    "florence_vision": "florence2",
    "git_vision_model": "git",
    "parakeet_encoder": "parakeet_ctc",
    "pix2struct_text_model": "pix2struct",
    "vitpose_backbone": "vitpose",
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
"""Types that are run as a part of a composite, since no class of theirs runs alone: that composite."""

KINDS = (
    *("ForTextToText", "ForConditionalGeneration", "MTModel", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForCTC"),
    *(
        "ForImageClassification",
        "ForAudioClassification",
        "ForVideoClassification",
        "ForObjectDetection",
        "ForPoseEstimation",
        "ForDepthEstimation",
        "ForVisionText2Text",
        "Decoder",
        "Model",
        "Backbone",
        "ContextEncoder",
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
