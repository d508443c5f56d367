"""Loading at tp 2: ready, ready and one forward, and every local byte in private memory; cached pages and cold ones."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.common import MIB, Options, middle, ratio, rows, warm
from tools.bench.models import CHECKPOINTS, checkpoint, split_of
from tools.bench.ranks import Ranks

TP = 2
CASES: dict[str, tuple[str, str | None, str]] = {
    "dense": ("dense", None, "a llama of 2 GB in bfloat16"),
    "moe": ("moe", None, "a mixtral of 2 GB in bfloat16"),
    "dtype": ("half", "float32", "a llama of 1 GB in bfloat16, wanted in float32: ours split with `--dtype float32`"),
}
"""Name to the checkpoint, the dtype that the split is made in and the peers are asked for, and words."""

OURS = ("mapped", "read", "load_file", "plain read")
FORWARD = ("mapped", "read", "transformers", "dcp")
COPY = ("read", "mapped", "transformers", "dcp", "load_file", "plain read")
LABELS = {
    "mapped": "reshard, mapped",
    "read": "reshard, read, hashes checked",
    "transformers": "transformers' own tensor parallelism",
    "dcp": "transformers, its distributed checkpoint",
    "load_file": "`safetensors.torch.load_file` of the rank's files",
    "plain read": "plain `read()` of the rank's files",
}


def run(options: Options) -> dict[str, Any]:
    """Take all samples."""
    found: dict[str, Any] = {}
    for case, (name, dtype, _) in CASES.items():
        source = checkpoint(name, small=options.small)
        split = split_of(source, TP, dtype)
        with Ranks("tools.bench.load_worker", TP) as ranks:
            jobs = _jobs(ranks, case, source, split, dtype)
            for job in jobs:
                ranks.measure({**job, "first": True})
            for cold in (False, True) if case == "dense" else (False,):
                for folder in {job["folder"] for job in jobs}:
                    warm(Path(folder))
                samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
                for _ in range(options.rounds):
                    for job in jobs:
                        samples[f"{job['then']} {job['contender']}"].append(
                            _slowest(ranks.measure({**job, "cold": cold}))
                        )
                found[f"{case} {'cold' if cold else 'warm'}"] = samples
    return {"samples": found}


def _jobs(ranks: Ranks, case: str, source: Path, split: Path, dtype: str | None) -> list[dict[str, Any]]:
    config = json.loads((source / "config.json").read_text())
    shared = {"architecture": config["architectures"][0], "stored": CHECKPOINTS[CASES[case][0]][2], "cold": False}
    folders = dict.fromkeys(OURS, split) | {"transformers": source}
    if case == "dense":
        folders["dcp"] = _distributed(ranks, source, shared)
    return [
        {**shared, "contender": contender, "folder": str(folders[contender]), "then": then}
        | ({"dtype": dtype} if dtype and contender not in OURS else {})
        for then, contenders in (("forward", FORWARD), ("copy", COPY))
        for contender in contenders
        if contender in folders
    ]


def _distributed(ranks: Ranks, source: Path, shared: dict[str, Any]) -> Path:
    """Return transformers' own per-rank form of a checkpoint, made if it is not there."""
    out = source.with_name(f"{source.name}-dcp{TP}")
    if not (out / "config.json").exists():
        ranks.measure({**shared, "contender": "transformers", "folder": str(source), "then": "save", "out": str(out)})
    return out


def _slowest(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sample of a load: times of the slowest rank, bytes of the one that has most."""
    return {name: max(rank[name] for rank in measured) for name in measured[0]}


def table(result: dict[str, Any]) -> list[str]:
    """Return the section of the page."""
    lines = ["## Loading", "", MEANING]
    for name, samples in result["samples"].items():
        case, _, cache = name.partition(" ")
        lines += ["", f"**{CASES[case][2]}, {'pages cached' if cache == 'warm' else 'pages dropped before'}**", ""]
        shown = [(label, samples[label]) for label in samples]
        lines += rows(
            (
                "what",
                "then",
                "ready, s",
                "then, s",
                "of transformers' time",
                "private, MiB",
                "peak, MiB",
                "touched / held",
            ),
            [_row(label, taken, samples) for label, taken in shown],
        )
    return lines


def _row(label: str, taken: list[dict[str, Any]], samples: dict[str, list[dict[str, Any]]]) -> list[str]:
    then, _, contender = label.partition(" ")
    reference = samples[f"{then} transformers"]
    ended = ratio([s["ended"] for s in taken], [s["ended"] for s in reference])
    ready = ratio([s["ready"] for s in taken], [s["ready"] for s in reference])
    read = samples["copy plain read"]
    beside = (
        f"; {ratio([s['ended'] for s in taken], [s['ended'] for s in read]):.2f} of plain read"
        if then == "copy"
        else ""
    )
    return [
        LABELS[contender],
        {"forward": "one forward of 16 tokens", "copy": "every local byte in private memory"}[then],
        f"{middle(s['ready'] for s in taken):.3f}",
        f"{middle(s['ended'] for s in taken):.3f}",
        f"{ready:.3f} ready, {ended:.2f} in all{beside}",
        f"{middle(s['private'] for s in taken) / MIB:.1f}",
        f"{middle(s['peak'] for s in taken) / MIB:.0f}",
        f"{middle(s['touched'] / s['held'] for s in taken):.2f}",
    ]


MEANING = (
    "Two ranks on one machine; times are the slowest rank's, counted from a process that has imported everything "
    "and has its process group. *Ready* is when the model can be called. A mapped model has read nothing then, so "
    "what counts is the time until after the first forward, or until every local byte is in private memory, which "
    "is what a copy to a device has to read. For `load_file` and plain `read` there is no model, and nothing is "
    "checked. *Private* is the growth of RssAnon until ready, *peak* that of all resident memory until the end, "
    "*touched* the file pages that were mapped in and the bytes of read calls, over the bytes of the rank's "
    "tensors. On a CPU `auto` maps, whether the pages are cached or not: the first two rows are its choice and the "
    "other one."
)
