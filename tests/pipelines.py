"""Tiny pipelines of diffusers with random weights, and one call of each."""

import string
from pathlib import Path
from typing import Any

import torch

WORDS = "a small red house by the sea"


def save_flux(folder: Path) -> Path:
    """Write a Flux-like pipeline: a CLIP and a T5 encoder, a transformer, a VAE."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels=1),
        text_encoder=transformers.CLIPTextModel(_clip_config()),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=transformers.T5EncoderModel(_t5_config()),
        tokenizer_2=_t5_tokenizer(),
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        ),
    )
    return _save(pipeline, folder)


def save_sd3(folder: Path) -> Path:
    """Write an SD3-like pipeline: two CLIP encoders and a T5 encoder, a transformer with one dual block, a VAE."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    pipeline = diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(channels=4),
        text_encoder=transformers.CLIPTextModelWithProjection(_clip_config(hidden_act="gelu")),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=transformers.CLIPTextModelWithProjection(_clip_config()),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=transformers.T5EncoderModel(_t5_config(d_model=64)),
        tokenizer_3=_t5_tokenizer(),
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=1,
            in_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    )
    return _save(pipeline, folder)


PIPELINES = {"flux": save_flux, "sd3": save_sd3}


def call(pipeline: Any, kind: str = "latent", *, seed: int | None = 7) -> torch.Tensor:
    """Return the latents or the image ("pt") of a call; with a generator of a seed, or with the default one."""
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(
        WORDS,
        num_inference_steps=2,
        height=16,
        width=16,
        max_sequence_length=16,
        generator=generator,
        output_type=kind,
        return_dict=False,
    )
    result: torch.Tensor = found[0]
    return result


def _save(pipeline: Any, folder: Path) -> Path:
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            with torch.no_grad():
                for parameter in part.parameters():
                    size = 1 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.05
                    parameter.add_(size * torch.randn_like(parameter))
    pipeline.save_pretrained(folder)
    return folder


def _vae(channels: int) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def _clip_config(**more: Any) -> Any:
    import transformers

    return transformers.CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=128,
        projection_dim=32,
        max_position_embeddings=77,
        **more,
    )


def _clip_tokenizer() -> Any:
    import transformers

    ends = ["<|startoftext|>", "!", "<|endoftext|>"]
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    vocabulary = {token: position for position, token in enumerate([*ends, *letters])}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_config(d_model: int = 32) -> Any:
    import transformers

    return transformers.T5Config(
        vocab_size=64,
        d_model=d_model,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )


def _t5_tokenizer() -> Any:
    import transformers

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary += [(letter, -3.0) for letter in string.ascii_lowercase]
    return transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0)
