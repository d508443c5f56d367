"""What the tiny models of types with a plan of ours alone are run on, where it is something else than text, or more."""

from collections.abc import Callable
from typing import Any

import torch

from tools.sweep.own import BANDS, DESCRIBED

Inputs = dict[str, Any]

BATCH, LENGTH = 2, 12


def text(generator: torch.Generator) -> Inputs:
    """Ordinary tokens."""
    return {"input_ids": torch.randint(5, 90, (BATCH, LENGTH), generator=generator)}


def translated(generator: torch.Generator) -> Inputs:
    """A prompt for the encoder, and one for the decoder."""
    return {**text(generator), "decoder_input_ids": text(generator)["input_ids"][:, :7]}


def described(generator: torch.Generator) -> Inputs:
    """The same with an image, for each of whose four patches, and for all of it, a token stands in the encoder."""
    inputs = translated(generator)
    inputs["input_ids"][:, :5] = DESCRIBED
    return {**inputs, **image(generator)}


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


def codes(generator: torch.Generator) -> torch.Tensor:
    """Return two codes for each of 7 frames a row."""
    return torch.randint(5, 90, (2 * BATCH, 7), generator=generator)


def flattened(generator: torch.Generator) -> torch.Tensor:
    """Return 16 patches of 4 x 4 points a row, each after its row and column."""
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).expand(BATCH, -1, -1)
    return torch.cat([places, torch.randn(BATCH, 16, 48, generator=generator)], -1)


def pointed(generator: torch.Generator) -> Inputs:
    """One image of 16 x 16 points a row, and a point in it."""
    return {**image(generator), "input_points": 16 * torch.rand(BATCH, 1, 1, 2, generator=generator)}


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
            *("pop2piano", "seamless_m4t", "seamless_m4t_v2"),
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
            *(
                "aimv2_vision_model",
                "blip_2_vision_model",
                "donut-swin",
                "instructblip_vision_model",
                "segformer",
                "swin",
            ),
            *("owlv2_vision_model", "sam_hq_vision_model", "sam_vision_model", "swinv2", "vitdet", "vitpose_backbone"),
            "depth_anything",
        ),
        image,
    ),
    **dict.fromkeys(
        (
            "aimv2",
            "altclip",
            "blip",
            "chinese_clip",
            "clip",
            "clipseg",
            "git",
            "layoutlmv3",
            "metaclip_2",
            "owlv2",
            "owlvit",
            "siglip",
            "vilt",
        ),
        captioned,
    ),
    **dict.fromkeys(
        (
            "data2vec-audio",
            "hubert",
            "sew",
            "sew-d",
            "unispeech",
            "unispeech-sat",
            "wav2vec2",
            "wav2vec2-conformer",
            "wavlm",
        ),
        waves,
    ),
    "align": lambda generator: {**text(generator), **image(generator, 3, 128, 128)},
    "blip-2": lambda generator: {
        "input_ids": torch.cat([torch.full((BATCH, 4), 90), text(generator)["input_ids"]], 1),
        **image(generator),
    },
    "blip_2_qformer": lambda generator: {
        "query_embeds": torch.randn(BATCH, 4, 64, generator=generator),
        "encoder_hidden_states": torch.randn(BATCH, 6, 64, generator=generator),
    },
    "csm_depth_decoder_model": lambda generator: {
        "input_ids": torch.randint(5, 90, (BATCH, 4), generator=generator),
        "backbone_last_hidden_state": torch.randn(BATCH, 64, generator=generator),
    },
    "dia": lambda generator: {
        **text(generator),
        "decoder_input_ids": torch.randint(5, 90, (BATCH, 7, 9), generator=generator),
    },
    "florence2": described,
    "vitpose": lambda generator: {**image(generator), "dataset_index": torch.arange(BATCH)},
    "idefics": lambda generator: {
        **text(generator),
        **image(generator, 1, 3, 16, 16),
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    },
    "instructblip_qformer": lambda generator: {
        **text(generator),
        "query_embeds": torch.randn(BATCH, 4, 64, generator=generator),
        "encoder_hidden_states": torch.randn(BATCH, 6, 64, generator=generator),
    },
    "kosmos-2": lambda generator: {
        **captioned(generator),
        "image_embeds_position_mask": first(LENGTH).roll(1, 1)
        + first(LENGTH).roll(2, 1)
        + first(LENGTH).roll(3, 1)
        + first(LENGTH).roll(4, 1),
    },
    "musicgen": lambda generator: {**text(generator), "decoder_input_ids": codes(generator)},
    "musicgen_decoder": lambda generator: {"input_ids": codes(generator)},
    "musicgen_melody": lambda generator: {**text(generator), "decoder_input_ids": codes(generator)},
    "musicgen_melody_decoder": lambda generator: {"input_ids": codes(generator)},
    "pix2struct": lambda generator: {
        "flattened_patches": flattened(generator),
        "decoder_input_ids": text(generator)["input_ids"][:, :7],
    },
    "pix2struct_vision_model": lambda generator: {"flattened_patches": flattened(generator)},
    "conditional_detr": lambda generator: image(generator, 3, 32, 32),
    "detr": lambda generator: image(generator, 3, 32, 32),
    "table-transformer": lambda generator: image(generator, 3, 32, 32),
    "xclip": lambda generator: {
        **text(generator),
        "pixel_values": torch.randn(BATCH, 2, 3, 16, 16, generator=generator),
    },
    "xclip_vision_model": image,
    "sam": pointed,
    "sam_hq": pointed,
    "udop": lambda generator: {
        **translated(generator),
        "bbox": torch.rand(BATCH, LENGTH, 4, generator=generator),
    },
    "vjepa2": lambda generator: {"pixel_values_videos": torch.randn(BATCH, 4, 3, 16, 16, generator=generator)},
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
