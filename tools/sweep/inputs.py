"""What a tiny model is run on: a prompt, with images or sounds where the model takes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.sweep.own_inputs import OWN_INPUTS
from tools.sweep.sizes import PARTS, SIZES

Inputs = dict[str, Any]

BATCH, LENGTH = 2, 12
IMAGE, AUDIO, START, END = 90, 92, 93, 94
PATCH = 3 * PARTS["patch_size"] ** 2
"""Numbers in a patch of an image."""


def tiny_inputs(model_type: str) -> Inputs:
    """Return the arguments of a forward, the same at each call."""
    return INPUTS.get(model_type, text)(torch.Generator().manual_seed(1))


def text(generator: torch.Generator) -> Inputs:
    """Ordinary tokens: none of the special ones."""
    return {"input_ids": torch.randint(5, 90, (BATCH, LENGTH), generator=generator)}


def around(generator: torch.Generator, count: int, token: int = IMAGE) -> torch.Tensor:
    """Return a prompt in each row of which so many tokens stand for an image."""
    ids = torch.randint(5, 90, (BATCH, LENGTH - 4 + count), generator=generator)
    ids[:, 1] = START
    ids[:, 2 + count] = END
    ids[:, 2 : 2 + count] = token
    return ids


def pictured(generator: torch.Generator, tokens: int = 4, **more: Any) -> Inputs:
    """One image of 16 x 16 points a row."""
    side = PARTS["image_size"]
    pixels = torch.randn(BATCH, 3, side, side, generator=generator)
    return {"input_ids": around(generator, tokens), "pixel_values": pixels, **more}


def gridded(generator: torch.Generator, *shape: int) -> Inputs:
    """One image of 4 x 4 patches a row, as rows of numbers; 2 x 2 patches become a token."""
    return {
        "input_ids": around(generator, 4),
        "pixel_values": torch.randn(BATCH * 16, *(shape or (2 * PATCH,)), generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


def patched(generator: torch.Generator, *shape: int) -> Inputs:
    """The same, and which tokens stand for it."""
    inputs = gridded(generator, *shape)
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def tower(generator: torch.Generator, name: str = "pixel_values", width: int = 2 * PATCH) -> Inputs:
    """The same image, for a vision model alone."""
    return {
        name: torch.randn(BATCH * 16, width, generator=generator),
        "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


def placed(generator: torch.Generator, name: str = "pixel_position_ids") -> Inputs:
    """The same image, with the position of each patch."""
    return {
        "pixel_values": torch.rand(BATCH, 16, PATCH, generator=generator),
        name: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1).clone(),
    }


def prompted(generator: torch.Generator) -> Inputs:
    """The same image and its position in a prompt."""
    ids = around(generator, 4)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        **placed(generator, "image_position_ids"),
    }


def embedded(generator: torch.Generator, length: int = LENGTH) -> Inputs:
    """Vectors in place of tokens."""
    return {"inputs_embeds": torch.randn(BATCH, length, SIZES["hidden_size"], generator=generator)}


def draft(generator: torch.Generator) -> Inputs:
    """Hidden states of two layers of the target model, and a block to be denoised."""
    width = SIZES["hidden_size"]
    return {
        "noise_embeds": torch.randn(BATCH, 4, width, generator=generator),
        "context_hidden_states": torch.randn(BATCH, 8, 2 * width, generator=generator),
    }


def translated(generator: torch.Generator) -> Inputs:
    """A prompt for the encoder, and one for the decoder."""
    return {**text(generator), "decoder_input_ids": text(generator)["input_ids"][:, :7]}


def sounding(generator: torch.Generator) -> Inputs:
    """16 frames of 8 bands a row, of which 4 become a token."""
    bands = PARTS["num_mel_bins"]
    return {
        "input_ids": around(generator, 2, AUDIO),
        "input_features": torch.randn(BATCH, bands, 16, generator=generator),
    }


def streamed(generator: torch.Generator) -> Inputs:
    """8 frames of 8 bands for every token."""
    bands = PARTS["num_mel_bins"]
    return {**text(generator), "input_features": torch.randn(BATCH, bands, 8 * LENGTH, generator=generator)}


def coded(generator: torch.Generator) -> Inputs:
    """4 frames of 4 codes, each a token."""
    return {
        "input_ids": around(generator, 4, AUDIO),
        "audio_input_ids": torch.randint(0, 24, (BATCH, 4, 4), generator=generator),
        "audio_input_ids_mask": torch.ones(BATCH, 4, dtype=torch.bool),
    }


INPUTS: dict[str, Callable[[torch.Generator], Inputs]] = {
    **OWN_INPUTS,
    "aria": partial(pictured, pixel_mask=torch.ones(BATCH, 16, 16, dtype=torch.bool)),
    "dots3_note_vision_encoder": partial(tower, width=PATCH),
    # It has 144 tokens for every image, and one that ends it.
    "deepseek_ocr2": partial(pictured, tokens=145),
    "ernie4_5_vl_moe": lambda generator: patched(generator, PATCH),
    "ernie4_5_vl_moe_vision": partial(tower, name="hidden_states", width=PATCH),
    "gemma3": pictured,
    "gemma4": prompted,
    "gemma4_vision": placed,
    "glm4v": patched,
    "glm4v_moe": patched,
    "glm_ocr": patched,
    "higgs_audio_v2": coded,
    "internvl": pictured,
    "llama4": pictured,
    "llama4_vision_model": lambda generator: {"pixel_values": pictured(generator)["pixel_values"]},
    "llava": pictured,
    "minimax_m3_vl": gridded,
    "mistral3": partial(pictured, image_sizes=[[16, 16]] * BATCH),
    "mistral_large4": partial(pictured, image_sizes=[[16, 16]] * BATCH),
    "muse_glimmer": gridded,
    "muse_glimmer_assistant": draft,
    "muse_glimmer_vision": tower,
    "muse_spark": gridded,
    "paddleocr_vl": lambda generator: patched(generator, 3, 4, 4),
    "qwen2_5_vl": patched,
    "qwen2_vl": patched,
    "qwen3_5": patched,
    "qwen3_5_moe": patched,
    "qwen3_omni_moe_talker_code_predictor": partial(embedded, length=2),
    "qwen3_omni_moe_talker_text": embedded,
    "qwen3_vl": patched,
    "qwen3_vl_moe": patched,
    "t5gemma": translated,
    "t5gemma2": translated,
    "voxtral": sounding,
    "voxtral_realtime": streamed,
}
"""Of the types that take something else than text, or more."""
