"""What surrounds the ranks' forwards: the steps of modules, and the attributes that are other ones on a rank."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

import msgspec

from manifests.errors import PlanError
from manifests.expression import Number, evaluate, parse_axis
from manifests.layout import Axis, Mesh
from manifests.manifest import Input, Module, PerRank, Rule
from manifests.natural import alike
from manifests.styles import Style, resolve_style
from reshard.degrees import Demand, Wanted, World
from reshard.plans import InputBinding, Matcher, Plan, expand_conditions, modules_of
from reshard.shares import Shares
from reshard.uneven import fit
from reshard.wishes import Wishes

Entry = TypeVar("Entry")


class Surroundings:
    """Finds the steps and the attributes of a model's modules."""

    def __init__(self, plan: Plan, world: World, wishes: Wishes) -> None:
        self._plan = plan
        self._world = world
        self._wishes = wishes
        self._owners = modules_of(wishes.tensors)
        self._axes: dict[str, Wanted] = {}
        """The axes that steps refer to, by module, as they are asked for."""

    def modules(self, demands: Mapping[str, Demand]) -> dict[str, Module]:
        """Return the steps of every module that has some."""
        modules: dict[str, Module] = {}
        shared: dict[tuple[str, ...], Module] = {}
        for module, rule in self._taken():
            style = resolve_style(rule.style)
            if rule.pattern in self._wishes.effective and not (style.before or style.after or style.own):
                continue
            weight_name = self._wishes.weight_of(module, module)
            weight = demands.get(weight_name)
            if style.cuts and (weight is None or self._wishes.rules[weight_name] is not rule):
                continue
            self._wishes.effective.add(rule.pattern)
            if style.before == "route_local":
                modules[module] = self._routed(style, module, demands)
            elif style.before or style.after or style.own:
                axis = self._axis(weight, rule, module)
                row = style.name, style.before, style.after, _text(axis.axis) if axis else ""
                modules[module] = shared.setdefault(row, Module(*row))
                if axis and self._world.uneven:
                    self._axes[module] = axis
        return modules

    def _axis(self, weight: Demand | None, rule: Rule, module: str) -> Wanted | None:
        """Return the axis that a module's steps refer to; that of its buffers only its rule knows."""
        if weight:
            return weight.cuts[0]
        return Wanted(0, self._wishes.axes.bind(rule.layout, f"{module}.", module, None)) if rule.layout else None

    def _taken(self) -> Iterator[tuple[str, Rule]]:
        """Yield the modules that a rule takes, with it."""
        owners = self._owners
        found: dict[str, Rule | None] = {}
        names = [*owners, *self._without_tensors(owners)]
        for module, kind in zip(names, alike(names, self._wishes.find.numbers), strict=True):
            if kind not in found:
                found[kind] = self._wishes.find.for_module(module)
            if rule := found[kind]:
                yield module, rule

    def _without_tensors(self, owners: list[str]) -> list[str]:
        """Return the modules that rules name inside of modules with tensors; no tensor's name tells of them."""
        found: list[str] = []
        for rule in self._plan.rules:
            parent, _, leaf = rule.pattern.rpartition(".")
            if resolve_style(rule.style).before in ("divide_input", "l2_norm") and parent and leaf != "*":
                inside = Matcher([Rule(parent, "")])
                names = [f"{owner}.{leaf}" for owner in owners if inside.find(owner)]
                known = set(owners)
                found += [name for name in names if name not in known]
        return found

    def _routed(self, style: Style, module: str, demands: Mapping[str, Demand]) -> Module:
        """Return the steps of experts that are divided over ranks."""
        mine = [demand for demand in demands.values() if demand.group == module and "ep" in demand.mesh_axes]
        axes = {str(demand.cuts[0].axis) for demand in mine}
        if len(axes) != 1:
            found = " and ".join(sorted(axes)) or "nothing"
            raise PlanError(f"{self._plan.label}: {module}: {style.name} needs experts divided alike, found {found}")
        copied = [demand.name for demand in mine if "etp" not in demand.mesh_axes and not demand.partial]
        if 0 < len(copied) < len(mine):
            ranks = self._world.size // self._world.experts
            raise PlanError(
                f"{self._plan.label}: {module}: ep {self._world.experts} leaves {ranks} ranks for each expert, and no "
                f"rule divides {copied[0]} over them, as the others are; ep {self._world.size} would do"
            )
        mesh = self._world.expert_mesh("rep" if copied else "etp") or ()
        self._axes[module] = mine[0].cuts[0]
        return Module(style.name, style.before, style.after, axes.pop(), mesh)

    def with_meshes(self, modules: Mapping[str, Module], meshes: Mapping[str, Mesh]) -> dict[str, Module]:
        """Return the steps with the meshes of those that are about heads, given the mesh of every group of heads.

        Raises:
            PlanError: A group of features is unevenly divided whose norm counts them.
        """
        completed = dict(modules)
        for name, entry in modules.items():
            mesh = entry.mesh
            if entry.before in ("rms_norm", "group_rms_norm", "layer_norm", "cut_buffers") and "@" in entry.axis:
                heads = name if entry.before == "cut_buffers" else name.rpartition(".")[0]
                mesh = meshes.get(heads, (("kv", 1), ("rep", 1)))
            axis = entry.axis
            if name in self._axes:
                fitted = self._axes[name].fitted(mesh or self._world.plain_mesh, self._world.uneven)
                axis = _text(fitted.axis)
                self._check_norm(name, entry, fitted, dict(mesh))
            if (mesh, axis) != (entry.mesh, entry.axis):
                completed[name] = msgspec.structs.replace(entry, mesh=mesh, axis=axis)
        return completed

    def _check_norm(self, name: str, entry: Module, fitted: Wanted, mesh: Mapping[str, int]) -> None:
        """Refuse norms that take the ranks' parts for equal."""
        groups = fitted.axis.segments[0].factors[0]
        if entry.before == "group_rms_norm" and groups.size % mesh.get(groups.on, 1) and not groups.padded:
            raise PlanError(
                f"{self._plan.label}: {name}: norms {fitted.axis} by groups, of which all ranks must have as many; "
                "--uneven pad would do"
            )
        if entry.before == "layer_norm" and fitted.shorter:
            raise PlanError(
                f"{self._plan.label}: {name}: a layer norm over {fitted.axis}, of which all ranks must have as much"
            )

    def attributes(self, meshes: Mapping[str, Mesh], shares: Mapping[str, Shares]) -> dict[str, dict[str, PerRank]]:
        """Return what to set on modules.

        Args:
            meshes: The mesh of every group of heads.
            shares: The ranks' shares of what is unevenly divided in a module.

        Raises:
            PlanError: A formula comes to no whole number.
        """
        if not self._plan.attributes:
            return {}
        attributes: dict[str, dict[str, PerRank]] = {}
        for module, formulas in self._fitting(self._plan.attributes):
            # Those of a norm beside the heads are the heads', those of a layer are its block's.
            parent = module.rpartition(".")[0]
            heads = meshes.get(module) or meshes.get(parent) or (("kv", 1), ("rep", 1))
            mesh = {"tp": self._world.size, **dict(heads)}
            uneven = shares.get(module) or shares.get(parent)
            changed: dict[str, PerRank] = {}
            for name, formula in formulas.items():
                alone = self._evaluate(formula, dict.fromkeys((*mesh, "kv", "rep"), 1), module)
                if uneven is None:
                    local: PerRank = self._evaluate(formula, mesh, module)
                else:
                    local = self._on_every_rank(formula, uneven, module)
                if local != alone:
                    changed[name] = local
            if changed:
                attributes[module] = changed
        return attributes

    def _on_every_rank(self, formula: str, shares: Shares, module: str) -> PerRank:
        """Return a formula's value on every rank, one number if all have the same.

        To divide by a mesh axis is to take the rank's share of what is divided over it.
        """
        places = [{name: 1 / share[rank] for name, share in shares.items()} for rank in range(self._world.size)]
        values = tuple(self._evaluate(formula, {"kv": 1, "rep": 1, **place}, module) for place in places)
        return values[0] if len(set(values)) == 1 else values

    def with_inputs(self, modules: Mapping[str, Module], meshes: Mapping[str, Mesh]) -> dict[str, Module]:
        """Return the modules with the arguments of which every rank takes its part.

        Of one rank it is all, and so it is of heads that the plan leaves whole.
        """
        completed = dict(modules)
        if self._world.size == 1 or not self._plan.inputs:
            return completed
        for module, bindings in self._fitting(self._plan.inputs):
            own = completed.get(module, Module("replicate"))
            found = (self._input(binding, module, meshes) for binding in bindings)
            if inputs := tuple(filter(None, found)):
                completed[module] = msgspec.structs.replace(own, inputs=inputs)
        return completed

    def _input(self, binding: InputBinding, module: str, meshes: Mapping[str, Mesh]) -> Input | None:
        try:
            axis = parse_axis(binding.layout, self._wishes.axes.sizes_in(module))
        except PlanError as error:
            raise PlanError(f"{self._plan.label}: inputs of {module}: {error}") from error
        grouped = axis.mesh_axes() & {"kv", "rep"}
        mesh = meshes.get(module) if grouped else self._world.plain_mesh
        if mesh is None:
            return None
        return Input(binding.name, binding.dim, str(fit(axis, mesh, self._world.uneven)), mesh)

    def _fitting(self, patterns: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
        """Yield the modules that patterns fit, each with what the most literal of them has for it."""
        # A rule's style keeps the pattern that it comes from.
        rules = [Rule(pattern, pattern) for pattern in patterns]
        matcher = Matcher(expand_conditions(rules, list(self._wishes.tensors)))
        known: dict[str, Rule | None] = {}
        for module, kind in zip(self._owners, alike(self._owners, matcher.numbers), strict=True):
            if kind not in known:
                known[kind] = matcher.find(module)
            if rule := known[kind]:
                yield module, patterns[rule.style]

    def _evaluate(self, formula: str, mesh: Mapping[str, Number], module: str) -> int:
        try:
            sizes = self._wishes.axes.sizes_in(module)
            return evaluate(formula, lambda name: mesh[name] if name in mesh else sizes(name))
        except PlanError as error:
            raise PlanError(f"{self._plan.label}: attributes of {module}: {error}") from error


@lru_cache(maxsize=4096)
def _text(axis: Axis) -> str:
    return str(axis)
