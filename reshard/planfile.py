"""Plan files: TOML or JSON, with the tables plan, experts, sizes, attributes, inputs, ties; or a bare table."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import PlanError
from manifests.jsontext import load_object
from manifests.opening import read_file
from manifests.shown import shown, shown_name
from reshard.plans import Plan, build_inputs, build_rule

MAX_PLAN_NBYTES = 1_000_000
_TABLES = {"plan", "experts", "sizes", "attributes", "inputs", "ties"}
_MAX_DOTS = 200


def given_plan(plan: Mapping[str, Any] | Path | str) -> Plan:
    """Return the plan that was given: as a document, or as the file of one.

    Raises:
        PlanError: It is not a plan.
    """
    return build_plan(dict(plan), "plan") if isinstance(plan, Mapping) else read_plan(Path(plan))


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: The file cannot be read, or is not a plan.
    """
    try:
        text = read_file(path, MAX_PLAN_NBYTES)
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
    for table, content in tables.items():
        if table not in _TABLES:
            raise PlanError(f"{label}: unknown table {shown(table)}; known are {', '.join(sorted(_TABLES))}")
        if not isinstance(content, dict):
            raise PlanError(f"{label}: {table} is not a table")
    rules = tuple(build_rule(pattern, choice, label) for pattern, choice in tables["plan"].items())
    if not rules:
        raise PlanError(f"{label}: has no rules")
    sizes = {
        name: _formula(value, f"{label}: sizes.{shown_name(name)}") for name, value in tables.get("sizes", {}).items()
    }
    for kind in ("attributes", "inputs"):
        for module, table in tables.get(kind, {}).items():
            if not isinstance(table, dict):
                raise PlanError(f"{label}: {kind}.{shown_name(module)} is not a table")
    attributes = {
        module: {
            name: _formula(value, f"{label}: attributes.{shown_name(module)}.{shown_name(name)}")
            for name, value in table.items()
        }
        for module, table in tables.get("attributes", {}).items()
    }
    experts = tuple(build_rule(pattern, choice, label) for pattern, choice in tables.get("experts", {}).items())
    inputs = {
        module: build_inputs(table, f"{label}: inputs.{module}") for module, table in tables.get("inputs", {}).items()
    }
    ties = tables.get("ties", {})
    for name, source in ties.items():
        if not isinstance(source, str):
            raise PlanError(f"{label}: ties.{shown_name(name)}: {shown(source)} is not a parameter's name")
    return Plan(label, rules, sizes, (), attributes, inputs, expert_rules=experts, ties=ties)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            return load_object(text)
        return _load_toml(text)
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from error


def _load_toml(text: bytes) -> dict[str, Any]:
    try:
        decoded = text.decode("utf-8")
        # A dotted key takes tomllib the square of its length.
        if any(line.count(".") > _MAX_DOTS for line in decoded.splitlines()):
            raise ValueError(f"a line with more than {_MAX_DOTS} dots")
        return tomllib.loads(decoded)
    except RecursionError as error:
        raise ValueError("not TOML in UTF-8 that is read: nested too deep") from error
    except ValueError as error:
        raise ValueError(f"not TOML in UTF-8: {error}") from error


def _formula(value: object, label: str) -> str:
    if isinstance(value, str) or (type(value) is int and abs(value) < 1 << 63):
        return str(value)
    raise PlanError(f"{label}: {shown(value)} is not a formula or a whole number below 2^63")
