"""Workers: starts the processes that run models for a check, and ends them.

torch and the loader are imported in those processes only. What they find comes back in files; what they say beyond that
is shown if one dies.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manifests.errors import LoadError

Process = subprocess.Popen[bytes]

MODULE = "loader.check_worker"
GRACE_S = 5.0
"""How long the other ranks may go on after one has died."""


def run_tiny(config: bytes, work: Path, tp: int, label: str) -> dict[str, Any]:
    """Make a tiny model of a configuration in ``work/tiny``; return what was made smaller.

    Raises:
        LoadError: The class cannot be made, or cannot be made small.
    """
    (work / "whole").mkdir()
    (work / "whole" / "config.json").write_bytes(config)
    job = {
        "config": str(work / "whole"),
        "out": str(work / "tiny"),
        "tp": tp,
        "label": label,
        "report": str(work / "tiny.json"),
    }
    (work / "tiny-jobs.json").write_text(json.dumps([job]))
    with _started(work, [["tiny", "tiny-jobs.json"]]) as (process,):
        process.wait()
        _check_died(process, "the process that makes the tiny model", work / "tiny-0.err")
    made: dict[str, Any] = json.loads((work / "tiny.json").read_text())
    if failed := made.get("failed"):
        raise LoadError(failed)
    return made


def run_ranks(work: Path, world_size: int) -> None:
    """Run the jobs of ``work/jobs.json`` in one process, then in ``world_size``, if it could load any of the models.

    Raises:
        LoadError: A process died.
    """
    ranks = [["rank", "jobs.json", str(rank), str(world_size)] for rank in range(world_size)]
    with _started(work, [["reference", "jobs.json"], *ranks]) as (reference, *others):
        reference.wait()
        _check_died(reference, "the one process", work / "reference-0.err")
        jobs = json.loads((work / "jobs.json").read_text())
        if not any(_loaded(Path(job["traces"]) / "reference.json") for job in jobs):
            return
        # Only now: the whole model and its parts need not be in memory at once.
        for process in others:
            if process.stdin is not None:
                process.stdin.close()
        _wait_for_all(others, work)


def _loaded(trace: Path) -> bool:
    return "failed" not in json.loads(trace.read_text())


def _wait_for_all(processes: list[Process], work: Path) -> None:
    deadline = None
    while any(process.poll() is None for process in processes):
        died = any(process.returncode for process in processes if process.returncode is not None)
        if died and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    # One that died by itself is named before those that died of its death.
    for rank, process in sorted(enumerate(processes), key=lambda item: (item[1].returncode or 0) >= 0):
        if process.returncode is not None:
            _check_died(process, f"rank {rank}", work / f"rank-{rank}.err")


def _check_died(process: Process, who: str, log: Path) -> None:
    code = process.returncode
    if not code:
        return
    said = log.read_text(errors="replace").strip().splitlines()[-8:]
    if code < 0:
        memory = "; is there enough memory for the model in float32?" if code == -signal.SIGKILL else ""
        reason = f"was ended by signal {-code}{memory}"
    else:
        reason = f"ended with code {code}"
    raise LoadError("\n  ".join([f"{who} {reason}", *said]))


@contextmanager
def _started(work: Path, commands: list[list[str]]) -> Iterator[list[Process]]:
    """Start processes; end those that are left when the body is done."""
    processes: list[Process] = []
    try:
        for role, jobs, *place in commands:
            log = work / f"{role}-{place[0] if place else 0}.err"
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, role, str(work / jobs), *place],
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=errors,
                    stderr=errors,
                )
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _environment() -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    given = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": loopback, **os.environ}
    # A model that goes through a set calls its modules in an order that the seed decides.
    given["PYTHONHASHSEED"] = "0"
    # A strategy of a user's own is found where this process would find it.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**given, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
