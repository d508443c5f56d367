"""Counting collectives, whoever asks for them: our steps, DTensor, or transformers itself."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
"""Operators of the namespaces c10d and _c10d_functional."""


class Collectives(TorchDispatchMode):
    """Within it, collectives are counted by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in NAMES:
            self.counts[NAMES[name]] += 1
        return func(*args, **dict(kwargs or {}))


def count(action: Any, **arguments: Any) -> tuple[Any, dict[str, int]]:
    """Return what an action gives, and how many collectives of each kind it took."""
    with Collectives() as collectives:
        given = action(**arguments)
    return given, dict(collectives.counts)
