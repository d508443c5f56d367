"""Mapping a rank file: one block of bytes that is the file's pages.

A mapping is private: nothing is read before it is used, clean pages are shared by the processes of a machine, and a
parameter that is written to gets a page of its own.
"""

import mmap

from manifests.errors import LoadError

_MAP_NORESERVE = 0x4000  # linux/mman.h; Python's mmap names it from 3.13 on


def map_file(label: str, handle: int, nbytes: int) -> mmap.mmap:
    """Return a file's pages; they may be written to, which does not change the file.

    Args:
        label: How messages name it.
        handle: The open file. Its size is looked at again here: a page beyond the end kills the process.
        nbytes: Its bytes, more than 0.

    Raises:
        LoadError: It has become shorter, or cannot be mapped.
    """
    try:
        return mmap.mmap(handle, nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{label}: {nbytes} bytes cannot be mapped: {error}; see whether it changes, or read='read'"
        ) from error
