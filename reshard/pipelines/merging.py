"""Verifying a split pipeline, and giving the pipeline back."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manifests.errors import DamageError, ManifestError
from manifests.manifest import read_manifest
from manifests.pipeline import PipelineRecord, check_carried_file, read_pipeline
from reshard import merging, verifying
from reshard.engine.limits import BUDGET_NBYTES
from reshard.pipelines.splitting import copy_hashed
from reshard.publishing.destination import check_apart, check_destination
from reshard.publishing.files import sync_folder
from reshard.publishing.staging import mend, staged
from reshard.splitting import TotalProgress


class PipelineReport(NamedTuple):
    """What was found whole.

    Attributes:
        parts: The report of every split part.
        carried: Number of carried files.
        nbytes: Bytes that were hashed.
    """

    parts: dict[str, verifying.Report]
    carried: int
    nbytes: int


def verify(out: str | Path, *, jobs: int = 2, progress: TotalProgress | None = None) -> PipelineReport:
    """Check that every split part and every carried file is what was written.

    Args:
        out: The folder of the split pipeline.
        jobs: Number of worker threads.
        progress: Called with the bytes of a part finished so far and their total.

    Raises:
        ManifestError: The folder holds no finished split of a pipeline.
        DamageError: Something differs; ``findings`` has a line for every place.
    """
    folder = Path(out)
    record = read_pipeline(folder)
    findings = [
        line
        for name, expected in record.carried.items()
        for line in check_carried_file(folder, name, expected, content=True)
    ]
    reports: dict[str, verifying.Report] = {}
    for name in record.splits:
        try:
            _check_key(folder, record, name)
            reports[name] = verifying.verify(folder / name, jobs=jobs, progress=progress)
        except DamageError as error:
            findings += (f"{name}/{line}" for line in error.findings)
        except ManifestError as error:
            findings.append(f"{name}: {error}")
    if findings:
        lines = "\n".join(f"  {line}" for line in findings)
        raise DamageError(f"{folder}: damaged:\n{lines}", findings=tuple(findings))
    nbytes = sum(file.nbytes for file in record.carried.values()) + sum(report.nbytes for report in reports.values())
    return PipelineReport(reports, len(record.carried), nbytes)


def _check_key(folder: Path, record: PipelineRecord, name: str) -> None:
    key = read_manifest(folder / name).key
    if key != record.splits[name]:
        raise ManifestError(f"of another split: its key is {key}, {record.splits[name]} expected")


def merge(
    out: str | Path,
    destination: str | Path,
    *,
    converted: bool = False,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
) -> dict[str, merging.Merged]:
    """Give a pipeline back, every part in its folder.

    Args:
        out: The folder of the split pipeline.
        destination: The folder to make.
        converted: As for `reshard.merge`.
        jobs: Number of worker threads.
        memory: Bytes that the process may take.
        progress: Called with the bytes of a part finished so far and their total.

    Returns:
        What `reshard.merge` tells, by the names of the split parts.

    Raises:
        ManifestError: The folder holds no finished split of a pipeline, or one that converted numbers.
        DamageError: Something is not what was written; nothing is published.
        OutputError: The destination exists, lacks space, or cannot be written.
    """
    folder, destination = Path(out), Path(destination)
    record = read_pipeline(folder)
    for name in record.splits:
        _check_key(folder, record, name)
    check_apart(destination, folder)
    nbytes = sum(file.nbytes for file in record.carried.values())
    nbytes += sum(file.nbytes for name in record.splits for file in read_manifest(folder / name).files)
    mend(destination)
    check_destination(destination, nbytes, force=False)
    merged: dict[str, merging.Merged] = {}
    with staged(destination, force=False) as hidden:
        staging = hidden.content
        for name in record.splits:
            merged[name] = merging.merge(
                folder / name, staging / name, converted=converted, jobs=jobs, memory=memory, progress=progress
            )
        for name, expected in record.carried.items():
            (staging / name).parent.mkdir(exist_ok=True)
            if copy_hashed(folder / name, staging / name) != expected:
                finding = f"{name}: its content is not what was carried over"
                raise DamageError(f"{folder}: damaged:\n  {finding}", findings=(finding,))
        for part in _folders(record):
            sync_folder(staging / part)
    return merged


def _folders(record: PipelineRecord) -> Iterator[str]:
    yield from dict.fromkeys(name.partition("/")[0] for name in record.carried if "/" in name)
