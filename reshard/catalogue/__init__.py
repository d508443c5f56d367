"""The catalogue: what is known of each model type, as data in this package.

``transformers.json`` is exported from transformers by ``tools/export_catalogue.py``; ``ours.toml`` is written by hand
and adds the axes of well-known modules and better plans. Splitting needs neither transformers nor torch.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from manifests.errors import PlanError
from manifests.manifest import Rule
from reshard.plans import AxisBinding, Plan, build_rule

PLAN_SOURCES = ("reshard", "transformers")


class Converter(NamedTuple):
    """How stored tensors become one of the running model.

    Attributes:
        sources: Patterns of stored names, in the order in which their tensors are joined.
        target: What a matched pattern is replaced with.
        operations: Applied in order: ("stack", dim) over the tensors of one pattern, ("concat", dim) over patterns.
    """

    sources: tuple[str, ...]
    target: str
    operations: tuple[tuple[str, int], ...]


class Architecture(NamedTuple):
    """One model class of the catalogue.

    Attributes:
        model_type: The configuration's model type.
        name: The class.
        prefix: Where the base model sits in the class; empty if it is the base model.
        base_prefix: Where the base model sits in the type's other classes.
        heads: First parts of the names of the class's own modules, beside the base model.
        ties: Parameters that are another one if the configuration ties them: name to name.
        defaults: The configuration class's own values, for names that a configuration may leave out.
        aliases: Other names of configuration values.
        ignored: Patterns of stored names that the class does not use.
        renames: Patterns of stored names and their replacement, applied in order.
        converters: Applied after them; the first that fits a name takes it.
    """

    model_type: str
    name: str
    prefix: str
    base_prefix: str
    heads: tuple[str, ...]
    ties: Mapping[str, str]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    ignored: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]
    converters: tuple[Converter, ...]


@cache
def exported() -> dict[str, Any]:
    """Return the content of ``transformers.json``."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("transformers.json").read_text("utf-8"))
    return content


@cache
def ours() -> dict[str, Any]:
    """Return the content of ``ours.toml``."""
    return tomllib.loads(files(__package__).joinpath("ours.toml").read_text("utf-8"))


def model_types() -> tuple[str, ...]:
    """Return the model types that have a plan."""
    return tuple(sorted(exported()["types"]))


def find_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the class that a configuration names, or None if its model type has no entry.

    Raises:
        PlanError: The type is known, the class is not.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in exported()["types"]:
        return None
    entry = exported()["types"][model_type]
    names = config.get("architectures") or []
    named = names[0] if isinstance(names, list) and names else ""
    name = _known_class(named, model_type, entry["classes"])
    if not name:
        raise PlanError(
            f"config.json: {named or 'no class in architectures'}: not a known class of {model_type}; "
            f"known are {', '.join(sorted(entry['classes']))}"
        )
    head = entry["classes"][name]
    plan, ties = head.get("plan", {}), head.get("ties", {})
    return Architecture(
        model_type=entry.get("model_type", model_type),
        name=name,
        prefix=head["prefix"],
        base_prefix=entry["base_prefix"],
        heads=tuple(sorted({key.split(".")[0] for key in (*plan, *ties, *head.get("modules", ()))})),
        ties=ties,
        defaults=entry.get("defaults", {}),
        aliases=entry.get("aliases", {}),
        ignored=tuple(entry.get("ignored", ())),
        renames=tuple((source, target) for source, target in entry.get("renames", ())),
        converters=tuple(
            Converter(tuple(item["sources"]), item["target"][0], tuple((name, dim) for name, dim in item["ops"]))
            for item in entry.get("converters", ())
        ),
    )


def _known_class(name: str, model_type: str, classes: Mapping[str, Any]) -> str:
    """Return the class as transformers names it.

    Some types run as another type's classes and are published under names of their own (ExaoneForCausalLM).
    """
    if name in classes:
        return name
    own = name.lower() == f"{model_type.replace('_', '')}forcausallm"
    alike = [known for known in classes if known.endswith("ForCausalLM")]
    return alike[0] if own and len(alike) == 1 else ""


def built_in_plan(architecture: Architecture, source: str = "reshard") -> Plan:
    """Return the plan of a class.

    Args:
        architecture: The class.
        source: "reshard" for our own plan where there is one, "transformers" for theirs as it is.
    """
    entry = exported()["types"][architecture.model_type]
    mine = ours()["types"].get(architecture.model_type, {}) if source == "reshard" else {}
    label = f"the {'built-in' if source == 'reshard' else 'transformers'} plan of {architecture.model_type}"
    base = mine.get("plan", entry["plan"])
    rules: list[Rule] = [
        build_rule(_join(architecture.prefix, pattern), choice, label) for pattern, choice in base.items()
    ]
    head = entry["classes"][architecture.name].get("plan", {})
    rules += [build_rule(pattern, choice, label) for pattern, choice in head.items()]
    attributes = mine.get("attributes", ours()["attributes"])
    return Plan(
        label=label,
        rules=tuple(rules),
        sizes=default_sizes(),
        bindings=(*_bindings(ours()["types"].get(architecture.model_type, {})), *default_bindings()),
        attributes={_join(architecture.prefix, pattern): table for pattern, table in attributes.items()},
        exhaustive=False,
    )


def default_sizes() -> dict[str, str]:
    """Return the formulas of the well-known sizes."""
    return dict(ours()["sizes"])


def default_bindings() -> tuple[AxisBinding, ...]:
    """Return the axes of well-known modules."""
    return _bindings(ours())


def _bindings(tables: Mapping[str, Any]) -> tuple[AxisBinding, ...]:
    return tuple(
        AxisBinding(suffix, table.get("out", ""), table.get("in", ""))
        for suffix, table in tables.get("bindings", {}).items()
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
