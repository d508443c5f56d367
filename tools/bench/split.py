"""Splitting against ``cp -r`` of the same bytes: time with the start-up, memory, processor time, bytes moved."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.commands import WRITES, copy, count_calls, measure
from tools.bench.common import MIB, RESULTS, Options, drop_cached, middle, ratio, rows
from tools.bench.sources import KINDS, make_source

DEGREES = (1, 2, 4, 8)
NBYTES = 2 << 30
SMALL_NBYTES = 100_000 * 16384
"""100,000 tensors of 16 KB."""


def run(options: Options) -> dict[str, Any]:
    """Split every kind of checkpoint, on a memory file system and on a disk."""
    places = {"tmpfs": Path("/dev/shm"), "disk": RESULTS}
    found: dict[str, Any] = {}
    for place, root in places.items():
        with tempfile.TemporaryDirectory(dir=root, prefix="reshard-bench-") as work:
            for kind in KINDS:
                if place == "disk" and kind == "small":
                    continue
                nbytes = (64 << 20) if options.small else SMALL_NBYTES if kind == "small" else NBYTES
                found[f"{kind} on {place}"] = _measure(kind, Path(work), nbytes, options.rounds, disk=place == "disk")
    return {"contenders": found}


def _measure(kind: str, work: Path, nbytes: int, rounds: int, *, disk: bool) -> dict[str, Any]:
    source, out = make_source(kind, work / kind, nbytes), work / "out"
    degrees = DEGREES if kind != "small" else (2,)
    contenders = {"cp": copy(source, out, synced=disk), **{f"tp {tp}": _split(source, out, tp) for tp in degrees}}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, command in contenders.items():
            samples[name].append(measure(command))
            shutil.rmtree(out)
    moved = {name: _moved(command, source, out, disk=disk) for name, command in contenders.items() if name != "cp"}
    shutil.rmtree(source)
    # The first round warms the caches.
    return {
        name: {
            "seconds": [sample["seconds"] for sample in taken[1:]],
            "cpu_seconds": middle(sample["cpu_seconds"] for sample in taken[1:]),
            "peak_nbytes": max(sample["peak_nbytes"] for sample in taken[1:]),
            **moved.get(name, {}),
        }
        for name, taken in samples.items()
    }


def _split(source: Path, out: Path, tp: int) -> list[str]:
    plan = ["--plan", str(source / "plan.json")] if (source / "plan.json").exists() else []
    return [sys.executable, "-m", "reshard", str(source), "--tp", str(tp), "-o", str(out), "-q", *plan]


def _moved(command: list[str], source: Path, out: Path, *, disk: bool) -> dict[str, Any]:
    """Return the bytes that a split reads and writes, as shares of the source's tensors and of the output's.

    ``rchar`` and ``wchar`` are those of all system calls, Python's own modules and the other files included; ``source``
    and ``output`` those from and to the two folders, by call; ``cold`` is what the disk was asked for, no page being
    cached.
    """
    if disk:
        drop_cached(source)
    took = measure(command)
    stored, made = (sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (source, out))
    shutil.rmtree(out)
    found: dict[str, Any] = {"rchar": took["rchar"] / stored, "wchar": took["wchar"] / made}
    if disk:
        found |= {"cold": took["read_bytes"] / stored, "cold_seconds": took["seconds"]}
    # Until it has its name, the output is in a hidden folder beside it.
    calls = count_calls(command, {"source": source, "output": out.parent})
    shutil.rmtree(out, ignore_errors=True)
    if not isinstance(calls, str):
        wholes = {"source": stored, "output": made}
        found |= {name: {call: nbytes / wholes[name] for call, nbytes in one.items()} for name, one in calls.items()}
        return found
    return {**found, "untraced": calls}


def table(result: dict[str, Any]) -> list[str]:
    """Return what the page says."""
    lines: list[list[object]] = []
    untraced: set[str] = set()
    for name, found in result["contenders"].items():
        copied = found["cp"]
        for contender, measured in found.items():
            untraced |= {measured["untraced"]} if "untraced" in measured else set()
            read, written = measured.get("source"), measured.get("output")
            lines.append(
                [
                    name,
                    contender,
                    f"{middle(measured['seconds']):.2f}",
                    f"{ratio(measured['seconds'], copied['seconds']):.2f}",
                    f"{measured['cpu_seconds'] / copied['cpu_seconds']:.1f}",
                    f"{measured['peak_nbytes'] / MIB:.0f}",
                    _share(measured.get("rchar")),
                    _share(read and sum(nbytes for call, nbytes in read.items() if call != "mmap")),
                    _share(read and read.get("mmap", 0.0)),
                    _share(measured.get("cold")),
                    _share(measured.get("wchar")),
                    _share(written and sum(nbytes for call, nbytes in written.items() if call in WRITES)),
                ]
            )
    told = "by calls and mapped are those from and to the two folders alone, as strace tells them"
    if untraced:
        told = f"no calls are told apart: {'; '.join(sorted(untraced))}"
    header = ["what", "", "s", "s / cp", "cpu s / cp", "peak MiB"]
    header += ["read", "by calls", "mapped", "cold, of the disk", "written", "by calls"]
    return [
        "## Splitting",
        "",
        "2 GiB of bfloat16 (of 16 KB tensors 1.6 GB), warm, in a process of its own, start-up included; on disk `cp` "
        "is followed by a `sync` of its files, as the splitter syncs what it writes. Hashes and checks are on. A peak "
        "is that of the command alone, started by a process of 10 MiB. Bytes are shares: those read of the source's "
        "tensors, those written of the output's. Read and written are what `/proc/PID/io` counts for all system calls "
        "(`rchar`, `wchar`), Python's own modules included; cold is what the disk was asked for (`read_bytes`) in a "
        f"run of its own after the source's pages were dropped; {told}.",
        "",
        "`cp` copies on one processor, without reading into its own memory (`splice`); what dominates on tmpfs is the "
        "first use of free pages. A virtual machine that gives free memory back to its host pays for that again, and "
        "then two processors pay half each: on this machine, dense at tp 2 was between .44 and 1.1 of `cp` from one "
        "hour to another, the processor time between .8 and 1.8.",
        "",
        *rows(header, lines),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
