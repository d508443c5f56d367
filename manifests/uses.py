"""Uses: which processes of this machine use a split that lies in a cache, and when it was used last.

A finished split is never changed, so this is told beside it: the cache has a folder ``.uses``, in it one for each split,
and in that a file for each process. What is noted is a courtesy to whoever tidies up, and never decides whether a split
is whole. So nothing here fails: a cache that cannot be written is used all the same.
"""

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
    with suppress(OSError):
        split = split.resolve()
        uses = split.parent / FOLDER
        if not uses.is_dir():
            return
        mine = uses / split.name
        mine.mkdir(exist_ok=True)
        _forget_the_dead(mine)
        content = msgspec.json.encode(this_process())
        (mine / xxhash.xxh3_64_hexdigest(content)).write_bytes(content)
        (mine / LAST).touch()


def touch(split: Path) -> None:
    """Note that a split of a cache was wanted just now, by somebody who does not go on to use it."""
    with suppress(OSError):
        uses = split.parent / FOLDER
        uses.mkdir(exist_ok=True)
        (uses / split.name).mkdir(exist_ok=True)
        (uses / split.name / LAST).touch()


def last_use(split: Path) -> float:
    """Return when a split of a cache was used last, in seconds since 1970; 0 if it never was."""
    times = [0.0]
    for path in _files(split):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def users_here(split: Path) -> list[Process]:
    """Return the processes of this machine that use a split of a cache, in the order of their numbers."""
    return sorted((user for _, user in _users(split.parent / FOLDER / split.name) if runs_here(user)), key=_pid)


def _pid(process: Process) -> int:
    return process.pid


def _files(split: Path) -> list[Path]:
    try:
        return [*(split.parent / FOLDER / split.name).iterdir()]
    except OSError:
        return []


def _users(folder: Path) -> Iterator[tuple[Path, Process]]:
    for path in folder.iterdir():
        with suppress(OSError, msgspec.DecodeError):
            if path.name != LAST:
                yield path, msgspec.json.decode(path.read_bytes(), type=Process)


def _forget_the_dead(folder: Path) -> None:
    for path, user in _users(folder):
        if runs_here(user) is False:
            path.unlink(missing_ok=True)
