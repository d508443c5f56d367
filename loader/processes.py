"""Which process a rank is, and whether it still runs: exact on one machine, unknown from another one."""

import os
import socket
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, as other processes may know it.

    Attributes:
        machine: The kernel that it runs on since it was started, and its space of process ids; empty if not known.
        host: The machine's name, for people.
        pid: Its id there.
        started: When it was started, as the kernel counts it: ids are given again.
    """

    machine: str
    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """Return the process that asks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        machine = f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        machine = ""
    pid = os.getpid()
    return Process(machine, socket.gethostname(), pid, _started(pid))


def has_ended(process: Process, here: str) -> bool:
    """Tell whether a process is known to have ended.

    Args:
        process: The process.
        here: The machine of the one that asks. Of a process of another one nothing is known.
    """
    return bool(here) and process.machine == here and _started(process.pid) != process.started


def _started(pid: int) -> str:
    """Return when a process was started; empty if there is none, or it has ended and its parent has not asked."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
