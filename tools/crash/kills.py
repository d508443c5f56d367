"""Kills at random moments."""

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass

from tools.crash.trial import Bench, require


@dataclass
class Kills:
    """What was found.

    Attributes:
        kills: Runs that a kill ended.
        late: Runs that were over before.
        most: The most bytes written over all attempts at one split, as a multiple of the output per kill, less the
            output itself for those after the first.
    """

    kills: int = 0
    late: int = 0
    most: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills at random moments ({self.late} more came too late): no half output, every rerun "
            f"right; written over all attempts at most {self.most:.3f} x the output"
        )


def kill_often(bench: Bench, kills: int, seed: int = 0) -> Kills:
    """Kill a split again and again; after every kill, or every few of them, let it complete.

    Args:
        bench: The split.
        kills: How many runs are ended by a kill.
        seed: Of the random moments.
    """
    rng, found = random.Random(seed), Kills()
    duration = _duration(bench)
    while found.kills < kills:
        in_a_row = rng.choice((1, 1, 1, 1, 3))
        bench.begin()
        written = killed = 0
        for _ in range(in_a_row):
            ended = _killed(bench, rng.uniform(0, duration))
            if bench.check_nothing_half():
                found.late += 1
                break
            written += ended
            killed += 1
        else:
            written += bench.check_rerun().nbytes
            allowed = 1 + 0.2 * killed
            require(written < allowed * bench.nbytes, f"{written} bytes written for {bench.nbytes}, {killed} kills")
            found.most = max(found.most, written / bench.nbytes / allowed * 1.2)
        found.kills += killed
    return found


def _duration(bench: Bench) -> float:
    """Return how long a run takes from its first file on, in seconds."""
    durations = []
    for _ in range(3):
        bench.begin()
        process = bench.start()
        _wait_for_a_file(bench, process)
        started = time.monotonic()
        bench.finish(process)
        durations.append(time.monotonic() - started)
    return max(durations)


def _killed(bench: Bench, after_s: float) -> int:
    """Kill a run some time after its first file; return the bytes that it wrote."""
    process = bench.start()
    _wait_for_a_file(bench, process)
    time.sleep(after_s)
    os.kill(process.pid, signal.SIGKILL)
    return bench.finish(process).nbytes


def _wait_for_a_file(bench: Bench, process: "subprocess.Popen[str]") -> None:
    """Wait until a run has made, or renamed, something; or until it has ended, and is still there to be counted."""
    before = _names(bench)
    while _names(bench) <= before and not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        time.sleep(0.001)


def _names(bench: Bench) -> set[str]:
    return {path.name for path in bench.out.parent.iterdir()}
