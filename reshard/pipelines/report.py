"""Reports on pipelines: the facts of their parts, each as `reshard.report` builds them, and their lines."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from manifests.manifest import read_manifest
from manifests.pipeline import PipelineRecord
from reshard import lines, merging, report
from reshard.lines import Facts
from reshard.pipelines.merging import PipelineReport
from reshard.pipelines.planning import PipelinePlan


def build_split(planned: PipelinePlan, out: str) -> Facts:
    """Return what the split of a pipeline will hold."""
    parts = planned.components
    return {
        "out": out,
        "source": planned.folder.label,
        "pipeline": planned.pipeline,
        "world_size": planned.world_size,
        "parts": {name: report.build_split(part.split) for name, part in parts.items() if part.split},
        "whole": {name: {"reason": part.whole, "nbytes": part.nbytes} for name, part in parts.items() if part.whole},
        "nbytes_read": planned.nbytes_read,
        "nbytes_written": planned.nbytes_written,
    }


def build_show(out: str, record: PipelineRecord) -> Facts:
    """Return what a split pipeline holds."""
    return {
        "out": out,
        "pipeline": record.pipeline,
        "world_size": record.world_size,
        "parts": {
            name: report.build_show(name, read_manifest(Path(out) / name), every_tensor=False) for name in record.splits
        },
        "whole": {
            name: {
                "reason": reason,
                "nbytes": sum(file.nbytes for path, file in record.carried.items() if path.startswith(f"{name}/")),
            }
            for name, reason in record.whole.items()
        },
    }


def build_verified(out: str, found: PipelineReport) -> Facts:
    """Return what a verification found whole."""
    parts = {name: report.build_verified(name, part) for name, part in found.parts.items()}
    return {"out": out, "parts": parts, "carried": found.carried, "nbytes": found.nbytes}


def build_merged(destination: str, merged: Mapping[str, merging.Merged]) -> Facts:
    """Return what a merge gave back."""
    return {
        "destination": destination,
        "parts": {name: report.build_merged(name, part) for name, part in merged.items()},
    }


def format_split(facts: Facts) -> Iterator[str]:
    """Yield the lines on the split of a pipeline."""
    yield f"{facts['source']}: {facts['pipeline']}, tp {facts['world_size']}"
    for name, part in facts["parts"].items():
        yield f"{name}: divided"
        # The last line of each is on the bytes, which are counted for the pipeline.
        yield from (f"  {line}" for line in [*lines.format_split({**part, "out": ""})][:-1])
    yield from _format_whole(facts["whole"])
    read, written = lines.human_bytes(facts["nbytes_read"]), lines.human_bytes(facts["nbytes_written"])
    if "seconds" in facts:
        yield f"read {read}, wrote {written} in {facts['seconds']:.1f} s"
    else:
        yield f"would read {read} and write {written} to {facts['out']}"


def format_show(facts: Facts) -> Iterator[str]:
    """Yield the lines on a split pipeline."""
    yield f"{facts['out']}: {facts['pipeline']}, world size {facts['world_size']}"
    for part in facts["parts"].values():
        yield from lines.format_show(part)
    yield from _format_whole(facts["whole"])


def format_verified(facts: Facts) -> Iterator[str]:
    """Yield the lines on a verification."""
    for part in facts["parts"].values():
        yield from lines.format_verified(part)
    yield f"{facts['out']}: whole: {facts['carried']} carried files, {lines.human_bytes(facts['nbytes'])} hashed in all"


def format_merged(facts: Facts) -> Iterator[str]:
    """Yield the lines on a merge."""
    for name, part in facts["parts"].items():
        yield f"{name}:"
        yield from (f"  {line}" for line in lines.format_merged(part))


def _format_whole(whole: Facts) -> Iterator[str]:
    for name, part in whole.items():
        yield f"{name}: whole on every rank, {lines.human_bytes(part['nbytes'])}: {part['reason']}"
