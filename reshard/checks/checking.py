"""Checking: runs a model in one process and in the ranks of a plan on the same input, and compares module by module.

A misplaced style usually still runs and gives something plausible. Here it is named: the first module that parts from
one process, and the rule that is to blame. The checkpoint, or a tiny model of its class, is split into a temporary
folder; processes of `loader.check_worker` run it in float32 and leave traces, which are compared
(`reshard.checks.traces`) and judged (`reshard.checks.blaming`). torch is imported in those processes only.
"""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from manifests.errors import LoadError, PlanError
from reshard import report
from reshard.checks.blaming import Judge
from reshard.checks.traces import Comparison, Divisions, Trace
from reshard.checks.workers import run_ranks, run_tiny
from reshard.options import Options
from reshard.planning import SplitPlan, locate, plan_split
from reshard.publishing.destination import check_destination
from reshard.sources.folder import LocalFolder
from reshard.splitting import TotalProgress, write_split

Facts = dict[str, Any]

TOKENS = 12
TOLERANCE = 1e-4
"""The largest difference, relative to a tensor's largest value, that two orders of summing in float32 may make."""
COLLECTIVE_TIMEOUT_S = 3600


class Wanted(NamedTuple):
    """A check to be made.

    Attributes:
        planned: The split.
        label: What is checked, for messages.
        tiny: What was made smaller, or None if the checkpoint itself is run.
    """

    planned: SplitPlan
    label: str
    tiny: Facts | None = None


def check(
    model: str | Path,
    *,
    tp: int,
    tiny: bool = False,
    tokens: int = TOKENS,
    progress: TotalProgress | None = None,
    **options: Any,  # noqa: ANN401 - the fields of Options
) -> Facts:
    """Run a model in one process and in ``tp``, and tell where they part.

    Args:
        model: A folder or a hub id. With ``tiny`` it need hold no more than ``config.json``.
        tp: Number of ranks.
        tiny: Whether a small random model of the same class is run in place of the checkpoint.
        tokens: Number of ids in the prompt.
        progress: Called with the bytes split so far and their total.
        options: The fields of `reshard.options.Options`.

    Returns:
        What was found, as facts: ``right``, and where it is not, the ``finding``.

    Raises:
        CheckpointError: The checkpoint is broken, or of a kind that is not split.
        PlanError: No plan, or one that does not fit; also a number of ranks that does not divide the model.
        OutputError: The temporary folder lacks the space for the split.
        LoadError: The model cannot be run, in one process or in a rank, before its forward.
    """
    chosen = Options(**options)
    if chosen.layout != "runtime":
        raise PlanError(f"layout {chosen.layout}: a model runs in the runtime layout only; leave --layout out")
    folder = locate(model, chosen)
    with TemporaryDirectory(prefix="reshard-check-", ignore_cleanup_errors=True) as work:
        if tiny:
            wanted = plan_tiny(folder, tp, chosen, Path(work))
        else:
            wanted = Wanted(plan_split(folder, tp, chosen), folder.label)
        (facts,) = check_all([wanted], Path(work), tokens=tokens, progress=progress)
    if isinstance(facts, LoadError):
        raise facts
    return facts


def plan_tiny(folder: Any, tp: int, options: Options, work: Path) -> Wanted:  # noqa: ANN401 - a Folder
    """Make a tiny model of the class in a folder's ``config.json``, and plan its split.

    The checkpoint's own headers are planned first, where it has weights: what they refuse, the tiny model may not.
    """
    names = folder.names()
    if "config.json" not in names:
        raise LoadError(f"{folder.label}: no config.json, so there is no class to make a tiny model of")
    if any(name.endswith(".safetensors") for name in names):
        plan_split(folder, tp, options)
    made = run_tiny(folder.read("config.json"), work, tp, folder.label)
    local = LocalFolder(work / "tiny", label=f"the tiny model of {folder.label}")
    try:
        planned = plan_split(local, tp, options._replace(revision="", subfolder="", variant=""))
    except PlanError as error:
        if options.plan is None or type(error) is not PlanError:
            raise
        raise PlanError(
            f"{error}\n  the tiny model has {made['layers']} layers and smaller sizes; "
            "layer numbers and sizes that a plan writes as numbers fit only the whole model"
        ) from error
    return Wanted(planned, folder.label, made)


def check_all(
    checks: Sequence[Wanted],
    work: Path,
    *,
    tokens: int = TOKENS,
    timeout_s: int = COLLECTIVE_TIMEOUT_S,
    progress: TotalProgress | None = None,
) -> list[Facts | LoadError]:
    """Make checks for one number of ranks in one launch of processes.

    Args:
        checks: What to check, all for the same number of ranks.
        work: An empty folder.
        tokens: Number of ids in the prompts.
        timeout_s: How long a rank waits in a collective for one that failed, in seconds.
        progress: Called with the bytes of a split so far and their total.

    Returns:
        For every check what was found, or why it cannot be run.
    """
    jobs = [_prepare(wanted, work / str(number), progress) for number, wanted in enumerate(checks)]
    for job in jobs:
        job.update(tokens=tokens, timeout_s=timeout_s)
    (work / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(work, checks[0].planned.world_size)
    return [_conclude(wanted, Path(job["traces"]), tokens) for wanted, job in zip(checks, jobs, strict=True)]


def _prepare(wanted: Wanted, folder: Path, progress: TotalProgress | None) -> Facts:
    """Split into a folder; return the job for the processes."""
    planned = wanted.planned
    if planned.model.library != "transformers":
        raise LoadError(
            f"{wanted.label}: not a model of transformers ({planned.model.architecture or 'no class named'}), which is "
            "all that can be built here; compare the ranks of your own module as docs/plans.md does"
        )
    check_destination(folder / "split", planned.nbytes_written, force=False)
    source = planned.checkpoint.folder
    if not isinstance(source, LocalFolder):
        source = source.download(planned.checkpoint.needed)
        planned = plan_split(source, planned.world_size, planned.options)
    (folder / "split").mkdir(parents=True)
    write_split(planned, folder / "split", progress=progress)
    return {
        "label": wanted.label,
        "source": str(source.path.absolute()),
        "variant": planned.options.variant,
        "architecture": planned.model.architecture,
        "split": str(folder / "split"),
        "traces": str(folder),
    }


def _conclude(wanted: Wanted, traces: Path, tokens: int) -> Facts | LoadError:
    planned = wanted.planned
    whole = Trace(traces / "reference")
    if failed := whole.failed or (whole.raised and {"kind": "", "message": whole.raised["error"], "ours": False}):
        return LoadError(failed["message"] if failed["ours"] else _cannot_run(wanted.label, "one process", failed))
    ranks = [Trace(traces / f"rank-{rank}") for rank in range(planned.world_size)]
    failures = [trace.failed for trace in ranks if trace.failed is not None]
    if failures:
        # A rank that gives up for another's sake says so; the other's own reason says more.
        failed = min(failures, key=lambda one: "cannot go on" in one["message"])
        return LoadError(failed["message"] if failed["ours"] else _cannot_run(wanted.label, "a rank", failed))
    resolution, split = planned.resolution, report.build_split(planned)
    rules = {rule.pattern: rule for rule in planned.rules}
    comparison = Comparison(whole, ranks, Divisions(resolution.tensors, planned.world_size), TOLERANCE)
    judge = Judge(comparison, rules.values(), resolution.tensors, resolution.modules)
    finding = judge.find()
    known = [one for one in judge.compared if one.outcome != "unknown"]
    largest = sorted((one for one in known if not one.parted), key=lambda one: one.difference, reverse=True)
    unknown = Counter(one.why for one in judge.compared if one.outcome == "unknown")
    return {
        "source": wanted.label,
        "model": split["model"],
        "plan": planned.plan.label,
        "world_size": planned.world_size,
        "tiny": wanted.tiny,
        "tokens": tokens,
        "tolerance": TOLERANCE,
        "right": finding is None,
        "finding": None if finding is None else {**finding._asdict(), "blamed": [b._asdict() for b in finding.blamed]},
        "modules": len({one.module for one in known}),
        "tensors": len(known),
        "divided": sum(one.outcome == "part" for one in known),
        "not_compared": dict(unknown),
        "largest": [
            {"module": one.module, "side": one.side, "difference": one.difference} for one in islice(largest, 3)
        ],
        "collectives": ranks[0].collectives,
        "uncovered": _uncovered(split),
        "notes": list(resolution.notes),
        "nbytes_temporary": planned.nbytes_written,
    }


def _cannot_run(label: str, who: str, failed: Facts) -> str:
    kind = f"{failed['kind']}: " if failed["kind"] else ""
    return f"{label}: {who} cannot run it: {kind}{failed['message']}"


def _uncovered(split: Facts) -> Facts:
    """Return the parameters that no rule names, the largest first, and their share of the model's bytes."""
    kinds = [kind for kind in split["whole"]["kinds"] if kind["reason"] == "no rule names it"]
    nbytes = sum(kind["nbytes"] for kind in kinds)
    return {
        "tensors": sum(kind["tensors"] for kind in kinds),
        "nbytes": nbytes,
        "share": round(nbytes / (split["nbytes_model"] or 1), 4),
        "kinds": kinds,
    }
