"""The collectives, on plain tensors: each gives a tensor that no other part of the program holds."""

import torch
import torch.distributed as dist
from torch import nn

from loader.steps.site import Group
from manifests.errors import LoadError

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUM = dist.AllreduceOptions()
if hasattr(_SUM, "asyncOp"):  # from torch 2.7 on
    _SUM.asyncOp = False


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum a contiguous tensor over the ranks, in place, and return it.

    It is ``dist.all_reduce`` without what that makes and compares anew in every call; what is special has it itself.
    """
    if torch.compiler.is_compiling() or tensor.is_complex() or (ranks := group or dist.group.WORLD) is None:
        dist.all_reduce(tensor, group=group)
    elif (work := ranks.allreduce([tensor], _SUM)) is not None:
        work.wait()
    return tensor


def gathered(tensor: torch.Tensor, dim: int, world_size: int, group: Group) -> torch.Tensor:
    """Return the ranks' contiguous tensors of one shape joined along a dimension, in the order of ranks."""
    flat = tensor.new_empty((world_size * tensor.numel(),))
    _all_gather(flat, tensor.view(-1), group=group)
    parts = flat.view(world_size, *tensor.shape)
    dim %= tensor.ndim
    return parts.movedim(0, dim).reshape(*tensor.shape[:dim], world_size * tensor.shape[dim], *tensor.shape[dim + 1 :])


def summed_part(tensor: torch.Tensor, dim: int, world_size: int, group: Group) -> torch.Tensor:
    """Return the rank's part along a dimension, which the number of ranks divides, of the sum over the ranks."""
    dim %= tensor.ndim
    shape = (*tensor.shape[:dim], tensor.shape[dim] // world_size, *tensor.shape[dim + 1 :])
    parts = tensor.reshape(*shape[:dim], world_size, *shape[dim:]).movedim(dim, 0).contiguous()
    part = tensor.new_empty(shape)
    _reduce_scatter(part.view(-1), parts.view(-1), group=group)
    return part


def collectable(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return a module's output in one piece.

    Raises:
        LoadError: It is not one tensor, or gradients would flow through it.
    """
    if not isinstance(output, torch.Tensor):
        raise LoadError(f"{type(module).__name__}: gives {type(output).__name__}, a collective needs one tensor")
    if output.requires_grad:
        raise LoadError(
            f"{type(module).__name__}: a sharded model computes no gradients; call it under torch.inference_mode()"
        )
    return output.contiguous()
