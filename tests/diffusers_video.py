"""Tiny configurations and inputs of the classes of diffusers that make videos and sounds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.diffusers_own import HEADS, OWN_CONFIGS, random_tensors

Arguments = dict[str, Any]


class VideoCase(NamedTuple):
    """One model and its forwards.

    Attributes:
        name: Its name, also of its folder.
        architecture: The class.
        config: Its configuration.
        calls: Returns the arguments of its forwards, which come one after the other.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    calls: Callable[[Any], list[Arguments]]


WAN = {
    **HEADS,
    "patch_size": (1, 2, 2),
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
}
IMAGE = {"image_dim": 16, "added_kv_proj_dim": 64}


def wan_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
        }
    ]


def wan_image_calls(_: Any) -> list[Arguments]:
    # The last 512 tokens are the text.
    return [
        {
            "hidden_states": random_tensors(1, 4, 2, 8, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": random_tensors(1, 512, 32),
            "encoder_hidden_states_image": random_tensors(1, 4, 16),
        }
    ]


def vace_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "control_hidden_states": random_tensors(2, 6, 2, 8, 8),
        }
    ]


def animate_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(1, 12, 3, 8, 8),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": random_tensors(1, 512, 32),
            "encoder_hidden_states_image": random_tensors(1, 4, 16),
            "pose_hidden_states": random_tensors(1, 4, 2, 8, 8),
            "face_pixel_values": random_tensors(1, 3, 5, 16, 16),
        }
    ]


def animate2_calls(model: Any) -> list[Arguments]:
    from diffusers.models.transformers import transformer_wan_animate_2 as module

    # The mask for flex attention is built by a compiled function; it is the same without.
    build = module.create_block_mask
    model.create_mask.__func__.__globals__["create_block_mask"] = lambda *args, **kwargs: build(
        *args, **{**kwargs, "_compile": False}
    )
    cache = module.WanAnimate2KVCache(model.config.num_layers)
    common = {
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": [random_tensors(8, 32)],
        "encoder_hidden_states_image": random_tensors(1, 4, 1280),
        "kv_cache": cache,
        "seq_len": 16,
    }
    grid = torch.tensor([[1, 4, 4]])
    return [
        {
            **common,
            "hidden_states": [random_tensors(4, 1, 8, 8)],
            "condition_latents": [random_tensors(2, 1, 8, 8)],
            "kv_cache_mode": "extract",
            "offset_grid_sizes": grid,
        },
        {
            **common,
            "hidden_states": [random_tensors(4, 1, 8, 8) * 2],
            "condition_latents": [random_tensors(2, 1, 8, 8) * 2],
            "kv_cache_mode": "cached",
            "reference_grid_sizes": grid,
            "origin_len": 1,
            "origin_area": [64, 64],
        },
    ]


def anyflow_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 2, 4, 8, 8),
            "timestep": torch.tensor([[3.0, 4.0], [5.0, 6.0]]),
            "r_timestep": torch.tensor([[1.0, 2.0], [2.0, 3.0]]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
        }
    ]


def anyflow_far_calls(model: Any) -> list[Arguments]:
    # A forward on all frames; then one that fills a cache of the rank's heads, and one that reads it.
    heads = model.blocks[0].attn1.heads
    common = {"chunk_partition": [1, 1], "encoder_hidden_states": random_tensors(1, 8, 32)}
    caches = [
        {"compressed_cache": torch.zeros(2, 1, heads, 4, 16), "full_cache": torch.zeros(2, 1, heads, 16, 16)}
        for _ in model.blocks
    ]
    flags = {"is_cache_step": True, "num_cached_chunks": 1}
    return [
        {
            **common,
            "hidden_states": random_tensors(1, 2, 4, 8, 8),
            "timestep": torch.tensor([[3.0, 4.0]]),
            "r_timestep": torch.tensor([[1.0, 2.0]]),
        },
        {
            **common,
            "chunk_partition": [1],
            "hidden_states": random_tensors(1, 1, 4, 8, 8),
            "timestep": torch.tensor([[0.0]]),
            "r_timestep": torch.tensor([[0.0]]),
            "kv_cache": caches,
            "kv_cache_flag": flags,
        },
        {
            **common,
            "hidden_states": random_tensors(1, 1, 4, 8, 8) * 2,
            "timestep": torch.tensor([[3.0]]),
            "r_timestep": torch.tensor([[1.0]]),
            "kv_cache": caches,
            "kv_cache_flag": {"is_cache_step": False, "num_cached_chunks": 1},
        },
    ]


def helios_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "indices_hidden_states": torch.tensor([[2, 3]] * 2),
            "indices_latents_history_short": torch.tensor([[1]] * 2),
            "latents_history_short": random_tensors(2, 4, 1, 8, 8),
        }
    ]


def sana_video_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(2, 8)
    mask[1, 6:] = 0
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([3, 5]),
        }
    ]


def ltx2_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 16, 8),
            "audio_hidden_states": random_tensors(2, 5, 6),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "audio_encoder_hidden_states": random_tensors(2, 8, 32),
            "timestep": torch.tensor([[3], [5]]),
            "audio_timestep": torch.tensor([[3], [5]]),
            "encoder_attention_mask": torch.ones(2, 8),
            "audio_encoder_attention_mask": torch.ones(2, 8),
            "num_frames": 1,
            "height": 4,
            "width": 4,
            "audio_num_frames": 5,
        }
    ]


def longcat_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(2, 8, dtype=torch.bool)
    return [
        {
            "hidden_states": random_tensors(2, 10, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "encoder_attention_mask": mask,
            "timestep": torch.tensor([0.3, 0.5]),
            "latent_cond": random_tensors(2, 10, 8) * 2,
        }
    ]


def framepack_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, 6:] = False
    return [
        {
            "hidden_states": random_tensors(1, 4, 2, 8, 8),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": random_tensors(1, 8, 32),
            "encoder_attention_mask": mask,
            "pooled_projections": random_tensors(1, 16),
            "image_embeds": random_tensors(1, 3, 16),
            "indices_latents": torch.tensor([3, 4]),
            "guidance": torch.tensor([100.0]),
            "latents_clean": random_tensors(1, 4, 1, 8, 8),
            "indices_latents_clean": torch.tensor([2]),
            "latents_history_2x": random_tensors(1, 4, 2, 8, 8) * 2,
            "indices_latents_history_2x": torch.tensor([0, 1]),
            "latents_history_4x": random_tensors(1, 4, 4, 8, 8),
            "indices_latents_history_4x": torch.tensor([0, 1, 2, 3]),
        }
    ]


def hunyuan15_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, 6:] = False
    return [
        {
            "hidden_states": random_tensors(1, 4, 2, 4, 4),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": random_tensors(1, 8, 32),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": random_tensors(1, 8, 16),
            "encoder_attention_mask_2": mask,
            "image_embeds": random_tensors(1, 3, 16),
        }
    ]


def motif_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(1, 8)
    mask[0, 6:] = 0
    return [
        {
            "hidden_states": random_tensors(1, 4, 2, 4, 4),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": random_tensors(1, 8, 32),
            "encoder_attention_mask": mask,
            "image_embeds": random_tensors(1, 3, 16),
        }
    ]


def easyanimate_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3.0, 5.0]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
        }
    ]


def consisid_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 2, 4, 8, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "timestep": torch.tensor([3, 5]),
            "id_cond": random_tensors(2, 16),
            "id_vit_hidden": [random_tensors(2, 6, 32)] * 2,
        }
    ]


def latte_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "timestep": torch.tensor([3, 3]),
        }
    ]


def allegro_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "timestep": torch.tensor([3, 5]),
            "attention_mask": torch.ones(2, 2, 8, 8),
            "encoder_attention_mask": torch.ones(2, 8),
        }
    ]


def temporal_calls(_: Any) -> list[Arguments]:
    return [{"hidden_states": random_tensors(4, 32, 4, 4), "num_frames": 4}]


def mochi_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "timestep": torch.tensor([3, 5]),
            "encoder_attention_mask": mask,
        }
    ]


def cosmos_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3.0, 5.0]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "fps": 24,
        }
    ]


def cosmos_image_calls(model: Any) -> list[Arguments]:
    (arguments,) = cosmos_calls(model)
    context = (arguments["encoder_hidden_states"], random_tensors(2, 4, 16))
    return [{**arguments, "encoder_hidden_states": context}]


def cosmos3_calls(_: Any) -> list[Arguments]:
    text, vision = 6, 8
    return [
        {
            "input_ids": torch.arange(text),
            "text_indexes": torch.arange(text),
            "position_ids": torch.arange(text + vision).expand(3, -1),
            "und_len": text,
            "sequence_length": text + vision,
            "vision_tokens": [random_tensors(1, 4, 2, 4, 4)],
            "vision_token_shapes": [(2, 2, 2)],
            "vision_sequence_indexes": torch.arange(text, text + vision),
            "vision_mse_loss_indexes": torch.arange(text, text + vision),
            "vision_timesteps": torch.full((vision,), 500.0),
            "vision_noisy_frame_indexes": [torch.arange(2)],
        }
    ]


def ace_step_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 12, 4),
            "timestep": torch.tensor([0.3, 0.5]),
            "timestep_r": torch.tensor([0.1, 0.2]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "context_latents": random_tensors(2, 12, 8),
        }
    ]


def minimax_h3_calls(_: Any) -> list[Arguments]:
    text, video, audio = torch.arange(6), torch.arange(6, 14), torch.arange(14, 17)
    return [
        {
            "hidden_states": random_tensors(1, 8, 16),
            "audio_hidden_states": random_tensors(1, 3, 6),
            "encoder_hidden_states": random_tensors(1, 6, 32),
            "timestep": torch.tensor([0.3, 0.5]),
            "timestep_indices": torch.tensor([0] * 6 + [1] * 11),
            "token_tags": torch.tensor([1] * 6 + [0] * 8 + [2] * 3),
            "position_ids": torch.arange(17)[:, None].expand(-1, 3),
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text,
        }
    ]


def music3_calls(_: Any) -> list[Arguments]:
    return [
        {
            "hidden_states": random_tensors(2, 8, 10),
            "timestep": torch.tensor([0.3, 0.5]),
            "encoder_hidden_states": random_tensors(2, 10, 32),
        }
    ]


def stable_audio_calls(_: Any) -> list[Arguments]:
    angles = random_tensors(11, 8)
    return [
        {
            "hidden_states": random_tensors(2, 4, 10),
            "timestep": torch.tensor([3.0, 5.0]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "global_hidden_states": random_tensors(2, 1, 16),
            "rotary_embedding": (angles.cos(), angles.sin()),
            "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool),
        }
    ]


def stable_audio3_calls(_: Any) -> list[Arguments]:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return [
        {
            "hidden_states": random_tensors(2, 4, 10),
            "timestep": torch.tensor([0.3, 0.5]),
            "encoder_hidden_states": random_tensors(2, 8, 32),
            "global_hidden_states": random_tensors(2, 16),
            "encoder_attention_mask": mask,
            "local_add_cond": random_tensors(2, 5, 10),
        }
    ]


LTX2 = {
    **HEADS,
    "in_channels": 8,
    "out_channels": 8,
    "cross_attention_dim": 64,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 8,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 32,
}
MOTIF = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "patch_size": 1,
    "text_embed_dim": 32,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 8),
}
COSMOS = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": 32,
    "adaln_lora_dim": 8,
    "max_size": (4, 8, 8),
    # Resizing the padding's mask needs torchvision.
    "concat_padding_mask": False,
}
HELIOS = {**WAN, "rope_dim": (8, 4, 4), "is_amplify_history": True}
STABLE_AUDIO3 = {
    "io_channels": 4,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 4,
    "cond_token_dim": 32,
    "global_cond_dim": 16,
    "local_add_cond_dim": 5,
    "timestep_features_dim": 16,
    "num_memory_tokens": 2,
}

CASES = [
    VideoCase("wan-image", "WanTransformer3DModel", {**WAN, **IMAGE}, wan_image_calls),
    VideoCase(
        "sana-normed",
        "SanaTransformer2DModel",
        {
            **OWN_CONFIGS["SanaTransformer2DModel"],
            "qk_norm": "rms_norm_across_heads",
        },
        lambda _: [
            {
                "hidden_states": random_tensors(2, 4, 8, 8),
                "encoder_hidden_states": random_tensors(2, 8, 32),
                "timestep": torch.tensor([3, 5]),
            }
        ],
    ),
    VideoCase(
        "vace",
        "WanVACETransformer3DModel",
        {**WAN, "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6},
        vace_calls,
    ),
    VideoCase(
        "animate",
        "WanAnimateTransformer3DModel",
        {
            **WAN,
            **IMAGE,
            "in_channels": 12,
            "latent_channels": 4,
            "inject_face_latents_blocks": 1,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 8,
            "face_encoder_num_heads": 2,
        },
        animate_calls,
    ),
    VideoCase(
        "animate2",
        "WanAnimate2Transformer3DModel",
        {
            "text_len": 8,
            "in_dim": 6,
            "dim": 64,
            "ffn_dim": 64,
            "freq_dim": 16,
            "text_dim": 32,
            "out_dim": 4,
            "num_heads": 4,
            "num_layers": 2,
        },
        animate2_calls,
    ),
    VideoCase("skyreels", "SkyReelsV2Transformer3DModel", {**WAN, "inject_sample_info": False}, wan_calls),
    VideoCase("chronoedit", "ChronoEditTransformer3DModel", {**WAN, **IMAGE}, wan_image_calls),
    VideoCase("anyflow", "AnyFlowTransformer3DModel", WAN, anyflow_calls),
    VideoCase(
        "anyflow-far",
        "AnyFlowFARTransformer3DModel",
        {**WAN, "full_chunk_limit": 2, "chunk_partition": (1, 1)},
        anyflow_far_calls,
    ),
    VideoCase("helios", "HeliosTransformer3DModel", HELIOS, helios_calls),
    VideoCase("helios-scalar", "HeliosTransformer3DModel", {**HELIOS, "history_scale_mode": "scalar"}, helios_calls),
    VideoCase(
        "sana-video",
        "SanaVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
            "caption_channels": 32,
        },
        sana_video_calls,
    ),
    VideoCase("ltx2", "LTX2VideoTransformer3DModel", LTX2, ltx2_calls),
    VideoCase(
        "ltx2-split",
        "LTX2VideoTransformer3DModel",
        {**LTX2, "rope_type": "split", "gated_attn": True, "audio_gated_attn": True},
        ltx2_calls,
    ),
    VideoCase(
        "longcat-audio",
        "LongCatAudioDiTTransformer",
        {"dit_dim": 64, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 32, "latent_dim": 8},
        longcat_calls,
    ),
    VideoCase(
        "framepack",
        "HunyuanVideoFramepackTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 2,
            "text_embed_dim": 32,
            "pooled_projection_dim": 16,
            "rope_axes_dim": (4, 4, 8),
            "has_image_proj": True,
            "image_proj_dim": 16,
            "has_clean_x_embedder": True,
        },
        framepack_calls,
    ),
    VideoCase(
        "hunyuan15",
        "HunyuanVideo15Transformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "text_embed_2_dim": 16,
            "image_embed_dim": 16,
            "rope_axes_dim": (4, 4, 8),
        },
        hunyuan15_calls,
    ),
    VideoCase("motif", "MotifVideoTransformer3DModel", MOTIF, motif_calls),
    VideoCase(
        "motif-crossed",
        "MotifVideoTransformer3DModel",
        {
            **MOTIF,
            "num_decoder_layers": 1,
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        motif_calls,
    ),
    VideoCase(
        "easyanimate",
        "EasyAnimateTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
        },
        easyanimate_calls,
    ),
    VideoCase(
        "consisid",
        "ConsisIDTransformer3DModel",
        {
            "attention_head_dim": 12,
            "num_attention_heads": 4,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "max_text_seq_length": 8,
            "is_train_face": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 8,
            "cross_attn_num_heads": 8,
            "LFE_id_dim": 16,
            "LFE_vit_dim": 32,
            "LFE_depth": 2,
            "LFE_dim_head": 8,
            "LFE_num_heads": 4,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 3,
            "LFE_output_dim": 32,
            "LFE_num_scale": 2,
        },
        consisid_calls,
    ),
    VideoCase(
        "latte",
        "LatteTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 64,
            "caption_channels": 32,
            "video_length": 2,
            "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_single",
            "num_embeds_ada_norm": 8,
        },
        latte_calls,
    ),
    VideoCase(
        "allegro",
        "AllegroTransformer3DModel",
        {
            **HEADS,
            "num_layers": 2,
            "cross_attention_dim": 64,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 2,
            "caption_channels": 32,
        },
        allegro_calls,
    ),
    VideoCase(
        "temporal",
        "TransformerTemporalModel",
        {**HEADS, "in_channels": 32, "num_layers": 2, "norm_num_groups": 4},
        temporal_calls,
    ),
    VideoCase(
        "mochi",
        "MochiTransformer3DModel",
        {
            "attention_head_dim": 24,
            "num_attention_heads": 4,
            "num_layers": 3,
            "pooled_projection_dim": 24,
            "in_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 8,
            "max_sequence_length": 8,
        },
        mochi_calls,
    ),
    VideoCase("cosmos", "CosmosTransformer3DModel", COSMOS, cosmos_calls),
    VideoCase(
        "cosmos-image",
        "CosmosTransformer3DModel",
        {
            **COSMOS,
            "text_embed_dim": 64,
            "img_context_dim_in": 16,
            "img_context_num_tokens": 4,
            "img_context_dim_out": 64,
            "encoder_hidden_states_channels": 64,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 32,
        },
        cosmos_image_calls,
    ),
    VideoCase(
        "cosmos3",
        "Cosmos3OmniTransformer",
        {
            "head_dim": 16,
            "hidden_size": 64,
            "intermediate_size": 96,
            "latent_channel": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "patch_latent_dim": 16,
            "vocab_size": 24,
            "rope_axes_dim": (4, 2, 2),
        },
        cosmos3_calls,
    ),
    VideoCase(
        "ace-step",
        "AceStepTransformer1DModel",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 2,
            "encoder_hidden_size": 32,
        },
        ace_step_calls,
    ),
    VideoCase(
        "minimax-h3",
        "MiniMaxH3Transformer3DModel",
        {
            **HEADS,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 80,
            "in_channels": 4,
            "audio_in_channels": 6,
            "text_dim": 32,
            "freq_dim": 16,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        minimax_h3_calls,
    ),
    VideoCase(
        "music3",
        "MiniMaxMusic3Transformer1DModel",
        {
            **HEADS,
            "in_channels": 8,
            "condition_dim": 32,
            "num_layers": 2,
            "ff_inner_dim": 80,
            "rotary_dim": 8,
            "fourier_embedding_dim": 16,
        },
        music3_calls,
    ),
    VideoCase(
        "music3-depth",
        "MiniMaxMusic3RVQDepthDecoder",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "audio_vocab_size": 8,
            "num_codebooks": 3,
        },
        lambda _: [],
    ),
    VideoCase(
        "stable-audio",
        "StableAudioDiTModel",
        {
            **HEADS,
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 24,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 32,
        },
        stable_audio_calls,
    ),
    VideoCase("stable-audio3", "StableAudio3DiTModel", STABLE_AUDIO3, stable_audio3_calls),
    VideoCase(
        "stable-audio3-plain",
        "StableAudio3DiTModel",
        {**STABLE_AUDIO3, "use_differential_attention": False},
        stable_audio3_calls,
    ),
]

FLEX = ("WanAnimate2Transformer3DModel", "AnyFlowFARTransformer3DModel")
"""Classes that need flex attention."""

FUSED = next(case for case in CASES if case.name == "chronoedit")._replace(name="chronoedit-fused")
"""A model that was saved after its projections had been fused: of queries, keys and values, and of keys and values."""


def build(case: VideoCase) -> Any:
    """Return a case's model with random parameters, no two of them alike."""
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, case.architecture)(**case.config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(size * torch.randn_like(parameter))
    return model


def fuse(model: Any) -> None:
    """Fuse the projections of every attention of `FUSED`."""
    for block in model.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()


def outputs(model: Any, case: VideoCase) -> dict[str, torch.Tensor]:
    """Return all tensors that a case's forwards give, by their numbers."""
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        if case.architecture == "MiniMaxMusic3RVQDepthDecoder":
            # What a pipeline does with it, one step.
            states = model(model.projection(model.audio_embeddings(torch.tensor([[1, 15, 7]] * 2))))
            found += [states, *(head(states) for head in model.audio_heads)]
        for arguments in case.calls(model):
            found += tensors_in(model(**arguments, return_dict=False))
    return {str(number): tensor.contiguous() for number, tensor in enumerate(found)}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, tuple | list) else []
