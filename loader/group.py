"""The group of ranks: this process's place in it, the store through which they meet, and starting it."""

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from manifests.errors import LoadError
from manifests.manifest import Manifest
from manifests.runtime import RuntimeManifest

CONNECT_S = 300.0
"""Most seconds that a rank tries to reach the store, which rank 0 opens before anything else."""


class Place(NamedTuple):
    """A process's place among the ranks that load together.

    Attributes:
        rank: Its number.
        size: How many there are; 1 for a process of its own.
        group: The group to compute in; None if it is not started yet, and in a process of its own.
        counted: How many there are, in words.
        problem: Why the process cannot meet the others; empty if it can.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    counted: str = ""
    problem: str = ""

    @property
    def holds_store(self) -> bool:
        """Whether the store is likely to end with this process."""
        return not _is_agents_store() and (dist.get_rank() if dist.is_initialized() else self.rank) == 0

    @property
    def opens_store(self) -> bool:
        """Whether the others meet in a store that is for this process to open."""
        starts = self.group is None and self.size > 1 and not self.problem
        return starts and self.rank == 0 and not _is_agents_store()

    def open_store(self, wait_s: float) -> Store:
        """Return the store through which the ranks meet: that of the group, or that of the environment.

        Args:
            wait_s: Most seconds to wait for it.

        Raises:
            LoadError: It cannot be reached.
        """
        if self.group is not None:
            return self.group.get_group_store()
        return _environment_store(self.rank, min(wait_s, CONNECT_S))

    def check(self, manifest: Manifest | RuntimeManifest) -> None:
        """Compare a split's number of ranks with that of the processes.

        Raises:
            LoadError: They differ, or the process has no place among them.
        """
        self.check_size(manifest.world_size)

    def check_size(self, expected: int) -> None:
        """Compare a number of ranks with that of the processes.

        Raises:
            LoadError: They differ, or the process has no place among them.
        """
        if 1 <= self.size != expected:
            raise LoadError(
                f"the split is for {expected} ranks, {self.counted}; "
                f"start {expected} processes (torchrun --nproc-per-node {expected}), or split with --tp {self.size}"
            )
        if self.problem:
            raise LoadError(self.problem)


def find_place(group: dist.ProcessGroup | None) -> Place:
    """Return this process's place: in a group, in the default one, or by torchrun's variables.

    Args:
        group: A group to use, or None for the default one, or for the environment if none is started.
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is None:
        return read_environment(os.environ)
    if not isinstance(group, dist.ProcessGroup):
        return Place(0, 0, None, problem="this process is no rank of the group that it was given")
    size = dist.get_world_size(group)
    return Place(dist.get_rank(group), size, group, f"the process group has {size}")


def read_environment(variables: Mapping[str, str]) -> Place:
    """Return the place that torchrun's variables give to this process.

    >>> read_environment({}).size, read_environment({"RANK": "4", "WORLD_SIZE": "4"}).problem
    (1, 'RANK is 4 of WORLD_SIZE 4; ranks count from 0 to 3')
    """
    size, rank = variables.get("WORLD_SIZE", ""), variables.get("RANK", "")
    for name, value in {"WORLD_SIZE": size or "1", "RANK": rank or "0"}.items():
        if not value.isascii() or not value.isdigit():
            return Place(0, 0, None, problem=f"{name} is {value!r}, which is no number; start with torchrun")
    counted = f"{size or 1} processes were started" + ("" if size else " (WORLD_SIZE is not set)")
    place = Place(int(rank or 0), int(size or 1), None, counted)
    if place.rank >= place.size:
        of = f"WORLD_SIZE {size}" if size else "1 process: WORLD_SIZE is not set"
        return place._replace(problem=f"RANK is {rank} of {of}; ranks count from 0 to {max(place.size - 1, 0)}")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if place.size > 1 else ()
    if missing := [name for name in needed if not variables.get(name)]:
        problem = f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start with torchrun"
        return place._replace(problem=problem)
    port = variables.get("MASTER_PORT", "0")
    if needed and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return place._replace(problem=f"MASTER_PORT is {port!r}, which is no port; start with torchrun")
    return place


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _environment_store(rank: int, wait_s: float) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 opens unless torchrun's agent has it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and not _is_agents_store()
    try:
        store = _open(address, port) if opens else None
        if store is None:
            _wait_for(address, port, wait_s)
            store = _connect(address, port, opens=False)
    except (OSError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        whose = "by this process" if opens else "by torchrun" if _is_agents_store() else "by rank 0"
        raise LoadError(
            f"rank {rank}: the ranks' store at {address}:{port}, to be opened {whose}, cannot be reached within "
            f"{wait_s:.0f} s: {first}; see that rank 0 runs, and MASTER_ADDR and MASTER_PORT"
        ) from error
    return PrefixStore(f"reshard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _open(address: str, port: int) -> Store | None:
    """Return a new store; None if the port is taken: if that is by rank 0 as well, the agreement finds it."""
    try:
        return _connect(address, port, opens=True)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            return None
        raise


def _connect(address: str, port: int, *, opens: bool) -> Store:
    limit = timedelta(seconds=CONNECT_S)
    return TCPStore(address, port, None, opens, limit, wait_for_workers=False, multi_tenant=True)


def _wait_for(address: str, port: int, wait_s: float) -> None:
    """Wait until somebody listens; torch would print a stack for each attempt, and take twice the time."""
    end, pause = time.monotonic() + wait_s, 0.01
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(end - time.monotonic(), 0.1)) as found:
                if found.getsockname() != found.getpeername():
                    return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


def start_group(place: Place, store: Store, device: torch.device) -> dist.ProcessGroup | None:
    """Start the default group, gloo for a CPU and nccl for CUDA, of ranks that meet in a store."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
    return dist.group.WORLD


def kept(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return what a model may keep of a group: None, torch's word for it, if it is the default group.

    A default group that a model holds on to outlives ``destroy_process_group``, and its threads abort the process when
    the interpreter ends.
    """
    return None if group is dist.group.WORLD else group
