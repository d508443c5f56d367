"""Experts that are stacked in tensors of three dimensions: (experts, out, in), or turned."""

from collections.abc import Mapping
from typing import NamedTuple

from reshard.proposing.groups import Setting
from reshard.proposing.proposal import Confidence, Suggestion
from reshard.proposing.tree import Module

ALIGNMENT_NBYTES = 16
"""What the rows of grouped matrix products are multiples of."""


class Stacked(NamedTuple):
    """Stacked experts of a module.

    Attributes:
        names: The tensors that expand, and the one that contracts, last.
        dims: Along which dimension the inner width of each lies.
        experts: Number of experts.
        inner: Their inner width.
        fused: Whether one tensor holds two things that expand, beside each other.
        turned: Whether its outputs are its last dimension.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    experts: int
    inner: int
    fused: bool
    turned: bool


def find_stacked(tensors: Mapping[str, tuple[int, ...]], width: int) -> Stacked | None:
    """Return the experts that tensors of three dimensions are; None if they are none.

    >>> find_stacked({"up": (8, 96, 64), "down": (8, 64, 48)}, 64)
    Stacked(names=('up', 'down'), dims=(1, 2), experts=8, inner=48, fused=True, turned=False)
    """
    if len(tensors) not in (2, 3) or len({shape[0] for shape in tensors.values()}) != 1:
        return None
    experts = next(iter(tensors.values()))[0]
    if any((shape[1] == width) == (shape[2] == width) for shape in tensors.values()):
        return None
    inner = {name: shape[2] if shape[1] == width else shape[1] for name, shape in tensors.items()}
    last = [name for name, shape in tensors.items() if shape[2] == width]
    first = [name for name in tensors if name not in last]
    if len(tensors) == 3:
        downs, ups = (first, last) if len(first) == 1 else (last, first)
        if len(downs) != 1 or len(set(inner.values())) != 1:
            return None
    else:
        if len(first) != 1:
            return None
        small, large = sorted(inner.values())
        if large not in (small, 2 * small):
            return None
        # Of two that are alike either may be the first: the cut is the same.
        downs = [min(first + last, key=lambda name: inner[name])] if small != large else first
        ups = [name for name in tensors if name not in downs]
    names = (*ups, *downs)
    fused = len(tensors) == 2 and inner[ups[0]] != inner[downs[0]]
    dims = tuple(1 if name in last else 2 for name in names)
    return Stacked(names, dims, experts, inner[downs[0]], fused, fused and ups[0] not in last)


def suggest_experts(module: Module, setting: Setting, nbytes: Mapping[str, int]) -> list[Suggestion]:
    """Return what the stacked experts of a module should have, as its own tensors or as layers in it."""
    own = {f"{module.name}.{leaf}": shape for leaf, shape in module.own.items() if len(shape) == 3}
    layers = {
        child.name: child.weight
        for child in module.children.values()
        if len(child.weight) == 3 and child.own.keys() <= {"weight", "bias"}
    }
    tensors = own or layers
    found = find_stacked(tensors, setting.width)
    if found is None or not _plausible(found, setting):
        return []
    reason = f"{found.experts} experts, {setting.width}->{found.inner}->{setting.width}"
    others = [name for name, _ in module.tensors() if name.removesuffix(".weight") not in found.names] if own else []
    tensor = found.names[0] if own else f"{found.names[0]}.weight"
    refused = _refusal(found, others, setting, nbytes[tensor])
    if not refused and len(found.names) == 2 and not found.fused and found.inner not in setting.numbers.inner:
        refused = f"what is between may be met by something whole, since {found.inner} is no inner width in config.json"
    if refused:
        return [Suggestion(name, "", f"{reason}; {refused}") for name in (*found.names, *others)]
    if found.fused:
        reason += (
            "; gate and up are two halves, as nearly always"
            if not found.turned
            else "; gate and up may be two halves or take turns"
        )
    confidence: Confidence = "guess" if found.turned else "likely"
    suggestions = []
    for name, dim in zip(found.names, found.dims, strict=True):
        down = name == found.names[-1]
        # In a plan `dim` counts in the tensor; without it rows are the last dimension but one.
        usual = 2 if down else 1
        style = "rowwise" if down else "packed_colwise" if found.fused else "colwise"
        suggestions.append(Suggestion(name, style, reason, confidence, "", None if dim == usual else dim))
    if own:
        suggestions.append(
            Suggestion(
                module.name,
                "moe_tp_experts",
                f"{reason}; what the ranks' parts add to is summed",
                confidence,
            )
        )
    return suggestions


def _plausible(found: Stacked, setting: Setting) -> bool:
    return found.experts in setting.numbers.experts or (not setting.numbers.experts and found.experts > 1)


def _refusal(found: Stacked, others: list[str], setting: Setting, item_nbytes: int) -> str:
    if others:
        return f"{others[0].rpartition('.')[2]} would be added by every rank, or see a summand: only --ep divides them"
    if found.inner % setting.ranks:
        return f"{setting.ranks} ranks do not divide {found.inner}"
    if found.inner // setting.ranks * item_nbytes % ALIGNMENT_NBYTES:
        return f"{found.inner // setting.ranks} numbers a rank are no multiple of {ALIGNMENT_NBYTES} bytes"
    return ""
