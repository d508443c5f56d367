"""Splitting: carries out a plan of `reshard.planning` and publishes the result."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from manifests.columns import Extents, Numbers, SourceTensors
from manifests.errors import CheckpointError
from manifests.manifest import MANIFEST_NAME, Manifest, Source, SourceFile, SplitFile, encoded
from manifests.stored import StoredTensors, Type
from reshard.collecting import without_collector
from reshard.engine import Hashes, hashes_in_files, run_program
from reshard.engine.limits import BUDGET_NBYTES
from reshard.options import Options, refuse_unproved
from reshard.planning import SplitPlan, default_output, locate, plan_split
from reshard.program import Program
from reshard.publishing.destination import check_apart, check_destination
from reshard.publishing.files import create_sized, is_sized, sync_file, write_synced
from reshard.publishing.staging import Staging, held_nbytes, kept, mend, staged
from reshard.sources.checkpoint import Checkpoint
from reshard.sources.folder import LocalFolder

TotalProgress = Callable[[int, int], None]
"""Called with the bytes finished so far and their total."""


def plan(model: str | Path, *, tp: int, **options: Any) -> SplitPlan:  # noqa: ANN401 - the fields of Options
    """Decide a split without making it: only headers are read, and only headers are fetched from the hub.

    Args:
        model: A folder or a hub id.
        tp: Number of ranks.
        options: The fields of `reshard.options.Options`.

    Raises:
        CheckpointError: The checkpoint is broken, or of a kind that is not split.
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
    """
    chosen = Options(**options)
    return plan_split(locate(model, chosen), tp, chosen)


def split(
    model: str | Path,
    out: str | Path | None = None,
    *,
    tp: int,
    force: bool = False,
    resume: bool = True,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
    **options: Any,  # noqa: ANN401 - the fields of Options
) -> Manifest:
    """Split a checkpoint for tensor parallelism.

    Args:
        model: A folder or a hub id.
        out: The folder to make; ``MODEL-tpN`` beside a folder, in the working directory for a hub id, if not given.
        tp: Number of ranks.
        force: Whether an older split under this name is replaced, once the new one is whole.
        resume: Whether what a killed run of the same split has made is gone on with; it is removed otherwise.
        jobs: Number of worker threads.
        memory: Bytes that the process may take, its buffers above all.
        progress: Called with the bytes finished so far and their total.
        options: The fields of `reshard.options.Options`.

    Returns:
        The manifest of the split.

    Raises:
        CheckpointError: The checkpoint is broken, of a kind that is not split, or changed while it was read.
        PlanError: No plan, or one that does not fit.
        DegreeError: The number of ranks does not divide the model.
        OutputError: The destination exists, lacks space, or cannot be written.
    """
    planned = plan(model, tp=tp, **options)
    destination = Path(out) if out is not None else default_output(model, tp, planned.options.subfolder)
    return carry_out(planned, destination, force=force, resume=resume, jobs=jobs, memory=memory, progress=progress)


def carry_out(
    planned: SplitPlan,
    out: Path,
    *,
    force: bool = False,
    resume: bool = True,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
) -> Manifest:
    """Make a split that was decided. The weights of a hub id are downloaded here, after everything was checked.

    Args:
        planned: The split, from `plan`.
        out: The folder to make.
        force: Whether an older split under this name is replaced, once the new one is whole.
        resume: Whether what a killed run of the same split has made is gone on with; it is removed otherwise.
        jobs: Number of worker threads.
        memory: Bytes that the process may take, its buffers above all.
        progress: Called with the bytes finished so far and their total.

    Raises:
        CheckpointError: The source cannot be read, or changed while it was read.
        OutputError: The destination exists, lacks space, or cannot be written.
        PlanError: The plan is one that is proposed.
    """
    refuse_unproved(planned.options, planned.checkpoint.folder.label)
    folder = planned.checkpoint.folder
    if isinstance(folder, LocalFolder):
        check_apart(out, folder.path)
    mend(out)
    check_destination(out, planned.nbytes_written - held_nbytes(out), force=force)
    if not isinstance(folder, LocalFolder):
        local = folder.download(planned.checkpoint.needed)
        planned = plan_split(local, planned.world_size, planned.options)

    def keep(staging: Staging, error: BaseException) -> str:
        return kept(staging, error, planned.nbytes_written) if _is_unchanged(planned) else ""

    with staged(out, force=force, key=planned.key, resume=resume, keep=keep) as staging:
        return write_split(
            planned, staging.content, jobs=jobs, memory=memory, progress=progress, journal=staging.journal
        )


def write_split(
    planned: SplitPlan,
    folder: Path,
    *,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
    journal: Path | None = None,
) -> Manifest:
    """Write all files of a split into a folder, the manifest last.

    Args:
        planned: The split.
        folder: The folder.
        jobs: Number of worker threads.
        memory: Bytes that the process may take, its buffers above all.
        progress: Called with the bytes finished so far and their total.
        journal: Where it is noted what is finished; what is finished already is not written again.

    Raises:
        CheckpointError: The source cannot be read, or changed while it was read.
        OutputError: A file cannot be written.
    """
    how: dict[str, Any] = {"jobs": jobs, "memory": memory, "progress": progress, "journal": journal}
    return write_manifest(planned, write_files(planned, planned.program, folder, **how), folder)


def write_files(
    planned: SplitPlan,
    program: Program,
    folder: Path,
    *,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
    journal: Path | None = None,
) -> Hashes:
    """Write the files of a program, which is the split's or a share of it, and make their bytes durable.

    What the folder holds already is gone on with if there is a journal, and else must not be there.

    Raises:
        CheckpointError: The source cannot be read, or changed while it was read.
        OutputError: A file cannot be written.
    """
    files = {file.name: file for file in planned.files}
    sized = {name: (files[name].header, files[name].nbytes) for name in program.output_files}
    paths = prepare(folder, sized, journal)
    places = {file.name: file.path for file in planned.checkpoint.files if file.path is not None}
    sources = [places[name] for name in program.input_files]
    report = counted(progress, program.nbytes_read)
    with without_collector():
        hashes = run_program(
            program, sources, paths, jobs=jobs, memory=memory, progress=report, journal=journal, key=planned.key
        )
    for path in paths:
        sync_file(path)
    _check_unchanged(planned.checkpoint)
    return hashes


def prepare(
    folder: Path, sized: Mapping[str, tuple[Callable[[], Iterable[bytes]], int]], journal: Path | None
) -> list[Path]:
    """Make the files that the engine writes, or leave them as they are if an earlier run made all of them.

    Args:
        folder: Where they are; nothing else is in it afterwards.
        sized: What gives the header of every file, in pieces, and the bytes of the file, by name.
        journal: What the earlier run noted; removed if its files are not as they should be.
    """
    paths = [folder / name for name in sized]
    made = all(is_sized(folder / name, header(), nbytes) for name, (header, nbytes) in sized.items())
    for path in [*folder.iterdir()] if journal is not None else []:
        if not made or path.name not in sized:
            path.unlink()
    if journal is not None and not made:
        journal.unlink(missing_ok=True)
    for name, (header, nbytes) in sized.items() if not made else ():
        create_sized(folder / name, header(), nbytes)
    return paths


def write_manifest(planned: SplitPlan, hashes: Hashes, folder: Path) -> Manifest:
    """Carry over the other files of the source and write the manifest, the last file of a split."""
    manifest = _build_manifest(planned, hashes, _carry(planned, folder))
    del hashes  # the manifest has them, and of 100,000 tensors they are many
    write_synced(folder / MANIFEST_NAME, encoded(manifest))
    return manifest


def counted(progress: TotalProgress | None, total: int) -> Callable[[int], None] | None:
    """Return a callback that adds up what workers finish."""
    if progress is None:
        return None
    lock = Lock()
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    progress(0, total)
    return add


def _check_unchanged(checkpoint: Checkpoint) -> None:
    folder = checkpoint.folder
    for file in checkpoint.files:
        if isinstance(folder, LocalFolder) and folder.identity(file.name) != file.identity:
            raise CheckpointError(f"{checkpoint.folder.label}/{file.name}: changed while it was read; split again")


def _is_unchanged(planned: SplitPlan) -> bool:
    """Tell whether a checkpoint is still what it was when the split was planned."""
    try:
        _check_unchanged(planned.checkpoint)
        for name in planned.carried:
            _read_carried(planned, name)
    except (CheckpointError, OSError):
        return False
    return True


def _read_carried(planned: SplitPlan, name: str) -> tuple[bytes, str]:
    """Return the bytes of a file that is carried over, and their hash."""
    source = planned.checkpoint.folder
    content = source.read(name)
    found = xxhash.xxh3_128_hexdigest(content)
    if planned.carried.get(name, found) != found:
        raise CheckpointError(f"{source.label}/{name}: changed while the weights were read; split again")
    return content, found


def _carry(planned: SplitPlan, folder: Path) -> dict[str, str]:
    carried: dict[str, str] = {}
    for name in planned.checkpoint.carried:
        content, carried[name] = _read_carried(planned, name)
        write_synced(folder / name, content)
    return carried


def _build_manifest(planned: SplitPlan, hashes: Hashes, carried: dict[str, str]) -> Manifest:
    resolution = planned.resolution
    read, written = hashes_in_files(planned.program, hashes)
    return Manifest(
        key=planned.key,
        world_size=planned.world_size,
        layout=planned.layout,
        model=planned.model,
        source=_build_source(planned, read),
        plan=planned.rules,
        sizes=resolution.sizes,
        tensors=resolution.tensors,
        files=tuple(
            SplitFile(
                name=file.name,
                owners=file.owners,
                nbytes=file.nbytes,
                data_offset=file.data_offset,
                header=file.digest,
                tensors=Extents(file.names, [shard.nbytes for shard in file.shards], tiles),
            )
            for file, tiles in zip(planned.files, written, strict=True)
        ),
        ties=resolution.ties,
        modules=resolution.modules,
        attributes=resolution.attributes,
        carried=carried,
    )


def _build_source(planned: SplitPlan, read: Sequence[str]) -> Source:
    """Return the source, given the hashes of all that was read of every file."""
    checkpoint = planned.checkpoint
    files = tuple(
        SourceFile(
            name=file.name,
            nbytes=file.nbytes,
            header=file.header.digest,
            tensors=_build_stored(file.header.tensors, tiles, planned.dropped),
            metadata=file.header.metadata,
        )
        for file, tiles in zip(checkpoint.files, read, strict=True)
    )
    folder = checkpoint.folder
    return Source(files, checkpoint.index_name, folder.repo, folder.revision, planned.dropped)


def _build_stored(tensors: StoredTensors, tiles: str, dropped: Collection[str]) -> SourceTensors:
    """Return the tensors of a source file, in the order of its bytes."""
    names, types = tensors.names, tensors.types
    if any([*column] != sorted(column) for column in (tensors.begins, tensors.ends)):
        spans = [*zip(tensors.begins, tensors.ends, strict=True)]
        order = sorted(range(len(spans)), key=spans.__getitem__)
        names, types = [names[at] for at in order], [types[at] for at in order]
    numbers = Numbers[Type]()
    known = {key: numbers[kind] for key, kind in {id(kind): kind for kind in types}.items()}
    return SourceTensors(names, list(numbers), [*map(known.__getitem__, map(id, types))], tiles, dropped)
