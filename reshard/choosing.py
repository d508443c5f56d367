"""Choosing: the class that will run, its tensors, and the plan that fits them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import PlanError
from manifests.expression import Lookup
from manifests.manifest import Rule
from manifests.natural import alike
from reshard.catalogue import (
    Architecture,
    built_in_plan,
    default_bindings,
    default_sizes,
    find_architecture,
    model_types,
)
from reshard.catalogue.diffusers import check_names, class_names
from reshard.model import RuntimeTensor
from reshard.options import Options
from reshard.planfile import build_plan, read_plan
from reshard.plans import Matcher, Plan, anchor_rules
from reshard.recipes import recipe
from reshard.sizes import scoped_sizes
from reshard.sources.checkpoint import Checkpoint

if TYPE_CHECKING:
    from reshard.proposing import Proposal


def choose_architecture(checkpoint: Checkpoint, options: Options) -> Architecture | None:
    """Return the catalogue's class; a user's own plan works without one."""
    try:
        return find_architecture(checkpoint.config)
    except PlanError:
        if options.plan is None:
            raise
        return None


def build_tensors(
    checkpoint: Checkpoint, architecture: Architecture | None, options: Options
) -> dict[str, RuntimeTensor]:
    """Return the tensors under the names and in the layout that were chosen."""
    stored = checkpoint.tensors.stored
    if architecture is not None and architecture.library == "diffusers":
        check_names(checkpoint.folder.label, architecture.name, stored)
    if architecture is None or options.layout == "checkpoint":
        return recipe.stored_tensors(stored)
    sizes = scoped_sizes(default_sizes(), checkpoint.config, architecture)

    def lookup_of(name: str) -> Lookup:
        # A name with a dot is a path in the whole configuration.
        return lambda size: (sizes.root if "." in size else sizes.of(name)).get(size)

    return recipe.runtime_tensors(stored.made(), architecture, lookup_of)


def choose_plan(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    tensors: Mapping[str, RuntimeTensor],
    ties: Mapping[str, str],
    options: Options,
    world_size: int,
) -> Plan:
    """Return the plan that was given, or the built-in one, with its rules under the names of these tensors.

    The built-in one speaks of the running model's tensors. One that is proposed (`reshard.proposing`) knows nothing of
    what the catalogue has.

    Raises:
        PlanError: There is none, or it is malformed, or it fits only the names of the other layout.
    """
    names = [*(name for name, tensor in tensors.items() if not tensor.unused), *ties]
    if options.plan is None:
        if architecture is None:
            raise PlanError(_no_plan(checkpoint))
        _check_parts(architecture, checkpoint)
        return built_in_plan(architecture, options.plan_source)
    if options.proposes:
        from reshard.proposing import propose

        return proposed_plan(propose(tensors, checkpoint.config, world_size), checkpoint.folder.label)
    given = (
        build_plan(dict(options.plan), "plan") if isinstance(options.plan, Mapping) else read_plan(Path(options.plan))
    )
    prefix = architecture.prefix if architecture else ""
    plan = anchor_rules(given, names, prefix)
    _refuse_other_layout(plan, checkpoint, architecture, names, options)
    known = built_in_plan(architecture) if architecture else None
    return plan._replace(
        sizes={**(known.sizes if known else default_sizes()), **plan.sizes},
        bindings=known.bindings if known else default_bindings(),
        attributes={**(known.attributes if known else {}), **plan.attributes},
        inputs={**(known.inputs if known else {}), **plan.inputs},
        expert_rules=plan.expert_rules or (known.expert_rules if known else ()),
    )


def describe_missing_plan(config: Mapping[str, Any]) -> str:
    """Return that no built-in plan fits a configuration."""
    model_type = config.get("model_type")
    if not model_type and (name := config.get("_class_name")):
        return f"no built-in plan for the class {name!r} of diffusers"
    return f"no built-in plan for the model type {model_type!r}" if model_type else "no model_type in config.json"


def proposed_plan(proposal: "Proposal", label: str) -> Plan:
    """Return the plan that is proposed for a model.

    Raises:
        PlanError: No rule is proposed.
    """
    if not proposal.document["plan"]:
        most = proposal.whole[0]
        raise PlanError(
            f"{label}: no rule can be proposed for tp {proposal.world_size}; most of the model is {most.pattern}: "
            f"{most.reason}"
        )
    plan = build_plan(proposal.document, f"the plan proposed for tp {proposal.world_size}")
    return plan._replace(sizes=default_sizes())


def _no_plan(checkpoint: Checkpoint) -> str:
    """Return the same for a message, with what there is and what would do."""
    config = checkpoint.config
    if not config.get("model_type") and config.get("_class_name"):
        there = f" ({', '.join(class_names())} have one)"
    elif config.get("model_type"):
        there = f" ({len(model_types())} types have one: `reshard plans`)"
    else:
        there = ", so no built-in plan fits"
    return f"{checkpoint.folder.label}: {describe_missing_plan(config)}{there}; give one with --plan"


def _check_parts(architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Refuse a composite whose configuration chooses parts of types that have no plan."""
    if architecture.scopes or architecture.library != "transformers":
        return
    parts = {name: part["model_type"] for name, part in checkpoint.config.items() if _has_type(part)}
    listed = ", ".join(f"{name} {model_type}" for name, model_type in sorted(parts.items()))
    raise PlanError(
        f"{checkpoint.folder.label}: no part of this {architecture.model_type} ({listed}) has a built-in plan; "
        "give one with --plan"
    )


def _has_type(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("model_type"), str)


def _refuse_other_layout(
    plan: Plan, checkpoint: Checkpoint, architecture: Architecture | None, names: list[str], options: Options
) -> None:
    """Refuse a plan that fits only the names of the other layout."""
    if architecture is None or _taken(plan.rules, names):
        return
    other = "checkpoint" if options.layout == "runtime" else "runtime"
    other_names = list(build_tensors(checkpoint, architecture, options._replace(layout=other)))
    if taken := _taken(plan.rules, other_names):
        kind = "stored" if other == "checkpoint" else "runtime"
        example = next((name for name in names if name not in other_names), names[0])
        raise PlanError(
            f"{plan.label}: its rules speak {kind} names, like {taken[0]}; use --layout {other}, "
            f"or names like {example}"
        )


def _taken(rules: tuple[Rule, ...], names: list[str]) -> list[str]:
    """Return some names that a rule takes: the first of those that differ in nothing but numbers."""
    matcher = Matcher(rules)
    first: dict[str, str] = {}
    for name, kind in zip(names, alike(names, matcher.numbers), strict=True):
        first.setdefault(kind, name)
    return [name for name in first.values() if matcher.find_for_parameter(name)[0]]
