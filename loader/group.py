"""The group of ranks: starting it, and agreeing through its store that all can go on."""

import os
from collections import Counter

import torch
import torch.distributed as dist

from manifests.errors import LoadError
from manifests.manifest import Manifest

_agreements: Counter[str] = Counter()


def ensure_group(manifest: Manifest, group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """Return the group to compute in, started from torchrun's environment if there is none.

    Args:
        manifest: The split's manifest.
        group: A group to use, or None for the default one.
        device: Decides the backend: gloo for a CPU, nccl for CUDA.

    Returns:
        The group; None for a split of one rank in a process without a group.

    Raises:
        LoadError: The number of processes is not the split's number of ranks.
    """
    expected = manifest.world_size
    if group is None and not dist.is_initialized():
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != expected:
            raise LoadError(
                f"the split is for {expected} ranks, {started} processes were started; "
                f"use torchrun --nproc-per-node {expected}, or split with --tp {started}"
            )
        if expected == 1:
            return None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = group or dist.group.WORLD
    size = dist.get_world_size(group)
    if size != expected:
        raise LoadError(
            f"the split is for {expected} ranks, the process group has {size}; "
            f"start {expected} processes, or split with --tp {size}"
        )
    return group


def agree(group: dist.ProcessGroup | None, topic: str, problem: str = "") -> None:
    """Tell all ranks whether this one can go on, and learn whether they can. Not a collective: it uses the store.

    Args:
        group: The ranks; without one there is nobody to agree with.
        topic: What is agreed on; the same on all ranks.
        problem: Why this rank cannot go on, or empty.

    Raises:
        LoadError: Another rank cannot go on; the message has its reason.
    """
    if group is None:
        return
    store = group.get_group_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    _agreements[topic] += 1
    prefix = f"reshard/{topic}/{_agreements[topic]}"
    store.set(f"{prefix}/{rank}", problem)
    if problem:
        return
    for other in range(size):
        reason = store.get(f"{prefix}/{other}").decode()
        if reason:
            raise LoadError(f"rank {other} cannot go on: {reason}")
