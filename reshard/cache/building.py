"""Building: a split of a cache is found, or made once, whatever number of processes asks for it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from manifests import uses
from manifests.errors import OutputError
from manifests.process import Process
from reshard.cache.entries import named_by, problem_of
from reshard.cache.removing import remove
from reshard.cache.turn import Taken, turn
from reshard.planning import SplitPlan
from reshard.publishing.staging import clear_left
from reshard.splitting import carry_out

POLL_S = (0.05, 2.0)
"""How long those that wait sleep between two looks: at first, and at most."""

Notice = Callable[[str], None]
"""Called with a line on what happens: who is waited for, what was damaged."""


class Provided(NamedTuple):
    """A split of a cache.

    Attributes:
        path: Its folder.
        found: Whether it was there; if not, this process has made it.
    """

    path: Path
    found: bool


def find(cache: Path, key: str) -> Path | None:
    """Return the folder of the whole split of a cache that has a key, and note that it was asked for.

    Raises:
        OutputError: The cache cannot be listed.
        ManifestError: There is one that cannot be read.
    """
    for entry in named_by(cache, key):
        if not problem_of(entry, key):
            uses.touch(entry)
            return entry
    return None


def problems_of(cache: Path, key: str) -> list[str]:
    """Return what is wrong with the splits of a cache that have a key in their names, and are not whole."""
    return [problem for entry in named_by(cache, key) if (problem := problem_of(entry, key))]


def provide(
    planned: SplitPlan,
    cache: Path,
    name: str,
    *,
    notice: Notice,
    **how: Any,  # noqa: ANN401 - what carry_out takes
) -> Provided:
    """Find a split in a cache, make it, or wait until another process has made it.

    Args:
        planned: The split.
        cache: The folder of the cache, which is made if there is none.
        name: What the split is called in it, if it is made.
        notice: Called with what a person should know meanwhile.
        how: What `reshard.splitting.carry_out` takes besides.

    Raises:
        CheckpointError: The source cannot be read, or changed while it was read.
        OutputError: The cache lacks space, or cannot be written.
        ManifestError: There is such a split, and it cannot be read.
    """
    told: Process | str = ""
    pause, longest = POLL_S
    while True:
        if found := find(cache, planned.key):
            return Provided(found, found=True)
        try:
            with turn(cache, planned.key):
                # Whoever had the turn before may have finished since.
                if found := find(cache, planned.key):
                    return Provided(found, found=True)
                return _make(planned, cache / name, notice, **how)
        except Taken as taken:
            who = taken.owner or "another process"
            if told != who:
                told = who
                notice(f"{cache / name}: {who} is making it; waiting")
        time.sleep(pause)
        pause = min(pause * 1.5, longest)


def _make(planned: SplitPlan, path: Path, notice: Notice, **how: Any) -> Provided:  # noqa: ANN401
    key = planned.key
    for entry in named_by(path.parent, key):
        if problem := problem_of(entry, key):
            notice(f"{problem}; it is made again")
            remove(entry, unless=lambda hidden: not problem_of(hidden, key))
    try:
        carry_out(planned, path, **how)
        provided = Provided(path, found=False)
    except OutputError:
        # Of two that take each other for dead, the second finds the name taken, by the same bytes.
        other = find(path.parent, key)
        if other is None:
            raise
        provided = Provided(other, found=True)
    clear_left(path)
    uses.touch(provided.path)
    return provided
