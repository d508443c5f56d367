"""Pipelines of diffusers: every part that has a plan is split, the others are carried over as they are.

    finding     whether MODEL is a pipeline
    planning    which parts are split, which stay whole and why; nothing is written
    splitting   one folder with a split in the place of each split part, published by one rename
    merging     a split pipeline verified, and the pipeline again
    commands    what the command line does with one

A split part is an ordinary split with a manifest of its own, so `loader.load_model(OUT/transformer)` works too.
``pipeline.json`` (`manifests.pipeline`) is written last and names the key of every part and the hash of every other
file.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "merge": "reshard.pipelines.merging",
    "plan": "reshard.pipelines.splitting",
    "split": "reshard.pipelines.splitting",
    "verify": "reshard.pipelines.merging",
}

__all__ = ["merge", "plan", "split", "verify"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
