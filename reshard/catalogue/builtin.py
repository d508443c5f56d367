"""The built-in plan of a class: those of its sub-models, joined."""

from collections.abc import Iterable, Mapping
from typing import Any

from manifests.errors import PlanError
from reshard.catalogue.architecture import Architecture
from reshard.catalogue.tables import exported, ours
from reshard.plans import AxisBinding, Plan, build_inputs, build_rule

PLAN_SOURCES = ("reshard", "transformers")


def built_in_plan(architecture: Architecture, source: str = "reshard") -> Plan:
    """Return the plan of a class: those of its sub-models under their names, and its classes' own.

    Args:
        architecture: The class.
        source: "reshard" for our own plans where there are some, "transformers" for theirs as they are.
    """
    if architecture.library == "diffusers":
        from reshard.catalogue import diffusers

        return diffusers.build_plan(architecture, source)
    label = f"the {'built-in' if source == 'reshard' else 'transformers'} plan of {architecture.model_type}"
    # The innermost sub-model first: what it says of its modules counts.
    scopes = sorted(architecture.scopes, key=lambda scope: -len(scope.prefix))
    tables = {scope: ours()["types"].get(scope.model_type, {}) for scope in scopes}
    mine = (
        tables
        if source == "reshard"
        else {scope: {"restated": table.get("restated", {})} for scope, table in tables.items()}
    )
    entries = {scope: exported()["types"].get(scope.model_type, {}) for scope in scopes}
    plans = [(scope.prefix, _base_plan(entries[scope], mine.get(scope, {}))) for scope in scopes]
    expert_plans = [(scope.prefix, entries[scope].get("ep_plan", {})) for scope in scopes]
    attributes = [(scope.prefix, tables[scope].get("attributes", ours()["attributes"])) for scope in reversed(scopes)]
    inputs = [(scope.prefix, tables[scope].get("inputs", {})) for scope in reversed(scopes)]
    rules = join_plan([*plans, ("", architecture.plan), ("", _heads_plan(architecture, source))])
    if not rules:
        raise PlanError(f"{architecture.name}: {source} has no plan for {architecture.model_type}")
    return Plan(
        label=label,
        rules=tuple(build_rule(pattern, choice, label) for pattern, choice in rules.items()),
        sizes=default_sizes(),
        bindings=(
            *(axes for scope in scopes for axes in build_bindings(tables[scope].get("bindings", {}), scope.prefix)),
            *default_bindings(),
        ),
        attributes=join_plan(attributes),
        inputs={
            pattern: build_inputs(table, f"{label}: inputs.{pattern}") for pattern, table in join_plan(inputs).items()
        },
        exhaustive=False,
        expert_rules=tuple(build_rule(pattern, choice, label) for pattern, choice in join_plan(expert_plans).items()),
    )


def _base_plan(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return a type's plan: ours, or theirs with our changes; a change to an empty text takes a rule away.

    A rule of theirs that cuts stored tensors, before they become the model's, is restated for the model's.
    """
    plan = {**mine.get("plan", theirs.get("plan", {})), **mine.get("restated", {}), **mine.get("changes", {})}
    return {pattern: choice for pattern, choice in plan.items() if choice}


def _heads_plan(architecture: Architecture, source: str) -> dict[str, Any]:
    """Return our rules for what a class has beside the base model, or beside those of its parts."""
    rules = ours()["types"].get(architecture.model_type, {}).get("heads", {}) if source == "reshard" else {}
    if all(scope.prefix for scope in architecture.scopes):
        return dict(rules)
    # It is the base model itself, whose modules may have the names of a head.
    parts = {*architecture.heads, *(scope.prefix.split(".")[0] for scope in architecture.scopes)}
    return {pattern: choice for pattern, choice in rules.items() if pattern.split(".")[0] in parts}


def join_plan(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the lines of all plans, each under its prefix; of two with one pattern the later counts.

    >>> join_plan([("model", {"embed_tokens": "embedding_rowwise"}), ("", {"lm_head": "colwise"})])
    {'model.embed_tokens': 'embedding_rowwise', 'lm_head': 'colwise'}
    """
    return {
        f"{prefix}.{pattern}" if prefix else pattern: choice
        for prefix, plan in parts
        for pattern, choice in plan.items()
    }


def default_sizes() -> dict[str, str]:
    """Return the formulas of the well-known sizes."""
    return dict(ours()["sizes"])


def default_bindings() -> tuple[AxisBinding, ...]:
    """Return the axes of well-known modules."""
    return build_bindings(ours()["bindings"])


def build_bindings(table: Mapping[str, Any], under: str = "") -> tuple[AxisBinding, ...]:
    """Return the axes of a table of suffixes, for the modules under one."""
    return tuple(AxisBinding(suffix, axes.get("out", ""), axes.get("in", ""), under) for suffix, axes in table.items())
