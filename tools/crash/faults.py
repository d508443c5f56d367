"""Faults: a run is killed, or refused something, at one call of the system after another, by strace."""

import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from tools.crash.trial import REFUSED, Bench, WrongError, require

CALLS = (
    "openat,mkdir,rename,renameat,renameat2,unlink,unlinkat,rmdir,ftruncate,fallocate,fsync,write,pwrite64,pwritev,pwritev2,"
    "utimensat"
)
DATA = ("pwrite64", "pwritev", "pwritev2")
KILL = "signal=KILL"
ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EACCES")
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")
_WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT")

_SPEAKS = re.compile(r"write[12],")


class Fault(NamedTuple):
    """A fault at the ``when``-th call of a name, counted in each thread; ``what`` as strace spells it."""

    call: str
    when: int
    what: str


@dataclass
class Faults:
    """What was found: how often each kind of fault was met, at which calls, and how the runs ended."""

    kinds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        def some(counter: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))

        return (
            f"{sum(self.kinds.values())} faults ({some(self.kinds)}) at {some(self.calls)}: no half output, "
            f"every rerun right; the runs ended with {some(self.codes)}"
        )


def is_possible() -> bool:
    """Tell whether strace is installed."""
    return shutil.which("strace") is not None


def calls_of(bench: Bench, *options: str, older: Mapping[str, bytes] | None = None) -> dict[str, list[int]]:
    """Return at which calls a run changes the disk: for each name their numbers, counted in their threads."""
    log = bench.work / "calls"
    bench.begin(older)
    ended = bench.finish(bench.start(*options, wrapper=["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS}"]))
    require(ended.code == 0, f"the traced run: {ended}")
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[str, set[int]] = {}
    for line in log.read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call, arguments = match.groups()
        counts[thread, call] += 1
        if (call != "openat" or _WRITES.search(arguments)) and not _SPEAKS.match(call + arguments):
            found.setdefault(call, set()).add(counts[thread, call])
    return {call: sorted(numbers) for call, numbers in found.items()}


def every_fault(calls: Mapping[str, Sequence[int]], data_calls: int) -> Iterator[Fault]:
    """Yield a kill and one of the errors at every call; of calls that write tensors, at so many, spread evenly."""
    errors = cycle(ERRORS)
    for call, numbers in calls.items():
        step = max(1, len(numbers) // data_calls) if call in DATA else 1
        for when in numbers[::step]:
            yield Fault(call, when, KILL)
            yield Fault(call, when, f"error={next(errors)}")


def meet(bench: Bench, fault: Fault, found: Faults, *options: str, older: Mapping[str, bytes] | None = None) -> None:
    """Run with a fault, and check what is there afterwards and that a rerun completes.

    Raises:
        WrongError: Something is not as it must be.
    """
    try:
        _meet(bench, fault, found, *options, older=older)
    except WrongError as error:
        raise WrongError(f"{fault}: {error}") from error


def _meet(bench: Bench, fault: Fault, found: Faults, *options: str, older: Mapping[str, bytes] | None) -> None:
    bench.begin(older)
    inject = f"inject={fault.call}:{fault.what}:when={fault.when}"
    wrapper = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={fault.call}", "-e", inject]
    ended = bench.finish(bench.start(*options, wrapper=wrapper))
    killed = fault.what == KILL
    allowed = (-signal.SIGKILL, 128 + signal.SIGKILL, 0) if killed else (0, REFUSED)
    require(ended.code in allowed, str(ended))
    if ended.code == REFUSED:
        require(ended.said.startswith("reshard: "), str(ended))
        require(str(bench.out.parent) in ended.said, f"names no file: {ended}")
    published = bench.check_nothing_half(older)
    require(published or ended.code, "no output, and exit code 0")
    if not published:
        bench.check_rerun(*options)
    found.kinds[fault.what.removeprefix("error=").removeprefix("signal=")] += 1
    found.calls[fault.call] += 1
    found.codes["a kill" if ended.code < 0 else f"exit code {ended.code}"] += 1


def older_split(bench: Bench) -> dict[str, bytes]:
    """Return the files of a small split that is to be replaced."""
    manifest = (bench.work / "reference" / "manifest.json").read_bytes()
    return {"manifest.json": manifest, "rank-00000-of-00001.safetensors": b"older"}
