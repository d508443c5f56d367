"""The destination: whether it may be made, and whether there is room, before anything is written."""

import os
from pathlib import Path

from manifests.errors import OutputError
from manifests.manifest import is_split
from manifests.pipeline import holds_pipeline


def check_destination(destination: Path, nbytes: int, *, force: bool) -> None:
    """Refuse a destination that cannot take the output, before anything is written.

    Args:
        destination: The folder to be made.
        nbytes: Bytes that will be written, less those that are there already.
        force: Whether an older output may be replaced.

    Raises:
        OutputError: It exists, its file system lacks the space, or it may not be written.
    """
    if os.path.lexists(destination):
        if not force:
            raise OutputError(
                f"{destination}: exists already; remove it or choose another name (--force replaces a split)"
            )
        if not destination.is_dir() or destination.is_symlink():
            raise OutputError(f"{destination}: is no folder; --force replaces a folder only")
        if any(destination.iterdir()) and not (is_split(destination) or holds_pipeline(destination)):
            raise OutputError(f"{destination}: holds no split, so it is not ours to replace; remove it yourself")
    parent = _existing_parent(destination)
    if not parent.is_dir():
        raise OutputError(f"{destination}: {parent} is not a folder")
    status = os.statvfs(parent)
    if status.f_flag & os.ST_RDONLY:
        raise OutputError(f"{destination}: {parent} is on a file system that is mounted read-only")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{destination}: no permission to write in {parent}")
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise OutputError(f"{destination}: {nbytes} bytes are needed, {free} are free there")


def check_apart(destination: Path, source: Path) -> None:
    """Refuse a destination that is the source, lies in it, or holds it.

    Raises:
        OutputError: The one is part of the other.
    """
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise OutputError(f"{destination}: overlaps with the source {source}; choose a folder beside it")


def _existing_parent(path: Path) -> Path:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent
