"""The step of experts that are divided over the ranks: every rank runs its own on the whole batch.

Source: ``AllReduceEP`` in ``transformers/distributed/expert_parallel.py`` of transformers 5.24.
"""

from typing import Any

import torch
from torch import nn

from loader.steps.inputs import InputNames
from loader.steps.site import Inputs, Site, Step
from manifests.errors import LoadError

EVERY_ID_AN_EXPERT = frozenset({"OpenAIPrivacyFilterExperts"})
"""Classes whose loop knows no id beyond their experts: routes to other ranks go to the first expert, with weight 0."""


def route_local(site: Site) -> Step:
    """Return the step that keeps the routes to the rank's own experts.

    The module's forward takes hidden states, the chosen experts (tokens, k) and their weights (tokens, k), in this
    order and under any names. Ids become local; a route to another rank's expert gets the id one past the last of them,
    and weight 0. Ranks that have copies of the same experts share the routes to them. The module is told how many
    experts it has, and that there are such ids.

    Raises:
        LoadError: The module's forward takes fewer inputs.
    """
    start, length, _ = site.owned_range()
    copy, copies = site.copy
    inputs, label = InputNames(site.module), site.label
    experts = site.running_numel()
    nowhere = 0 if label in EVERY_ID_AN_EXPERT else experts
    if len(inputs) < 3:
        raise LoadError(
            f"{label}: its forward takes {len(inputs)} inputs; "
            "hidden states, chosen experts and their weights are needed"
        )

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        chosen, weights = inputs.get(1, args, kwargs), inputs.get(2, args, kwargs)
        if chosen.shape != weights.shape:
            raise LoadError(
                f"{label}: gets {list(chosen.shape)} chosen experts with {list(weights.shape)} weights; "
                "a weight for each is needed"
            )
        local = chosen - start
        foreign = (local < 0) | (local >= length)
        if copies > 1:
            turn = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape)
            foreign |= turn % copies != copy
        args, kwargs = inputs.put(1, local.masked_fill(foreign, nowhere), args, kwargs)
        return inputs.put(2, weights.masked_fill(foreign, 0), args, kwargs)

    return Step(before, attributes={"num_experts": experts, "_is_expert_parallel": True})
