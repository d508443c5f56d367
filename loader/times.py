"""Where the time from the start of the process to a model that is ready went."""

import os
import time
from pathlib import Path


class Times:
    """Parts of a time, one after the other.

    >>> times = Times()
    >>> times.end("manifest")
    >>> str(times).startswith("ready ")
    True
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._before = _process_age()
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """Call the time since the last call a part, in seconds."""
        now = time.perf_counter()
        self.parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {1000 * seconds:.1f} ms" for part, seconds in self.parts.items())
        inside = sum(self.parts.values())
        if self._before is None:
            return f"ready in {inside:.3f} s: {parts}"
        return f"ready {self._before + inside:.2f} s after the process started: {self._before:.2f} s before, {parts}"


def _process_age() -> float | None:
    """Return the seconds since this process started, as the kernel counts them; None where it does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None
