"""Filling up: parts that are shorter than the others' get zeros where an axis is padded (``~``)."""

import torch

from manifests.contents import Tensor
from manifests.dtypes import atom
from manifests.layout import Axis, Mesh, running_part
from manifests.placement import bound_axis
from manifests.runs import Runs, divide_unit, expand


def filled(part: torch.Tensor, tensor: Tensor, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor as it runs; the part itself if nothing is to be filled up.

    Args:
        part: What the rank's file holds.
        tensor: What the manifest says of the whole.
        rank: The rank.
    """
    for cut in tensor.placement.cuts:
        axis = bound_axis(cut.axis)
        if axis.is_padded:
            runs, size = running_part(axis, tensor.placement.mesh, rank)
            unit = cut.unit * (atom(tensor.dtype)[0] if cut.dim == len(tensor.shape) - 1 else 1)
            part = spread(part, cut.dim, divide_unit(runs, unit, axis.size) or (), size // unit)
    return part


def spread(part: torch.Tensor, dim: int, runs: Runs, size: int) -> torch.Tensor:
    """Return entries of a dimension at the destinations of runs, in their order, with zeros between and after them."""
    if part.shape[dim] == size:
        return part
    spread = torch.zeros(*part.shape[:dim], size, *part.shape[dim + 1 :], dtype=part.dtype, device=part.device)
    at = 0
    for dst, length in sorted((dst, length) for _, dst, length in expand(runs)):
        spread.narrow(dim, dst, length).copy_(part.narrow(dim, at, length))
        at += length
    return spread


def taken(whole: torch.Tensor, dim: int, axis: Axis, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return a rank's entries of a dimension that has an axis, as they run: with zeros where it is padded."""
    runs, size = running_part(axis, mesh, rank)
    spans = sorted((dst, src, length) for src, dst, length in expand(runs))
    chosen = (torch.arange(src, src + length, device=whole.device) for _, src, length in spans)
    part = whole.index_select(dim, torch.cat([torch.arange(0, device=whole.device), *chosen]))
    return spread(part, dim, runs, size)
