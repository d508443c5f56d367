"""The catalogue's entries, put together and checked against transformers."""

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from .conversions import export_conversions
from .finding import find_classes, find_types
from .plans import Used, check_joined, class_plan, config_path, find_scopes, is_planned, type_plan, used_plans
from .small import build_small
from .values import chosen_by_file, export_defaults, export_tied, export_ties, flat_parts, part_defaults

SHARED = dict.fromkeys(("base_prefix", "renames", "converters", "ignored", "kept", "float32", "float32_for_float16"))
"""What classes of one type mostly have alike."""


def export_catalogue() -> dict[str, Any]:
    """Return the whole catalogue.

    Raises:
        PlanMismatchError: The plans of a class's parts do not make the class's plan.
        UnsaidError: A conversion cannot be said in the catalogue's terms.
    """
    types: dict[str, Any] = {}
    used: list[Used] = []
    for model_type in find_types():
        used += add_type(model_type, types)
    for one in used:
        check_joined(one, types)
    return {
        "source": f"transformers {transformers.__version__}",
        "types": {name: without_empty(entry) for name, entry in types.items()},
    }


def add_type(model_type: str, types: dict[str, Any]) -> list[Used]:
    """Add the entry of a type, and to those of its parts the plans, which a built model shows."""
    entry = _entry_of(model_type, types)
    used = []
    for cls in find_classes(model_type):
        model = build_small(cls, model_type)
        scopes = find_scopes(model)
        for _, part in scopes:
            _add_plans(part, types)
        if is_planned(model, scopes):
            entry["classes"][cls.__name__] = export_class(model, scopes)
            entry["defaults"] = {**_defaults_in_parts(model, entry["classes"][cls.__name__]), **entry["defaults"]}
            used.append(used_plans(model))
    _share(entry)
    return used


def _entry_of(model_type: str, types: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a type, with what its configuration class says if it is new."""
    if model_type in types:
        return types[model_type]
    config_class = CONFIG_MAPPING[model_type]
    types[model_type] = {
        "plan": {},
        "ep_plan": {},
        "defaults": export_defaults(model_type),
        "aliases": dict(config_class.attribute_map),
        "flat": flat_parts(model_type),
        "tied": export_tied(model_type),
        "classes": {},
    }
    return types[model_type]


def _add_plans(part: PreTrainedModel, types: dict[str, Any]) -> None:
    """Add the plans of a sub-model's type; only one of its classes may have embeddings."""
    entry = _entry_of(part.config.model_type, types)
    entry["plan"] |= type_plan(part, "tp_plan")
    entry["ep_plan"] |= type_plan(part, "ep_plan")
    if not SHARED.keys() & entry.keys():
        entry |= {"base_prefix": part.base_model_prefix, **export_conversions(part)}


def export_class(model: PreTrainedModel, scopes: list[tuple[str, PreTrainedModel]]) -> dict[str, Any]:
    """Return the entry of one model class.

    ``prefix`` is found in the built model, as ``base_model_prefix`` need not be the name of an attribute. ``modules``
    are the parts beside the base model that own parameters. ``plan`` is what the classes have of their own.
    """
    prefix = base_prefix(model, scopes)
    ties = export_ties(model)
    return {
        "prefix": prefix,
        "modules": own_modules(model, prefix) if prefix else [],
        "plan": class_plan(model),
        "scopes": [export_scope(model, prefix, part) for prefix, part in scopes],
        "ties": ties.pop("", {}),
        "part_ties": ties,
        "base_prefix": model.base_model_prefix,
        **export_conversions(model),
    }


def base_prefix(model: PreTrainedModel, scopes: list[tuple[str, PreTrainedModel]]) -> str:
    """Return where the base model sits in a model; empty if it is the base model, or has none."""
    if model.base_model is not model:
        return next(name for name, module in model.named_modules() if module is model.base_model)
    whole = [prefix for prefix, part in scopes if part.config is model.config]
    return whole[0] if len(scopes) == len(whole) == 1 else ""


def export_scope(model: PreTrainedModel, prefix: str, part: PreTrainedModel) -> list[str | bool]:
    """Return a sub-model as [prefix, type, path], and true if a configuration may name another type there."""
    path = config_path(model.config, part.config)
    return [prefix, part.config.model_type, path, *([True] if chosen_by_file(model, path) else [])]


def own_modules(model: PreTrainedModel, prefix: str) -> list[str]:
    """Return the names of the modules with parameters beside the base model."""
    with_parameters = {name.split(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(with_parameters - {prefix.split(".")[0]})


def _defaults_in_parts(model: PreTrainedModel, entry: dict[str, Any]) -> dict[str, int]:
    """Return the values that the formulas of a composite's converters find in the parts of its configuration."""
    operations = [operation for converter in entry["converters"] for operation in converter["ops"]]
    named = [operation[1] for operation in operations if operation[0] in ("rope_permute", "unpad_vocab")]
    return part_defaults(model.config, named)


def _share(entry: dict[str, Any]) -> None:
    """Move to the type what its base model has, and leave with its classes what differs."""
    classes = entry["classes"]
    if classes and not SHARED.keys() & entry.keys():
        base = next((one for one in classes.values() if not one["prefix"]), next(iter(classes.values())))
        entry |= {key: base[key] for key in SHARED}
    for one in classes.values():
        for key in SHARED:
            if one[key] == entry[key]:
                del one[key]


def without_empty(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a type's entry without its empty lists and tables; a class's are kept where the type's are not empty."""
    kept = {key: content for key, content in entry.items() if content not in ([], {}, "")}
    for name, one in entry["classes"].items():
        kept["classes"][name] = {
            key: content for key, content in one.items() if key in ("prefix", *SHARED) or content not in ([], {})
        }
    return kept
