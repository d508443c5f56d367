"""Ties: parameters that are another one.

Source: ``tie_weights`` and ``get_expanded_tied_weights_keys`` in ``transformers/modeling_utils.py`` of transformers
5.24, and what the configuration classes of composites do to ``tie_word_embeddings``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from manifests.errors import CheckpointError, PlanError
from manifests.shown import shown_name
from reshard.catalogue import Architecture, exported, part_of_config
from reshard.model import RuntimeTensor
from reshard.options import Options
from reshard.planfile import given_plan
from reshard.sources.checkpoint import Checkpoint

FLAG = "tie_word_embeddings"


def find_ties(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    tensors: Mapping[str, RuntimeTensor],
    options: Options,
) -> dict[str, str]:
    """Return the parameters that are another one, which is stored: under the name that ties or that is tied to.

    Where both are stored they stay two parameters, as transformers keeps them if their values differ. A plan may name
    more of them, for classes of which nothing is known.

    Raises:
        CheckpointError: One of the two is not stored, and the configuration does not tie them.
        PlanError: The plan ties a parameter to one that is not stored.
    """
    stored = {name for name, tensor in tensors.items() if not tensor.unused}
    ties = _given(options, stored)
    if architecture is None:
        return ties
    pairs = list(_pairs(architecture, stored))
    for position, (one, other) in enumerate(pairs):
        if not is_tied(checkpoint.config, architecture, one):
            _check_stored(one, other, stored, checkpoint, options)
            continue
        held = [name for name in (one, other) if name in stored or name in ties]
        if len(held) == 1:
            absent = other if held[0] == one else one
            ties[absent] = ties.get(held[0], held[0])
        elif not held:
            later = [third for third, source in pairs[position + 1 :] if source == other and third in stored]
            if later:
                ties[one] = later[0]
    return ties


def _given(options: Options, stored: set[str]) -> dict[str, str]:
    """Return what the plan ties."""
    if options.plan is None or options.proposes:
        return {}
    plan = given_plan(options.plan)
    for name, source in plan.ties.items():
        if source not in stored:
            raise PlanError(
                f"{plan.label}: ties: {shown_name(name)} is to be {shown_name(source)}, which is not stored"
            )
    return {name: source for name, source in plan.ties.items() if name not in stored}


def _pairs(architecture: Architecture, stored: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that may be tied; of a pattern those of which one is stored."""
    for one, other in architecture.ties.items():
        if "**" not in one:
            yield one, other
            continue
        here, there = (pattern.split("**") for pattern in (one, other))
        middles = {
            name[len(before) : len(name) - len(after)]
            for before, after in (here, there)
            for name in stored
            if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
        }
        for middle in sorted(middles):
            yield middle.join(here), middle.join(there)


def _check_stored(one: str, other: str, stored: set[str], checkpoint: Checkpoint, options: Options) -> None:
    if options.layout == "runtime" and (one in stored) != (other in stored):
        absent = other if one in stored else one
        raise CheckpointError(
            f"{checkpoint.folder.label}: {absent} is not stored, and {FLAG} is false in "
            "config.json; the model cannot run without it"
        )


def is_tied(config: Mapping[str, Any], architecture: Architecture, name: str) -> bool:
    """Tell whether a configuration ties a parameter to the one that `Architecture.ties` names.

    Sub-models that tie parameters of their own have their own flag. A composite's flag may follow that of its text
    model: in which cases is a table in the catalogue, as its class was seen to behave.
    """
    path = architecture.tie_flags.get(name, "")
    part = part_of_config(config, architecture.model_type, path)
    model_type = part.get("model_type", "") if path else architecture.model_type
    entry = exported()["types"].get(model_type, {}) if isinstance(model_type, str) else {}
    if "tied" in entry:
        inner = part_of_config(part, model_type, entry["tied"]["part"])
        table: list[str] = entry["tied"]["table"]
        return table[_column(part)][_column(inner)] == "T"
    return bool(part.get(FLAG, entry.get("defaults", {}).get(FLAG, False)))


def _column(part: Mapping[str, Any]) -> int:
    """Return the place of a flag in a table: absent, false, true."""
    return 0 if FLAG not in part else 1 + bool(part[FLAG])
