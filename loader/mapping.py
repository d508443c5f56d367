"""Mapping a rank file: one block of bytes that is the file's pages.

A mapping is private: nothing is read before it is used, clean pages are shared by the processes of a machine, and a
parameter that is written to gets a page of its own.
"""

import mmap
from pathlib import Path

_MAP_NORESERVE = 0x4000  # linux/mman.h; Python's mmap names it from 3.13 on


def map_file(path: Path, nbytes: int) -> mmap.mmap:
    """Return a file's pages; they may be written to, which does not change the file.

    Args:
        path: The file.
        nbytes: Its bytes, more than 0.
    """
    with path.open("rb") as stream:
        return mmap.mmap(
            stream.fileno(), nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
