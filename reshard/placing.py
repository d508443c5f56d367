"""Placing: from a plan to what happens to every tensor and around every module.

One function decides for all tensors of a module, so a bias is always cut by the blocks of its weight. All that does not
fit is collected and reported at once, with the numbers of ranks that would do.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from manifests.errors import DegreeError, PlanError
from manifests.expression import UnknownSizeError, evaluate, parse_axis
from manifests.layout import Axis, Mesh, packed_axis, plain_axis
from manifests.manifest import Module, Part, Rule, Tensor
from manifests.placement import PARTIAL, REPLICATED, Placement, part_of
from manifests.styles import STYLES, axis_dim
from reshard.degrees import Demand, allowed_degrees, by_shape, describe, failing, group_meshes, mesh_for, shown_degrees
from reshard.plans import Matcher, Plan, modules_of
from reshard.sizes import Sizes

MESH_AXES = frozenset({"tp", "kv", "rep"})


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
    sizes: Sizes
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


def check_degree(world_size: object) -> int:
    """Return the number of ranks.

    Raises:
        PlanError: It is not a whole number from 1.
    """
    if type(world_size) is not int or world_size < 1:
        raise PlanError(f"tp: {world_size!r} is not a number of ranks; a whole number from 1 is")
    return world_size


def resolve(model: Model, plan: Plan, world_size: int) -> Resolution:
    """Apply a plan.

    Args:
        model: The model.
        plan: The plan, its rules under the model's names.
        world_size: Number of ranks.

    Raises:
        DegreeError: The number of ranks does not divide something that the plan divides.
        PlanError: The plan does not fit the model.
    """
    return _Resolver(model, plan, check_degree(world_size)).run()


class _Resolver:
    def __init__(self, model: Model, plan: Plan, world_size: int) -> None:
        self.model = model
        self.plan = plan
        self.world_size = world_size
        self.matcher = Matcher(plan.rules)
        self.tensors = {name: tensor for name, tensor in model.tensors.items() if not tensor.unused}
        # A tied parameter is planned like a stored one: its rule must lead to the placement of what it is tied to.
        self.tied = {name: self.tensors[source] for name, source in model.ties.items()}
        self.rules: dict[str, Rule] = {}
        self.effective: set[str] = set()
        self.notes: dict[str, None] = {}

    def run(self) -> Resolution:
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
            placements[demand.name] = demand.placed(mesh_for(demand, meshes, self.world_size))
            self._check_summed(demand, placements[demand.name])
        self._check_ties(placements)
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
            notes=tuple(self.notes),
        )

    def _wish(self, name: str, tensor: RuntimeTensor) -> Demand | Placement:
        rule, direct = self.matcher.find_for_parameter(name)
        if rule is None:
            return REPLICATED
        self.rules[name] = rule
        style = STYLES[rule.style]
        if not style.cuts:
            self.effective.add(rule.pattern)
            return REPLICATED
        module, _, leaf = name.rpartition(".")
        if not tensor.shape:
            return REPLICATED
        is_bias = leaf.endswith("bias") and not direct
        if is_bias and style.bias != "cut":
            return PARTIAL if style.bias == "partial" else REPLICATED
        if len(tensor.shape) == 1 and not is_bias and not direct and style.cuts != "out":
            return REPLICATED
        axis = self._axis(rule, module if not direct else name, name if direct else self._weight_of(module, name))
        dim = _dim(rule, tensor, name)
        unit = self._unit(tensor, dim, axis, name)
        if unit is None:
            return REPLICATED
        self.effective.add(rule.pattern)
        group = name.rpartition(".")[0] if direct else module.rpartition(".")[0]
        return Demand(name, tensor.dtype, tensor.shape, axis, dim, unit, group)

    def _weight_of(self, module: str, name: str) -> str:
        weight = f"{module}.weight"
        return weight if weight in self.tensors or weight in self.tied else name

    def _axis(self, rule: Rule, target: str, reference: str) -> Axis:
        """Return the axis that a rule cuts, from the tensor that defines its size."""
        style = STYLES[rule.style]
        tensor = self.tensors.get(reference) or self.tied[reference]
        size = tensor.shape[_dim(rule, tensor, reference)]
        if style.packed and not rule.layout:
            blocks = rule.blocks or (1, 1)
            if size % sum(blocks):
                raise PlanError(
                    f"{self.plan.label}: {reference}: {size} is not a multiple of its blocks {list(blocks)}; "
                    "give the blocks' proportions or sizes"
                )
            return packed_axis(tuple(block * (size // sum(blocks)) for block in blocks))
        notation = rule.layout or (
            "" if style.contiguous else self._binding(target, "in" if style.cuts == "in" else "out")
        )
        if not notation:
            return plain_axis(size)
        axis = self._bind(notation, target, required=bool(rule.layout))
        if axis is None:
            return plain_axis(size)
        if unknown := axis.mesh_axes() - MESH_AXES:
            raise PlanError(
                f"{self.plan.label}: {reference}: the layout {notation} divides over {min(unknown)!r}; "
                f"known are {', '.join(sorted(MESH_AXES))} (* is tp)"
            )
        if not axis.mesh_axes():
            raise PlanError(
                f"{self.plan.label}: {reference}: the layout {notation} divides nothing; mark a factor with *"
            )
        if axis.size != size:
            raise PlanError(
                f"{self.plan.label}: {reference}: the layout {notation} has {axis.size} elements ({axis}), "
                f"the tensor {size}; give its rule a layout, or bind the sizes in [sizes]"
            )
        return axis

    def _binding(self, target: str, side: str) -> str:
        """Return the axis bound to a module by the longest fitting suffix of its name."""
        fitting = [b for b in self.plan.bindings if f".{target}".endswith(f".{b.suffix}")]
        best = max(fitting, key=lambda binding: len(binding.suffix), default=None)
        if best is None:
            return ""
        return best.into if side == "in" else best.out

    def _bind(self, notation: str, target: str, *, required: bool) -> Axis | None:
        try:
            return parse_axis(notation, self.model.sizes.get)
        except UnknownSizeError as error:
            if required:
                raise PlanError(f"{self.plan.label}: {target}: {error}; bind it in [sizes]") from error
            suffix = target.rpartition(".")[2]
            self.notes[f"{suffix}: cut as plain rows, since the size {error.name!r} of its heads is not known"] = None
            return None

    def _unit(self, tensor: RuntimeTensor, dim: int, axis: Axis, name: str) -> int | None:
        """Return how many elements of the axis one entry of the dimension stands for, or None if it has none."""
        size = tensor.shape[dim]
        if size == axis.size:
            return 1
        if name.endswith("_scale_inv") and self.model.scale_blocks:
            unit = self.model.scale_blocks[dim - len(tensor.shape)]
            if -(-axis.size // unit) == size:
                return unit
        if size == 1:
            return None
        raise PlanError(f"{self.plan.label}: {name}: dim {dim} has {size} entries, the axis of its module {axis.size}")

    def _modules(self, demands: Mapping[str, Demand]) -> dict[str, Module]:
        modules: dict[str, Module] = {}
        for module in modules_of([*self.tensors, *self.tied]):
            rule = self.matcher.find(module)
            if rule is None:
                continue
            style = STYLES[rule.style]
            weight_name = self._weight_of(module, module)
            weight = demands.get(weight_name)
            if style.cuts and (weight is None or self.rules[weight_name] is not rule):
                continue
            self.effective.add(rule.pattern)
            if style.before or style.after:
                axis = str(weight.axis) if weight else ""
                modules[module] = Module(style.name, style.before, style.after, axis)
        return modules

    def _check_rules_used(self) -> None:
        dead = [rule for rule in self.plan.rules if rule.pattern not in self.effective]
        if not dead or not (self.plan.exhaustive or len(dead) == len(self.plan.rules)):
            for rule in dead:
                self.notes[f"the rule {rule.pattern} = {rule.style} takes nothing in this model"] = None
            return
        lines = "\n".join(f"  {rule.pattern} = {rule.style}" for rule in dead)
        example = next(iter(self.tensors), "")
        raise PlanError(
            f"{self.plan.label}: {len(dead)} of {len(self.plan.rules)} rules take nothing:\n{lines}\n"
            f"names of this model look like {example}; correct the rules or remove them"
        )

    def _meshes(self, demands: Iterable[Demand]) -> dict[str, Mesh]:
        """Return the mesh of every group of modules with heads, or raise with everything that does not divide."""
        demands = list(demands)
        unsatisfied = failing(demands, self.world_size)
        if not unsatisfied:
            return group_meshes(demands, self.world_size)
        allowed = allowed_degrees(demands)
        kinds = by_shape(unsatisfied)
        lines = tuple(describe(kind, group, demands, self.world_size) for kind, group in kinds.items())
        known = ", ".join(f"{name} {value}" for name, value in sorted(self.model.sizes.consulted.items()))
        raise DegreeError(
            f"{self.plan.label}: tp {self.world_size} does not divide this model{f' ({known})' if known else ''}; "
            f"tp {shown_degrees(allowed)} would do\n" + "\n".join(f"  {line}" for line in lines),
            misfits=lines,
            allowed=allowed,
        )

    def _check_summed(self, demand: Demand, placement: Placement) -> None:
        """Refuse copies of what the ranks add up: each would be counted."""
        rule = self.rules[demand.name]
        parts = {part_of(placement, rank) for rank in range(self.world_size)} if placement.mesh[0][0] != "tp" else ()
        if STYLES[rule.style].after == "all_reduce" and parts and len(parts) < self.world_size:
            raise PlanError(
                f"{self.plan.label}: {demand.name}: {rule.style} adds up the ranks' parts, and {demand.axis} has "
                f"{len(parts)} for {self.world_size} ranks, copies among them; divide it over kv and rep"
            )

    def _check_ties(self, placements: Mapping[str, Placement]) -> None:
        for name, source in self.model.ties.items():
            if placements.get(name, REPLICATED) != placements.get(source, REPLICATED):
                styles = [self.rules[tied].style if tied in self.rules else "no rule" for tied in (name, source)]
                raise PlanError(
                    f"{self.plan.label}: {name} is tied to {source}, but their rules cut them differently "
                    f"({styles[0]}, {styles[1]})"
                )

    def _attributes(self, meshes: Mapping[str, Mesh]) -> dict[str, dict[str, int]]:
        rules = [Rule(pattern, "") for pattern in self.plan.attributes]
        matcher = Matcher(rules)
        attributes: dict[str, dict[str, int]] = {}
        for module in modules_of(self.tensors):
            rule = matcher.find(module)
            if rule is None:
                continue
            mesh = {"tp": self.world_size, **dict(meshes.get(module, (("kv", 1), ("rep", 1))))}
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
            return evaluate(formula, lambda name: mesh[name] if name in mesh else self.model.sizes.get(name))
        except PlanError as error:
            raise PlanError(f"{self.plan.label}: attributes of {module}: {error}") from error


def _dim(rule: Rule, tensor: RuntimeTensor, name: str) -> int:
    """Return the dimension of a tensor that a rule cuts."""
    ndim = len(tensor.shape)
    cuts = STYLES[rule.style].cuts
    if rule.dim is None or ndim == 1:
        return axis_dim(cuts, ndim) if cuts else 0
    if not -ndim <= rule.dim < ndim:
        raise PlanError(f"{rule.pattern}: dim {rule.dim} is not one of the {ndim} dimensions of {name}")
    return rule.dim % ndim
