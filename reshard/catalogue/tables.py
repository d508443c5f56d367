"""The catalogue's tables: ``transformers.json``, those in ``ours``, and what is looked up in them by type."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def exported() -> dict[str, Any]:
    """Return the content of ``transformers.json``."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("transformers.json").read_text("utf-8"))
    return content


@cache
def ours() -> dict[str, Any]:
    """Return the tables of all files in ``ours``.

    A type that is ``like`` others, or like rules that several have in ``parts``, has their lines too; its own count.
    """
    content: dict[str, Any] = {}
    for file in sorted(files(__package__).joinpath("ours").iterdir(), key=lambda file: file.name):
        for name, table in tomllib.loads(file.read_text("utf-8")).items():
            content.setdefault(name, {}).update(table)
    types = content["types"]
    models = {**content.get("parts", {}), **types}
    content["types"] = {name: _joined(models, table) for name, table in types.items()}
    return content


def _joined(models: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a type's tables with the lines of those that it is like, in their order, before its own."""
    likes = table.get("like", [])
    joined: dict[str, Any] = {}
    for part in (*(models[name] for name in ([likes] if isinstance(likes, str) else likes)), table):
        for key, lines in part.items():
            if key != "like":
                joined[key] = {**joined.get(key, {}), **lines}
    return joined


def own_plans() -> dict[str, dict[str, Any]]:
    """Return the plans of our own by type: those in place of one of transformers, and those where it has none."""
    return {name: table["plan"] for name, table in ours()["types"].items() if "plan" in table}


def model_types() -> tuple[str, ...]:
    """Return the model types of which a class has a plan."""
    return tuple(sorted(name for name, entry in exported()["types"].items() if entry.get("classes")))


def type_values(model_type: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the defaults and the aliases of a type's configuration."""
    entry = exported()["types"].get(model_type, {})
    return entry.get("defaults", {}), entry.get("aliases", {})


def part_of_config(config: Mapping[str, Any], model_type: str, path: str) -> Mapping[str, Any]:
    """Return the part of a configuration at a path, empty if it is missing.

    Files of old hold the values of some composites' parts themselves.
    """
    part: Any = config
    flat = exported()["types"].get(model_type, {}).get("flat", ())
    for name in filter(None, path.split(".")):
        if part is config and name in flat and not isinstance(config.get(name), Mapping):
            continue
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}
