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

    A type, or a class of diffusers, that is ``like`` another has that one's tables where it has none. What it is like
    of ``parts``, rules that several have, is joined with its own lines; its own count.
    """
    content: dict[str, Any] = {}
    for file in sorted(files(__package__).joinpath("ours").iterdir(), key=lambda file: file.name):
        for name, table in tomllib.loads(file.read_text("utf-8")).items():
            content.setdefault(name, {}).update(table)
    parts = content["parts"]
    for kind in ("types", "classes"):
        tables = content[kind]
        content[kind] = {name: _with_others(table, tables, parts) for name, table in tables.items()}
    return content


def _with_others(table: Mapping[str, Any], tables: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a type's or a class's tables, completed by those that it is like."""
    named = table.get("like", [])
    likes = [named] if isinstance(named, str) else named
    others: dict[str, Any] = {}
    for name in likes:
        others |= {} if name in parts else _with_others(tables[name], tables, parts)
    own: dict[str, Any] = {}
    for source in (*(parts[name] for name in likes if name in parts), table):
        for key, lines in source.items():
            if key != "like":
                own[key] = {**own.get(key, {}), **lines}
    return {**others, **own}


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
