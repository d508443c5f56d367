"""Processes: what tells one from every other, also from one of its number on another machine or at another time."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True):
    """A process.

    Attributes:
        host: Its machine's name.
        boot: Tells one start of that machine from another; empty where the system does not say.
        namespace: In which its number counts: that of the machine, or of a container.
        pid: Its number.
        started: When it was started, in ticks since the machine was.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def encode_process(process: Process) -> str:
    """Return a process as a text that others can read."""
    return msgspec.json.encode(process).decode()


def decode_process(text: str | bytes) -> Process:
    """Return the process that a text tells of."""
    return msgspec.json.decode(text, type=Process)


def this_process() -> Process:
    """Return the process that asks."""
    return Process(*this_machine(), os.getpid(), started(os.getpid()))


@cache
def this_machine() -> tuple[str, str, str]:
    """Return the machine's name, what tells its starts apart, and where its processes are counted."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - what it names is no path
    return os.uname().nodename, boot, namespace


def runs_here(process: Process) -> bool | None:
    """Tell whether a process runs; None if it is of another machine or container, where it cannot be seen from here."""
    if not process.boot or this_machine() != (process.host, process.boot, process.namespace):
        return None
    return started(process.pid) == process.started


def started(pid: int) -> int:
    """Return when a process was started, in ticks since its machine was; -1 if there is none that still runs."""
    try:
        # The program's name, in parentheses, may hold anything; after it the state comes as third field.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
