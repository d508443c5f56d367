"""Removing from a cache: by renaming to a hidden name first, so that nothing half removed ever looks finished."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from manifests import uses
from manifests.errors import OutputError

REMOVED = ".removed-"


def remove(folder: Path, *, unless: Callable[[Path], bool] = lambda _: False) -> bool:
    """Remove a folder of a cache.

    Args:
        folder: The folder.
        unless: Asked about the folder once it is hidden; if true it comes back, unless another has its name by then.

    Returns:
        Whether it was there, and is removed.

    Raises:
        OutputError: It cannot be renamed or removed.
    """
    stem = folder.name.lstrip(".").partition(REMOVED)[0]
    hidden = folder.with_name(f".{stem}{REMOVED}{os.urandom(6).hex()}")
    try:
        folder.rename(hidden)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OutputError(f"{folder}: cannot be removed: {error.strerror}") from error
    if unless(hidden) and _put_back(hidden, folder):
        return False
    try:
        shutil.rmtree(hidden)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise OutputError(f"{folder}: cannot be removed whole: {error.strerror}; what is left is {hidden}") from error
    shutil.rmtree(folder.parent / uses.FOLDER / folder.name, ignore_errors=True)
    return True


def _put_back(hidden: Path, folder: Path) -> bool:
    """Give a folder its name back; a folder of files that has the name by then makes the renaming fail."""
    try:
        hidden.rename(folder)
    except OSError:
        return False
    return True
