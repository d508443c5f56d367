"""Renaming: a finished folder gets its name, alone or in exchange for an older one's.

``renameat2`` of Linux refuses a name that is taken, and exchanges two, in one step. Where the kernel or the file system
lacks it, the name is looked up before, and an exchange takes two steps: the older folder is put aside and brought back
if the second step fails; if the process dies in between, the next run brings it back (`reshard.publishing.staging`).
"""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from manifests.errors import OutputError
from reshard.publishing.files import sync_folder

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_LACKING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
ASIDE_NAME = "replaced"
"""Where an older output is, beside the new one's content, between the two steps of an exchange."""


def publish(content: Path, destination: Path, *, force: bool) -> None:
    """Give a finished folder its destination's name; an older folder of that name is where this one was afterwards.

    Args:
        content: The folder, in a folder of its own; the names of its files are made durable here.
        destination: The name.
        force: Whether an older folder may be replaced.

    Raises:
        OutputError: The destination exists, and is not to be replaced.
        OSError: The folder cannot be synced or renamed.
    """
    sync_folder(content)
    try:
        _rename_new(content, destination)
    except FileExistsError as error:
        if not force:
            raise OutputError(f"{destination}: appeared while its content was made; nothing was replaced") from error
        _exchange(content, destination)
    sync_folder(destination.parent)


def _rename_new(source: Path, target: Path) -> None:
    """Rename to a name that nothing has.

    Raises:
        FileExistsError: Something has it.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def _exchange(source: Path, target: Path) -> None:
    if _renameat2(source, target, _EXCHANGE):
        return
    aside = source.with_name(ASIDE_NAME)
    target.rename(aside)
    try:
        source.rename(target)
    except OSError:
        aside.rename(target)
        raise
    aside.rename(source)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Rename with a flag; return whether the system can."""
    call = _system_call()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


@cache
def _system_call() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
