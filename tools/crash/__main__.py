"""Run all crash tests: ``python -m tools.crash``; ``make test-full`` does it."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tools.crash import disks, faults
from tools.crash.kills import kill_often
from tools.crash.trial import Bench


def main() -> int:
    """Run them and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tools.crash", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="at random moments")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--sizes", type=int, default=50, help="of small file systems")
    parser.add_argument("--data-calls", type=int, default=10, help="at which tensors are written, of all of them")
    parser.add_argument("--only", default="", choices=["", "kills", "faults", "disks"])
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a file system in memory")
    parser.add_argument("--disk", type=Path, help="a folder on a disk; that for temporary files if not given")
    options = parser.parse_args()
    for name, run in (("kills", _kills), ("faults", _faults), ("disks", _disks)):
        if options.only in ("", name):
            started = time.monotonic()
            for line in run(options):
                print(f"{line} ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


def _kills(options: argparse.Namespace) -> list[object]:
    with tempfile.TemporaryDirectory(dir=options.memory) as work:
        bench = Bench(Path(work) / "bench", 51)
        return [kill_often(bench, options.kills, options.seed)]


def _faults(options: argparse.Namespace) -> list[object]:
    if not faults.is_possible():
        return ["no faults: strace is not installed"]
    found = []
    with tempfile.TemporaryDirectory(dir=options.disk) as work:
        bench = Bench(Path(work) / "bench", 6, options=["--jobs", "1"])
        for force in (False, True):
            older = faults.older_split(bench) if force else None
            met, arguments = faults.Faults(), ["--force"] if force else []
            calls = faults.calls_of(bench, *arguments, older=older)
            for fault in faults.every_fault(calls, options.data_calls):
                faults.meet(bench, fault, met, *arguments, older=older)
            found.append(f"{'an older output replaced' if force else 'a new output'}: {met}")
    return found


def _disks(options: argparse.Namespace) -> list[object]:
    with tempfile.TemporaryDirectory(dir=options.memory) as work:
        if not disks.is_possible(Path(work) / "try"):
            return ["no full disks: mounting is not permitted"]
        return [disks.fill(Bench(Path(work) / "bench", 51), options.sizes)]


if __name__ == "__main__":
    sys.exit(main())
