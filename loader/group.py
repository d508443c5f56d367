"""The group of ranks: starting it, and agreeing through its store that all can go on."""

import os
from typing import Protocol

import torch
import torch.distributed as dist

from manifests.errors import LoadError


class Divided(Protocol):
    """What is for a number of ranks: the manifest of a split, the record of a pipeline."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...


def join_group(
    manifest: Divided | None, group: dist.ProcessGroup | None, device: torch.device
) -> dist.ProcessGroup | None:
    """Return the group to compute in, started from torchrun's environment if there is none.

    Args:
        manifest: The split's; its number of ranks is compared before a group is started. Not used if there is one.
        group: A group to use, or None for the default one.
        device: Decides the backend: gloo for a CPU, nccl for CUDA.

    Returns:
        The group; None in a process of its own, which a split for one rank needs only.

    Raises:
        LoadError: No group is started yet, and the number of processes is not the split's number of ranks.
    """
    if manifest is None or group is not None or dist.is_initialized():
        return group or dist.group.WORLD
    expected = manifest.world_size
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != expected:
        raise LoadError(
            f"the split is for {expected} ranks, {started} processes were started; "
            f"use torchrun --nproc-per-node {expected}, or split with --tp {started}"
        )
    if expected > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return dist.group.WORLD
    return None


def kept(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return what a model may keep of a group: None, torch's word for it, if it is the default group.

    A default group that a model holds on to outlives ``destroy_process_group``, and its threads abort the process when
    the interpreter ends.
    """
    return None if group is dist.group.WORLD else group


def check_world_size(manifest: Divided, group: dist.ProcessGroup | None) -> None:
    """Compare a split's number of ranks with the group's.

    Raises:
        LoadError: They differ.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if size != manifest.world_size:
        raise LoadError(
            f"the split is for {manifest.world_size} ranks, the process group has {size}; "
            f"start {manifest.world_size} processes, or split with --tp {size}"
        )


def agree(group: dist.ProcessGroup | None, key: str, problem: str = "") -> None:
    """Tell all ranks whether this one can go on, and learn whether they can. Not a collective: it uses the store.

    Args:
        group: The ranks; without one there is nobody to agree with.
        key: The split's key, which must be the same on all ranks.
        problem: Why this rank cannot go on, or empty.

    Raises:
        LoadError: Another rank cannot go on, for the reason in the message, or has another split.
    """
    if group is None:
        return
    store = group.get_group_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Every rank counts its loads in this group, in the group's own store.
    prefix = f"reshard/load/{store.add(f'reshard/loads/{rank}', 1)}"
    store.set(f"{prefix}/{rank}", f"{key}\n{problem}")
    if problem:
        return
    for other in range(size):
        other_key, _, reason = store.get(f"{prefix}/{other}").decode().partition("\n")
        if reason:
            raise LoadError(f"rank {other} cannot go on: {reason}")
        if other_key != key:
            raise LoadError(f"rank {other} has another split: its key is {other_key}, rank {rank}'s {key}")
