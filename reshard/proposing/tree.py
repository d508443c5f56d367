"""The names of a model as a tree of modules, its linear layers, and the widths that lists of blocks share."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard.recipes.scales import SCALE

Shapes = Mapping[str, tuple[int, ...]]


class Linear(NamedTuple):
    """A linear layer, as far as shapes tell.

    Attributes:
        name: Its module.
        out: Its output features.
        into: Its input features.
        biased: Whether it has a bias.
        turned: Whether its weight is (in, out), as that of transformers' Conv1D; None where nothing tells.
    """

    name: str
    out: int
    into: int
    biased: bool
    turned: bool | None = False


class Module:
    """A module.

    Attributes:
        name: Its dotted name; empty for the model.
        children: The modules in it, by the last part of their names.
        own: The shapes of its own tensors, by the last part of their names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: dict[str, Module] = {}
        self.own: dict[str, tuple[int, ...]] = {}

    @property
    def is_list(self) -> bool:
        """Whether it is a list: it holds numbered modules and nothing else."""
        return bool(self.children) and not self.own and all(part.isdecimal() for part in self.children)

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape of its weight; empty if it has none."""
        return self.own.get("weight", ())

    @property
    def is_linear(self) -> bool:
        """Whether it may be a linear layer: a weight of two dimensions, perhaps a bias that fits, and nothing else."""
        if self.children or len(self.weight) != 2 or self.own.keys() - {"weight", "bias"}:
            return False
        return "bias" not in self.own or (len(self.own["bias"]) == 1 and self.own["bias"][0] in self.weight)

    def walk(self) -> Iterator["Module"]:
        """Yield the module and all that are in it."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all tensors in it."""
        for module in self.walk():
            for leaf, shape in module.own.items():
                yield f"{module.name}.{leaf}" if module.name else leaf, shape


def build_tree(shapes: Shapes) -> Module:
    """Return the tree of a model's names; scales belong to their weights and are left out.

    >>> tree = build_tree({"a.0.up.weight": (8, 4), "a.1.up.weight": (8, 4)})
    >>> tree.children["a"].is_list, tree.children["a"].children["0"].children["up"].is_linear
    (True, True)
    """
    root = Module("")
    for name, shape in shapes.items():
        if name.endswith(SCALE):
            continue
        node = root
        *path, leaf = name.split(".")
        for part in path:
            node = node.children.setdefault(part, Module(f"{node.name}.{part}" if node.name else part))
        node.own[leaf] = shape
    return root


def find_linears(root: Module) -> dict[str, Linear]:
    """Return every layer that may be linear, by its name.

    A bias tells which side of a weight is the output. Where every bias of a model that tells says that weights are
    turned, those without one that tells are unknown.
    """
    found: dict[str, Linear] = {}
    told: Counter[bool] = Counter()
    for module in root.walk():
        if not module.is_linear:
            continue
        rows, columns = module.weight
        bias = module.own.get("bias")
        turned: bool | None = None
        if bias is not None and rows != columns:
            turned = bias[0] == columns
            told[turned] += 1
        found[module.name] = Linear(module.name, rows, columns, bias is not None, turned)
    usual = None if told[True] else False
    return {name: _facing(linear, usual) for name, linear in found.items()}


def _facing(linear: Linear, usual: bool | None) -> Linear:
    turned = usual if linear.turned is None else linear.turned
    if turned:
        return linear._replace(out=linear.into, into=linear.out, turned=True)
    return linear._replace(turned=turned)


def shared_width(
    blocks: Iterable[Module], linears: Mapping[str, Linear], known: Iterable[int], outer: int | None
) -> int | None:
    """Return the width of the hidden states of a list of blocks: on a side of most of its layers, and of a norm.

    Args:
        blocks: The blocks.
        linears: The model's linear layers.
        known: Widths that the configuration names.
        outer: The width of the list around this one, which is kept if every block has it.

    Returns:
        The width, or None where two have the same claim to it.
    """
    sides: Counter[int] = Counter()
    norms: set[int] = set()
    for block in blocks:
        for module in block.walk():
            if module.name in linears:
                linear = linears[module.name]
                sides.update({linear.out, linear.into})
            elif len(module.weight) == 1:
                norms.add(module.weight[0])
    named = set(known)
    for evidence in ((norms | named) & sides.keys(), sides.keys()):
        most = max((sides[size] for size in evidence), default=0)
        widths = {size for size in evidence if sides[size] == most}
        widths = widths if len(widths) == 1 else widths & named
        if len(widths) == 1:
            return widths.pop()
    return None
