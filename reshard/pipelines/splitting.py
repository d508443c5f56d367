"""Splitting a pipeline: every part in its folder, then the record, then one rename."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from manifests.errors import CheckpointError
from manifests.manifest import Manifest
from manifests.pipeline import PIPELINE_NAME, CarriedFile, PipelineRecord, encode_record
from reshard.engine.limits import BUDGET_NBYTES
from reshard.options import Options
from reshard.pipelines.finding import INDEX_NAME
from reshard.pipelines.planning import PipelinePlan, plan_pipeline
from reshard.planning import default_output, plan_split
from reshard.publishing.destination import check_apart, check_destination
from reshard.publishing.files import sync_folder, write_synced
from reshard.publishing.staging import held_nbytes, mend, staged
from reshard.sources.folder import Folder, LocalFolder
from reshard.splitting import TotalProgress, write_split

_BLOCK_NBYTES = 1 << 20


def plan(model: str | Path, *, tp: int, whole: tuple[str, ...] = (), **options: Any) -> PipelinePlan:  # noqa: ANN401 - the fields of Options
    """Decide the split of a pipeline without making it.

    Args:
        model: A folder or a hub id.
        tp: Number of ranks.
        whole: Names of parts that every rank is to load whole.
        options: The fields of `reshard.options.Options`.

    Raises:
        CheckpointError: The pipeline or one of its parts is broken.
        PlanError: No part has a plan, or a plan was given.
        DegreeError: The number of ranks does not divide a part.
    """
    return plan_pipeline(model, tp, Options(**options), whole)


def split(
    model: str | Path,
    out: str | Path | None = None,
    *,
    tp: int,
    whole: tuple[str, ...] = (),
    force: bool = False,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
    **options: Any,  # noqa: ANN401 - the fields of Options
) -> PipelineRecord:
    """Split a pipeline of diffusers: every part that has a plan.

    Args:
        model: A folder or a hub id.
        out: The folder to make; as for `reshard.split` if not given.
        tp: Number of ranks.
        whole: Names of parts that every rank is to load whole.
        force: Whether an older split under this name is replaced, once the new one is whole.
        jobs: Number of worker threads.
        memory: Bytes that the process may take.
        progress: Called with the bytes finished so far and their total.
        options: The fields of `reshard.options.Options`.

    Returns:
        The record of the split.

    Raises:
        CheckpointError: The pipeline is broken, or changed while it was read.
        PlanError: No part has a plan, or a plan was given.
        DegreeError: The number of ranks does not divide a part.
        OutputError: The destination exists, lacks space, or cannot be written.
    """
    planned = plan(model, tp=tp, whole=whole, **options)
    destination = Path(out) if out is not None else default_output(model, tp)
    return carry_out(planned, destination, force=force, jobs=jobs, memory=memory, progress=progress)


def carry_out(
    planned: PipelinePlan,
    out: Path,
    *,
    force: bool = False,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
) -> PipelineRecord:
    """Make a pipeline's split that was decided; parts of a hub id are downloaded here.

    Raises:
        CheckpointError: The source cannot be read, or changed while it was read.
        OutputError: The destination exists, lacks space, or cannot be written.
    """
    if isinstance(planned.folder, LocalFolder):
        check_apart(out, planned.folder.path)
    mend(out)
    check_destination(out, planned.nbytes_written - held_nbytes(out), force=force)
    splits: dict[str, Manifest] = {}
    carried: dict[str, CarriedFile] = {}
    done = 0

    def show(now: int, _: int = 0) -> None:
        if progress is not None:
            progress(done + now, planned.nbytes_read)

    with staged(out, force=force) as hidden:
        staging = hidden.content
        for name in planned.folder.names():
            if name == INDEX_NAME or name.upper().startswith(("LICENSE", "NOTICE")):
                content = planned.folder.read(name)
                write_synced(staging / name, content)
                carried[name] = CarriedFile(len(content), xxhash.xxh3_128_hexdigest(content))
        for name, part in planned.components.items():
            (staging / name).mkdir()
            if part.split is not None:
                folder = _local(part.split.checkpoint.folder, tuple(part.split.checkpoint.needed))
                local = plan_split(folder, planned.world_size, part.split.options)
                splits[name] = write_split(local, staging / name, jobs=jobs, memory=memory, progress=show)
                done += local.program.nbytes_read
            else:
                folder = _local(part.folder, part.files)
                for file in part.files:
                    carried[f"{name}/{file}"] = copy_hashed(folder.path / file, staging / name / file, show)
                    done += carried[f"{name}/{file}"].nbytes
            sync_folder(staging / name)
        record = PipelineRecord(
            pipeline=planned.pipeline,
            world_size=planned.world_size,
            variant=planned.options.variant,
            splits={name: manifest.key for name, manifest in splits.items()},
            whole={name: part.whole for name, part in planned.components.items() if part.whole},
            carried=carried,
        )
        write_synced(staging / PIPELINE_NAME, encode_record(record))
    return record


def _local(folder: Folder, names: tuple[str, ...]) -> LocalFolder:
    return folder if isinstance(folder, LocalFolder) else folder.download(names)


def copy_hashed(source: Path, target: Path, progress: Callable[[int], None] = lambda _: None) -> CarriedFile:
    """Copy a file, hash it in passing, and make its bytes durable.

    Raises:
        CheckpointError: The source cannot be read.
        OSError: The target cannot be written.
    """
    hasher, nbytes, block = xxhash.xxh3_128(), 0, memoryview(bytearray(_BLOCK_NBYTES))
    try:
        stream = source.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from error
    with stream, target.open("xb", buffering=0) as file:
        while got := stream.readinto(block):
            hasher.update(block[:got])
            file.write(block[:got])
            nbytes += got
            progress(nbytes)
        os.fsync(file.fileno())
    return CarriedFile(nbytes, hasher.hexdigest())
