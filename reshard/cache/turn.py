"""The turn: of all that want to make one split of a cache, one does, and the others wait.

It is a folder with an owner file, as publishing has them. It gets its name by being renamed, which fails for a name
that a folder with something in it has; so one process alone succeeds, on every file system, those included on which
locks do not work. A dead owner's is claimed.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manifests.errors import OutputError, ReshardError
from manifests.process import Process, this_process
from reshard.cache.entries import KEY_DIGITS
from reshard.publishing.owner import beating, claim, is_alive, read_owner, write_owner

SUFFIX = ".turn"


class Taken(Exception):  # noqa: N818 - no failure: somebody else does the work
    """Somebody else has the turn.

    Attributes:
        owner: Who it is, if that can be told.
    """

    def __init__(self, owner: Process | None) -> None:
        super().__init__()
        self.owner = owner


@contextmanager
def turn(cache: Path, key: str) -> Iterator[None]:
    """Have the turn for a split while the body runs.

    Args:
        cache: The folder of the cache, which is made if there is none.
        key: Of the split.

    Raises:
        Taken: Somebody else has it, and lives; or has got it while the body ran, which failed.
        OutputError: The cache cannot be written.
    """
    folder = cache / f".{key[:KEY_DIGITS]}{SUFFIX}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        mine = _take(folder)
    except OSError as error:
        raise OutputError(f"{cache}: cannot be written: {error.strerror} ({error.filename})") from error
    if not mine:
        yield
        return
    try:
        for remains in cache.glob(f"{folder.name}-*"):
            # Of those that were killed; whoever is about to have the turn in vain makes a new one.
            shutil.rmtree(remains, ignore_errors=True)
        with beating(folder):
            yield
    except ReshardError as error:
        # What fails for one that was taken for dead, another is about to do.
        if _is_lost(folder):
            raise Taken(read_owner(folder)) from error
        raise
    finally:
        if not _is_lost(folder):
            _take_away(folder)


def _is_lost(folder: Path) -> bool:
    return read_owner(folder) != this_process()


def _take(folder: Path) -> bool:
    """Make the folder this process's; tell whether that was possible where its owner is dead."""
    while True:
        if os.path.lexists(folder) and not _clear(folder):
            return False
        mine = _beside(folder)
        mine.mkdir()
        try:
            write_owner(mine, folder.name)
            mine.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
        else:
            return True
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _clear(folder: Path) -> bool:
    """Take away the folder of one who is dead; tell whether that was possible, or it is gone."""
    if is_alive(folder):
        raise Taken(read_owner(folder))
    remains = _beside(folder)
    try:
        if claim(folder, remains.name):
            shutil.rmtree(remains, ignore_errors=True)
    except OSError:
        # Another user's, with no right to write: without the turn the work may be done twice, and right all the same.
        return False
    return True


def _take_away(folder: Path) -> None:
    remains = _beside(folder)
    with suppress(OSError):
        folder.rename(remains)
        shutil.rmtree(remains, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-{os.urandom(6).hex()}")
