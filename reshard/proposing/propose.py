"""Going through a model's modules, the innermost first."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from manifests.dtypes import BITS
from reshard.model import RuntimeTensor
from reshard.proposing.alone import suggest_alone, suggest_outside
from reshard.proposing.experts import suggest_experts
from reshard.proposing.groups import Setting, find_group
from reshard.proposing.merging import merge_suggestions, starred
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
    nbytes = {name: BITS.get(tensor.dtype, 8) // 8 for name, tensor in used.items()}
    return merge_suggestions(Survey(shapes, nbytes, config, ranks).suggest(), shapes, ranks)


class Survey:
    """What is found on the way through a model's modules.

    Attributes:
        suggestions: By the name of what they are for.
        lists: The width of every list of blocks.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        nbytes: Mapping[str, int],
        config: Mapping[str, Any],
        ranks: int,
    ) -> None:
        self._shapes = shapes
        self._nbytes = nbytes
        self._root = build_tree(shapes)
        self._linears = find_linears(self._root)
        self._config = config
        self._numbers: Numbers = read_numbers(config)
        self._ranks = ranks
        self._modules = {module.name: module for module in self._root.walk()}
        self._closed: set[str] = set()
        self._blocks: set[str] = set()
        self._stacked: set[int] = set()
        self._mixtures: set[str] = set()
        self._layers = self._find_layers()
        self.suggestions: dict[str, Suggestion] = {}
        self.lists: dict[str, int] = {}

    def suggest(self) -> dict[str, Suggestion]:
        """Return the suggestion for every module and parameter that there is something to say of."""
        rest = self._visit(self._root, None)
        self._take(suggest_tables(rest, self.lists, self._config, self._numbers, self._ranks))
        self._take([suggest_outside(linear, self._parent(linear), self._ranks) for linear in rest])
        return self.suggestions

    def _visit(self, module: Module, width: int | None) -> list[Linear]:
        """Go through a module; return its linear layers that nothing was suggested for."""
        if module.name in self._linears:
            return [self._linears[module.name]]
        blocks = list(module.children.values())
        if module.is_list and not any(block.name in self._linears for block in blocks):
            inner = shared_width(blocks, self._linears, self._numbers.widths, width) or width
            if inner is not None:
                self.lists[module.name] = inner
            self._blocks.update(block.name for block in blocks)
            for block in blocks:
                self._settle(self._visit(block, inner), inner)
            return []
        rest = [linear for child in blocks for linear in self._visit(child, width)]
        if width is None:
            return rest
        setting = self._setting(module, rest, width)
        experts = suggest_experts(module, setting, self._nbytes)
        self._stacked.update(self._shapes[one.name][0] for one in experts if one.name in self._shapes)
        if experts or sum(len(shape) == 3 for shape in module.own.values()) > 1:
            self._mixtures.add(module.name.rpartition(".")[0] if module.own else module.name)
        self._take(experts)
        group = find_group(rest, setting) if rest else None
        if group is None:
            return rest
        self._take(group)
        self._closed.add(module.name)
        return []

    def _settle(self, rest: list[Linear], width: int | None) -> None:
        """Judge the layers that a block has left over."""
        for linear in rest:
            if width is None:
                self._take([Suggestion(linear.name, "", "the width of the hidden states around it is not known")])
                continue
            parent = self._parent(linear)
            experts = frozenset({*self._numbers.experts, *self._stacked})
            setting = self._setting(parent, [linear], width)
            chooses = any(linear.name.startswith(f"{module}.") for module in self._mixtures)
            self._take([suggest_alone(linear, parent, setting, experts, chooses=chooses)])

    def _parent(self, linear: Linear) -> Module:
        return self._modules[linear.name.rpartition(".")[0]]

    def _setting(self, module: Module, linears: list[Linear], width: int) -> Setting:
        extras = dict(self._extras(module, {one.name for one in linears}))
        outermost = module.name in self._blocks or module.name.rpartition(".")[0] in self._blocks
        uniform = len(self._layers[starred(module.name)]) == 1
        return Setting(width, self._ranks, self._numbers, extras, outermost=outermost, uniform=uniform)

    def _find_layers(self) -> dict[str, set[frozenset[str]]]:
        """Return which linear layers the modules of a name have in them, of names that differ in numbers only."""
        layers: dict[str, set[frozenset[str]]] = defaultdict(set)
        for module in self._root.walk():
            inside = [
                inner.name.removeprefix(f"{module.name}.") for inner in module.walk() if inner.name in self._linears
            ]
            layers[starred(module.name)].add(frozenset(inside))
        return layers

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
