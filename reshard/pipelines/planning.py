"""Planning the split of a pipeline: which of its parts are divided, and which are not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manifests.errors import CheckpointError, DegreeError, PlanError
from manifests.names import is_file_name
from reshard.catalogue import find_architecture
from reshard.choosing import describe_missing_plan
from reshard.options import Options
from reshard.pipelines.finding import INDEX_NAME
from reshard.planning import SplitPlan, locate, plan_split
from reshard.sources.checkpoint import open_checkpoint, read_object
from reshard.sources.folder import Folder, LocalFolder


class Component(NamedTuple):
    """A part of a pipeline that has a folder: a model, a tokenizer, a scheduler.

    Attributes:
        folder: Where it lies.
        split: How it is divided, or None if it is carried over.
        whole: Why every rank loads it whole, if it has weights and is not divided; else empty.
        files: The names of its files that are carried over.
        nbytes: Bytes of the weights that are carried over.
    """

    folder: Folder
    split: SplitPlan | None
    whole: str
    files: tuple[str, ...]
    nbytes: int = 0


class PipelinePlan(NamedTuple):
    """A pipeline's split, decided and not yet made.

    Attributes:
        folder: The pipeline's.
        pipeline: Its class in diffusers.
        world_size: Number of ranks.
        options: What was chosen.
        components: Its parts by their names.
    """

    folder: Folder
    pipeline: str
    world_size: int
    options: Options
    components: Mapping[str, Component]

    @property
    def nbytes_read(self) -> int:
        """Bytes of all weights that will be read."""
        return sum(part.split.program.nbytes_read if part.split else part.nbytes for part in self.components.values())

    @property
    def nbytes_written(self) -> int:
        """Bytes of all weight files that will be written."""
        return sum(part.split.nbytes_written if part.split else part.nbytes for part in self.components.values())


def plan_pipeline(model: str | Path, world_size: int, options: Options, whole: tuple[str, ...] = ()) -> PipelinePlan:
    """Decide the split of a pipeline from the headers of its parts.

    Args:
        model: A folder or a hub id.
        world_size: Number of ranks.
        options: What was chosen; a variant is used by the parts that have it, as diffusers does.
        whole: Names of parts that every rank is to load whole, whether they have a plan or not.

    Raises:
        CheckpointError: The pipeline or one of its parts is broken.
        PlanError: A plan was given, which is for one model; no part has a plan; or an unknown part is named.
        DegreeError: The number of ranks does not divide a part; the message names it.
    """
    folder = locate(model, options)
    if options.plan is not None:
        raise PlanError(
            f"{folder.label}: a pipeline, and a plan is for one model; split that one with --subfolder NAME --plan FILE"
        )
    index = read_object(folder, INDEX_NAME)
    names = [name for name, value in index.items() if _is_component(value)]
    if unknown := sorted({*whole} - {*names}):
        raise PlanError(f"{folder.label}: has no part {', '.join(unknown)}; its parts are {', '.join(names)}")
    components = {name: _component(model, name, world_size, options, kept=name in whole) for name in names}
    planned = PipelinePlan(folder, str(index.get("_class_name", "")), world_size, options, components)
    if not any(part.split for part in components.values()):
        reasons = "; ".join(f"{name}: {part.whole}" for name, part in components.items() if part.whole)
        raise PlanError(f"{folder.label}: no part of this pipeline is divided: {reasons or 'none has weights'}")
    return planned


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)


def _component(model: str | Path, name: str, world_size: int, options: Options, *, kept: bool) -> Component:
    if not is_file_name(name):
        raise CheckpointError(f"{model}/{INDEX_NAME}: {name!r} is not the name of a folder in the pipeline")
    path = Path(model)
    if path.is_dir():
        if not (path / name).is_dir():
            raise CheckpointError(f"{path / name}: {INDEX_NAME} names this part, and there is no such folder")
        folder: Folder = LocalFolder(path / name)
    else:
        folder = locate(model, options._replace(subfolder=name))
    names = folder.names()
    if not any(_is_weights(file) for file in names):
        return Component(folder, None, "", tuple(names))
    variant = options.variant if any(f".{options.variant}." in file for file in names) else ""
    chosen = options._replace(variant=variant, subfolder="" if path.is_dir() else name)
    checkpoint = open_checkpoint(folder, variant)
    nbytes = sum(file.nbytes for file in checkpoint.files)
    reason = "asked for" if kept else _reason_whole(checkpoint.config)
    if reason:
        return Component(folder, None, reason, tuple(checkpoint.needed), nbytes)
    try:
        return Component(folder, plan_split(folder, world_size, chosen), "", ())
    except DegreeError as error:
        message = f"{name}: {error}; --whole {name} keeps this part whole on every rank"
        raise DegreeError(message, misfits=error.misfits, allowed=error.allowed) from error


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".ckpt", ".msgpack"))


def _reason_whole(config: Mapping[str, Any]) -> str:
    """Return why a model is not divided, empty if the catalogue has a plan for its class."""
    try:
        architecture = find_architecture(config)
    except PlanError as error:
        return str(error)
    return "" if architecture is not None else describe_missing_plan(config)
