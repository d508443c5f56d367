"""Placing: from a plan to what happens to every tensor and around every module.

One function decides for all tensors of a module, so a bias is always cut by the blocks of its weight. All that does not
fit is collected and reported at once, with the numbers of ranks that would do.
"""

from collections.abc import Iterable, Mapping
from math import prod
from types import NotImplementedType
from typing import NamedTuple

from manifests.errors import DegreeError, PlanError
from manifests.expression import evaluate
from manifests.layout import Axis, Factor, Mesh, Segment
from manifests.manifest import Module, Part, Rule, Tensor
from manifests.placement import PARTIAL, REPLICATED, Placement, part_of
from manifests.strategy import Parameter, place_parameter
from manifests.styles import Style, axis_dim, resolve_style
from reshard.axes import AxisFinder, over
from reshard.degrees import (
    Demand,
    Wanted,
    World,
    allowed_degrees,
    by_shape,
    describe,
    failing,
    group_meshes,
    mesh_for,
    shown_degrees,
)
from reshard.plans import Matcher, Plan, expand_conditions, modules_of
from reshard.recipes.scales import SCALE
from reshard.sizes import ScopedSizes


class RuntimeTensor(NamedTuple):
    """A tensor of the running model, before it is placed; ``parts`` as in the manifest."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    unused: bool = False


class Model(NamedTuple):
    """What placing needs to know of a model.

    Attributes:
        tensors: Its tensors by name.
        sizes: Its sizes.
        ties: Parameters that are another one: name to name.
        scale_blocks: Rows and columns that one entry of an FP8 block scale stands for, or empty.
    """

    tensors: Mapping[str, RuntimeTensor]
    sizes: ScopedSizes
    ties: Mapping[str, str]
    scale_blocks: tuple[int, ...] = ()


class Resolution(NamedTuple):
    """What a plan makes of a model.

    Attributes:
        tensors: Every tensor, placed.
        rules: The rule that took each tensor, where one did.
        modules: What happens around modules' forwards.
        attributes: What to set on modules.
        ties: Parameters that are another one.
        sizes: The sizes that were used.
        notes: What a reader of the report should know.
    """

    tensors: dict[str, Tensor]
    rules: dict[str, Rule]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, int]]
    ties: dict[str, str]
    sizes: dict[str, int]
    notes: tuple[str, ...]


def check_degree(world_size: object, experts: object = 1) -> World:
    """Return the ranks.

    Raises:
        PlanError: Not a whole number of ranks from 1, or the experts are not divided over a divisor of it.
    """
    if type(world_size) is not int or world_size < 1:
        raise PlanError(f"tp: {world_size!r} is not a number of ranks; a whole number from 1 is")
    if type(experts) is not int or experts < 1 or world_size % experts:
        raise PlanError(f"ep: {experts!r} does not divide the {world_size} ranks; a divisor of tp does")
    return World(world_size, experts)


def resolve(model: Model, plan: Plan, world_size: int, experts: int = 1) -> Resolution:
    """Apply a plan.

    Args:
        model: The model.
        plan: The plan, its rules under the model's names.
        world_size: Number of ranks.
        experts: Over how many of the ranks experts are divided; 1 leaves all experts on every rank.

    Raises:
        DegreeError: The number of ranks does not divide something that the plan divides.
        PlanError: The plan does not fit the model.
    """
    names = [*(name for name, tensor in model.tensors.items() if not tensor.unused), *model.ties]
    expanded = plan._replace(
        rules=expand_conditions(plan.rules, names), expert_rules=expand_conditions(plan.expert_rules, names)
    )
    return _Resolver(model, expanded, check_degree(world_size, experts)).run()


class _Rules:
    """The rules that take names; those of divided experts come first, and alone below a module that has one."""

    def __init__(self, plan: Plan, *, experts: bool) -> None:
        self._rules = Matcher(plan.rules)
        self._experts = Matcher(plan.expert_rules if experts else ())

    def for_module(self, name: str) -> Rule | None:
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
        """Return the rule that divides the inner width of an expert's parameter."""
        rule, direct = self._rules.find_for_parameter(name.removesuffix(SCALE))
        return rule if rule and direct and resolve_style(rule.style).cuts else None


class _Resolver:
    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        self.model = model
        self.plan = plan
        self.world = world
        self.find = _Rules(plan, experts=world.experts > 1)
        self.tensors = {name: tensor for name, tensor in model.tensors.items() if not tensor.unused}
        self.axes = AxisFinder(plan, model.sizes, {name: tensor.shape for name, tensor in self.tensors.items()})
        # A tied parameter is planned like a stored one: its rule must lead to the placement of what it is tied to.
        self.tied = {name: self.tensors[source] for name, source in model.ties.items()}
        self.rules: dict[str, Rule] = {}
        self.effective: set[str] = set()
        self.notes: dict[str, None] = {}

    def run(self) -> Resolution:
        if self.world.experts > 1 and not self.plan.expert_rules:
            raise PlanError(f"{self.plan.label}: ep {self.world.experts}: has no rules that divide experts")
        demands: dict[str, Demand] = {}
        placements: dict[str, Placement] = {}
        for name, tensor in {**self.tensors, **self.tied}.items():
            wish = self._wish(name, tensor)
            if isinstance(wish, Demand):
                demands[name] = wish
            else:
                placements[name] = wish
        modules = self._modules(demands)
        self._check_rules_used()
        meshes = self._meshes(demands.values())
        for demand in demands.values():
            mesh = mesh_for(demand, meshes, self.world)
            placements[demand.name] = demand.placed(mesh or self.world.plain_mesh)
            self._check_summed(demand, placements[demand.name])
        self._check_ties(placements)
        self._note_shorter(demands.values())
        self._note_little(demands)
        return Resolution(
            tensors={
                name: Tensor(tensor.dtype, tensor.shape, placements.get(name, REPLICATED), tensor.parts, tensor.unused)
                for name, tensor in self.model.tensors.items()
            },
            rules={name: rule for name, rule in self.rules.items() if name in self.tensors},
            modules=modules,
            attributes=self._attributes(meshes),
            ties=dict(self.model.ties),
            sizes=dict(sorted(self.model.sizes.used.items())),
            notes=(*self.axes.notes, *self.notes),
        )

    def _wish(self, name: str, tensor: RuntimeTensor) -> Demand | Placement:
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
            return REPLICATED
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
        placed = place_parameter(style.own, Parameter(name, tensor.dtype, tensor.shape, self.world.size))
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

        Experts that have no such rule are copied to the ranks that are left for each.
        """
        module = name.rpartition(".")[0]
        self.effective.add(rule.pattern)
        cuts = [Wanted(0, Axis((Segment((Factor(tensor.shape[0], "ep"),)),)))]
        if self.world.experts < self.world.size:
            inner = self.find.within(name)
            cut = self._cut(inner, resolve_style(inner.style), name, tensor, direct=True) if inner else None
            if cut is not None:
                cuts.append(cut._replace(axis=over(cut.axis, "etp")))
        return Demand(name, tensor.dtype, tensor.shape, tuple(cuts), module)

    def _cut(self, rule: Rule, style: Style, name: str, tensor: RuntimeTensor, *, direct: bool) -> Wanted | None:
        """Return the dimension that a rule divides, or None if the tensor has no entries along its axis."""
        module = name.rpartition(".")[0]
        reference = name.removesuffix(SCALE) if direct else self._weight_of(module, name)
        reference = reference if reference in self.tensors or reference in self.tied else name
        defining = self.tensors.get(reference) or self.tied[reference]
        size = defining.shape[_dim(rule, style, defining, reference)]
        axis = self.axes.find(rule, style, name if direct else module, reference, size)
        dim = _dim(rule, style, tensor, name)
        unit = self._unit(tensor, dim, axis, name)
        return None if unit is None else Wanted(dim, axis, unit, self._is_vocabulary(style, module, size))

    def _is_vocabulary(self, style: Style, module: str, size: int) -> bool:
        """Tell whether a dimension is the vocabulary, whose parts the steps take at any length: it may be odd."""
        looked_up, joined = style.before == "mask_ids", style.contiguous and style.after == "all_gather"
        return looked_up or (joined and size == self.axes.sizes_in(module)("vocab_size"))

    def _weight_of(self, module: str, name: str) -> str:
        weight = f"{module}.weight"
        return weight if weight in self.tensors or weight in self.tied else name

    def _unit(self, tensor: RuntimeTensor, dim: int, axis: Axis, name: str) -> int | None:
        """Return how many elements of the axis one entry of the dimension stands for, or None if it has none."""
        size = tensor.shape[dim]
        if size == axis.size:
            return 1
        if name.endswith(SCALE) and self.model.scale_blocks:
            unit = self.model.scale_blocks[dim - len(tensor.shape)]
            if -(-axis.size // unit) == size:
                return unit
        if size == 1:
            return None
        raise PlanError(f"{self.plan.label}: {name}: dim {dim} has {size} entries, the axis of its module {axis.size}")

    def _modules(self, demands: Mapping[str, Demand]) -> dict[str, Module]:
        modules: dict[str, Module] = {}
        owners = modules_of([*self.tensors, *self.tied])
        for module in (*owners, *self._without_tensors(owners)):
            rule = self.find.for_module(module)
            if rule is None:
                continue
            style = resolve_style(rule.style)
            weight_name = self._weight_of(module, module)
            weight = demands.get(weight_name)
            if style.cuts and (weight is None or self.rules[weight_name] is not rule):
                continue
            self.effective.add(rule.pattern)
            if style.before == "route_local":
                modules[module] = self._routed(style, module, demands)
            elif style.before or style.after or style.own:
                axis = str(weight.cuts[0].axis) if weight else ""
                modules[module] = Module(style.name, style.before, style.after, axis)
        return modules

    def _without_tensors(self, owners: list[str]) -> list[str]:
        """Return the identities that rules name inside of modules with tensors; no tensor's name tells of them."""
        found: list[str] = []
        for rule in self.plan.rules:
            parent, _, leaf = rule.pattern.rpartition(".")
            if resolve_style(rule.style).before == "divide_input" and parent and leaf != "*":
                inside = Matcher([Rule(parent, "")])
                names = [f"{owner}.{leaf}" for owner in owners if inside.find(owner)]
                found += [name for name in names if name not in owners]
        return found

    def _routed(self, style: Style, module: str, demands: Mapping[str, Demand]) -> Module:
        """Return the steps of experts that are divided over ranks."""
        mine = [demand for demand in demands.values() if demand.group == module and "ep" in demand.mesh_axes]
        axes = {str(demand.cuts[0].axis) for demand in mine}
        if len(axes) != 1:
            found = " and ".join(sorted(axes)) or "nothing"
            raise PlanError(f"{self.plan.label}: {module}: {style.name} needs experts divided alike, found {found}")
        copied = [demand.name for demand in mine if "etp" not in demand.mesh_axes]
        if 0 < len(copied) < len(mine):
            raise PlanError(
                f"{self.plan.label}: {module}: ep {self.world.experts} leaves "
                f"{self.world.size // self.world.experts} ranks for each expert, and no rule divides {copied[0]} over "
                f"them, as the others are; ep {self.world.size} would do"
            )
        mesh = self.world.expert_mesh("rep" if copied else "etp") or ()
        return Module(style.name, style.before, style.after, axes.pop(), mesh)

    def _check_rules_used(self) -> None:
        rules = (*self.plan.rules, *(self.plan.expert_rules if self.world.experts > 1 else ()))
        taken_over = {rule.pattern for rule in self.plan.expert_rules} if self.world.experts > 1 else set()
        dead = [rule for rule in rules if rule.pattern not in self.effective | taken_over]
        if not dead or not (self.plan.exhaustive or len(dead) == len(rules)):
            for rule in dead:
                self.notes[f"the rule {rule.pattern} = {rule.style} takes nothing in this model"] = None
            return
        lines = "\n".join(f"  {rule.pattern} = {rule.style}" for rule in dead)
        example = next(iter(self.tensors), "")
        raise PlanError(
            f"{self.plan.label}: {len(dead)} of {len(rules)} rules take nothing:\n{lines}\n"
            f"names of this model look like {example}; correct the rules or remove them"
        )

    def _meshes(self, demands: Iterable[Demand]) -> dict[str, Mesh]:
        """Return the mesh of every group of modules with heads, or raise with everything that does not divide."""
        demands = list(demands)
        unsatisfied = failing(demands, self.world)
        if not unsatisfied:
            return group_meshes(demands, self.world)
        allowed = allowed_degrees(demands, self.world.experts)
        kinds = by_shape(unsatisfied)
        lines = tuple(describe(kind, group, demands, self.world) for kind, group in kinds.items())
        known = ", ".join(f"{name} {value}" for name, value in sorted(self.model.sizes.consulted.items()))
        ep = f" with ep {self.world.experts}" if self.world.experts > 1 else ""
        counts = {cut.axis.size for demand in unsatisfied for cut in demand.cuts if cut.axis.mesh_axes() == {"ep"}}
        uneven = [str(count) for count in sorted(counts) if count % self.world.experts]
        advice = (
            f"ep must divide the {' and '.join(uneven)} experts" if uneven else f"tp {shown_degrees(allowed)} would do"
        )
        raise DegreeError(
            f"{self.plan.label}: tp {self.world.size}{ep} does not divide this model{f' ({known})' if known else ''}; "
            f"{advice}\n" + "\n".join(f"  {line}" for line in lines),
            misfits=lines,
            allowed=allowed,
        )

    def _check_summed(self, demand: Demand, placement: Placement) -> None:
        """Refuse copies of what the ranks add up: each would be counted."""
        rule = self.rules[demand.name]
        plain = placement.mesh[0][0] == "tp"
        parts = set() if plain else {part_of(placement, rank) for rank in range(self.world.size)}
        sums = resolve_style(rule.style).after in ("all_reduce", "reduce_scatter_sequence")
        if sums and parts and len(parts) < self.world.size:
            axis = demand.cuts[0].axis
            raise PlanError(
                f"{self.plan.label}: {demand.name}: {rule.style} adds up the ranks' parts, and {axis} has "
                f"{len(parts)} for {self.world.size} ranks, copies among them; divide it over kv and rep"
            )

    def _note_shorter(self, demands: Iterable[Demand]) -> None:
        for demand in demands:
            for cut in demand.cuts:
                if cut.shorter and cut.axis.size % self.world.size:
                    most = -(-cut.axis.size // self.world.size)
                    last = cut.axis.size - most * (self.world.size - 1)
                    self.notes[f"{demand.name}: {most} of {cut.axis.size} rows a rank, {last} on the last"] = None

    def _note_little(self, demands: Mapping[str, Demand]) -> None:
        """Say it where the ranks hold most of the model alike: every memory must have room for it."""
        numel = {name: prod(tensor.shape) for name, tensor in self.tensors.items()}
        whole = sum(count for name, count in numel.items() if name not in demands)
        if self.world.size > 1 and 2 * whole > sum(numel.values()):
            share = 100 * whole // sum(numel.values())
            idle = self.world.experts == 1 and self.plan.expert_rules
            self.notes[
                f"{share} % of the elements are whole on every rank: this plan divides little; "
                + ("--ep N divides the experts" if idle else "a plan of your own may divide more")
            ] = None

    def _check_ties(self, placements: Mapping[str, Placement]) -> None:
        for name, source in self.model.ties.items():
            if placements.get(name, REPLICATED) != placements.get(source, REPLICATED):
                styles = [self.rules[tied].style if tied in self.rules else "no rule" for tied in (name, source)]
                raise PlanError(
                    f"{self.plan.label}: {name} is tied to {source}, but their rules cut them differently "
                    f"({styles[0]}, {styles[1]})"
                )

    def _attributes(self, meshes: Mapping[str, Mesh]) -> dict[str, dict[str, int]]:
        if not self.plan.attributes:
            return {}
        rules = [Rule(pattern, "") for pattern in self.plan.attributes]
        matcher = Matcher(rules)
        attributes: dict[str, dict[str, int]] = {}
        for module in modules_of(self.tensors):
            rule = matcher.find(module)
            if rule is None:
                continue
            mesh = {"tp": self.world.size, **dict(meshes.get(module, (("kv", 1), ("rep", 1))))}
            changed: dict[str, int] = {}
            for name, formula in self.plan.attributes[rule.pattern].items():
                alone = self._evaluate(formula, dict.fromkeys((*mesh, "kv", "rep"), 1), module)
                local = self._evaluate(formula, mesh, module)
                if local != alone:
                    changed[name] = local
            if changed:
                attributes[module] = changed
        return attributes

    def _evaluate(self, formula: str, mesh: Mapping[str, int], module: str) -> int:
        try:
            sizes = self.axes.sizes_in(module)
            return evaluate(formula, lambda name: mesh[name] if name in mesh else sizes(name))
        except PlanError as error:
            raise PlanError(f"{self.plan.label}: attributes of {module}: {error}") from error


def _dim(rule: Rule, style: Style, tensor: RuntimeTensor, name: str) -> int:
    """Return the dimension of a tensor that a rule cuts."""
    ndim = len(tensor.shape)
    if rule.dim is None or ndim == 1:
        return axis_dim(style.cuts, ndim) if style.cuts else 0
    if not -ndim <= rule.dim < ndim:
        raise PlanError(f"{rule.pattern}: dim {rule.dim} is not one of the {ndim} dimensions of {name}")
    return rule.dim % ndim
