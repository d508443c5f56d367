"""Wishes: what the rules of a plan want for every tensor, before the number of ranks has a say.

One rule decides for all tensors of a module, so a bias is always cut by the blocks of its weight.
"""

from collections.abc import Hashable
from math import lcm
from types import NotImplementedType

from manifests.columns import Numbers
from manifests.dtypes import atom
from manifests.errors import PlanError
from manifests.layout import Axis, Factor, Segment
from manifests.manifest import Rule
from manifests.natural import alike
from manifests.placement import PARTIAL, REPLICATED, Placement
from manifests.strategy import Parameter, place_parameter
from manifests.styles import Style, axis_dim, resolve_style
from reshard.axes import AxisFinder, over
from reshard.degrees import Demand, Wanted, World
from reshard.model import Model, RuntimeTensor
from reshard.plans import Matcher, Plan
from reshard.recipes.scales import SCALE
from reshard.uneven import Grain


class RuleFinder:
    """The rules that take names; those of divided experts come first, and alone below a module that has one."""

    def __init__(self, plan: Plan, *, experts: bool) -> None:
        self._rules = Matcher(plan.rules)
        self._experts = Matcher(plan.expert_rules if experts else ())

    @property
    def numbers(self) -> set[str]:
        """The numbers that patterns mention, as texts."""
        return self._rules.numbers | self._experts.numbers

    def for_module(self, name: str) -> Rule | None:
        """Return the rule that takes a module."""
        parent = name.rpartition(".")[0]
        return self._experts.find(name) or (None if self._experts.find(parent) else self._rules.find(name))

    def for_parameter(self, name: str) -> tuple[Rule | None, bool]:
        """Return the rule that takes a parameter, and whether it names the parameter rather than its module.

        A rule that names a parameter takes its scales as well.
        """
        if name.endswith(SCALE):
            rule, direct = self._for_parameter(name.removesuffix(SCALE))
            if direct:
                return rule, True
        return self._for_parameter(name)

    def _for_parameter(self, name: str) -> tuple[Rule | None, bool]:
        rule, direct = self._experts.find_for_parameter(name)
        return (rule, direct) if rule else self._rules.find_for_parameter(name)

    def within(self, name: str) -> Rule | None:
        """Return the rule that divides the inner width of an expert's parameter, or counts it once."""
        rule, direct = self._rules.find_for_parameter(name.removesuffix(SCALE))
        style = resolve_style(rule.style) if rule and direct else None
        divides = style and style.cuts not in ("", "expert")
        return rule if style and (divides or style.bias == "partial") else None


class Wishes:
    """Asks the rules for every tensor.

    Attributes:
        find: The rules.
        axes: The axes that rules divide.
        tensors: The tensors that are used, and under their own names those that are tied to one of them.
        rules: The rule that took each tensor, where one did.
        effective: The patterns of the rules that took something.
    """

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        self._model = model
        self._plan = plan
        self._world = world
        used = model.tensors
        if any(tensor.unused for tensor in used.values()):
            used = {name: tensor for name, tensor in used.items() if not tensor.unused}
        # A tied parameter is planned like a stored one: its rule must lead to the placement of what it is tied to.
        self.tensors = {**used, **{name: used[source] for name, source in model.ties.items()}} if model.ties else used
        self.find = RuleFinder(plan, experts=world.experts > 1)
        self.axes = AxisFinder(plan, model.sizes, used)
        self.rules: dict[str, Rule] = {}
        self.effective: set[str] = set()

    def all(self) -> dict[str, Demand | Placement]:
        """Return for every tensor the wish to divide it, or its placement where that is no question of numbers.

        Tensors that differ in nothing but the numbers of their names are decided together: plain wishes of these are
        one object, which has the name of the first.
        """
        plain = self.axes.same_in_layers
        kinds = zip(self.tensors, self.tensors.values(), alike(self.tensors, self.numbers()), strict=True)
        numbers = Numbers[Hashable]()
        together = [
            numbers[(kind, id(tensor)) if plain and name.endswith(".weight") else self._kind(name, kind)]
            for name, tensor, kind in kinds
        ]
        first = dict(zip(reversed(together), reversed([*self.tensors]), strict=True))
        decided = [self._decide(first[number]) for number in range(len(numbers))]
        rules = [self.rules.get(first[number]) for number in range(len(numbers))]
        self.rules.update(
            (name, rule) for name, number in zip(self.tensors, together, strict=True) if (rule := rules[number])
        )
        own = {number for number, (wish, alone) in enumerate(decided) if alone or not _is_shared(wish)}
        wishes: dict[str, Demand | Placement] = {}
        for name, number in zip(self.tensors, together, strict=True):
            wish, alone = decided[number]
            if number in own and name != first[number]:
                wish = self._decide(name)[0] if alone or not isinstance(wish, Demand) else wish.renamed(name)
            wishes[name] = wish
        return wishes

    def _decide(self, name: str) -> tuple[Demand | Placement, bool]:
        """Return the wish for a tensor, and whether tensors of its kind may have other ones."""
        self.axes.looked_beside = False
        wish = self._of(name)
        style = resolve_style(self.rules[name].style) if name in self.rules else None
        return wish, self.axes.looked_beside or bool(style and style.own)

    def numbers(self) -> set[str]:
        """Return the numbers in names that matter to rules, axes or sizes, as texts."""
        return self.find.numbers | self.axes.numbers

    def _kind(self, name: str, kind: str) -> Hashable:
        """Return what decides the wish for a tensor, but for what its rule's layout looks up beside it."""
        module, _, leaf = name.rpartition(".")
        beside = None if leaf == "weight" else self.tensors.get(f"{module}.weight")
        scaled = self.tensors.get(name.removesuffix(SCALE)) if leaf.endswith(SCALE) else None
        sizes = None if self.axes.same_in_layers else id(self._model.sizes.of(module))
        return kind, id(self.tensors[name]), id(beside), id(scaled), sizes

    def _of(self, name: str) -> Demand | Placement:
        tensor = self.tensors[name]
        rule, direct = self.find.for_parameter(name)
        if rule is None:
            return REPLICATED
        self.rules[name] = rule
        style = resolve_style(rule.style)
        placed = self._placed_by_strategy(style, name, tensor)
        if placed is not None:
            self.effective.add(rule.pattern)
            return placed
        if not style.cuts:
            self.effective.add(rule.pattern)
            return PARTIAL if style.bias == "partial" else REPLICATED
        if not tensor.shape:
            return REPLICATED
        if style.cuts == "expert":
            return self._expert_wish(rule, name, tensor)
        module, _, leaf = name.rpartition(".")
        is_bias = leaf.endswith("bias") and not direct
        if is_bias and style.bias != "cut":
            return PARTIAL if style.bias == "partial" else REPLICATED
        if len(tensor.shape) == 1 and not is_bias and not direct and style.cuts != "out":
            return REPLICATED
        cut = self._cut(rule, style, name, tensor, direct=direct)
        if cut is None:
            return REPLICATED
        self.effective.add(rule.pattern)
        group = name.rpartition(".")[0] if direct else module.rpartition(".")[0]
        return Demand(name, tensor.dtype, tensor.shape, (cut,), group)

    def _placed_by_strategy(self, style: Style, name: str, tensor: RuntimeTensor) -> Demand | Placement | None:
        """Return what a strategy of the user's own wishes, or None if the style's row says it."""
        if style.own is None:
            return None
        placed = place_parameter(style.own, Parameter(name, tensor.dtype, tensor.shape, self._world.size))
        if placed is None:
            return REPLICATED
        if isinstance(placed, NotImplementedType):
            return None
        notation, dim = placed
        module = name.rpartition(".")[0]
        axis = self.axes.bind(notation, module, name, tensor.shape[dim])
        return Demand(name, tensor.dtype, tensor.shape, (Wanted(dim, axis),), module.rpartition(".")[0])

    def _expert_wish(self, rule: Rule, name: str, tensor: RuntimeTensor) -> Demand:
        """Return the wish to divide experts over ``ep``, and each over ``etp`` by its rule for undivided experts.

        Experts that have no such rule are copied to the ranks that are left for each. A bias that is added once is used
        by the first of them. Where experts are not to be divided, it is the plan itself that keeps each of them whole.
        """
        module = name.rpartition(".")[0]
        self.effective.add(rule.pattern)
        cuts = [Wanted(0, Axis((Segment((Factor(tensor.shape[0], "ep"),)),)))]
        if 1 < self._world.experts < self._world.size:
            inner = self.find.within(name)
            style = resolve_style(inner.style) if inner else None
            if style and not style.cuts:
                return Demand(name, tensor.dtype, tensor.shape, tuple(cuts), module, partial=True)
            cut = self._cut(inner, style, name, tensor, direct=True) if inner and style else None
            if cut is not None:
                cuts.append(cut._replace(axis=over(cut.axis, "etp")))
        return Demand(name, tensor.dtype, tensor.shape, tuple(cuts), module)

    def _cut(self, rule: Rule, style: Style, name: str, tensor: RuntimeTensor, *, direct: bool) -> Wanted | None:
        """Return the dimension that a rule divides, or None if the tensor has no entries along its axis."""
        module = name.rpartition(".")[0]
        reference = name.removesuffix(SCALE) if direct else self.weight_of(module, name)
        reference = reference if reference in self.tensors else name
        defining = self.tensors[reference]
        size = defining.shape[_dim(rule, style, defining, reference)]
        axis = self.axes.find(rule, style, name if direct else module, reference, size)
        dim = _dim(rule, style, tensor, name)
        unit = self._unit(tensor, dim, axis, name)
        if unit is None:
            return None
        if self._is_vocabulary(style, module, size):
            return Wanted(dim, axis, unit, shorter=True)
        # The grouped matrix products of experts want rows of 16 bytes; what is added to them is cut as they are.
        stacked = self.tensors.get(name.removesuffix("_bias"), defining) if direct else None
        needed = max(1, 16 // atom(stacked.dtype)[1]) if stacked and len(stacked.shape) > 2 else 1
        grain = Grain(lcm(*self._model.scale_blocks), needed)
        known = not self._world.uneven or self.axes.is_known(rule, style, name if direct else module)
        return Wanted(dim, axis, unit, grain=grain, summed=style.cuts == "in", plain=not known)

    def _is_vocabulary(self, style: Style, module: str, size: int) -> bool:
        """Tell whether a dimension is the vocabulary, whose parts the steps take at any length: it may be odd."""
        looked_up, joined = style.before == "mask_ids", style.contiguous and style.after == "all_gather"
        return looked_up or (joined and size == self._model.sizes.of(module).peek("vocab_size"))

    def weight_of(self, module: str, name: str) -> str:
        """Return the weight of a module, or a name if it has none."""
        weight = f"{module}.weight"
        return weight if weight in self.tensors else name

    def _unit(self, tensor: RuntimeTensor, dim: int, axis: Axis, name: str) -> int | None:
        """Return how many elements of the axis one entry of the dimension stands for, or None if it has none."""
        size = tensor.shape[dim]
        if size == axis.size:
            return 1
        if name.endswith(SCALE) and self._model.scale_blocks:
            unit = self._model.scale_blocks[dim - len(tensor.shape)]
            if -(-axis.size // unit) == size:
                return unit
        if size == 1:
            return None
        raise PlanError(f"{self._plan.label}: {name}: dim {dim} has {size} entries, the axis of its module {axis.size}")


def _is_shared(wish: Demand | Placement) -> bool:
    """Tell whether a wish is the same for all tensors of its kind."""
    return not isinstance(wish, Demand) or wish.is_plain


def _dim(rule: Rule, style: Style, tensor: RuntimeTensor, name: str) -> int:
    """Return the dimension of a tensor that a rule cuts."""
    ndim = len(tensor.shape)
    if rule.dim is None or ndim == 1:
        return axis_dim(style.cuts, ndim) if style.cuts else 0
    if not -ndim <= rule.dim < ndim:
        raise PlanError(f"{rule.pattern}: dim {rule.dim} is not one of the {ndim} dimensions of {name}")
    return rule.dim % ndim
