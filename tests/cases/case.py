"""A case: a checkpoint, a plan, and the one right outcome."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import deserialize
from safetensors.torch import save

from manifests.errors import CheckpointError, ReshardError
from tests.checkpoints import LLAMA, Stored
from tests.checkpoints import save as save_checkpoint

Tensors = Mapping[str, torch.Tensor]
Ranges = list[tuple[int, int]]


class Case(NamedTuple):
    """A case.

    Attributes:
        name: The kind's letter and number in the reports, and a few words.
        write: Writes the checkpoint into a folder that is not there yet.
        rules: The plan, which speaks stored names.
        ranks: The tensors of every rank, or empty if it is refused.
        refusal: What it is refused with; None if it is not.
        words: What the message says.
        tp: Number of ranks.
        options: Options of the command line beside.
        said: What the summary says of a split.
    """

    name: str
    write: Callable[[Path], object]
    rules: Mapping[str, Any]
    ranks: tuple[Tensors, ...] = ()
    refusal: type[ReshardError] | None = None
    words: tuple[str, ...] = ()
    tp: int = 2
    options: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


def of(tensors: Tensors, **config: Any) -> Callable[[Path], object]:
    """Return what writes a checkpoint of one file, with a Llama's configuration but for what is given."""
    return lambda folder: save_checkpoint(folder, tensors, {**LLAMA, **config})


def take(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    """Return ranges of a dimension, joined; sizes of a dtype of half a byte count as torch has them, in bytes."""
    plain = tensor if tensor.itemsize > 1 or tensor.dtype == torch.bool else tensor.view(torch.uint8)
    parts = [plain.narrow(dim, begin, end - begin) for begin, end in ranges]
    return torch.cat(parts, dim).contiguous().view(tensor.dtype)


def cut(tensors: Tensors, dims: Mapping[str, int], ranges: list[Ranges]) -> tuple[Tensors, ...]:
    """Return the tensors of every rank: those that have a dim with its ranges of it, the others whole."""
    return tuple(
        {name: take(tensor, dims[name], rank) if name in dims else tensor for name, tensor in tensors.items()}
        for rank in ranges
    )


def even(size: int, tp: int) -> list[Ranges]:
    """Return the ranges of a plain cut."""
    part = size // tp
    return [[(rank * part, (rank + 1) * part)] for rank in range(tp)]


def as_stored(tensors: Tensors) -> dict[str, Stored]:
    """Return tensors as the safetensors library writes them."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    }


def refused(name: str, write: Callable[[Path], object], rules: Mapping[str, Any], *words: str, **more: Any) -> Case:
    """Return a case that is refused, as a broken checkpoint if nothing else is said."""
    return Case(name, write, rules, refusal=more.pop("refusal", CheckpointError), words=words, **more)
