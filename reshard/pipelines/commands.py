"""What the command line does where MODEL or OUT is a pipeline: the same commands, part by part."""

from pathlib import Path
from time import perf_counter
from typing import Any

from manifests.pipeline import read_pipeline
from reshard.output import print_result, print_summary, progress_bar
from reshard.pipelines import merging, report, splitting
from reshard.planning import default_output


def split(
    model: str,
    tp: int,
    out: Path | None,
    whole: tuple[str, ...],
    chosen: dict[str, Any],
    *,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **how: Any,  # noqa: ANN401 - as splitting's
) -> None:
    """Split a pipeline; the arguments are those of the command."""
    started = perf_counter()
    out = out or default_output(model, tp)
    planned = splitting.plan(model, tp=tp, whole=whole, **chosen)
    facts = report.build_split(planned, str(out))
    if dry_run:
        print_result(facts, report.format_split(facts), as_json=as_json)
        return
    with progress_bar("split", quiet=quiet) as progress:
        splitting.carry_out(planned, out, progress=progress, **how)
    facts["seconds"] = round(perf_counter() - started, 3)
    print_result(facts, [str(out)], as_json=as_json)
    print_summary(report.format_split(facts), quiet=quiet or as_json)


def show(out: Path, *, as_json: bool) -> None:
    """Print what a split pipeline holds."""
    facts = report.build_show(str(out), read_pipeline(out))
    print_result(facts, report.format_show(facts), as_json=as_json)


def verify(out: Path, jobs: int, *, quiet: bool, as_json: bool) -> None:
    """Check a split pipeline."""
    with progress_bar("verify", quiet=quiet) as progress:
        found = merging.verify(out, jobs=jobs, progress=progress)
    facts = report.build_verified(str(out), found)
    print_result(facts, [], as_json=as_json)
    print_summary(report.format_verified(facts), quiet=quiet or as_json)


def merge(out: Path, dest: Path, *, quiet: bool, as_json: bool, **how: Any) -> None:  # noqa: ANN401 - as merging's
    """Give a pipeline back."""
    with progress_bar("merge", quiet=quiet) as progress:
        merged = merging.merge(out, dest, progress=progress, **how)
    facts = report.build_merged(str(dest), merged)
    print_result(facts, [str(dest)], as_json=as_json)
    print_summary(report.format_merged(facts), quiet=quiet or as_json)
