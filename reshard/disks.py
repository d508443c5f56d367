"""Disks: room that is taken at once, and writing back that starts early; both only where a file system is on a disk.

On a disk, blocks taken for a whole file lie together, and what is sent to the disk while the rest is read and cut does
not wait for the end. In memory neither helps. Elsewhere (network, FUSE) the one may be done by writing zeros.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_ON_DISK = frozenset({"ext4", "xfs", "f2fs"})
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of ``linux/fs.h``: start writing back, wait for nothing."""


def is_on_disk(path: Path) -> bool:
    """Tell whether a file lies on a file system that is known to be on a disk."""
    return _kind(path.stat().st_dev) in _ON_DISK


@cache
def _kind(device: int) -> str:
    """Return the kind of the file system with a device number; empty if it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        if rest and fields.split()[2] == number:
            return rest.split()[0]
    return ""


def reserve(descriptor: int, nbytes: int) -> None:
    """Take the room for a whole file; leave it to the writes where the file system cannot.

    Raises:
        OSError: The room is not there.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def start_writing_back(descriptor: int) -> None:
    """Start to write a file's new bytes to its disk; a failure shows when the file is synced."""
    if (start := _sync_file_range()) is not None:
        start(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE))
