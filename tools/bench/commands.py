"""Commands as they are measured: what one took, and which system calls moved its bytes."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.bench.common import ROOT

READS = ("read", "readv", "pread64", "preadv", "preadv2", "mmap")
WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
BOTH = ("copy_file_range", "sendfile", "splice")
"""Calls that move bytes from one file to another."""

_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (\d+|0x[0-9a-f]+)")
_BEGUN = re.compile(r"(\d+) +(\w+\(.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_FILE = re.compile(r"\d+<(/[^>]*)>")

Calls = dict[str, dict[str, int]]
"""Bytes by the name of a folder, then by call."""


def copy(source: Path, out: Path, *, synced: bool) -> list[str]:
    """Return the command that copies a folder, and makes its files durable as the splitter does on a disk."""
    if not synced:
        return ["cp", "-r", str(source), str(out)]
    return ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/* "$2"', "sh", str(source), str(out)]


def measure(command: Sequence[str]) -> dict[str, float]:
    """Run a command; return its seconds, its processor time, its peak, and the counts of ``/proc/PID/io``.

    What it waits for of its children is counted too.

    Raises:
        SystemExit: It failed.
    """
    runner = [sys.executable, "-I", "-S", str(Path(__file__).with_name("runner.py"))]
    done = subprocess.run([*runner, *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if code := took.pop("exit_code"):
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return took


def count_calls(command: Sequence[str], folders: Mapping[str, Path]) -> Calls | str:
    """Return the bytes that a command's system calls move from and to files below folders.

    Args:
        command: The command.
        folders: By a name for each; a file below several counts for the first of them.

    Returns:
        The bytes, or why there are none: not every machine has strace, or lets it trace.
    """
    if shutil.which("strace") is None:
        return "no strace here"
    with tempfile.NamedTemporaryFile("r", prefix="reshard-calls-") as trace:
        names = ",".join((*READS, *WRITES, *BOTH))
        tracing = ["strace", "-f", "-qq", "-y", "-s", "0", "-e", "signal=none", "-e", f"trace={names}"]
        done = subprocess.run(
            [*tracing, "-o", trace.name, *command],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            return (done.stderr.splitlines() or ["strace failed"])[-1]
        return parse_calls(trace, folders)


def parse_calls(lines: Iterable[str], folders: Mapping[str, Path]) -> Calls:
    """Return the bytes that the lines of strace tell of; see `count_calls`."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    begun: dict[str, str] = {}
    for line in lines:
        if match := _BEGUN.match(line):
            begun[match[1]] = match[2]
            continue
        if match := _RESUMED.match(line):
            line = f"{match[1]} {begun.pop(match[1], '')}{match[2]}"
        if not (match := _CALL.match(line)):
            continue  # failed, or an end
        _, call, arguments, result = match.groups()
        nbytes = int(arguments.split(", ")[1]) if call == "mmap" else int(result)
        for path in _FILE.findall(arguments):
            folder = next((name for name, folder in folders.items() if Path(path).is_relative_to(folder)), None)
            if folder is not None:
                found[folder][call] += nbytes
    return {name: dict(calls) for name, calls in found.items()}
