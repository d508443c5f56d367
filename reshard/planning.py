"""Planning: everything that a split will do, decided from headers and integers before a byte moves."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manifests.errors import CheckpointError, PlanError
from manifests.manifest import TILE_NBYTES, VERSION, Model, Rule, Tensor, digest_of
from manifests.styles import STYLES
from reshard import placing, recipe
from reshard.catalogue import (
    PLAN_SOURCES,
    Architecture,
    built_in_plan,
    default_bindings,
    default_sizes,
    find_architecture,
    model_types,
)
from reshard.checkpoint import Checkpoint, open_checkpoint
from reshard.folder import Folder, LocalFolder
from reshard.moves import Place, build_input, build_program, split_moves
from reshard.placing import Resolution, RuntimeTensor, check_degree
from reshard.planfile import build_plan, read_plan
from reshard.plans import Matcher, Plan, anchor_rules, modules_of
from reshard.program import Program, check_program
from reshard.rankfile import FileOptions, PlannedFile, plan_files
from reshard.sizes import Sizes

LAYOUTS = ("runtime", "checkpoint")


class Options(NamedTuple):
    """What a caller may choose.

    Attributes:
        plan: A plan file, the content of one, or None for the built-in plan.
        plan_source: Whose built-in plan: "reshard" or "transformers".
        layout: "runtime" for the names and layout of the running model, "checkpoint" for the stored ones.
        revision: Of a hub id.
        subfolder: Of a folder or a hub id.
        variant: Of the file names (``fp16``).
        self_contained: Whether every rank's file holds its own copy of the replicated tensors.
        max_file_nbytes: The most data bytes in one file; 0 for no limit.
        drop_unused: Whether tensors that the model does not use are left out.
    """

    plan: Path | str | Mapping[str, Any] | None = None
    plan_source: str = "reshard"
    layout: str = "runtime"
    revision: str = ""
    subfolder: str = ""
    variant: str = ""
    self_contained: bool = False
    max_file_nbytes: int = 0
    drop_unused: bool = False


class SplitPlan(NamedTuple):
    """A split, decided and not yet made.

    Attributes:
        checkpoint: The source, by its headers.
        model: The class that the tensors are for.
        plan: The plan, its rules under the names of the layout.
        resolution: What it makes of every tensor.
        world_size: Number of ranks.
        layout: "runtime" or "checkpoint".
        key: What decides the output bytes, hashed.
        files: The files that will be written.
        program: What will be moved.
        dropped: Stored names of the tensors that are left out.
    """

    checkpoint: Checkpoint
    model: Model
    plan: Plan
    resolution: Resolution
    world_size: int
    layout: str
    key: str
    files: tuple[PlannedFile, ...]
    program: Program
    dropped: tuple[str, ...]

    @property
    def nbytes_written(self) -> int:
        """Bytes of all safetensors files that will be written."""
        return sum(file.nbytes for file in self.files)


def locate(model: str | Path, options: Options) -> Folder:
    """Return the folder or the hub repository that MODEL names.

    Raises:
        CheckpointError: It is neither.
    """
    path = Path(model)
    if path.is_dir():
        if options.revision:
            raise CheckpointError(f"{model}: a folder has no revision")
        return LocalFolder(path / options.subfolder if options.subfolder else path)
    from reshard.hub import is_repo_id
    from reshard.hub import locate as locate_repo

    if path.exists() or not is_repo_id(str(model)):
        raise CheckpointError(f"{model}: no such folder, and not a hub id (org/name)")
    return locate_repo(str(model), options.revision, options.subfolder)


def plan_split(folder: Folder, world_size: int, options: Options) -> SplitPlan:
    """Decide a split of the checkpoint in a folder.

    Raises:
        CheckpointError: The checkpoint is broken, or of a kind that is not split.
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
    """
    check_degree(world_size)
    if options.layout not in LAYOUTS:
        raise PlanError(f"layout {options.layout!r}: unknown; known are {', '.join(LAYOUTS)}")
    if options.plan_source not in PLAN_SOURCES:
        raise PlanError(f"plan source {options.plan_source!r}: unknown; known are {', '.join(PLAN_SOURCES)}")
    checkpoint = open_checkpoint(folder, options.variant)
    _refuse_unsupported_quantization(checkpoint)
    architecture = _architecture(checkpoint, options)
    tensors = _tensors(checkpoint, architecture, options)
    ties = _ties(checkpoint, architecture, tensors)
    plan = _plan(checkpoint, architecture, tensors, ties, options)
    model = placing.Model(tensors, _sizes(plan, checkpoint, architecture), ties, _scale_blocks(checkpoint))
    resolution = placing.resolve(model, plan, world_size)
    dropped = tuple(name for name, tensor in tensors.items() if tensor.unused) if options.drop_unused else ()
    kept = {name: tensor for name, tensor in resolution.tensors.items() if name not in dropped}
    key = _key(checkpoint, resolution, kept, world_size, options)
    files = plan_files(kept, world_size, key, FileOptions(options.self_contained, options.max_file_nbytes))
    program = _program(checkpoint, kept, files)
    check_program(program, [file.nbytes for file in files], [len(file.header) for file in files])
    return SplitPlan(
        checkpoint=checkpoint,
        model=_model_of(checkpoint, architecture, options),
        plan=plan,
        resolution=resolution._replace(tensors=kept),
        world_size=world_size,
        layout=options.layout,
        key=key,
        files=files,
        program=program,
        dropped=dropped,
    )


def _architecture(checkpoint: Checkpoint, options: Options) -> Architecture | None:
    """Return the catalogue's class; a user's own plan works without one."""
    try:
        return find_architecture(checkpoint.config)
    except PlanError:
        if options.plan is None:
            raise
        return None


def _tensors(checkpoint: Checkpoint, architecture: Architecture | None, options: Options) -> dict[str, RuntimeTensor]:
    stored = {name: tensor.stored for name, tensor in checkpoint.tensors.items()}
    if architecture is None or options.layout == "checkpoint":
        return recipe.stored_tensors(stored)
    return recipe.runtime_tensors(stored, architecture)


def _ties(
    checkpoint: Checkpoint, architecture: Architecture | None, tensors: Mapping[str, RuntimeTensor]
) -> dict[str, str]:
    """Return the parameters that are another one, stored under one of the two names.

    Where both are stored they stay two parameters, as transformers keeps them if their values differ.
    """
    ties: dict[str, str] = {}
    if architecture is None:
        return ties
    flag = checkpoint.config.get("tie_word_embeddings", architecture.defaults.get("tie_word_embeddings"))
    for one, other in architecture.ties.items():
        if one in tensors and other in tensors:
            continue
        if not flag and (one in tensors) != (other in tensors):
            absent = other if one in tensors else one
            raise CheckpointError(
                f"{checkpoint.folder.label}: {absent} is not stored, and tie_word_embeddings is false in config.json; "
                f"the model cannot run without it"
            )
        if other in tensors:
            ties[one] = other
        elif one in tensors:
            ties[other] = one
    return ties


def _plan(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    tensors: Mapping[str, RuntimeTensor],
    ties: Mapping[str, str],
    options: Options,
) -> Plan:
    names = [*(name for name, tensor in tensors.items() if not tensor.unused), *ties]
    if options.plan is None:
        if architecture is None:
            raise PlanError(_no_plan(checkpoint))
        plan = built_in_plan(architecture, options.plan_source)
        return plan if options.layout == "runtime" else _only_fitting(plan, names)
    given = (
        build_plan(dict(options.plan), "plan") if isinstance(options.plan, Mapping) else read_plan(Path(options.plan))
    )
    prefix = architecture.prefix if architecture else ""
    plan = anchor_rules(given, names, prefix)
    _refuse_other_layout(plan, checkpoint, architecture, names, options)
    return plan._replace(sizes={**default_sizes(), **plan.sizes}, bindings=default_bindings())


def _no_plan(checkpoint: Checkpoint) -> str:
    model_type = checkpoint.config.get("model_type")
    if not model_type:
        return (
            f"{checkpoint.folder.label}: no model_type in config.json, so no built-in plan fits; give one with --plan"
        )
    return (
        f"{checkpoint.folder.label}: no built-in plan for the model type {model_type!r} "
        f"({len(model_types())} types have one: `reshard plans`); give one with --plan"
    )


def _only_fitting(plan: Plan, names: list[str]) -> Plan:
    """Return the built-in plan if its rules, which speak runtime names, fit the stored names too."""
    known = {*names, *modules_of(names)}
    dead = [rule for rule in plan.rules if not any(Matcher([rule]).find(name) for name in known)]
    if dead:
        raise PlanError(
            f"{plan.label}: {dead[0].pattern}: speaks a runtime name, which this checkpoint stores otherwise; "
            "with --layout checkpoint give a --plan of stored names"
        )
    return plan


def _refuse_other_layout(
    plan: Plan, checkpoint: Checkpoint, architecture: Architecture | None, names: list[str], options: Options
) -> None:
    """Refuse a plan that fits only the names of the other layout."""
    if architecture is None or _takes_any(plan.rules, names):
        return
    other = "checkpoint" if options.layout == "runtime" else "runtime"
    other_names = list(_tensors(checkpoint, architecture, options._replace(layout=other)))
    if _takes_any(plan.rules, other_names):
        kind = "stored" if other == "checkpoint" else "runtime"
        raise PlanError(
            f"{plan.label}: its rules speak {kind} names, like {other_names[0]}; use --layout {other}, "
            f"or names like {names[0]}"
        )


def _takes_any(rules: tuple[Rule, ...], names: list[str]) -> bool:
    matcher = Matcher(rules)
    return any(matcher.find_for_parameter(name)[0] for name in names)


def _sizes(plan: Plan, checkpoint: Checkpoint, architecture: Architecture | None) -> Sizes:
    if architecture is None:
        return Sizes(plan.sizes, checkpoint.config)
    return Sizes(plan.sizes, checkpoint.config, architecture.defaults, architecture.aliases)


def _refuse_unsupported_quantization(checkpoint: Checkpoint) -> None:
    quantization = checkpoint.config.get("quantization_config")
    if not isinstance(quantization, dict):
        return
    method = quantization.get("quant_method")
    if method != "fp8":
        raise CheckpointError(
            f"{checkpoint.folder.label}: quantized by {method!r}; of the quantized formats only fp8 is split"
        )


def _scale_blocks(checkpoint: Checkpoint) -> tuple[int, ...]:
    quantization = checkpoint.config.get("quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if blocks is None:
        return ()
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(b) is int and b > 0 for b in blocks):
        raise CheckpointError(f"{checkpoint.folder.label}/config.json: weight_block_size {blocks!r} is not two sizes")
    return tuple(blocks)


def _model_of(checkpoint: Checkpoint, architecture: Architecture | None, options: Options) -> Model:
    if architecture is not None and options.layout == "runtime":
        return Model("transformers", architecture.model_type, architecture.name)
    config = checkpoint.config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("_class_name", "")
    library = "transformers" if "model_type" in config else "diffusers" if "_class_name" in config else ""
    return Model(library, str(config.get("model_type", "")), str(name))


def _key(
    checkpoint: Checkpoint,
    resolution: Resolution,
    kept: Mapping[str, Tensor],
    world_size: int,
    options: Options,
) -> str:
    return digest_of(
        [
            VERSION,
            TILE_NBYTES,
            world_size,
            options.layout,
            options.self_contained,
            options.max_file_nbytes,
            options.drop_unused,
            [checkpoint.folder.repo, checkpoint.folder.revision],
            [(file.name, file.nbytes, digest_of(file.header.raw)) for file in checkpoint.files],
            # A commit of the hub fixes the content; a folder's files are known by their sizes and times.
            [] if checkpoint.folder.revision else [file.identity for file in checkpoint.files],
            kept,
            resolution.modules,
            resolution.attributes,
            resolution.ties,
        ]
    )


def _program(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], files: tuple[PlannedFile, ...]) -> Program:
    inputs = {
        name: build_input(
            name,
            source.stored.dtype,
            source.stored.shape,
            source.file,
            checkpoint.files[source.file].header.data_offset + source.stored.begin,
        )
        for name, source in checkpoint.tensors.items()
    }
    places: dict[str, list[Place]] = {name: [] for name in tensors}
    for position, file in enumerate(files):
        for shard in file.shards:
            offset = len(file.header) + file.tensors[shard.name].begin
            places[shard.name].append(Place(position, offset, shard.rank))
    moves = split_moves(tensors, inputs, places)
    return build_program((f.name for f in checkpoint.files), (f.name for f in files), moves)


def default_output(model: str | Path, world_size: int, subfolder: str = "") -> Path:
    """Return where a split goes by default: beside a folder, in the working directory for a hub id.

    >>> default_output("org/Name", 4).as_posix()
    'Name-tp4'
    """
    path = Path(model)
    name = re.sub(r"[/\\]", "-", subfolder.strip("/")) if subfolder else ""
    if path.is_dir():
        resolved = path.absolute() if path.name not in ("", ".", "..") else path.resolve()
        return resolved.with_name("-".join(filter(None, (resolved.name, name, f"tp{world_size}"))))
    return Path("-".join(filter(None, (path.name, name, f"tp{world_size}"))))


def reason_whole(resolution: Resolution, name: str) -> str:
    """Return why a tensor is on every rank."""
    rule = resolution.rules.get(name)
    if rule is None:
        return "no rule names it"
    style = STYLES[rule.style]
    return f"{rule.pattern} = {rule.style}" + ("" if not style.cuts else ", which keeps it whole")
