"""Resolving a model that is in memory: the same choices as for a checkpoint, from names, dtypes and shapes alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manifests.errors import CheckpointError
from manifests.stored import StoredTensors
from reshard import placing
from reshard.choosing import choose_architecture, choose_plan
from reshard.model import Model, RuntimeTensor
from reshard.options import Options, refuse_unproved
from reshard.placing import Resolution, check_degree
from reshard.planning import model_sizes
from reshard.plans import Plan
from reshard.sources.checkpoint import Checkpoint, SourceTensors
from reshard.sources.folder import LocalFolder, WeightFile


class ResolvedModel(NamedTuple):
    """A plan and what it makes of a model."""

    plan: Plan
    resolution: Resolution


def resolve_model(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    plan: Mapping[str, Any] | Path | str | None,
    world_size: int,
    *,
    ties: Mapping[str, str],
    label: str,
    experts: int = 1,
    uneven: str = "",
    plan_source: str = "reshard",
) -> ResolvedModel:
    """Decide how the tensors of a model are divided, as a split of its checkpoint would.

    Args:
        tensors: dtype, as in a safetensors header, and shape of every parameter and stored buffer, by its name in the
            model.
        config: The model's configuration, as in ``config.json``; empty if it has none.
        plan: A plan, the file of one, or None for the built-in one.
        world_size: Number of ranks.
        ties: Parameters that are another one: name to name.
        label: How messages name the model.
        experts: Over how many of the ranks experts are divided; 1 leaves all experts on every rank.
        uneven: What becomes of what the ranks do not divide: "ceil" or "pad"; empty to refuse it.
        plan_source: Whose built-in plan: "reshard" or "transformers".

    Raises:
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
    """
    world = check_degree(world_size, experts, uneven)
    options = Options(plan=plan, plan_source=plan_source, experts=experts)
    refuse_unproved(options, label)
    nothing = [0] * len(tensors)
    stored = SourceTensors([StoredTensors([*tensors], [*tensors.values()], nothing, nothing)])
    checkpoint = Checkpoint(_Memory(label), (), stored, "", config, (), ())
    runtime = {name: RuntimeTensor(dtype, shape) for name, (dtype, shape) in tensors.items()}
    architecture = choose_architecture(checkpoint, options)
    chosen = choose_plan(checkpoint, architecture, runtime, ties, options, world_size)
    model = Model(runtime, model_sizes(chosen, checkpoint, architecture), ties)
    return ResolvedModel(chosen, placing.resolve(model, chosen, world))


class _Memory:
    """A folder without files, which only names the model."""

    repo = ""
    revision = ""

    def __init__(self, label: str) -> None:
        self.label = label

    def names(self) -> list[str]:
        return []

    def read(self, name: str, most: int | None = None) -> bytes:
        raise CheckpointError(f"{self.label}: is in memory, and has no {name}")

    def check(self, name: str) -> None:
        raise CheckpointError(f"{self.label}: is in memory, and has no {name}")

    def weights(self, name: str) -> WeightFile:
        raise CheckpointError(f"{self.label}: is in memory, and has no {name}")

    def download(self, names: Iterable[str]) -> LocalFolder:
        raise CheckpointError(f"{self.label}: is in memory, and has no {' '.join(names)}")
