"""Going through a model's modules, the innermost first."""

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.model import RuntimeTensor
from reshard.proposing.alone import suggest_alone
from reshard.proposing.experts import suggest_experts
from reshard.proposing.groups import Setting, find_group
from reshard.proposing.merging import merge_suggestions
from reshard.proposing.numbers import Numbers, read_numbers
from reshard.proposing.proposal import Proposal, Suggestion
from reshard.proposing.tables import suggest_tables
from reshard.proposing.tree import Linear, Module, build_tree, find_linears, shared_width


def propose(tensors: Mapping[str, RuntimeTensor], config: Mapping[str, Any], ranks: int) -> Proposal:
    """Propose a plan.

    Args:
        tensors: The model's tensors by name.
        config: The content of ``config.json``.
        ranks: The number of ranks that it is for.
    """
    used = {name: tensor for name, tensor in tensors.items() if not tensor.unused}
    shapes = {name: tensor.shape for name, tensor in used.items()}
    survey = Survey(shapes, config, ranks)
    return merge_suggestions(survey.suggest(), shapes, ranks)


class Survey:
    """What is found on the way through a model's modules.

    Attributes:
        suggestions: By the name of what they are for.
        lists: The width of every list of blocks.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], ranks: int) -> None:
        self._root = build_tree(shapes)
        self._linears = find_linears(self._root)
        self._config = config
        self._numbers: Numbers = read_numbers(config)
        self._ranks = ranks
        self._modules = {module.name: module for module in self._root.walk()}
        self._closed: set[str] = set()
        self.suggestions: dict[str, Suggestion] = {}
        self.lists: dict[str, int] = {}

    def suggest(self) -> dict[str, Suggestion]:
        """Return the suggestion for every module and parameter that there is something to say of."""
        rest = self._visit(self._root, None)
        self._take(suggest_tables(rest, self.lists, self._config, self._numbers, self._ranks))
        return self.suggestions

    def _visit(self, module: Module, width: int | None) -> list[Linear]:
        """Go through a module; return its linear layers that nothing was suggested for."""
        if module.name in self._linears:
            return [self._linears[module.name]]
        blocks = list(module.children.values())
        if module.is_list and not any(block.name in self._linears for block in blocks):
            known = {*self._numbers.widths}
            inner = shared_width(blocks, self._linears, known) or width
            if inner is not None:
                self.lists[module.name] = inner
            for block in blocks:
                self._settle(block, self._visit(block, inner), inner)
            return []
        rest = [linear for child in blocks for linear in self._visit(child, width)]
        if width is None:
            return rest
        setting = self._setting(module, rest, width)
        self._take(suggest_experts(module, setting, 4))
        group = find_group(module, rest, setting) if rest else None
        if group is None:
            return rest
        self._take(group)
        self._closed.add(module.name)
        return []

    def _settle(self, block: Module, rest: list[Linear], width: int | None) -> None:
        """Judge the layers that a block has left over."""
        for linear in rest:
            if width is None:
                self._take([Suggestion(linear.name, "", "the width of the hidden states around it is not known")])
                continue
            parent = self._modules[linear.name.rpartition(".")[0]]
            stacked = {shape[0] for _, shape in block.tensors() if len(shape) == 3}
            experts = frozenset({*self._numbers.experts, *stacked})
            self._take([suggest_alone(linear, parent, self._setting(parent, [linear], width), experts)])

    def _setting(self, module: Module, linears: list[Linear], width: int) -> Setting:
        return Setting(width, self._ranks, self._numbers, dict(self._extras(module, {one.name for one in linears})))

    def _extras(self, module: Module, linears: set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield a module's tensors that are of none of the layers and of no group inside of it."""
        if module.name in self._closed or module.name in linears:
            return
        for leaf, shape in module.own.items():
            yield f"{module.name}.{leaf}", shape
        for child in module.children.values():
            yield from self._extras(child, linears)

    def _take(self, suggestions: list[Suggestion]) -> None:
        for suggestion in suggestions:
            self.suggestions.setdefault(suggestion.name, suggestion)
