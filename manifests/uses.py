"""Uses: which processes of this machine use a split that lies in a cache, and when it was used last.

A finished split is never changed, so this is told beside it: the cache has a folder ``.uses``, in it one for each
split, and in that a file for each process. What is noted is a courtesy to whoever tidies up, and never decides whether
a split is whole. So nothing here fails: a cache that cannot be written is used all the same.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from manifests.process import Process, runs_here, this_process

FOLDER = ".uses"
LAST = "last"


def note_use(split: Path) -> None:
    """Note, if a split lies in a cache, that this process uses it from now on."""
    split = Path(os.path.realpath(split))
    uses = split.parent / FOLDER / split.name
    if not uses.parent.is_dir():
        return
    for path, user in _users(split):
        if runs_here(user) is False:
            with suppress(OSError):
                path.unlink()
    content = msgspec.json.encode(this_process())
    with suppress(OSError):
        uses.mkdir(exist_ok=True)
        (uses / xxhash.xxh3_64_hexdigest(content)).write_bytes(content)
    touch(split)


def touch(split: Path) -> None:
    """Note that a split of a cache was asked for just now."""
    uses = split.parent / FOLDER / split.name
    with suppress(OSError):
        uses.mkdir(parents=True, exist_ok=True)
        (uses / LAST).touch()


def last_use(split: Path) -> float:
    """Return when a split of a cache was used last, in seconds since 1970; 0 if that is not known."""
    times = [0.0]
    for path in _files(split):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def users_here(split: Path) -> list[Process]:
    """Return the processes of this machine that use a split of a cache, in the order of their numbers."""
    return sorted((user for _, user in _users(split) if runs_here(user)), key=lambda user: user.pid)


def _users(split: Path) -> Iterator[tuple[Path, Process]]:
    for path in _files(split):
        with suppress(OSError, msgspec.DecodeError):
            if path.name != LAST:
                yield path, msgspec.json.decode(path.read_bytes(), type=Process)


def _files(split: Path) -> list[Path]:
    try:
        return [*(split.parent / FOLDER / split.name).iterdir()]
    except OSError:
        return []
