"""What the benchmarks share: memory and bytes of this process, dropping cached pages, medians, the page."""

import importlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "bench"
MODELS = RESULTS / "models"
PAGE = ROOT / "docs" / "bench.md"
MIB = 1 << 20


class Options(NamedTuple):
    """How a benchmark is run.

    Attributes:
        small: On models of a few MB.
        rounds: Samples of each number.
    """

    small: bool
    rounds: int


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processors, memory, and how busy it is."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / (1 << 20)),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def status() -> dict[str, int]:
    """Return this process's memory and the bytes that it read, in bytes."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile"):
            found[name] = int(value.split()[0]) << 10
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value)
    return found


def forget_peak() -> None:
    """Make VmHWM, the highest VmRSS, start again from now."""
    Path("/proc/self/clear_refs").write_text("5")


def drop_cached(folder: Path) -> None:
    """Drop the cached pages of all files below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def warm(folder: Path) -> None:
    """Read all files below a folder once, so that their pages are cached."""
    buffer = bytearray(8 << 20)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass


def middle(values: Iterable[float]) -> float:
    """Return the median."""
    return float(median(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of samples that were taken one after the other."""
    return middle(mine / other for mine, other in zip(ours, theirs, strict=True))


def rows(header: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """Return a table in Markdown."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines),
    ]


def write_page(names: Sequence[str]) -> None:
    """Write docs/bench.md from the results of benchmarks."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`, which runs all of them: about 25 minutes, 17 GB of disk and 5 GB of memory, on a "
        "machine that should do nothing else. `python -m tools.bench split` runs one (`split`, `load`, `pipeline`, "
        "`forward`, `scale`); `--rounds 9` takes more samples, `--small` tries it on models of a few MB and writes no"
        " page, `--page` only writes the page. The samples are in `build/bench/*.json`.",
        "",
        "Contenders take turns, every number is a median, and every ratio is the median of the ratios of samples "
        "taken one after the other.",
    ]
    for name in names:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        where = result["machine"]
        lines += ["", *importlib.import_module(f"tools.bench.{name}").table(result), ""]
        lines += [
            f"{result['rounds']} rounds in {result['seconds']} s on {where['cpus']} processors with "
            f"{where['memory_gib']} GiB; load average {where['load']} before and {result['load_after']} after."
        ]
    PAGE.write_text("\n".join(lines) + "\n")
