"""Installing a strategy of a user's own (`manifests.strategy`): the only hooks that may replace a module's forward."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from loader.ranks import GroupRanks
from loader.steps import Site, Step
from loader.steps.site import Inputs
from manifests.strategy import Ranks, Strategy, writes


class ReplacedForward:
    """The handle of a forward that was replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = module.__dict__.get("forward")

    def remove(self) -> None:
        """Give the module the forward back that it had."""
        if self._before is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.forward = self._before


def own_step(strategy: Strategy, site: Site) -> Step:
    """Return what a strategy does to the inputs and to the output of a site's module by methods of its own."""
    ranks: Ranks = GroupRanks(site.group)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        inputs: Inputs = strategy.before(module, args, kwargs, ranks)
        return inputs

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - the module's own
        return strategy.after(module, args, output, ranks)

    kind = type(strategy)
    return Step(before if writes(kind, "before") else None, after if writes(kind, "after") else None)


def replace_forward(strategy: Strategy, site: Site) -> ReplacedForward | None:
    """Put what a strategy does around or in place of a module's forward; None if it does neither."""
    kind, module, ranks = type(strategy), site.module, GroupRanks(site.group)
    if not writes(kind, "around") and not writes(kind, "forward"):
        return None
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not writes(kind, "forward"):
            return original(*args, **kwargs)
        return strategy.forward(module, original, args, kwargs, ranks)

    def surrounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with strategy.around(module, ranks):
            return forward(*args, **kwargs)

    handle = ReplacedForward(module)
    module.forward = functools.wraps(original)(surrounded if writes(kind, "around") else forward)
    return handle
