"""Plan files: TOML or JSON, with the tables plan, experts, sizes, attributes, inputs; or a bare dictionary of rules."""

import tomllib
from pathlib import Path
from typing import Any

from manifests.errors import CheckpointError, PlanError
from reshard.plans import Plan, build_inputs, build_rule
from reshard.sources.checkpoint import load_json_object

_TABLES = {"plan", "experts", "sizes", "attributes", "inputs"}


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: The file cannot be read, or is not a plan.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    return build_plan(_parse(path, text), str(path))


def build_plan(document: dict[str, Any], label: str) -> Plan:
    """Return the plan that a document holds.

    Raises:
        PlanError: The document is not a plan.
    """
    bare = not isinstance(document.get("plan"), dict)
    tables: dict[str, Any] = {"plan": document} if bare else document
    unknown = tables.keys() - _TABLES
    if unknown:
        raise PlanError(f"{label}: unknown table {min(unknown)!r}; known are {', '.join(sorted(_TABLES))}")
    for table, content in tables.items():
        if not isinstance(content, dict):
            raise PlanError(f"{label}: {table} is not a table")
    rules = tuple(build_rule(pattern, choice, label) for pattern, choice in tables["plan"].items())
    if not rules:
        raise PlanError(f"{label}: has no rules")
    sizes = {name: _formula(value, f"{label}: sizes.{name}") for name, value in tables.get("sizes", {}).items()}
    for kind in ("attributes", "inputs"):
        for module, table in tables.get(kind, {}).items():
            if not isinstance(table, dict):
                raise PlanError(f"{label}: {kind}.{module} is not a table")
    attributes = {
        module: {name: _formula(value, f"{label}: attributes.{module}.{name}") for name, value in table.items()}
        for module, table in tables.get("attributes", {}).items()
    }
    experts = tuple(build_rule(pattern, choice, label) for pattern, choice in tables.get("experts", {}).items())
    inputs = {
        module: build_inputs(table, f"{label}: inputs.{module}") for module, table in tables.get("inputs", {}).items()
    }
    return Plan(label, rules, sizes, (), attributes, inputs, expert_rules=experts)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            return load_json_object(text, str(path))
        return tomllib.loads(text.decode("utf-8"))
    except CheckpointError as error:
        raise PlanError(str(error)) from error
    except ValueError as error:
        raise PlanError(f"{path}: not TOML in UTF-8: {error}") from error


def _formula(value: object, label: str) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise PlanError(f"{label}: {value!r} is not a formula or a whole number")
