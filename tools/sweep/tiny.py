"""Tiny random models of the catalogue's types, built by transformers, which is imported only where one is built."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from loader.tiny import randomize
from tools.sweep.own import OWN_COMPOSITES, OWN_PARTS, OWN_SIZES, OWN_TYPES, own_class, own_types
from tools.sweep.sizes import PARTS, SIZES, Values
from tools.sweep.types import CLASSES, COMPOSITES, TYPES

PART_KINDS = ("_vision", "_vision_model", "_vision_encoder", "_audio", "_audio_encoder", "pixtral", "ocr2_encoder")
PART_KINDS += ("voxtral_encoder", "voxtral_realtime_encoder")
"""Ends of the names of types that are about images or sounds."""


def tiny_config(model_type: str, values: Mapping[str, Any]) -> Any:
    """Return a configuration of a type: 3 layers, 4 heads in 2 groups where it has groups."""
    from transformers import CONFIG_MAPPING

    return sized(CONFIG_MAPPING[model_type], values)


def sized(config_class: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration of a class, and of the classes of its sub-models, of the sweep's sizes."""
    from transformers import CONFIG_MAPPING

    model_type = config_class.model_type
    fields = {field.name for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in sizes_of(model_type).items() if name in fields}
    for table in (TYPES, OWN_TYPES, COMPOSITES, OWN_COMPOSITES):
        given |= table.get(model_type, {})
    given |= dict(values)
    for name, default in config_class.sub_configs_defaults.items():
        inner = given.get(name, {})
        if inner is not None:
            wanted = inner.get("model_type", default.model_type)
            known = wanted in CONFIG_MAPPING  # whose get() does not load
            inner_class = CONFIG_MAPPING[wanted] if known else default.config_class
            given[name] = sized(inner_class, {key: value for key, value in inner.items() if key != "model_type"})
    return config_class(**given)


def sizes_of(model_type: str) -> Values:
    """Return the sizes that a type may take."""
    if model_type in own_types() or model_type in OWN_COMPOSITES:
        return OWN_SIZES
    if model_type.endswith(PART_KINDS):
        return PARTS
    return OWN_SIZES if model_type in OWN_PARTS else SIZES


def model_class(model_type: str) -> Any:
    """Return the class that is run: one with a head where there is one."""
    import transformers
    from transformers.models.auto import modeling_auto

    if model_type in own_types() or model_type in OWN_COMPOSITES:
        return getattr(transformers, own_class(model_type))
    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    for table in ("FOR_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", ""):
        names = getattr(modeling_auto, f"MODEL_{table}_MAPPING_NAMES".replace("__", "_"))
        if model_type in names:
            return getattr(transformers, names[model_type])
    raise KeyError(model_type)


def tiny_model(model_type: str, values: Mapping[str, Any]) -> Any:
    """Return a model of a type with random parameters, no two alike."""
    config = tiny_config(model_type, values)
    torch.manual_seed(0)
    model = model_class(model_type)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model, seed=zlib.crc32(model_type.encode()))
    if model.can_generate():
        # Generation shall not stop early.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 2
    return model
