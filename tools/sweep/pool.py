"""Working through cases in as many processes as ranks, whatever becomes of one of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.sweep.cases import ROOT, Case

CASE_TIMEOUT_S = 60
"""From a case's start to its outcome."""

PREPARING_TIMEOUT_S = 600
"""For making the models, the expected results and the splits of all cases."""

Outcomes = dict[str, list[dict[str, Any]]]


class LaunchError(Exception):
    """The processes ended before any case had started."""


def work_through(
    world_size: int, cases: Sequence[Case], work: Path, tell: Callable[[str], None] = lambda name: None
) -> Outcomes:
    """Return every case's outcomes, one of each rank, or a single one where it was not begun or not ended.

    Processes that die or are stuck are replaced; the case that they were at is told as failed.

    Args:
        world_size: Number of processes.
        cases: What they work through.
        work: Folder for models, splits, logs and outcomes; models that are there are used.
        tell: Called with the name of a case that is done.

    Raises:
        LaunchError: The processes ended, or did not start a case in time.
    """
    folder = work / "outcomes"
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        (folder / f"{case.name}.json").unlink(missing_ok=True)
    waiting = list(cases)
    while waiting:
        launch = Launch(world_size, waiting, work)
        stuck = launch.watch(tell)
        if stuck:
            case, why = stuck
            (folder / f"{case.name}.json").write_text(json.dumps([{"error": why, "stage": "run", "traceback": why}]))
            tell(case.name)
        waiting = [case for case in waiting if not (folder / f"{case.name}.json").exists()]
    return {case.name: json.loads((folder / f"{case.name}.json").read_text()) for case in cases}


class Launch:
    """One set of processes."""

    def __init__(self, world_size: int, cases: Sequence[Case], work: Path) -> None:
        self.cases, self.work, self.started = cases, work, time.monotonic()
        # Of this process alone: another may be at other cases in the same folder.
        own = work / "launches" / str(os.getpid())
        own.mkdir(parents=True, exist_ok=True)
        cases_file = own / "cases.json"
        cases_file.write_text(json.dumps([case._asdict() for case in cases]))
        # The ranks meet in a store of this process, on a port that the system chooses and never gives up between.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = [own / f"rank-{rank}.log" for rank in range(world_size)]
        command = [sys.executable, "-m", "tools.sweep.worker", str(cases_file), str(work)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("wb") as stream:
                environment = {**os.environ, **self._environment(rank, world_size)}
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
                )

    def _environment(self, rank: int, world_size: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }

    def watch(self, tell: Callable[[str], None]) -> tuple[Case, str] | None:
        """Wait for the end; return the case at which the processes died or were stuck, if there was one.

        Raises:
            LaunchError: They were at none.
        """
        try:
            return self._follow(tell)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def _follow(self, tell: Callable[[str], None]) -> tuple[Case, str] | None:
        for position, case in enumerate(self.cases):
            outcome, since = self.work / "outcomes" / f"{case.name}.json", None
            while not outcome.exists():
                codes = [process.poll() for process in self.processes]
                if since is None and self.store.check([f"started/{position}"]):
                    since = time.monotonic()
                if any(codes):
                    self._refuse_if(since is None, f"ranks ended with {codes}")
                    return case, f"ranks ended with {codes}"
                if since is not None and time.monotonic() > since + CASE_TIMEOUT_S:
                    return case, f"no outcome within {CASE_TIMEOUT_S} s"
                late = since is None and time.monotonic() > self.started + PREPARING_TIMEOUT_S
                self._refuse_if(late, f"no case started within {PREPARING_TIMEOUT_S} s")
                time.sleep(0.02)
            tell(case.name)
            self.started = time.monotonic()
        return None

    def _refuse_if(self, failed: bool, what: str) -> None:
        if failed:
            tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)
            raise LaunchError(f"{what}:\n{tails}")
