"""What is kept of a case: whether it was right, and what the table shows."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 1e-4
"""Of the largest difference, relative to the largest value where that is over one."""


class Record(NamedTuple):
    """The outcome of a case.

    Attributes:
        right: Whether output and tokens are those of one process.
        error: What went wrong, in one line; empty if right.
        stage: What the ranks were doing then.
        difference: The largest of the output, relative; None if there was none.
        share: Of the parameters, on the rank that has most.
        collectives: Of one forward, by kind.
        tokens: "equal", "different", "none" of a class that generates nothing.
        seconds: For loading, the forward and the tokens.
    """

    right: bool
    error: str = ""
    stage: str = ""
    difference: float | None = None
    share: float | None = None
    collectives: dict[str, int] = {}  # noqa: RUF012 - never changed
    tokens: str = "none"
    seconds: float = 0.0


def record(outcomes: Sequence[dict[str, Any]]) -> Record:
    """Sum up what the ranks of a case found."""
    seconds = max(outcome.get("seconds", 0.0) for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome["error"]]
    if failed:
        first = min(failed, key=lambda outcome: outcome.get("seconds", 0.0))
        return Record(False, first["error"], first.get("stage", ""), seconds=seconds)
    found = Record(
        right=False,
        difference=_difference(outcomes),
        share=max(outcome["share"] for outcome in outcomes),
        collectives=outcomes[0]["collectives"],
        tokens=_compare_tokens(outcomes),
        seconds=seconds,
    )
    error = _what_differs(found, outcomes)
    return found._replace(right=not error, error=error, stage="compare" if error else "")


def _difference(outcomes: Sequence[dict[str, Any]]) -> float | None:
    if any(outcome["shape"] != outcome["expected_shape"] for outcome in outcomes):
        return None
    relative = [outcome["difference"] / max(1.0, outcome["largest"]) for outcome in outcomes]
    # The largest of some numbers and none may be either.
    return math.nan if any(map(math.isnan, relative)) else max(relative)


def _compare_tokens(outcomes: Sequence[dict[str, Any]]) -> str:
    if not outcomes[0]["expected_tokens"]:
        return "none"
    equal = all(outcome["tokens"] == outcome["expected_tokens"] for outcome in outcomes)
    return "equal" if equal else "different"


def _what_differs(found: Record, outcomes: Sequence[dict[str, Any]]) -> str:
    if found.difference is None:
        return f"shape {outcomes[0]['shape']}, not {outcomes[0]['expected_shape']}"
    # Not "greater": a difference that is no number is one.
    if not found.difference <= TOLERANCE:
        return f"output differs by {found.difference:.1e}"
    return "other tokens" if found.tokens == "different" else ""


class Store:
    """Records by the name of their case, each with a key that says what decided it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, key: str, found: Record) -> None:
        """Keep a record."""
        self._file(name).write_text(json.dumps({"key": key, **found._asdict()}))

    def get(self, name: str, key: str | None = None) -> Record | None:
        """Return a record, or None if there is none, or only one with another key."""
        if not self._file(name).exists():
            return None
        kept = json.loads(self._file(name).read_text())
        if kept.pop("key") != key and key is not None:
            return None
        return Record(**kept)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"
