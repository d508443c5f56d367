"""Split safetensors checkpoints into tensor-parallel rank files, offline, and prove where every byte came from.

    plan, split     decide a split; make it
    verify, merge   prove it whole; take it apart again
    propose         a plan for a model that has none, from its names and shapes
    check           run it beside one process, and name the first module that differs
    pipelines       the same for a pipeline of diffusers

Importing this package imports neither numpy nor torch; a function loads what it needs.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "check": "reshard.checks.checking",
    "plan": "reshard.splitting",
    "propose": "reshard.proposing.offering",
    "split": "reshard.splitting",
    "verify": "reshard.verifying",
    "merge": "reshard.merging",
}

__all__ = ["__version__", "check", "merge", "plan", "propose", "split", "verify"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
