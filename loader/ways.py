"""Which way a rank's files are read: mapped, or read into memory.

A mapping costs nothing before it is used, and a page that another machine takes away under it kills the process. So
local files are mapped, those of network and FUSE file systems are read; and what goes to a GPU is read through pinned
buffers, since all of it is needed at once. Whether the pages are cached changes neither: if they are, a mapping copies
nothing; if not, a first forward that reads what it uses from a local disk ends before one for which all was read, and
no later than one for which the pages were asked for ahead (docs/operations.md has the measurement).
"""

import os
from pathlib import Path
from typing import Literal, get_args

import torch

from manifests.errors import LoadError

Way = Literal["auto", "mmap", "read"]
Check = Literal["auto", "headers", "full"]

REMOTE = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2"}
    | {"orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
"""Types of file systems whose pages may come from another machine, beside those of FUSE."""

_MOUNTS = Path("/proc/self/mountinfo")


def choose_way(read: str, folder: Path, device: torch.device) -> Literal["mmap", "read"]:
    """Return how the files of a folder are to be read.

    Args:
        read: "mmap", "read", or "auto", which decides.
        folder: The split.
        device: Where the tensors shall be.

    Raises:
        LoadError: There is no such way, or not for such a device.
    """
    if read not in get_args(Way):
        raise LoadError(f"read {read!r}: must be one of {', '.join(get_args(Way))}")
    if device.type not in ("cpu", "cuda"):
        if read == "read":
            raise LoadError(f"read 'read': is for a CPU and for CUDA, not for {device.type}; use 'mmap'")
        return "mmap"
    if read != "auto":
        return "mmap" if read == "mmap" else "read"
    return "mmap" if device.type == "cpu" and not is_remote(file_system(folder)) else "read"


def choose_check(verify: str, way: str) -> bool:
    """Return whether the hash of every tile is compared: "auto" does so where all bytes pass by, which is in reading.

    Raises:
        LoadError: There is no such check.
    """
    if verify not in get_args(Check):
        raise LoadError(f"verify {verify!r}: must be one of {', '.join(get_args(Check))}")
    return verify == "full" or (verify == "auto" and way == "read")


def is_remote(kind: str) -> bool:
    """Tell whether a type of file system, as the kernel names it, is that of a network or of FUSE.

    >>> is_remote("nfs4"), is_remote("fuse.sshfs"), is_remote("fuseblk"), is_remote("ext4")
    (True, True, True, False)
    """
    return kind in REMOTE or kind.startswith("fuse")


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is on, as the kernel names it; empty where it does not tell."""
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
        real, device = os.path.realpath(path), path.stat().st_dev
    except OSError:
        return ""
    return type_of_mount(lines, real, f"{os.major(device)}:{os.minor(device)}")


def type_of_mount(lines: list[str], path: str, device: str) -> str:
    r"""Return the type of the innermost mount that holds a path, from the lines of ``mountinfo``.

    Args:
        lines: As proc_pid_mountinfo(5) has them.
        path: Without links.
        device: The path's, "major:minor"; it decides between mounts on top of each other.

    >>> lines = ["22 1 8:1 / / rw - ext4 /dev/sda rw", "30 22 0:45 / /mnt/my\\040nfs rw shared:2 - nfs4 host:/ rw"]
    >>> type_of_mount(lines, "/mnt/my nfs/out", "0:45"), type_of_mount(lines, "/mnt/my", "8:1")
    ('nfs4', 'ext4')
    """
    best = (-1, False, 0, "")
    for position, line in enumerate(lines):
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        point = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape") if "\\" in line else fields[4]
        if path == point or path.startswith(point.rstrip("/") + "/"):
            best = max(best, (len(point), fields[2] == device, position, after.split(" ", 1)[0]))
    return best[3]
