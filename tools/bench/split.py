"""Splitting against ``cp -r`` of the same bytes: time with the start-up, memory, processor time, bytes moved."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.common import MIB, RESULTS, ROOT, Options, middle, ratio, rows
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
                found[f"{kind} on {place}"] = _measure(kind, Path(work), nbytes, options.rounds, synced=place == "disk")
    return {"contenders": found}


def _measure(kind: str, work: Path, nbytes: int, rounds: int, *, synced: bool) -> dict[str, Any]:
    source = make_source(kind, work / kind, nbytes)
    degrees = DEGREES if kind != "small" else (2,)
    copy = ["cp", "-r", str(source), str(work / "out")]
    contenders = {"cp": copy, **{f"tp {tp}": _command(source, work / "out", tp) for tp in degrees}}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, command in contenders.items():
            samples[name].append(_time(command, synced=synced and name == "cp"))
            shutil.rmtree(work / "out")
    transfers = {f"tp {tp}": _transfers(_command(source, work / "out", tp), source) for tp in degrees}
    shutil.rmtree(work / "out", ignore_errors=True)
    shutil.rmtree(source)
    # The first round warms the caches.
    return {
        name: {
            "seconds": [sample["seconds"] for sample in taken[1:]],
            "cpu_seconds": middle(sample["cpu_seconds"] for sample in taken[1:]),
            "peak_nbytes": max(sample["peak_nbytes"] for sample in taken[1:]),
            **transfers.get(name, {}),
        }
        for name, taken in samples.items()
    }


def _command(source: Path, out: Path, tp: int) -> list[str]:
    plan = ["--plan", str(source / "plan.json")] if (source / "plan.json").exists() else []
    return [sys.executable, "-m", "reshard", str(source), "--tp", str(tp), "-o", str(out), "-q", *plan]


def _time(command: list[str], *, synced: bool) -> dict[str, float]:
    """Run a command; ``cp`` is followed by a sync of what it wrote where the splitter syncs too."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    if synced:
        subprocess.run(["sync", "-f", command[-1]], check=True)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_nbytes": usage.ru_maxrss << 10,
    }


def _transfers(command: list[str], source: Path) -> dict[str, float]:
    """Return the bytes that one split reads of the source and writes of its output, as shares of what there is."""
    report = source.with_name("io.json")
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from reshard.cli import main\n"
        "main(sys.argv[2:], standalone_mode=False)\n"
        "lines = Path('/proc/self/io').read_text().splitlines()\n"
        "Path(sys.argv[1]).write_text(json.dumps({k: int(v) for k, v in (line.split(': ') for line in lines)}))\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(report), *command[3:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    counted = json.loads(report.read_text())
    out = Path(command[command.index("-o") + 1])
    stored, made = (sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (source, out))
    shutil.rmtree(out)
    # Python reads its own modules too, a few MB.
    return {"read": counted["rchar"] / stored, "written": counted["wchar"] / made}


def table(result: dict[str, Any]) -> list[str]:
    """Return what the page says."""
    lines: list[list[object]] = []
    for name, found in result["contenders"].items():
        copied = found["cp"]
        for contender, measured in found.items():
            lines.append(
                [
                    name,
                    contender,
                    f"{middle(measured['seconds']):.2f}",
                    f"{ratio(measured['seconds'], copied['seconds']):.2f}",
                    f"{measured['cpu_seconds'] / copied['cpu_seconds']:.1f}",
                    f"{measured['peak_nbytes'] / MIB:.0f}",
                    f"{measured['read']:.3f}" if "read" in measured else "",
                    f"{measured['written']:.3f}" if "written" in measured else "",
                ]
            )
    header = ["what", "", "s", "s / cp", "cpu s / cp", "peak MiB", "read / source", "written / output"]
    return [
        "## Splitting",
        "",
        "2 GiB of bfloat16 (of 16 KB tensors 1.6 GB), warm, in a process of its own, start-up included; on disk `cp` "
        "is followed by `sync`, as the splitter syncs what it writes. Hashes and checks are on. Bytes read and written "
        "are those of system calls (`rchar`, `wchar`), Python's own modules included. A peak is at least what the "
        "measuring process had when it started the command (80 MiB after it made the small tensors).",
        "",
        "`cp` copies on one processor, without reading into its own memory (`splice`); what dominates on tmpfs is the "
        "first use of free pages. A virtual machine that gives free memory back to its host pays for that again, and "
        "then two processors pay half each: on this machine, dense at tp 2 was between .44 and 1.1 of `cp` from one "
        "hour to another, the processor time between .8 and 1.8.",
        "",
        *rows(header, lines),
    ]
