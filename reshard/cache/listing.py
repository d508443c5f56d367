"""Listing: what a cache holds, finished or not, how large and how old it is, and who uses it."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from manifests import uses
from manifests.errors import ManifestError
from manifests.manifest import MANIFEST_NAME
from manifests.process import Process
from reshard.cache.entries import is_entry_name, names_in, problem_of
from reshard.cache.removing import REMOVED
from reshard.cache.turn import SUFFIX
from reshard.publishing.owner import is_alive, read_owner

State = Literal["whole", "damaged", "unreadable", "being made", "abandoned"]
"""Of a split: whole, or not; unreadable, which may be either. Of what is hidden: whether its maker lives."""

# What a split, its making and its removal leave in a cache. Nothing else there is ours.
_HIDDEN = re.compile(
    r"\.(?:.+-tp[0-9]+-[0-9a-f]+\.[a-z]+-[0-9a-f-]+"
    rf"|[0-9a-f]+{re.escape(SUFFIX)}(?:-[0-9a-f]+)?)(?:{re.escape(REMOVED)}[0-9a-f]+)?"
)


class Item(NamedTuple):
    """A split of a cache, or something hidden that is about to become one, or is left of one.

    Attributes:
        path: Its folder.
        state: What it is.
        problem: Why it is not whole, if it has the name of a split.
        nbytes: Bytes of its files.
        made: When it was finished, or last changed, in seconds since 1970.
        used: When it was last wanted; not before it was made.
        users: The processes of this machine that use it, or that make it.
    """

    path: Path
    state: State
    problem: str
    nbytes: int
    made: float
    used: float
    users: tuple[Process, ...]

    @property
    def name(self) -> str:
        """What it is called in the cache."""
        return self.path.name


def items_of(cache: Path) -> list[Item]:
    """Return all that a cache holds, splits first.

    Raises:
        OutputError: It cannot be listed.
    """
    names = names_in(cache)
    splits = [_split(cache / name) for name in names if is_entry_name(name)]
    hidden = [_hidden(cache / name) for name in names if _HIDDEN.fullmatch(name)]
    return splits + hidden


def _split(path: Path) -> Item:
    state: State = "whole"
    try:
        if problem := problem_of(path):
            state = "damaged"
    except ManifestError as error:
        state, problem = "unreadable", str(error)
    nbytes, changed = _measure(path)
    made = _time(path / MANIFEST_NAME) or changed
    return Item(path, state, problem, nbytes, made, max(made, uses.last_use(path)), tuple(uses.users_here(path)))


def _hidden(path: Path) -> Item:
    alive = REMOVED not in path.name and is_alive(path)
    owner = read_owner(path) if alive else None
    nbytes, changed = _measure(path)
    return Item(path, "being made" if alive else "abandoned", "", nbytes, changed, changed, (owner,) if owner else ())


def _measure(folder: Path) -> tuple[int, float]:
    """Return the bytes of a folder's files, and when it or one of them was changed last, or renamed."""
    nbytes, changed = 0, 0.0
    with suppress(OSError):
        changed = folder.stat().st_ctime
    for path in folder.rglob("*"):
        with suppress(OSError):
            status = path.stat()
            nbytes += status.st_size
            changed = max(changed, status.st_mtime)
    return nbytes, changed


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
