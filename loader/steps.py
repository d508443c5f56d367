"""The steps that the styles name (`manifests.styles`): what happens to a module's inputs and to its output.

Everything that can be known before the first call is computed when a step is made. Steps act on plain local tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manifests.errors import LoadError
from manifests.layout import rank_runs
from manifests.placement import bound_axis

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | None
"""The ranks that compute together; None is the default group."""
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]


def owned_range(axis: str, world_size: int, rank: int) -> tuple[int, int, int]:
    """Return the first entry, the number of entries that a rank owns of a contiguous axis, and the axis's size.

    >>> owned_range("(12*)", 3, 1)
    (4, 4, 12)
    """
    bound = bound_axis(axis)
    runs = rank_runs(bound, (("tp", world_size),), rank)
    if len(runs) > 1 or any(run.repeat > 1 for run in runs):
        raise LoadError(f"{axis}: a rank's part is not contiguous")
    return (runs[0].src, runs[0].length, bound.size) if runs else (0, 0, bound.size)


def all_reduce(group: Group) -> After:
    """Return the step that sums the output over the ranks, in place."""

    def step(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor | None) -> torch.Tensor | None:
        if output is None:
            return None
        output = _collectable(module, output)
        dist.all_reduce(output, group=group)
        return output

    return step


def all_gather(group: Group) -> After:
    """Return the step that joins the ranks' features, the last dimension of the output."""
    world_size = dist.get_world_size(group)

    def step(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        output = _collectable(module, output)
        flat = output.new_empty((world_size * output.numel(),))
        _all_gather(flat, output.view(-1), group=group)
        parts = flat.view(world_size, *output.shape)
        return parts.movedim(0, -2).reshape(*output.shape[:-1], world_size * output.shape[-1])

    return step


def slice_input(axis: str, group: Group) -> Before:
    """Return the step that keeps the rank's own features of the first input."""
    start, length, size = owned_range(axis, dist.get_world_size(group), dist.get_rank(group))

    def step(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name, value = _first_input(module, args, kwargs)
        if value.shape[-1] != size:
            raise LoadError(
                f"{type(module).__name__}: gets {value.shape[-1]} features, its split expects all {size}; "
                "the module before it is cut otherwise"
            )
        return _with_first_input(name, value.narrow(-1, start, length), args, kwargs)

    return step


class MaskedIds:
    """The two steps of an embedding cut by its vocabulary: ids become local, foreign ids give zeros.

    The mask is kept from the one step to the other. On a CPU an id outside the whole vocabulary raises, as torch does;
    on other devices and in compiled code it gives zeros, since a check would wait for the device.
    """

    def __init__(self, axis: str, group: Group) -> None:
        self._start, self._length, self._size = owned_range(axis, dist.get_world_size(group), dist.get_rank(group))
        self._foreign: torch.Tensor | None = None
        self._reduce = all_reduce(group)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make ids local."""
        name, ids = _first_input(module, args, kwargs)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
            lowest, highest = torch.aminmax(ids)
            if lowest < 0 or highest >= self._size:
                raise IndexError(
                    f"ids from {int(lowest)} to {int(highest)} are not all in a vocabulary of {self._size}"
                )
        local = ids - self._start
        self._foreign = (local < 0) | (local >= self._length)
        return _with_first_input(name, local.masked_fill(self._foreign, 0), args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Clear the rows of foreign ids and sum over the ranks."""
        foreign, self._foreign = self._foreign, None
        if foreign is None:
            raise LoadError(f"{type(module).__name__}: its output came without its inputs")
        output = output.masked_fill_(foreign.unsqueeze(-1), 0)
        reduced: torch.Tensor = self._reduce(module, args, output)
        return reduced


def _collectable(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise LoadError(f"{type(module).__name__}: gives {type(output).__name__}, a collective needs one tensor")
    if output.requires_grad:
        raise LoadError(
            f"{type(module).__name__}: a sharded model computes no gradients; call it under torch.inference_mode()"
        )
    return output.contiguous()


def _first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Return the first input and its name; an empty name if it is positional."""
    if args:
        return "", args[0]
    name = next(iter(kwargs), "")
    if not name:
        raise LoadError(f"{type(module).__name__}: was called without inputs")
    return name, kwargs[name]


def _with_first_input(
    name: str, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (args, {**kwargs, name: value}) if name else ((value, *args[1:]), kwargs)
