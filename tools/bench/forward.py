"""Decoding at tp 2: milliseconds a token with hooks, with the collectives written by hand, and by the peer."""

import json
from typing import Any

from tools.bench.common import Options, middle, ratio, rows
from tools.bench.models import checkpoint, split_of
from tools.bench.ranks import Ranks

TP = 2
MODELS = {"llama": "a llama of 12 layers", "phi3": "a phi3 of 12 layers, its projections fused"}
LABELS = {
    "reshard": "reshard: hooks",
    "by hand": "the same model, collectives written into its classes",
    "transformers": "transformers' own tensor parallelism",
}
GROUPS = {
    "fake": "torch's fake process group, whose collectives do nothing: the processor's time of the code around them",
    "gloo": "gloo, two processes",
}


def run(options: Options) -> dict[str, Any]:
    """Take all samples."""
    found: dict[str, Any] = {"decoding": {}, "hook": {}}
    rounds, tokens = (3, 4) if options.small else (max(3 * options.rounds, 9), 24)
    for name in MODELS:
        source = checkpoint(name, small=options.small)
        split = split_of(source, TP)
        job = {
            "what": "decode",
            "folder": str(source),
            "split": str(split),
            "architecture": json.loads((source / "config.json").read_text())["architectures"][0],
            "rounds": rounds,
            "tokens": tokens,
            "world_size": TP,
        }
        for backend, processes in (("fake", 1), ("gloo", TP)):
            with Ranks("tools.bench.forward_worker", processes) as ranks:
                measured = ranks.measure({**job, "backend": backend})
            found["decoding"][f"{name} {backend}"] = _slowest(measured)
    for backend in GROUPS:
        with Ranks("tools.bench.forward_worker", 1) as ranks:
            (measured,) = ranks.measure({"what": "hook", "backend": backend, "world_size": 1, "rounds": rounds})
        found["hook"][backend] = measured["microseconds"]
    return found


def _slowest(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return every round's time of the slowest rank."""
    times = {
        name: [max(each) for each in zip(*(rank["milliseconds"][name] for rank in measured), strict=True)]
        for name in measured[0]["milliseconds"]
    }
    return {"milliseconds": times, "collectives": measured[0]["collectives"]}


def table(result: dict[str, Any]) -> list[str]:
    """Return the section of the page."""
    lines = ["## Forward", "", MEANING]
    for name, found in result["decoding"].items():
        model, _, backend = name.partition(" ")
        times = found["milliseconds"]
        lines += ["", f"**{MODELS[model]}; {GROUPS[backend]}**", ""]
        lines += rows(
            ("form", "ms a token", "of by hand", "of transformers", "collectives a token"),
            [
                (
                    LABELS[form],
                    f"{middle(times[form]):.2f}",
                    f"{ratio(times[form], times['by hand']):.3f}",
                    f"{ratio(times[form], times['transformers']):.2f}",
                    ", ".join(f"{count} {kind}" for kind, count in sorted(found["collectives"][form].items())),
                )
                for form in LABELS
            ],
        )
    for backend, costs in result["hook"].items():
        cost = middle(costs)
        lines += ["", f"A hook adds {cost:.2f} microseconds to an all-reduce in a group of one rank ({backend})."]
    return lines


MEANING = (
    "One token at a time after a short prompt, batch 1, with a cache, in float32; layers so small that the work around "
    "the matrices shows. All three forms are in one process (under gloo in the same two) and take turns."
)
