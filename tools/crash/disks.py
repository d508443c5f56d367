"""Full disks: a split into small file systems of many sizes, each of which then grows."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.crash.trial import REFUSED, RESHARD, ROOMY, Bench, require


@dataclass
class Disks:
    """What was found: how many sizes, how the runs ended, and the most that was written over both attempts."""

    sizes: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    most: float = 0.0

    def __str__(self) -> str:
        codes = ", ".join(f"{count} {name}" for name, count in sorted(self.codes.items()))
        return (
            f"{self.sizes} sizes of a small file system: {codes}; no half output, every rerun with room right, "
            f"{self.kept} of them went on with what was there; written over both attempts at most "
            f"{self.most:.3f} x the output"
        )


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[None]:
    """Mount a file system in memory.

    Raises:
        PermissionError: It is not permitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        raise PermissionError(f"{folder}: cannot be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def is_possible(folder: Path) -> bool:
    """Tell whether file systems may be mounted."""
    try:
        with mounted(folder, 1 << 20):
            return True
    except (PermissionError, FileNotFoundError):
        return False


def fill(bench: Bench, sizes: int) -> Disks:
    """Split into file systems of so many sizes, up to a little more than is needed.

    The check for room is left out, as if another program had taken it meanwhile; what it says is compared as well.
    """
    found = Disks()
    place = bench.out.parent
    for step in range(sizes):
        nbytes = int(bench.nbytes * 1.02 * (step + 1) / sizes) >> 12 << 12
        with mounted(place, nbytes):
            checked = bench.finish(bench.start(module=RESHARD))
            if not bench.check_nothing_half():
                require(checked.code == REFUSED and str(place) in checked.said, f"{nbytes} bytes: {checked}")
                full = bench.finish(bench.start(module=ROOMY))
                require(full.code == REFUSED, f"{nbytes} bytes: {full}")
                require("No space left on device" in full.said and str(place) in full.said, f"{nbytes} bytes: {full}")
                require(not bench.check_nothing_half(), f"{nbytes} bytes: an output")
                subprocess.run(["mount", "-o", f"remount,size={2 * bench.nbytes}", str(place)], check=True)
                again = bench.check_rerun()
                written = checked.nbytes + full.nbytes + again.nbytes
                require(written < 1.2 * bench.nbytes, f"{written} bytes written for {bench.nbytes}")
                found.most = max(found.most, written / bench.nbytes)
                found.kept += "are kept" in full.said
            found.codes[f"exit code {checked.code}"] += 1
            found.sizes += 1
    return found
