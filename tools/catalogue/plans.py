"""The plans of types and classes, and the proof that their parts make what transformers uses.

Source: ``init_parallel_plans`` in distributed/mixin.py of transformers 5.24. A class's own plan is taken as it is; the
plan of a configuration holds for the base model that has it; every child's plan holds under the child's name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from reshard.catalogue import join_plan, own_plans
from reshard.plans import without_conditions

from .finding import has_plan, inner_configs

PLANS = ("tp_plan", "ep_plan")


class PlanMismatchError(Exception):
    """A class's parts do not make the plan that transformers uses."""


def planned_models(model: PreTrainedModel, prefix: str = "") -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the models in a model whose plans become the whole's, itself included: those that no plain module holds."""
    yield prefix, model
    for name, child in model.named_children():
        if isinstance(child, PreTrainedModel):
            yield from planned_models(child, f"{prefix}.{name}".lstrip("."))


def find_scopes(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """Return the base models that have a plan by their configuration, each with its prefix.

    Llama4ForCausalLM, whose base model has another name than the class says, has its plan twice: under the base model,
    and as it is, where it names nothing. Such a copy is left out.
    """
    found = [
        (prefix, inner)
        for prefix, inner in planned_models(model)
        if inner.base_model is inner and has_plan(inner.config)
    ]
    names = names_of(model)
    return [(prefix, inner) for prefix, inner in found if len(found) == 1 or _names_any(prefix, inner, names)]


def _names_any(prefix: str, model: PreTrainedModel, names: set[str]) -> bool:
    plans = [*(type_plan(model, kind) for kind in PLANS), own_plan(model)]
    return any(not names.isdisjoint(join_plan([(prefix, plan)])) for plan in plans)


def own_plan(model: PreTrainedModel) -> dict[str, Any]:
    """Return the plan of our own that a base model's type has, its patterns without conditions."""
    return {
        without_conditions(pattern): choice for pattern, choice in own_plans().get(model.config.model_type, {}).items()
    }


def is_planned(model: PreTrainedModel, scopes: list[tuple[str, PreTrainedModel]]) -> bool:
    """Tell whether a model has a plan of transformers, or a part of it one of our own."""
    names = names_of(model)
    ours = (join_plan([(prefix, own_plan(part))]) for prefix, part in scopes)
    return any(getattr(model, kind) for kind in PLANS) or any(not names.isdisjoint(plan) for plan in ours)


def type_plan(model: PreTrainedModel, kind: str) -> dict[str, str]:
    """Return the plan that a base model has by its configuration, and the rule for its embeddings.

    Source: ``base_model_tp_plan`` in the type's configuration file; the rule is put in by ``init_parallel_plans``.
    """
    plan = dict(getattr(model.config, f"base_model_{kind}") or {})
    if kind == "tp_plan" and plan and isinstance(getattr(model, "embed_tokens", None), torch.nn.Embedding):
        plan.setdefault("embed_tokens", "embedding_rowwise")
    return plan


def class_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return what the classes of a model and of the models in it have of their own (``_tp_plan``)."""
    plan: dict[str, str] = {}
    for prefix, inner in planned_models(model):
        if type(inner)._ep_plan:
            raise PlanMismatchError(f"{type(inner).__name__}: has an _ep_plan of its own, which no class had")
        plan |= join_plan([(prefix, type(inner)._tp_plan or {})])
    return plan


def config_path(root: PreTrainedConfig, inner: PreTrainedConfig) -> str:
    """Return where a sub-model's configuration is in the root's; models may hold a copy."""
    inside = list(inner_configs(root))
    if inner is root or (inner.model_type == root.model_type and all(inner is not config for _, config in inside)):
        return ""
    for is_it in (lambda config: config is inner, lambda config: config.model_type == inner.model_type):
        for path, config in inside:
            if is_it(config):
                return path
    raise PlanMismatchError(f"{root.model_type}: no configuration in it is that of its {inner.model_type}")


class Used(NamedTuple):
    """What transformers makes of a class's plans, kept to be compared once all types are known.

    Attributes:
        name: The class.
        names: The names of its modules and parameters, as plans write them.
        plans: Its plans, without rules that name nothing.
        parts: The types of its parts, each with its prefix.
        own: What its classes have of their own.
    """

    name: str
    names: frozenset[str]
    plans: Mapping[str, Mapping[str, str]]
    parts: tuple[tuple[str, str], ...]
    own: Mapping[str, str]


def used_plans(model: PreTrainedModel) -> Used:
    """Return the plans that transformers makes for a model."""
    names = names_of(model)
    return Used(
        name=type(model).__name__,
        names=frozenset(names),
        plans={kind: {name: style for name, style in getattr(model, kind).items() if name in names} for kind in PLANS},
        parts=tuple((prefix, part.config.model_type) for prefix, part in find_scopes(model)),
        own=class_plan(model),
    )


def check_joined(used: Used, types: Mapping[str, Any]) -> None:
    """Check that the plans of a class's parts make the plans that transformers uses, but for rules that name nothing.

    Raises:
        PlanMismatchError: They do not.
    """
    for kind, key in zip(PLANS, ("plan", "ep_plan"), strict=True):
        own = used.own if kind == "tp_plan" else {}
        joined = join_plan([("", own), *((prefix, types[name].get(key, {})) for prefix, name in used.parts)])
        ours = {name: style for name, style in joined.items() if name in used.names}
        if ours != used.plans[kind]:
            different = sorted(name for name, _ in ours.items() ^ used.plans[kind].items())
            raise PlanMismatchError(f"{used.name}: {kind}: {', '.join(different[:4])}: not what its parts make")


def names_of(model: PreTrainedModel) -> set[str]:
    """Return the names of modules and parameters as plans write them: every number is a ``*``."""
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules | parameters}
