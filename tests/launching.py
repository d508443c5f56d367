"""Starting one process a rank, and waiting for all of them."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def run_ranks(worker: str, folder: Path, *more: str, world_size: int, timeout_s: float) -> None:
    """Run a module of the tests in as many processes as ranks; the first to fail ends all, and so does the time limit.

    The worker gets the folder and what more there is as its arguments, and torchrun's variables.
    """
    # The ranks meet in a store of this process, on a port that the system chooses and that is never given up between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    command = [sys.executable, "-m", worker, str(folder), *more]
    processes = [start_rank(command, rank, world_size, store.port, log) for rank, log in enumerate(logs)]
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
    assert codes == [0] * world_size, f"ranks ended with {codes}:\n{tails}"


def gathered(folder: Path, world_size: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every rank left with `torch.save` in its file, a table by the name of a case, by that name."""
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def start_rank(command: list[str], rank: int, world_size: int, port: int, log: Path) -> "subprocess.Popen[bytes]":
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=stream, stderr=subprocess.STDOUT
        )
