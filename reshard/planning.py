"""Planning: everything that a split will do, decided from headers and integers before a byte moves."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from manifests.checking import MAX_RANKS
from manifests.contents import VERSION
from manifests.errors import CheckpointError, PlanError
from manifests.manifest import TILE_NBYTES, Model, Rule, Tensor, digest_of
from manifests.shown import shown, shown_name
from manifests.styles import resolve_style
from manifests.wire import PartTable, TensorTable
from reshard import placing
from reshard.casting import cast_tensors
from reshard.catalogue import Architecture
from reshard.choosing import build_tensors, choose_architecture, choose_plan
from reshard.collecting import without_collector
from reshard.model import Model as RunningModel
from reshard.moves import Inputs, build_program, split_moves
from reshard.movetable import Places
from reshard.options import Options, check_options
from reshard.placing import Resolution, check_degree
from reshard.plans import Plan
from reshard.program import Program
from reshard.proof import check_program
from reshard.rankfile import FileOptions, PlannedFile, plan_files
from reshard.recipes.pullback import in_stored_order, is_as_stored, pull_back
from reshard.sizes import ScopedSizes, scoped_sizes
from reshard.sources.checkpoint import Checkpoint, open_checkpoint
from reshard.sources.folder import Folder, LocalFolder
from reshard.ties import find_ties

_PACKED_WORDS = ("qweight", "qzeros", "g_idx", "weight_packed", "absmax", "quant_map", "quant_state.")
_PACKED = re.compile(r"[._](qweight|qzeros|g_idx|weight_packed|absmax|quant_map|quant_state\..*)$")
"""Ends names of numbers packed by a format that is not read."""


class SplitPlan(NamedTuple):
    """A split, decided and not yet made.

    Attributes:
        checkpoint: The source, by its headers.
        model: The class that the tensors are for.
        plan: The plan, its rules under the names of the layout.
        resolution: What it makes of every tensor.
        world_size: Number of ranks.
        options: What was chosen.
        key: What decides the output bytes, hashed.
        files: The files that will be written.
        program: What will be moved.
        dropped: Stored names of the tensors that are left out.
        carried: xxh3-128 of the files that are carried over; empty for the hub, whose commit fixes them.
    """

    checkpoint: Checkpoint
    model: Model
    plan: Plan
    resolution: Resolution
    world_size: int
    options: Options
    key: str
    files: tuple[PlannedFile, ...]
    program: Program
    dropped: tuple[str, ...]
    carried: Mapping[str, str]

    @property
    def layout(self) -> str:
        """Whose names and layout the tensors have: "runtime" or "checkpoint"."""
        return self.options.layout

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that applied."""
        return (*self.plan.rules, *(self.plan.expert_rules if self.options.experts > 1 else ()))

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
    if not str(model).strip():
        raise CheckpointError("MODEL is empty; give a folder or a hub id (org/name)")
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises where a folder above may not be searched
        if options.revision:
            raise CheckpointError(f"{model}: a folder has no revision")
        return LocalFolder(path / options.subfolder if options.subfolder else path)
    if os.path.isfile(path):  # noqa: PTH113
        raise CheckpointError(f"{model}: no such folder: it is a file; MODEL is the folder that holds it")
    from reshard.sources.hub import is_repo_id
    from reshard.sources.hub import locate as locate_repo

    if os.path.lexists(path) or not is_repo_id(str(model)):
        raise CheckpointError(f"{model}: no such folder, and not a hub id (org/name)")
    try:
        return locate_repo(str(model), options.revision, options.subfolder)
    except CheckpointError as error:
        raise CheckpointError(f"{model}: no such folder here, and as a hub id: {error}") from error


@without_collector()
def plan_split(folder: Folder, world_size: int, options: Options) -> SplitPlan:
    """Decide a split of the checkpoint in a folder.

    Raises:
        CheckpointError: The checkpoint is broken, or of a kind that is not split.
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
    """
    world = check_degree(world_size, options.experts, options.uneven)
    check_options(options)
    checkpoint = open_checkpoint(folder, options.variant)
    _refuse_unsupported_quantization(checkpoint)
    architecture = choose_architecture(checkpoint, options)
    # The built-in plan speaks of the running model's tensors, whatever the layout of those that are written.
    pulled = options.layout == "checkpoint" and options.plan is None
    tensors = build_tensors(checkpoint, architecture, options._replace(layout="runtime") if pulled else options)
    stored = checkpoint.tensors.stored.made() if pulled else {}
    if pulled:
        tensors = in_stored_order(tensors, stored)
    ties = find_ties(checkpoint, architecture, tensors, options)
    plan = choose_plan(checkpoint, architecture, tensors, ties, options, world_size)
    model = RunningModel(tensors, model_sizes(plan, checkpoint, architecture), ties, _scale_blocks(checkpoint))
    resolution = placing.resolve(model, plan, world)
    if world_size > MAX_RANKS:
        raise PlanError(f"tp: {world_size} ranks; {MAX_RANKS} at most, a file each")
    if pulled:
        resolution = pull_back(resolution, stored, world_size, plan.label)
    loadable = is_as_stored(tensors) if pulled else _runs_as_written(checkpoint, architecture, options)
    # What is unused of a tensor that is used otherwise stays: the tensor could not be merged without it.
    unused = tuple(name for name, tensor in resolution.tensors.items() if tensor.unused and not tensor.parts)
    dropped = unused if options.drop_unused else ()
    kept = resolution.tensors
    if dropped:
        kept = {name: tensor for name, tensor in kept.items() if name not in dropped}
    kept = cast_tensors(kept, options.dtype, architecture, checkpoint.config)
    carried = _carried_hashes(checkpoint)
    key = _key(checkpoint, carried, resolution, kept, world_size, options)
    files = plan_files(kept, world_size, key, FileOptions(options.self_contained, options.max_file_nbytes))
    program = _program(checkpoint, kept, files)
    check_program(program, [file.nbytes for file in files], [file.data_offset for file in files])
    return SplitPlan(
        checkpoint=checkpoint,
        model=_model_of(checkpoint, architecture, options, loadable=loadable),
        plan=plan,
        resolution=resolution._replace(tensors=kept),
        world_size=world_size,
        options=options,
        key=key,
        files=files,
        program=program,
        dropped=dropped,
        carried=carried,
    )


def model_sizes(plan: Plan, checkpoint: Checkpoint, architecture: Architecture | None) -> ScopedSizes:
    """Return the sizes that a plan's layouts are bound with."""
    return scoped_sizes(plan.sizes, checkpoint.config, architecture)


def _refuse_unsupported_quantization(checkpoint: Checkpoint) -> None:
    quantization = checkpoint.config.get("quantization_config")
    if not quantization:
        text = "\n".join(checkpoint.tensors)
        likely = any(word in text for word in _PACKED_WORDS)
        if likely and (packed := next(filter(_PACKED.search, checkpoint.tensors), "")):
            raise CheckpointError(
                f"{checkpoint.folder.label}: {shown_name(packed)}: quantized; "
                "of the quantized formats only fp8 is split"
            )
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise CheckpointError(
            f"{checkpoint.folder.label}: quantized by {shown(method)}; of the quantized formats only fp8 is split"
        )


def _scale_blocks(checkpoint: Checkpoint) -> tuple[int, ...]:
    quantization = checkpoint.config.get("quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if blocks is None:
        return ()
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(b) is int and b > 0 for b in blocks):
        raise CheckpointError(
            f"{checkpoint.folder.label}/config.json: weight_block_size {shown(blocks)} is not two sizes"
        )
    return tuple(blocks)


def _model_of(checkpoint: Checkpoint, architecture: Architecture | None, options: Options, *, loadable: bool) -> Model:
    """Return the class that the tensors are for; without a library if it does not take them as they are."""
    if architecture is not None and options.layout == "runtime":
        return Model(architecture.library, architecture.model_type, architecture.name)
    config = checkpoint.config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("_class_name", "")
    library = "transformers" if "model_type" in config else "diffusers" if "_class_name" in config else ""
    return Model(library if loadable else "", str(config.get("model_type", "")), str(name))


def _runs_as_written(checkpoint: Checkpoint, architecture: Architecture | None, options: Options) -> bool:
    """Tell whether the class takes the tensors in the layout in which they are written."""
    if architecture is None or options.layout == "runtime":
        return True
    try:
        return is_as_stored(build_tensors(checkpoint, architecture, options._replace(layout="runtime")))
    except CheckpointError:
        return False


def _key(
    checkpoint: Checkpoint,
    carried: Mapping[str, str],
    resolution: Resolution,
    kept: Mapping[str, Tensor],
    world_size: int,
    options: Options,
) -> str:
    folder = checkpoint.folder
    return digest_of(
        [
            VERSION,
            TILE_NBYTES,
            world_size,
            options.layout,
            options.self_contained,
            options.max_file_nbytes,
            options.drop_unused,
            # A commit of the hub fixes the content of all files of a folder in it.
            [folder.label, folder.revision] if folder.revision else ["", ""],
            [(file.name, file.nbytes, file.header.digest) for file in checkpoint.files],
            # Elsewhere weight files are known by their sizes and times, and the small ones by their content.
            [] if folder.revision else [*(file.identity for file in checkpoint.files), *sorted(carried.items())],
            TensorTable.of(kept),
            PartTable.of(kept, checkpoint.tensors),
            resolution.modules,
            resolution.attributes,
            resolution.ties,
        ]
    )


def _carried_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    folder = checkpoint.folder
    if folder.revision:
        return {}
    return {name: xxhash.xxh3_128_hexdigest(folder.read(name)) for name in checkpoint.carried}


def _program(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], files: tuple[PlannedFile, ...]) -> Program:
    inputs = Inputs((file.header.tensors, file.header.data_offset) for file in checkpoint.files)
    moves = split_moves(tensors, inputs, Places.in_files(tensors, [file.places for file in files]))
    return build_program((f.name for f in checkpoint.files), (f.name for f in files), moves)


def default_output(model: str | Path, world_size: int, subfolder: str = "") -> Path:
    """Return where a split goes by default: beside a folder, in the working directory for a hub id.

    >>> default_output("org/Name", 4).as_posix()
    'Name-tp4'
    """
    path = Path(model)
    name = re.sub(r"[/\\]", "-", subfolder.strip("/")) if subfolder else ""
    if path.is_dir():
        named = path if path.name not in ("", ".", "..") else path.resolve()
        return named.with_name("-".join(filter(None, (named.name, name, f"tp{world_size}"))))
    return Path("-".join(filter(None, (path.name, name, f"tp{world_size}"))))


def reason_whole(resolution: Resolution, name: str) -> str:
    """Return why a tensor is on every rank."""
    rule = resolution.rules.get(name)
    if rule is None:
        return "no rule names it"
    style = resolve_style(rule.style)
    return f"{rule.pattern} = {rule.style}" + ("" if not style.cuts else ", which keeps it whole")
