"""The classes of diffusers that have a plan: its own (``diffusers.json``), or one of ours (``ours/diffusers.toml``).

A configuration of diffusers names its class (``_class_name``) and no model type. Stored names are those of the model.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import msgspec

from manifests.errors import CheckpointError, PlanError
from manifests.expression import MAX_SIZE
from manifests.shown import shown
from reshard.catalogue.architecture import Architecture
from reshard.catalogue.builtin import build_bindings
from reshard.catalogue.tables import FOLDER, Entries, ours
from reshard.plans import AxisBinding, Plan, build_inputs, build_rule

FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_kv": ("to_k", "to_v"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""What fusing its projections adds to an attention, beside what it was made of, which stays."""

ADAPTERS = {
    r"\.lora_|\.base_layer\.": "a LoRA adapter; fuse it (`fuse_lora`, then `unload_lora`) and save the model again",
    r"\.(to_k_ip|to_v_ip)\.|^encoder_hid_proj\.": (
        "an IP adapter, whose processor counts heads; save the model without it (`unload_ip_adapter`)"
    ),
}
"""Patterns of names that belong to what was put on a model, and what would do."""


@cache
def exported() -> dict[str, Any]:
    """Return the content of ``diffusers.json``."""
    content: dict[str, Any] = msgspec.json.decode((FOLDER / "diffusers.json").read_bytes())
    return content


@cache
def classes() -> Mapping[str, Any]:
    """Return the entry of every class that has a plan."""
    mine, theirs = ours()["classes"], exported()["classes"]
    return Entries((*mine, *theirs), lambda name: theirs.get(name) or mine[name])


def class_names() -> tuple[str, ...]:
    """Return the classes that have a plan."""
    return tuple(sorted(classes()))


def find_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the class that a configuration of diffusers names, or None if it has no entry.

    Raises:
        PlanError: A number of the configuration, of which sizes are products, is none.
    """
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in classes():
        return None
    entry = classes()[name]
    defaults = dict(entry.get("defaults", {}))
    for size, factors in entry.get("products", {}).items():
        defaults[size] = _whole_product(config, defaults, factors)
    return Architecture(
        model_type="",
        name=name,
        variant=tuple((key, str(config[key])) for key in entry.get("when", {}) if key in config),
        prefix="",
        base_prefix="",
        heads=(),
        ties={},
        defaults=defaults,
        aliases={},
        ignored=tuple(rf"\.{fused}\." for fused in _fused(name)),
        renames=(),
        converters=(),
        library="diffusers",
        blocks=_blocks(config, entry.get("blocks", {}).get("lists", ())),
    )


def _blocks(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what the blocks of a U-Net have of configuration values that may be lists, which go down and up again."""
    lists = {name: config[name] for name in names if isinstance(config.get(name), list)}
    blocks: dict[str, dict[str, Any]] = {}
    for name, values in lists.items():
        for at, value in enumerate(values):
            blocks.setdefault(f"down_blocks.{at}", {})[name] = value
            blocks.setdefault(f"up_blocks.{len(values) - 1 - at}", {})[name] = value
        blocks.setdefault("mid_block", {})[name] = values[-1] if values else None
    return blocks


def _whole_product(config: Mapping[str, Any], defaults: Mapping[str, Any], factors: list[str]) -> int:
    """Return a product of configuration values without what is behind the point, as the classes compute widths."""
    numbers = {name: config.get(name, defaults[name]) for name in factors}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < MAX_SIZE:
            raise PlanError(
                f"config.json: {name} is {shown(number)}; sizes are computed from it, a number from 0 is needed"
            )
    return int(prod(numbers.values()))


def build_plan(architecture: Architecture, source: str) -> Plan:
    """Return the plan of a class.

    Args:
        architecture: The class.
        source: "reshard" for ours where diffusers has none, "transformers" for diffusers' own only.

    Raises:
        PlanError: Diffusers has none for the class.
    """
    entry = _entry(architecture)
    if source != "reshard" and architecture.name not in exported()["classes"]:
        raise PlanError(f"{architecture.name}: diffusers has no plan for it; --plan-source reshard has one")
    label = f"the {'built-in' if source == 'reshard' else 'diffusers'} plan of {architecture.name}"
    return Plan(
        label=label,
        rules=tuple(build_rule(pattern, choice, label) for pattern, choice in entry["plan"].items()),
        sizes={**ours()["sizes"], **entry.get("sizes", {})},
        bindings=_bindings(architecture.name, entry),
        attributes=entry.get("attributes", {}),
        inputs={
            pattern: build_inputs(table, f"{label}: inputs.{pattern}")
            for pattern, table in entry.get("inputs", {}).items()
        },
        exhaustive=False,
    )


def _entry(architecture: Architecture) -> Mapping[str, Any]:
    """Return a class's tables, with the lines in place that are for values of its configuration."""
    entry: dict[str, Any] = classes()[architecture.name]
    for key, value in architecture.variant:
        changed = entry["when"][key].get(value, {})
        entry = {**entry, **{name: {**entry.get(name, {}), **lines} for name, lines in changed.items()}}
    return entry


def _bindings(name: str, entry: Mapping[str, Any]) -> tuple[AxisBinding, ...]:
    """Return the axes of a class's modules; those that were exported say under which module each is."""
    if name in exported()["classes"]:
        return tuple(
            AxisBinding(table["suffix"], table.get("out", ""), table.get("in", ""), table["under"])
            for table in entry["bindings"]
        )
    return build_bindings({**ours()["class_bindings"], **entry.get("bindings", {})})


def _fused(name: str) -> dict[str, tuple[str, ...]]:
    """Return what fusing adds to a class; those of these modules that its plan names are its own."""
    own = {pattern.rpartition(".")[2] for pattern in classes()[name]["plan"]}
    return {fused: made_of for fused, made_of in FUSED.items() if fused not in own}


def check_names(label: str, name: str, names: Iterable[str]) -> None:
    """Refuse a checkpoint of a model that something was put on, or of which parts are only stored fused.

    The class does not use what fusing adds; it goes to the unused file.

    Args:
        label: The checkpoint's folder.
        name: The class.
        names: The names of its tensors.

    Raises:
        CheckpointError: It holds an adapter's tensors, or fused projections without those that they were made of.
    """
    known, fused = set(names), _fused(name)
    for tensor in sorted(known):
        for pattern, advice in ADAPTERS.items():
            if re.search(pattern, tensor):
                raise CheckpointError(f"{label}: {tensor}: belongs to {advice}")
        parts = tensor.split(".")
        for absent in fused.get(parts[-2], ()) if len(parts) > 1 else ():
            unfused = ".".join([*parts[:-2], absent, parts[-1]])
            if unfused not in known:
                raise CheckpointError(
                    f"{label}: {tensor}: projections fused into one, and {unfused} is not stored beside it; "
                    "undo it (`unfuse_qkv_projections`) and save the model again"
                )
