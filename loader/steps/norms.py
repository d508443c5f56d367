"""Steps on norms of features of which a rank has some: the features of all ranks count.

The module's own forward runs on the rank's features. The output of an RMS norm is then scaled from the rank's norm to
that of all, that of a layer norm is computed anew. The collective carries one or two numbers for every token and group,
where joining the ranks would carry the features.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from loader.steps.collectives import collectable, gathered, summed
from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step
from manifests.errors import LoadError
from manifests.placement import bound_axis

EPSILONS = ("variance_epsilon", "eps")
"""Names under which norms have the number that is added to the squares."""


def rms_norm(site: Site) -> Step:
    """Return the step of an RMS norm over the features of all ranks.

    Raises:
        LoadError: The norm adds a bias, or has no epsilon of a known name.
    """
    # What all ranks have, each copy counted, as in the sum.
    return _NormOverRanks(site, sum(map(site.owned_numel, range(site.world_size)))).step()


def l2_norm(site: Site) -> Step:
    """Return the step of a norm by the sum of squares, not their mean.

    Raises:
        LoadError: As of `rms_norm`.
    """
    return _NormOverRanks(site).step()


def group_rms_norm(site: Site) -> Step:
    """Return the step of an RMS norm over every group of features by itself.

    The groups are divided over ``kv``, each over ``rep``; where that is one rank, there is nothing to do.

    Raises:
        LoadError: As of `rms_norm`.
    """
    mesh = dict(site.mesh)
    if mesh.get("rep", 1) == 1:
        return Step()
    axis, kv = bound_axis(site.entry.axis), mesh["kv"]
    groups = axis.segments[0].factors[0].size
    return _NormOverRanks(site, axis.size // groups, groups=-(-groups // kv), places=kv).step()


def layer_norm(site: Site) -> Step:
    """Return the step of a layer norm over the features of all ranks.

    Raises:
        LoadError: The norm is not torch's own.
    """
    module, group = site.module, site.group
    if type(module) is not nn.LayerNorm:
        raise LoadError(f"{site.label}: is not torch's LayerNorm, the only one that can be divided")
    world_size = site.world_size
    inputs = InputNames(module)
    kept: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        states = inputs.get(0, args, kwargs).float()
        # The copies of a part are as many as those of every other, so they change no mean.
        own = torch.stack(torch.var_mean(states, -1, correction=0))
        squares, means = gathered(own.unsqueeze(0), 0, world_size, group).unbind(1)
        mean = means.mean(0)
        variance = (squares + (means - mean).square()).mean(0)
        kept[:] = [(states - mean.unsqueeze(-1)) * (variance + module.eps).rsqrt().unsqueeze(-1)]
        return args, kwargs

    def after(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if not kept:
            raise LoadError(f"{site.label}: its output came without its inputs")
        normed = kept.pop() * module.weight.float()
        if module.bias is not None:
            normed = normed + module.bias.float()
        return normed.to(collectable(module, output).dtype)

    return Step(before, after, {"normalized_shape": (site.owned_numel(),)})


class _NormOverRanks:
    """Keeps the ratio of the two norms from the inputs to the output.

    Groups of different ranks are summed in one collective, each in a place of its own.
    """

    def __init__(self, site: Site, numel: int = 0, *, groups: int = 1, places: int = 1) -> None:
        """Prepare.

        Args:
            site: Where the norm is.
            numel: Of how many features all ranks sum up the squares; 0 if it is their sum that counts.
            groups: That a rank has.
            places: Of ranks that have other groups.
        """
        module = site.module
        if getattr(module, "bias", None) is not None:
            raise LoadError(f"{site.label}: adds a bias, which its split cannot scale")
        epsilon = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
        if not isinstance(epsilon, float):
            raise LoadError(f"{site.label}: has no epsilon under one of the names {', '.join(EPSILONS)}")
        self._epsilon = epsilon
        self._inputs, self._group = InputNames(module), site.group
        # Where the gate is multiplied before the norm, it is a part of what is squared.
        gated = "gate" in self._inputs and not getattr(module, "norm_before_gate", False)
        self._gate = self._inputs.index("gate") if gated else None
        self._numel, self._groups, self._places = numel, groups, places
        self._place = site.rank // (site.world_size // places)
        self._ratio: torch.Tensor | None = None
        # torch's own norm knows how many features it gets.
        sized = hasattr(module, "normalized_shape")
        self._attributes = {"normalized_shape": (site.running_numel(),)} if sized else {}

    def step(self) -> Step:
        return Step(self.before, self.after, self._attributes)

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        states = self._inputs.get(0, args, kwargs).float()
        if self._gate is not None and (gate := self._inputs.find(self._gate, args, kwargs)) is not None:
            states = states * silu(gate.float())
        numel = states.shape[-1] // self._groups
        own = states.reshape(*states.shape[:-1], self._groups, numel).square().sum(-1)
        every = own.new_zeros((self._places, *own.shape))
        every[self._place] = own
        whole = summed(every, self._group)[self._place]
        if self._numel:
            own, whole = own / numel, whole / self._numel
        self._ratio = ((own + self._epsilon) / (whole + self._epsilon)).sqrt().unsqueeze(-1)
        return args, kwargs

    def after(self, module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        ratio, self._ratio = self._ratio, None
        if ratio is None:
            raise LoadError(f"{type(module).__name__}: its output came without its inputs")
        *shape, features = collectable(module, output).shape
        scaled = output.view(*shape, self._groups, features // self._groups) * ratio
        return scaled.view(*shape, features).to(output.dtype)
