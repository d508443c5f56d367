"""Finding the class that a configuration names."""

from collections.abc import Mapping
from typing import Any

from manifests.errors import PlanError
from manifests.shown import shown_name
from reshard.catalogue.architecture import Architecture, Converter, Rename, Scope
from reshard.catalogue.tables import exported, part_of_config


def find_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the class that a configuration names, or None if its model type has no entry.

    Raises:
        PlanError: The type is known, the class is not.
    """
    if "model_type" not in config and "_class_name" in config:
        from reshard.catalogue import diffusers

        return diffusers.find_architecture(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in exported()["types"]:
        return None
    entry = exported()["types"][model_type]
    names = config.get("architectures") or []
    named = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    name = _known_class(named, model_type, entry.get("classes", {}))
    if not name:
        known = ", ".join(sorted(entry.get("classes", {}))) or "none, it is part of others"
        found = shown_name(named) or "no class in architectures"
        raise PlanError(f"config.json: {found}: not a known class of {model_type}; known are {known}")
    return _build_architecture(model_type, name, config)


def _known_class(name: str, model_type: str, classes: Mapping[str, Any]) -> str:
    """Return the class as transformers names it.

    Some types run as another type's classes and are published under names of their own (ExaoneForCausalLM).
    """
    if name in classes:
        return name
    own, _, purpose = name.partition("For")
    alike = [known for known in classes if purpose and known.endswith(f"For{purpose}")]
    return alike[0] if own.lower() == model_type.replace("_", "") and len(alike) == 1 else ""


def _build_architecture(model_type: str, name: str, config: Mapping[str, Any]) -> Architecture:
    entry = exported()["types"][model_type]
    head = entry["classes"][name]
    base_prefix = head.get("base_prefix", entry.get("base_prefix", ""))
    plan, ties, of_parts = head.get("plan", {}), head.get("ties", {}), head.get("part_ties", {})
    heads = {key.split(".")[0] for key in (*plan, *ties, *head.get("modules", ()))}
    renames = [_rename(item) for item in head.get("renames", entry.get("renames", ()))]
    converters = [_converter(item) for item in head.get("converters", entry.get("converters", ()))]
    scopes: list[Scope] = []
    for prefix, part_type, path, *by_file in head.get("scopes", ()):
        stated = part_of_config(config, model_type, path).get("model_type", part_type) if by_file else part_type
        chosen = stated if isinstance(stated, str) else part_type
        if chosen != part_type:
            inner = prefix.removeprefix(base_prefix).lstrip(".")
            renames = [item for item in renames if item.scope != inner] + _scoped(chosen, "renames", inner, base_prefix)
            converters = [item for item in converters if item.scope != inner]
            converters += _scoped(chosen, "converters", inner, base_prefix)
        if chosen in exported()["types"]:
            scopes.append(Scope(prefix, chosen, path))
    return Architecture(
        model_type=model_type,
        name=name,
        prefix=head["prefix"],
        base_prefix=base_prefix,
        heads=tuple(sorted(heads - {head["prefix"].split(".")[0]})),
        ties={**ties, **{one: other for pairs in of_parts.values() for one, other in pairs.items()}},
        defaults=entry.get("defaults", {}),
        aliases=entry.get("aliases", {}),
        ignored=tuple(head.get("ignored", entry.get("ignored", ()))),
        renames=tuple(renames),
        converters=tuple(converters),
        plan=plan,
        scopes=tuple(scopes),
        tie_flags={one: path for path, pairs in of_parts.items() for one in pairs},
        kept=tuple(head.get("kept", entry.get("kept", ()))),
        float32=tuple(head.get("float32", entry.get("float32", ()))),
        float32_for_float16=tuple(head.get("float32_for_float16", entry.get("float32_for_float16", ()))),
    )


def _scoped(model_type: str, key: str, scope: str, base: str) -> list[Any]:
    """Return the renames or converters of a type for a sub-model of that type."""
    build = _rename if key == "renames" else _converter
    items = [build(item) for item in exported()["types"].get(model_type, {}).get(key, ())]
    return [item._replace(scope=scope, base=base) for item in items if item.scope is None]


def _rename(item: Any) -> Rename:  # noqa: ANN401 - as in the JSON
    if isinstance(item, list):
        return Rename((item[0],), (item[1],))
    return Rename(
        tuple(item["sources"]),
        tuple(item["targets"]),
        item.get("kind", "plain"),
        item.get("offset", 0),
        item.get("scope"),
        item.get("base", ""),
    )


def _converter(item: Mapping[str, Any]) -> Converter:
    return Converter(
        tuple(item["sources"]),
        tuple(item["targets"]),
        tuple(_as_tuple(operation) for operation in item["ops"]),
        item.get("scope"),
        item.get("base", ""),
    )


def _as_tuple(content: Any) -> Any:  # noqa: ANN401 - lists of the JSON, at any depth
    return tuple(_as_tuple(item) for item in content) if isinstance(content, list) else content
