"""Linear layers that no group has taken: each has the exact form, or stays whole."""

from reshard.proposing.groups import Setting, gathered
from reshard.proposing.proposal import Suggestion
from reshard.proposing.tree import Linear, Module

SMALLEST = 16
"""A layer with fewer features than the hidden states' width divided by this is not worth a collective."""


def suggest_alone(linear: Linear, parent: Module, setting: Setting, experts: frozenset[int]) -> Suggestion:
    """Return what a layer should have by itself.

    Args:
        linear: The layer.
        parent: The module that it is in.
        setting: Of its block.
        experts: Numbers of experts that the block may have.
    """
    shape = f"{linear.into}->{linear.out}"
    if linear.out in experts and linear.into == setting.width:
        return _whole(linear, f"{shape} may choose among {linear.out} experts, by a module that gives more than scores")
    least = min(linear.out, linear.into)
    if least * SMALLEST < setting.width:
        return _whole(linear, f"{shape} is small beside the hidden states' {setting.width}")
    own = [leaf for leaf, tensor in parent.own.items() if leaf not in ("weight", "bias") and len(tensor) > 1]
    if own:
        return _whole(linear, f"{shape} is beside {own[0]}, a tensor without a module: it may not be called by itself")
    if setting.width not in (linear.out, linear.into) and not _is_pure(parent):
        return _whole(linear, f"{shape} is beside tensors of no linear layer: its weight may be used directly")
    return gathered(linear, setting, f"{shape}: its part in the block is not known")


def _is_pure(parent: Module) -> bool:
    """Tell whether a module has only linear layers and norms in it."""
    return all(
        name.rpartition(".")[2] in ("weight", "bias") and len(shape) < 3 for name, shape in parent.tensors()
    )


def _whole(linear: Linear, reason: str) -> Suggestion:
    return Suggestion(linear.name, "", reason)
