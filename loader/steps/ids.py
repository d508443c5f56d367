"""The step of an embedding that is divided by its vocabulary: ids become local, foreign ids give zeros."""

from typing import Any

import torch
from torch import nn

from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step
from manifests.errors import LoadError


def mask_ids(site: Site) -> Step:
    """Return the step that makes ids local, and clears the rows of foreign ids.

    Raises:
        LoadError: The embedding rescales its rows.
    """
    module = site.module
    if getattr(module, "max_norm", None) is not None:
        raise LoadError(f"{site.label}: max_norm rescales rows in place, which its split cannot")
    masked = _MaskedIds(site)
    # It only stops gradients, of which there are none; torch wants it among the rank's own rows.
    has_padding = getattr(module, "padding_idx", None) is not None
    return Step(masked.before, masked.after, {"padding_idx": None} if has_padding else {})


class _MaskedIds:
    """Keeps the mask from the inputs to the output.

    On a CPU an id outside the whole vocabulary raises, as torch does; on other devices and in compiled code it gives
    zeros, since a check would wait for the device.
    """

    def __init__(self, site: Site) -> None:
        self._start, self._length, self._size = site.owned_range()
        self._inputs = InputNames(site.module)
        self._foreign: torch.Tensor | None = None

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        ids = self._inputs.get(0, args, kwargs)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
            lowest, highest = (int(end) for end in torch.aminmax(ids))
            if lowest < 0 or highest >= self._size:
                raise IndexError(f"ids from {lowest} to {highest} are not all in a vocabulary of {self._size}")
        local = ids - self._start
        self._foreign = (local < 0) | (local >= self._length)
        return self._inputs.put(0, local.masked_fill(self._foreign, 0), args, kwargs)

    def after(self, module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        foreign, self._foreign = self._foreign, None
        if foreign is None:
            raise LoadError(f"{type(module).__name__}: its output came without its inputs")
        return output.masked_fill_(foreign.unsqueeze(-1), 0)
