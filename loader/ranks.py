"""The ranks as a strategy's hooks see them (`manifests.strategy.Ranks`)."""

import torch
import torch.distributed as dist

from loader.steps.collectives import gathered, summed
from loader.steps.site import Group


class GroupRanks:
    """The ranks of a process group.

    Attributes:
        rank: This one's number.
        world_size: How many there are.
        group: The process group; None is the default group.
    """

    def __init__(self, group: Group) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; the tensor itself stays as it is."""
        return summed(tensor.clone(memory_format=torch.contiguous_format), self.group)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, which have one shape, joined along a dimension in the order of ranks."""
        return gathered(tensor.contiguous(), dim, self.world_size, self.group)
