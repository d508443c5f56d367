"""Tiny configurations and inputs of the other classes of diffusers that make images; a name may have a variant."""

from collections.abc import Callable
from typing import Any

import torch

from tests.diffusers_own import HEADS, OWN_CONFIGS, OWN_INPUTS, random_tensors

Inputs = dict[str, Any]

FLUX = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
HUNYUAN_DIT = {
    **HEADS,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 64,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
    "text_len": 8,
    "text_len_t5": 4,
    "use_style_cond_and_image_meta_size": False,
}
HUNYUAN_IMAGE = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 16,
    "rope_axes_dim": (8, 8),
}
SD3 = {
    **HEADS,
    "sample_size": 8,
    "in_channels": 4,
    "num_layers": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 16,
    "out_channels": 4,
    "pos_embed_max_size": 8,
    "qk_norm": "rms_norm",
}
JOY = {
    "in_channels": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "text_dim": 32,
    "num_layers": 2,
    "rope_dim_list": [4, 4, 8],
}
KREA = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 32,
    "num_text_layers": 3,
    "text_num_attention_heads": 4,
    "text_num_key_value_heads": 4,
    "text_intermediate_size": 48,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 4, 8),
}
NUCLEUS = {
    **HEADS,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "num_key_value_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 4, 4),
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 48,
    "capacity_factors": 2.0,
}
UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
UNET_XL = {
    **UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64),
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (4, 8),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}
UNET_3D = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
CONTROL_UNET = {name: UNET[name] for name in UNET if name not in ("sample_size", "up_block_types")} | {
    "conditioning_embedding_out_channels": (8, 16)
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 32,
    "axes_dims": [8, 8, 8],
    "axes_lens": [128, 16, 16],
}

LUMINA = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 4,
    "multiple_of": 16,
    "cross_attention_dim": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "PixArtTransformer2DModel@gated": OWN_CONFIGS["PixArtTransformer2DModel"] | {"activation_fn": "geglu"},
    "DiTTransformer2DModel@gated": OWN_CONFIGS["DiTTransformer2DModel"] | {"activation_fn": "geglu"},
    "BriaTransformer2DModel": FLUX,
    "BriaFiboTransformer2DModel": {**FLUX, "text_encoder_dim": 16},
    "LongCatImageTransformer2DModel": FLUX,
    "FluxControlNetModel": {**FLUX, "pooled_projection_dim": 32},
    "OvisImageTransformer2DModel": {**FLUX, "out_channels": 4},
    "Flux3Transformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "cond_in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "joint_attention_dim": 32,
        "timestep_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "HunyuanImageTransformer2DModel": HUNYUAN_IMAGE,
    "SD3ControlNetModel": SD3,
    "SanaControlNetModel": OWN_CONFIGS["SanaTransformer2DModel"],
    "GlmImageTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 32,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "prior_vq_quantizer_codebook_size": 16,
    },
    "CogView3PlusTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 32,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "pos_embed_max_size": 8,
        "sample_size": 8,
    },
    "QwenImageControlNetModel": {
        **HEADS,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
    },
    "HunyuanDiT2DModel": {**HUNYUAN_DIT, "num_layers": 4},
    "HunyuanDiT2DModel@gated": {**HUNYUAN_DIT, "num_layers": 2, "activation_fn": "geglu"},
    "HunyuanDiT2DControlNetModel": {**HUNYUAN_DIT, "transformer_num_layers": 4},
    "Ideogram4Transformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "intermediate_size": 96,
        "adaln_dim": 16,
        "llm_features_dim": 32,
        "mrope_section": (4, 2, 2),
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "in_channels": 4,
        "out_channels": 4,
        "text_in_dim": 32,
        "rope_axes_dim": (4, 4, 8),
    },
    "ZImageTransformer2DModel": Z_IMAGE,
    "ZImageTransformer2DModel@few": {**Z_IMAGE, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [16, 16, 16]},
    "ZImageTransformer2DModel@siglip": {**Z_IMAGE, "in_channels": 16, "siglip_feat_dim": 16},
    "ZImageControlNetModel": {
        "control_layers_places": [0, 1],
        "control_refiner_layers_places": [0],
        "control_in_dim": 4,
        "add_control_noise_refiner": "control_noise_refiner",
        "dim": 96,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
    },
    "BriaFibo2Transformer2DModel": {
        "in_channels": 4,
        "dim": 96,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "cap_feat_dim": 32,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
        "gist_step": 4,
        "gist_min_text_len": 4,
        "gist_max_text_len": 8,
        "axes_dims": (8, 8, 8),
        "axes_lens": (32, 16, 16),
    },
    "LuminaNextDiT2DModel": LUMINA,
    "LuminaNextDiT2DModel@grouped": {**LUMINA, "num_kv_heads": 2},
    "PRXTransformer2DModel": {
        "in_channels": 4,
        "context_in_dim": 32,
        "hidden_size": 64,
        "num_heads": 4,
        "depth": 2,
        "axes_dim": [8, 8],
    },
    "JoyImageEditTransformer3DModel": JOY,
    "JoyImageEditPlusTransformer3DModel": JOY,
    "OmniGenTransformer2DModel": {
        "in_channels": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 32,
        "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "type": "su"},
        "pos_embed_max_size": 8,
        "time_step_dim": 16,
    },
    "Krea2Transformer2DModel": KREA,
    "Krea2Transformer2DModel@few": {**KREA, "text_num_attention_heads": 2, "text_num_key_value_heads": 2},
    "NucleusMoEImageTransformer2DModel": NUCLEUS,
    "HiDreamImageTransformer2DModel": {
        **HEADS,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "caption_channels": [32, 16],
        "text_emb_dim": 16,
        "axes_dims_rope": (4, 4, 8),
        "max_resolution": (8, 8),
        "llama_layers": [0, 1],
    },
    # Turned queries and keys pass through bfloat16: they are bit by bit the same only before the first sum.
    "Kandinsky5Transformer3DModel": {
        "in_text_dim": 32,
        "in_text_dim2": 16,
        "time_dim": 16,
        "model_dim": 64,
        "ff_dim": 96,
        "num_text_blocks": 1,
        "num_visual_blocks": 1,
        "axes_dims": (4, 4, 8),
    },
    "Kandinsky6Transformer3DModel": {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 32,
        "in_text_dim2": 16,
        "time_dim": 16,
        "model_dim": 64,
        "ff_dim": 96,
        "num_text_blocks": 1,
        "num_visual_blocks": 1,
        "axes_dims": (4, 4, 8),
        "visual_cond": False,
        "in_audio_dim": 4,
        "out_audio_dim": 4,
        "model_dim_a": 32,
        "axes_dims_a": (2, 2, 4),
    },
    "PriorTransformer": {
        **HEADS,
        "num_layers": 2,
        "embedding_dim": 16,
        "num_embeddings": 7,
        "additional_embeddings": 4,
    },
    "Transformer2DModel": {
        **HEADS,
        "in_channels": 32,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "num_layers": 2,
    },
    "Transformer2DModel@patches": {
        **HEADS,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "num_embeds_ada_norm": 8,
        "norm_type": "ada_norm_zero",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
    },
    "UNet2DConditionModel": UNET,
    "UNet2DConditionModel@xl": UNET_XL,
    "UNet2DConditionModel@few": {
        **UNET,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "attention_head_dim": (2, 1),
    },
    "UNet2DConditionModel@shifted": {**UNET, "resnet_time_scale_shift": "scale_shift"},
    "ControlNetModel": CONTROL_UNET,
    "UNetMotionModel": {
        **{name: UNET[name] for name in UNET if name != "attention_head_dim"},
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        "num_attention_heads": 4,
        "motion_num_attention_heads": (4, 8),
    },
    "SparseControlNetModel": {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "cross_attention_dim": 32,
        "attention_head_dim": (4, 8),
        "norm_num_groups": 8,
        "conditioning_embedding_out_channels": (8, 16),
    },
    "UVit2DModel": {
        "hidden_size": 64,
        "cond_embed_dim": 16,
        "micro_cond_encode_dim": 8,
        "micro_cond_embed_dim": 40,
        "encoder_hidden_size": 32,
        "vocab_size": 34,
        "codebook_size": 32,
        "in_channels": 32,
        "block_out_channels": 32,
        "num_res_blocks": 1,
        "block_num_heads": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
    "UNetSpatioTemporalConditionModel": {
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "block_out_channels": (32, 64),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "num_attention_heads": (4, 8),
        "num_frames": 2,
    },
    "UNet3DConditionModel": UNET_3D,
    "I2VGenXLUNet": UNET_3D,
    "ControlNetUnionModel": {
        **CONTROL_UNET,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
        "num_trans_channel": 32,
        "num_trans_head": 4,
        "num_proj_channel": 32,
    },
}

COMPANIONS = {"ZImageControlNetModel": "ZImageTransformer2DModel"}
"""Cases that run modules of another's."""


def outputs(model: Any, case: str, companion: Any = None) -> dict[str, torch.Tensor]:
    """Return every tensor that a case's forward gives, by its place."""
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value.contiguous()
        elif value is not None:
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                collect(part, f"{place}.{key}")

    if companion is not None:
        type(model).from_transformer(model, companion)
    # One class's forward always gives a table, another always a tensor.
    options = {} if case in ("ZImageControlNetModel", "UVit2DModel") else {"return_dict": False}
    with torch.inference_mode():
        collect(model(**INPUTS[case](), **options), "output")
    return found


def grid_ids(height: int, width: int) -> torch.Tensor:
    """Return the three coordinates of every place of an image."""
    return torch.cartesian_prod(torch.arange(1.0), torch.arange(float(height)), torch.arange(float(width)))


def flux_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 16, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": grid_ids(4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


def flux3_inputs() -> Inputs:
    one, four = torch.arange(1.0), torch.arange(4.0)
    image = torch.cartesian_prod(one, four, four, one)
    return {
        "hidden_states": random_tensors(2, 16, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "timestep": torch.tensor([1.0, 0.5]),
        "img_ids": image,
        "txt_ids": torch.cartesian_prod(one, one, one, torch.arange(8.0)),
        "image_cond_hidden_states": random_tensors(2, 16, 4) / 2,
        "image_cond_ids": image + 1,
    }


def hunyuan_image_inputs() -> Inputs:
    mask = torch.ones(2, 8)
    mask[1, 6:] = 0
    return {
        "hidden_states": random_tensors(2, 4, 4, 4),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": random_tensors(2, 8, 16),
        "encoder_attention_mask_2": mask,
    }


def hunyuan_dit_inputs() -> Inputs:
    angles = random_tensors(16, 16)
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "text_embedding_mask": torch.ones(2, 8),
        "encoder_hidden_states_t5": random_tensors(2, 4, 32),
        "text_embedding_mask_t5": torch.ones(2, 4),
        "image_rotary_emb": [angles.cos(), angles.sin()],
    }


def joy_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 4, 1, 8, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
    }


def joy_plus_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 16, 4, 1, 2, 2),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "encoder_hidden_states_mask": torch.ones(2, 8),
        "shape_list": [[(1, 4, 4)], [(1, 3, 4)]],
    }


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "controlnet_cond": random_tensors(2, 4, 8, 8) / 2,
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "pooled_projections": random_tensors(2, 16),
        "timestep": torch.tensor([1.0, 0.5]),
    }


def cogview_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "timestep": torch.tensor([3, 5]),
        "target_size": torch.tensor([[8, 8]] * 2),
        "crop_coords": torch.tensor([[0, 0]] * 2),
    }


def qwen_inputs() -> Inputs:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return {
        "hidden_states": random_tensors(2, 16, 16),
        "encoder_hidden_states": random_tensors(2, 8, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 0.5]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def ideogram_inputs() -> Inputs:
    indicator = torch.tensor([[3] * 8 + [2] * 16] * 2)
    segments = torch.ones(2, 24, dtype=torch.long)
    segments[1, :2] = -1
    return {
        "hidden_states": random_tensors(2, 24, 4),
        "timestep": torch.tensor([1.0, 0.5]),
        "encoder_hidden_states": random_tensors(2, 24, 32),
        "position_ids": torch.arange(24)[None, :, None].expand(2, -1, 3),
        "segment_ids": segments,
        "indicator": indicator,
    }


def ernie_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 4, 4, 4),
        "timestep": torch.tensor([3.0, 5.0]),
        "text_bth": random_tensors(2, 8, 32),
        "text_lens": torch.tensor([8, 6]),
    }


def z_image_inputs() -> Inputs:
    return {
        "x": [random_tensors(4, 1, 8, 8), random_tensors(4, 1, 8, 4)],
        "t": torch.tensor([0.3, 0.5]),
        "cap_feats": [random_tensors(8, 32), random_tensors(40, 32)],
    }


def z_image_siglip_inputs() -> Inputs:
    """An image to be made beside one that is given, with features of the latter."""
    return {
        "x": [[random_tensors(16, 1, 8, 8), random_tensors(16, 1, 8, 4)]],
        "t": torch.tensor([0.3]),
        "cap_feats": [[random_tensors(8, 32), random_tensors(9, 32)]],
        "siglip_feats": [[random_tensors(4, 4, 16), None]],
        "image_noise_mask": [[0, 1]],
    }


def fibo2_inputs() -> Inputs:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 4:] = False
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([0.3, 0.5]),
        "encoder_hidden_states": random_tensors(2, 2, 8, 32),
        "encoder_attention_mask": mask,
    }


def lumina_inputs() -> Inputs:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([0.3, 0.5]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "encoder_mask": mask,
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 16, 16),
        "cross_attention_kwargs": {},
    }


def prx_inputs() -> Inputs:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([0.3, 0.5]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "attention_mask": mask,
    }


def omnigen_inputs() -> Inputs:
    length = 8 + 1 + 16
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "input_ids": torch.arange(16).reshape(2, 8) * 2,
        "input_img_latents": [random_tensors(1, 4, 4, 4)],
        "input_image_sizes": {0: [[2, 6]]},
        "attention_mask": torch.ones(2, length, length).tril(),
        "position_ids": torch.arange(length).expand(2, -1),
    }


def krea_inputs() -> Inputs:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return {
        "hidden_states": random_tensors(2, 16, 4),
        "encoder_hidden_states": random_tensors(2, 8, 3, 32),
        "timestep": torch.tensor([0.3, 0.5]),
        "position_ids": torch.cat([torch.zeros(8, 3), grid_ids(4, 4)]),
        "encoder_attention_mask": mask,
    }


def hidream_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timesteps": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states_t5": random_tensors(2, 8, 32),
        "encoder_hidden_states_llama3": random_tensors(2, 2, 8, 16),
        "pooled_embeds": random_tensors(2, 16),
    }


def kandinsky_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 2, 4, 4, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "timestep": torch.tensor([3.0, 5.0]),
        "pooled_projections": random_tensors(2, 16),
        "visual_rope_pos": (torch.arange(2), torch.arange(2), torch.arange(2)),
        "text_rope_pos": torch.arange(8),
    }


def kandinsky6_inputs() -> Inputs:
    return {
        "hidden_states": random_tensors(2, 2, 4, 4, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "pooled_projections": random_tensors(2, 16),
        "timestep": torch.tensor([3.0, 5.0]),
        "audio_hidden_states": random_tensors(2, 6, 4),
    }


def prior_inputs() -> Inputs:
    mask = torch.ones(2, 7)
    mask[1, 5:] = 0
    return {
        "hidden_states": random_tensors(2, 16),
        "timestep": torch.tensor(3),
        "proj_embedding": random_tensors(2, 16) / 2,
        "encoder_hidden_states": random_tensors(2, 7, 16),
        "attention_mask": mask,
    }


def unet_inputs() -> Inputs:
    return {
        "sample": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": random_tensors(2, 8, 32),
    }


def video_unet_inputs() -> Inputs:
    return {**unet_inputs(), "sample": random_tensors(2, 4, 2, 8, 8)}


INPUTS: dict[str, Callable[[], Inputs]] = {
    "PixArtTransformer2DModel@gated": lambda: OWN_INPUTS["PixArtTransformer2DModel"]({}),
    "DiTTransformer2DModel@gated": lambda: OWN_INPUTS["DiTTransformer2DModel"]({}),
    "BriaTransformer2DModel": flux_inputs,
    "BriaFiboTransformer2DModel": lambda: {**flux_inputs(), "text_encoder_layers": [random_tensors(2, 8, 16)] * 4},
    "LongCatImageTransformer2DModel": flux_inputs,
    "FluxControlNetModel": lambda: {
        **flux_inputs(),
        "controlnet_cond": random_tensors(2, 16, 4) / 2,
        "pooled_projections": random_tensors(2, 32),
    },
    "OvisImageTransformer2DModel": flux_inputs,
    "Flux3Transformer2DModel": flux3_inputs,
    "HunyuanImageTransformer2DModel": hunyuan_image_inputs,
    "SD3ControlNetModel": sd3_inputs,
    "SanaControlNetModel": lambda: {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "controlnet_cond": random_tensors(2, 4, 8, 8) / 2,
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "timestep": torch.tensor([3, 5]),
    },
    "GlmImageTransformer2DModel": lambda: {
        **cogview_inputs(),
        "prior_token_id": torch.arange(32).reshape(2, 16) % 16,
        "prior_token_drop": torch.zeros(2, 16, dtype=torch.bool),
    },
    "CogView3PlusTransformer2DModel": lambda: {**cogview_inputs(), "original_size": torch.tensor([[8, 8]] * 2)},
    "QwenImageControlNetModel": lambda: {**qwen_inputs(), "controlnet_cond": random_tensors(2, 16, 16) / 2},
    "HunyuanDiT2DModel": hunyuan_dit_inputs,
    "HunyuanDiT2DModel@gated": hunyuan_dit_inputs,
    "HunyuanDiT2DControlNetModel": lambda: {**hunyuan_dit_inputs(), "controlnet_cond": random_tensors(2, 4, 8, 8) / 2},
    "Ideogram4Transformer2DModel": ideogram_inputs,
    "ErnieImageTransformer2DModel": ernie_inputs,
    "ZImageTransformer2DModel": z_image_inputs,
    "ZImageTransformer2DModel@few": z_image_inputs,
    "ZImageTransformer2DModel@siglip": z_image_siglip_inputs,
    "ZImageControlNetModel": lambda: {
        **z_image_inputs(),
        "control_context": [random_tensors(4, 1, 8, 8) / 2, random_tensors(4, 1, 8, 4) / 2],
    },
    "BriaFibo2Transformer2DModel": fibo2_inputs,
    "LuminaNextDiT2DModel": lumina_inputs,
    "LuminaNextDiT2DModel@grouped": lumina_inputs,
    "PRXTransformer2DModel": prx_inputs,
    "JoyImageEditTransformer3DModel": joy_inputs,
    "JoyImageEditPlusTransformer3DModel": joy_plus_inputs,
    "OmniGenTransformer2DModel": omnigen_inputs,
    "Krea2Transformer2DModel": krea_inputs,
    "Krea2Transformer2DModel@few": krea_inputs,
    "NucleusMoEImageTransformer2DModel": lambda: {
        **qwen_inputs(),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "img_shapes": [(1, 4, 4)] * 2,
    },
    "HiDreamImageTransformer2DModel": hidream_inputs,
    "Kandinsky5Transformer3DModel": kandinsky_inputs,
    "Kandinsky6Transformer3DModel": kandinsky6_inputs,
    "PriorTransformer": prior_inputs,
    "Transformer2DModel": lambda: {
        "hidden_states": random_tensors(2, 32, 4, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "encoder_attention_mask": torch.ones(2, 8),
    },
    "Transformer2DModel@patches": lambda: {
        "hidden_states": random_tensors(2, 4, 8, 8),
        "timestep": torch.tensor([3, 5]),
        "class_labels": torch.tensor([1, 2]),
    },
    "UNet2DConditionModel": unet_inputs,
    "UNet2DConditionModel@xl": lambda: {
        **unet_inputs(),
        "added_cond_kwargs": {"text_embeds": random_tensors(2, 16), "time_ids": torch.arange(12).reshape(2, 6)},
    },
    "UNet2DConditionModel@few": unet_inputs,
    "UNet2DConditionModel@shifted": unet_inputs,
    "ControlNetModel": lambda: {**unet_inputs(), "controlnet_cond": random_tensors(2, 3, 16, 16)},
    "UNetMotionModel": lambda: {**video_unet_inputs(), "encoder_hidden_states": random_tensors(4, 8, 32)},
    "SparseControlNetModel": lambda: {
        **video_unet_inputs(),
        "encoder_hidden_states": random_tensors(4, 8, 32),
        "controlnet_cond": random_tensors(2, 4, 2, 8, 8) / 2,
        "conditioning_mask": torch.ones(2, 1, 2, 8, 8),
    },
    "UVit2DModel": lambda: {
        "input_ids": torch.arange(32).reshape(2, 4, 4),
        "encoder_hidden_states": random_tensors(2, 8, 32),
        "pooled_text_emb": random_tensors(2, 16),
        "micro_conds": torch.arange(10.0).reshape(2, 5),
    },
    "UNetSpatioTemporalConditionModel": lambda: {
        "sample": random_tensors(2, 2, 8, 8, 8),
        "timestep": torch.tensor([3.0, 5.0]),
        "encoder_hidden_states": random_tensors(2, 1, 32),
        "added_time_ids": torch.arange(6.0).reshape(2, 3),
    },
    "UNet3DConditionModel": video_unet_inputs,
    "I2VGenXLUNet": lambda: {
        **video_unet_inputs(),
        "fps": torch.tensor([8, 8]),
        "image_latents": random_tensors(2, 4, 2, 8, 8) / 2,
        "image_embeddings": random_tensors(2, 32),
    },
    "ControlNetUnionModel": lambda: {
        **unet_inputs(),
        "controlnet_cond": [random_tensors(2, 3, 16, 16)],
        "control_type": torch.tensor([[0, 1, 0, 0, 0, 0]] * 2),
        "control_type_idx": [1],
        "added_cond_kwargs": {"text_embeds": random_tensors(2, 16), "time_ids": torch.arange(12).reshape(2, 6)},
    },
}
