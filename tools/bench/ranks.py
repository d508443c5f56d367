"""Ranks for measuring: each sample is taken in a new process, forked from one that has imported everything.

So imports and what an earlier sample left behind are in no number, and a sample costs no interpreter's start. What the
first sample of a kind imports, the parent imports after it.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tools.bench.common import ROOT

Job = dict[str, Any]
Measure = Callable[[Job, int, int], dict[str, Any]]


class Ranks:
    """One process a rank of a worker module, which take jobs together."""

    def __init__(self, worker: str, world_size: int) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", worker, str(rank), str(world_size)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            if process.stdin:
                process.stdin.close()
            process.wait()

    def measure(self, job: Job) -> list[dict[str, Any]]:
        """Return what each rank measured.

        Raises:
            RuntimeError: A rank ended, or measured nothing.
        """
        self._jobs += 1
        store = [self._store.port, f"job-{self._jobs}"]
        for process in self._processes:
            process.stdin.write(json.dumps({**job, "store": store}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        found = []
        for rank, process in enumerate(self._processes):
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line or "failed" in (measured := json.loads(line)):
                raise RuntimeError(f"rank {rank}: {job}: {line or 'ended'}")
            found.append(measured)
        return found


def start_group(job: Job, rank: int, world_size: int) -> None:
    """Start gloo as torchrun has it: its store is in another process."""
    import torch.distributed as dist

    port, prefix = job["store"]
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def serve(measure: Measure, modules: tuple[str, ...]) -> None:
    """Take jobs from standard input, one a line, and answer each with what a new process measured."""
    import importlib

    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    for module in modules:
        importlib.import_module(module)
    # The peers' own warnings of what they will rename.
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = _in_child(measure, json.loads(line), rank, world_size)
        for name in answer.pop("modules", []):
            if name not in sys.modules:
                try:
                    importlib.import_module(name)
                except ImportError:
                    continue
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _in_child(measure: Measure, job: Job, rank: int, world_size: int) -> dict[str, Any]:
    receive, send = os.pipe()
    before = set(sys.modules)
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            answer = measure(job, rank, world_size)
            answer["modules"] = sorted(set(sys.modules) - before) if job.get("first") else []
        except BaseException as error:  # noqa: BLE001 - told by the process that started the ranks
            answer = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        with os.fdopen(send, "w") as stream:
            stream.write(json.dumps(answer))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"failed": "the process ended"}  # type: ignore[no-any-return]
