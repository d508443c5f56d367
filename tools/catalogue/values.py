"""The values that a configuration has where a file leaves them out."""

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from .finding import has_plan, inner_configs
from .plans import config_path
from .small import WRONG, StrictDataclassError, own_config

NOT_SIZES = re.compile(
    r"_token_id$|_token_index$|_token$|_id$|^id$|_idx$|^seed$|^max_length$|^chunk_size_feed_forward$"
)
"""Whole numbers that are no sizes."""

TABLE = (None, False, True)


def export_defaults(model_type: str) -> dict[str, int | bool]:
    """Return the class's own whole numbers, without those that it computes from others.

    Many classes fill a size that is not given in ``__post_init__``. Which those are shows when every number is doubled
    in turn: what else changes is computed. A number that a class holds at a fixed value is its own.
    """
    config = own_config(model_type)
    names = [field.name for field in dataclasses.fields(config) if not NOT_SIZES.search(field.name)]
    own = {name: value for name in names if type(value := _value(config, name)) is int}
    computed: set[str] = set()
    for name, value in own.items():
        try:
            other = own_config(model_type, **{name: 2 * value or 1})
        except (*WRONG, StrictDataclassError):
            continue
        computed |= {changed for changed in own if changed != name and _value(other, changed) != own[changed]}
    sizes = {name: value for name, value in own.items() if name not in computed}
    return sizes | {"tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False))}


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a value, or None where it differs by layer."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return None


def part_defaults(config: PreTrainedConfig, formulas: list[str]) -> dict[str, int]:
    """Return the values that formulas over a composite's configuration find in its parts (``vision_config.heads``)."""
    defaults: dict[str, int] = {}
    for path in {name for formula in formulas for name in re.findall(r"[A-Za-z_][\w.]*", formula)}:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is None:
            value = getattr(config.get_text_config(), path, None)
        if type(value) is int:
            defaults[path] = value
    return defaults


def flat_parts(model_type: str) -> list[str]:
    """Return the parts whose values a configuration of the type may hold itself, as files of old did."""
    config_class = CONFIG_MAPPING[model_type]
    parts = [(path, part) for path, part in inner_configs(own_config(model_type)) if has_plan(part) and "." not in path]
    found = []
    for path, part in parts:
        odd = 2 * getattr(part, "hidden_size", 0)
        try:
            config = config_class.from_dict({"hidden_size": odd})
        except (*WRONG, StrictDataclassError):
            continue
        if odd and getattr(getattr(config, path), "hidden_size", 0) == odd:
            found.append(path)
    return found


def export_tied(model_type: str) -> dict[str, Any]:
    """Return how a composite decides whether embeddings are tied, if not by its own flag alone.

    Returns:
        The part that has a say, and a table: rows for the composite's own flag absent, false and true, columns for the
        part's. "T" is tied.
    """
    config_class = CONFIG_MAPPING[model_type]
    for path, part in inner_configs(own_config(model_type)):
        if "." in path or not has_plan(part) or not hasattr(part, "vocab_size"):
            continue
        table = ["".join(_tied(config_class, path, part, flag, inner) for inner in TABLE) for flag in TABLE]
        if table not in (["FFF", "FFF", "TTT"], ["TTT", "FFF", "TTT"]):
            return {"part": path, "table": table}
    return {}


def _tied(config_class: type[PreTrainedConfig], path: str, part: PreTrainedConfig, *flags: bool | None) -> str:
    own, inner = ({} if flag is None else {"tie_word_embeddings": flag} for flag in flags)
    try:
        config = config_class.from_dict({**own, path: {"model_type": part.model_type, **inner}})
    except (*WRONG, StrictDataclassError):
        return "TF"[flags[0] is not True]
    return "FT"[bool(getattr(config, "tie_word_embeddings", False))]


def chosen_by_file(model: PreTrainedModel, path: str) -> bool:
    """Tell whether the type of a part is what the configuration names, not one that the class fixes."""
    config = model.config
    for name in filter(None, path.split(".")):
        if config.sub_configs.get(name) is AutoConfig:
            return True
        config = getattr(config, name)
    return False


def export_ties(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Return the parameters that are another one if a flag is set, by the part of the configuration with the flag.

    A ``**`` stands for any number of parts of a name.

    Source: ``_tied_weights_keys`` of all models in the model; ``get_expanded_tied_weights_keys`` in modeling_utils.py.
    """
    ties: dict[str, dict[str, str]] = {}
    for prefix, inner in model.named_modules():
        if not isinstance(inner, PreTrainedModel) or not inner._tied_weights_keys:
            continue
        under = f"{prefix}." if prefix else ""
        of_part = ties.setdefault(config_path(model.config, inner.config), {})
        for one, other in inner._tied_weights_keys.items():
            pair = _whole_name(inner, one), _whole_name(inner, other)
            if all(pair):
                of_part[under + pair[0]] = under + pair[1]
    return ties


def _whole_name(model: PreTrainedModel, name: str) -> str:
    """Return a name of ``_tied_weights_keys`` as a parameter's; it may be its module's, a pattern, or nothing's."""
    if "(" in name:
        return re.sub(r"\\\.\(\?:\[\^\.\]\+\\\.\)\*", ".**.", name)
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    return next((known for known in (name, f"{name}.weight") if known in names), "")
