"""Opening files that others made: only regular files, and never more of one than is expected."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_TEXT_NBYTES = 100_000_000
"""The most that is read of an index or a configuration."""


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: It cannot be opened, or is none.
    """
    return os.fdopen(open_handle(path), "rb")


def open_handle(path: Path) -> int:
    """Return the descriptor of a regular file, opened for reading. A pipe or a device is refused, not waited for.

    Raises:
        OSError: It cannot be opened, or is none.
    """
    try:
        mode = path.stat().st_mode  # opening a device may do something to it
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a pipe, a socket or a device, not a file", str(path))
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a path: {error}", repr(path)) from error


def read_file(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        most: The most bytes that it may have; any number if not given.

    Raises:
        OSError: It cannot be read, is none, or is longer.
    """
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, of such a file at most {most} are read", str(path))
        content = file.read(nbytes + 1)
    if len(content) > nbytes:
        raise OSError(errno.EIO, f"grew while it was read, over {nbytes} bytes", str(path))
    return content
