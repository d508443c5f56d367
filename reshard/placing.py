"""Placing: from a plan to what happens to every tensor and around every module.

All that does not fit is collected and reported at once, with the numbers of ranks that would do.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from manifests.errors import DegreeError, PlanError
from manifests.layout import Axis, Mesh
from manifests.manifest import Module, PerRank, Rule, Tensor
from manifests.placement import REPLICATED, Placement, part_of
from manifests.styles import resolve_style
from reshard.degrees import (
    Demand,
    Granted,
    World,
    allowed_degrees,
    by_shape,
    describe,
    failing,
    group_meshes,
    mesh_for,
    shown_degrees,
)
from reshard.meeting import Side, check_joined, check_meeting, taken_sides
from reshard.model import Model
from reshard.plans import Plan, expand_conditions
from reshard.remarks import tell_parts
from reshard.shares import Shares, shares_of
from reshard.surroundings import Surroundings
from reshard.uneven import POLICIES, Uneven
from reshard.wishes import Wishes


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
    attributes: dict[str, dict[str, PerRank]]
    ties: dict[str, str]
    sizes: dict[str, int]
    notes: tuple[str, ...]


def check_degree(world_size: object, experts: object = 1, uneven: str = "") -> World:
    """Return the ranks.

    Raises:
        PlanError: Not a whole number of ranks from 1, or the experts are not divided over a divisor of it, or an
            unknown policy for what they do not divide.
    """
    policy: Uneven = next((known for known in POLICIES if known == uneven), "")
    if uneven and not policy:
        raise PlanError(f"uneven {uneven!r}: unknown; known are {', '.join(POLICIES)}")
    if type(world_size) is not int or world_size < 1:
        raise PlanError(f"tp: {world_size!r} is not a number of ranks; a whole number from 1 is")
    if type(experts) is not int or experts < 1 or world_size % experts:
        raise PlanError(f"ep: {experts!r} does not divide the {world_size} ranks; a divisor of tp does")
    return World(world_size, experts, policy)


def resolve(model: Model, plan: Plan, world: World) -> Resolution:
    """Apply a plan.

    Args:
        model: The model.
        plan: The plan, its rules under the model's names.
        world: The ranks (`check_degree`).

    Raises:
        DegreeError: The number of ranks does not divide something that the plan divides.
        PlanError: The plan does not fit the model.
    """
    names = [*(name for name, tensor in model.tensors.items() if not tensor.unused), *model.ties]
    expanded = plan._replace(
        rules=expand_conditions(plan.rules, names), expert_rules=expand_conditions(plan.expert_rules, names)
    )
    return _Resolver(model, expanded, world).run()


class _Resolver:
    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        self.model = model
        self.plan = plan
        self.world = world
        self.wishes = Wishes(model, plan, world)
        self.notes: dict[str, None] = {}

    def run(self) -> Resolution:
        if self.world.experts > 1 and not self.plan.expert_rules:
            raise PlanError(f"{self.plan.label}: ep {self.world.experts}: has no rules that divide experts")
        wishes = self.wishes.all()
        demands = {name: wish for name, wish in wishes.items() if isinstance(wish, Demand)}
        surroundings = Surroundings(self.plan, self.world, self.wishes)
        modules = surroundings.modules(demands)
        self._check_rules_used()
        different = list({id(demand): demand for demand in demands.values()}.values())
        meshes = self._meshes(different, demands)
        granted: dict[int, Granted] = {}
        for demand in different:
            mesh = mesh_for(demand, meshes, self.world) or self.world.plain_mesh
            fitted = demand.fitted(mesh, self.world.uneven)
            granted[id(demand)] = Granted(fitted, self._counted(fitted, mesh))
        placements = _Placements(wishes, granted)
        placed = self._placed(placements)
        surrounded = surroundings.with_inputs(surroundings.with_meshes(modules, meshes), meshes)
        shares = self._shares(demands, granted, surrounded)
        self._check_ties(placements)
        self.notes |= dict.fromkeys(tell_parts(demands, granted, self.world.size))
        self._note_little(demands)
        return Resolution(
            tensors=placed,
            rules=self._rules(),
            modules=surrounded,
            attributes=surroundings.attributes(meshes, shares),
            ties=dict(self.model.ties),
            sizes=dict(sorted(self.model.sizes.used.items())),
            notes=(*self.wishes.axes.notes, *self.notes),
        )

    def _rules(self) -> dict[str, Rule]:
        """Return the rules that took tensors, without those of parameters that are another one."""
        for name in self.model.ties.keys() - self.model.tensors.keys():
            self.wishes.rules.pop(name, None)
        return self.wishes.rules

    def _placed(self, placements: "_Placements") -> dict[str, Tensor]:
        """Return the tensors with their placements; those that are alike are one object."""
        shared: dict[tuple[int, int], Tensor] = {}
        placed: dict[str, Tensor] = {}
        of_used = iter(placements)
        for name, tensor in self.model.tensors.items():
            placement = REPLICATED if tensor.unused else next(of_used)
            key = id(tensor), id(placement)
            found = shared.get(key)
            if found is None:
                found = Tensor(tensor.dtype, tensor.shape, placement, tensor.parts, tensor.unused)
                shared[key] = found
            placed[name] = found
        return placed

    def _check_rules_used(self) -> None:
        rules = (*self.plan.rules, *(self.plan.expert_rules if self.world.experts > 1 else ()))
        taken_over = {rule.pattern for rule in self.plan.expert_rules} if self.world.experts > 1 else set()
        effective = self.wishes.effective | taken_over
        dead = [rule for rule in rules if rule.pattern not in effective]
        if not dead or not (self.plan.exhaustive or len(dead) == len(rules)):
            for rule in dead:
                self.notes[f"the rule {rule.pattern} = {rule.style} takes nothing in this model"] = None
            return
        lines = "\n".join(f"  {rule.pattern} = {rule.style}" for rule in dead)
        example = next(iter(self.wishes.tensors), "")
        raise PlanError(
            f"{self.plan.label}: {len(dead)} of {len(rules)} rules take nothing:\n{lines}\n"
            f"names of this model look like {example}; correct the rules or remove them"
        )

    def _meshes(self, different: list[Demand], every: Mapping[str, Demand]) -> dict[str, Mesh]:
        """Return the mesh of every group of modules with heads, or raise with everything that does not divide."""
        if not failing(different, self.world):
            return group_meshes(different, self.world)
        demands = [demand._replace(name=name) for name, demand in every.items()]
        unsatisfied = failing(demands, self.world)
        allowed = allowed_degrees(demands, self.world)
        kinds = by_shape(unsatisfied)
        lines = tuple(describe(kind, group, demands, self.world) for kind, group in kinds.items())
        known = ", ".join(f"{name} {value}" for name, value in sorted(self.model.sizes.consulted.items()))
        ep = f" with ep {self.world.experts}" if self.world.experts > 1 else ""
        counts = {cut.axis.size for demand in unsatisfied for cut in demand.cuts if cut.axis.mesh_axes() == {"ep"}}
        uneven = [str(count) for count in sorted(counts) if count % self.world.experts]
        advice = (
            f"ep must divide the {' and '.join(uneven)} experts" if uneven else f"tp {shown_degrees(allowed)} would do"
        )
        policies = [policy for policy in POLICIES if not failing(different, self.world._replace(uneven=policy))]
        if policies and not self.world.uneven:
            advice += f", or --uneven {' or '.join(policies)}"
        raise DegreeError(
            f"{self.plan.label}: tp {self.world.size}{ep} does not divide this model{f' ({known})' if known else ''}; "
            f"{advice}\n" + "\n".join(f"  {line}" for line in lines),
            misfits=lines,
            allowed=allowed,
        )

    def _counted(self, demand: Demand, mesh: Mesh) -> Placement:
        """Return the placement over a mesh. Copies of what the ranks add up are refused, or the first alone counts."""
        placement, style = demand.placed(mesh), resolve_style(self.wishes.rules[demand.name].style)
        plain = mesh[0][0] == "tp"
        parts = set() if plain else {part_of(placement, rank) for rank in range(self.world.size)}
        sums = style.after in ("all_reduce", "reduce_scatter_sequence")
        if not sums or not parts or len(parts) == self.world.size:
            return placement
        if style.once:
            return demand._replace(partial=True).placed(mesh)
        axis = demand.cuts[0].axis
        raise PlanError(
            f"{self.plan.label}: {demand.name}: {style.name} adds up the ranks' parts, and {axis} has "
            f"{len(parts)} for {self.world.size} ranks, copies among them; divide it over kv and rep, "
            "or let one of each count: rowwise_once"
        )

    def _shares(
        self, demands: Mapping[str, Demand], granted: Mapping[int, Granted], modules: Mapping[str, Module]
    ) -> dict[str, Shares]:
        """Return the ranks' shares of what is divided in each module, if parts may be uneven.

        Raises:
            PlanError: Parts of different modules cannot be shown to meet.
        """
        if not self.world.uneven:
            return {}
        sides: list[Side] = []
        groups: dict[str, set[tuple[Axis, Mesh]]] = {}
        for name, demand in demands.items():
            fitted, placement = granted[id(demand)]
            style = resolve_style(self.wishes.rules[name].style)
            if style.contiguous and style.cuts != "expert":
                continue
            group = fitted.renamed(name).group
            for cut in fitted.cuts:
                groups.setdefault(group, set()).add((cut.axis, placement.mesh))
                if cut.axis.mesh_axes() == {"ep"}:
                    continue
                sides.append(Side(name, cut.axis, placement.mesh, cut.summed, cut.plain))
        check_joined(sides, modules, self.plan.label)
        check_meeting([*sides, *taken_sides(modules, self.world.plain_mesh)], self.world.size, self.plan.label)
        shares = {axes: shares_of(axes, self.world.size) for axes in {frozenset(axes) for axes in groups.values()}}
        return {group: shares[frozenset(axes)] for group, axes in groups.items()}

    def _note_little(self, demands: Mapping[str, Demand]) -> None:
        """Say it where the ranks hold most of the model alike: every memory must have room for it."""
        tensors = self.model.tensors
        different = {id(tensor): tensor for tensor in tensors.values()}
        numel = {key: 0 if tensor.unused else prod(tensor.shape) for key, tensor in different.items()}
        every = sum(numel[key] * count for key, count in Counter(map(id, tensors.values())).items())
        wanted = {id(demand): demand for demand in demands.values()}
        divided = sum(prod(wanted[key].shape) * count for key, count in Counter(map(id, demands.values())).items())
        divided -= sum(prod(demands[name].shape) for name in demands.keys() & self.model.ties.keys())
        whole = every - divided
        if self.world.size > 1 and 2 * whole > every:
            share = 100 * whole // every
            idle = self.world.experts == 1 and self.plan.expert_rules
            self.notes[
                f"{share} % of the elements are whole on every rank: this plan divides little; "
                + ("--ep N divides the experts" if idle else "a plan of your own may divide more")
            ] = None

    def _check_ties(self, placements: "_Placements") -> None:
        for name, source in self.model.ties.items():
            if placements.of(name) != placements.of(source):
                rules = [self.wishes.rules.get(tied) for tied in (name, source)]
                styles = [rule.style if rule else "no rule" for rule in rules]
                raise PlanError(
                    f"{self.plan.label}: {name} is tied to {source}, but their rules cut them differently "
                    f"({styles[0]}, {styles[1]})"
                )


class _Placements:
    """The placements of tensors: what their wishes were granted.

    Args:
        wishes: By tensor, in the order of the used ones.
        granted: What demands were granted, by the identities of these.
    """

    def __init__(self, wishes: Mapping[str, Demand | Placement], granted: Mapping[int, Granted]) -> None:
        self._wishes = wishes
        self._granted = granted

    def of(self, name: str) -> Placement:
        """Return the placement of a tensor."""
        wish = self._wishes[name]
        return self._granted[id(wish)].placement if isinstance(wish, Demand) else wish

    def __iter__(self) -> Iterator[Placement]:
        """Yield the placements of all, in their order."""
        for wish in self._wishes.values():
            yield self._granted[id(wish)].placement if isinstance(wish, Demand) else wish
