"""Linear layers that no group has taken: each has the exact form, or stays whole."""

from reshard.proposing.groups import Setting, gathered
from reshard.proposing.proposal import Suggestion
from reshard.proposing.tree import Linear, Module

SMALLEST = 16
"""A layer with fewer features than the hidden states' width divided by this is not worth a collective."""


def suggest_alone(
    linear: Linear, parent: Module, setting: Setting, experts: frozenset[int], *, chooses: bool
) -> Suggestion:
    """Return what a layer should have by itself.

    Args:
        linear: The layer.
        parent: The module that it is in.
        setting: Of its block.
        experts: Numbers of experts that the block may have.
        chooses: Whether it is beside experts.
    """
    shape = f"{linear.into}->{linear.out}"
    if linear.into == setting.width != linear.out and (
        linear.out in experts or (chooses and linear.out < setting.width)
    ):
        return _whole(linear, f"{shape} may choose among experts, by a module that gives more than scores")
    least = min(linear.out, linear.into)
    if least * SMALLEST < setting.width:
        return _whole(linear, f"{shape} is small beside the hidden states' {setting.width}")
    own = [leaf for leaf, tensor in parent.own.items() if _is_matrix(tensor) and setting.width in tensor]
    if own:
        return _whole(linear, f"{shape} is beside {own[0]}, a matrix without a module: it may not be called by itself")
    if setting.width not in (linear.out, linear.into):
        if not _is_pure(parent):
            return _whole(linear, f"{shape} is beside tensors of no linear layer: its weight may be used directly")
        if (linear.into,) not in setting.extras.values():
            return _whole(linear, f"{shape} is perhaps no linear layer: no norm is over {linear.into} features")
    return gathered(linear, setting, f"{shape}: its part in the block is not known")


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return sum(size > 1 for size in shape) > 1


def _is_pure(parent: Module) -> bool:
    """Tell whether a module has only linear layers and norms in it."""
    return all(name.rpartition(".")[2] in ("weight", "bias") and len(shape) < 3 for name, shape in parent.tensors())


def suggest_outside(linear: Linear, parent: Module, ranks: int) -> Suggestion:
    """Return what a layer outside of all lists of blocks should have: a bias shows that it is linear."""
    if not linear.biased or linear.turned is not False:
        return _whole(linear, "outside of the blocks, and perhaps no linear layer")
    if any(_is_matrix(tensor) for tensor in parent.own.values()):
        return _whole(linear, "outside of the blocks, beside a matrix without a module: it may not be called by itself")
    if linear.out % ranks:
        return _whole(linear, f"{ranks} ranks do not divide its {linear.out} features")
    reason = f"{linear.into}->{linear.out} with a bias, outside of the blocks; exact whatever the layer is for"
    return Suggestion(linear.name, "colwise_gather_output", reason)


def _whole(linear: Linear, reason: str) -> Suggestion:
    return Suggestion(linear.name, "", reason)
