"""What surrounds the ranks' forwards: the steps of modules, and the attributes that are other ones on a rank."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from manifests.errors import PlanError
from manifests.expression import evaluate, parse_axis
from manifests.layout import Mesh
from manifests.manifest import Input, Module, Rule
from manifests.styles import Style, resolve_style
from reshard.degrees import Demand, World
from reshard.plans import InputBinding, Matcher, Plan, expand_conditions, modules_of
from reshard.wishes import Wishes

Entry = TypeVar("Entry")


class Surroundings:
    """Finds the steps and the attributes of a model's modules."""

    def __init__(self, plan: Plan, world: World, wishes: Wishes) -> None:
        self._plan = plan
        self._world = world
        self._wishes = wishes

    def modules(self, demands: Mapping[str, Demand]) -> dict[str, Module]:
        """Return the steps of every module that has some."""
        modules: dict[str, Module] = {}
        owners = modules_of(self._wishes.tensors)
        for module in (*owners, *self._without_tensors(owners)):
            rule = self._wishes.find.for_module(module)
            if rule is None:
                continue
            style = resolve_style(rule.style)
            weight_name = self._wishes.weight_of(module, module)
            weight = demands.get(weight_name)
            if style.cuts and (weight is None or self._wishes.rules[weight_name] is not rule):
                continue
            self._wishes.effective.add(rule.pattern)
            if style.before == "route_local":
                modules[module] = self._routed(style, module, demands)
            elif style.before or style.after or style.own:
                axis = str(weight.cuts[0].axis) if weight else self._along(rule, module)
                modules[module] = Module(style.name, style.before, style.after, axis)
        return modules

    def _along(self, rule: Rule, module: str) -> str:
        """Return the axis of a module's buffers, which only its rule knows."""
        return str(self._wishes.axes.bind(rule.layout, f"{module}.", module, None)) if rule.layout else ""

    def _without_tensors(self, owners: list[str]) -> list[str]:
        """Return the modules that rules name inside of modules with tensors; no tensor's name tells of them."""
        found: list[str] = []
        for rule in self._plan.rules:
            parent, _, leaf = rule.pattern.rpartition(".")
            if resolve_style(rule.style).before in ("divide_input", "l2_norm") and parent and leaf != "*":
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
            raise PlanError(f"{self._plan.label}: {module}: {style.name} needs experts divided alike, found {found}")
        copied = [demand.name for demand in mine if "etp" not in demand.mesh_axes and not demand.partial]
        if 0 < len(copied) < len(mine):
            ranks = self._world.size // self._world.experts
            raise PlanError(
                f"{self._plan.label}: {module}: ep {self._world.experts} leaves {ranks} ranks for each expert, and no "
                f"rule divides {copied[0]} over them, as the others are; ep {self._world.size} would do"
            )
        mesh = self._world.expert_mesh("rep" if copied else "etp") or ()
        return Module(style.name, style.before, style.after, axes.pop(), mesh)

    def with_meshes(self, modules: Mapping[str, Module], meshes: Mapping[str, Mesh]) -> dict[str, Module]:
        """Return the steps with the meshes of those that are about heads, given the mesh of every group of heads."""
        groups = {"group_rms_norm": lambda name: name.rpartition(".")[0], "cut_buffers": lambda name: name}
        return {
            name: msgspec.structs.replace(entry, mesh=meshes.get(groups[entry.before](name), (("kv", 1), ("rep", 1))))
            if entry.before in groups and "@" in entry.axis
            else entry
            for name, entry in modules.items()
        }

    def attributes(self, meshes: Mapping[str, Mesh]) -> dict[str, dict[str, int]]:
        """Return what to set on modules, given the mesh of every group of heads."""
        if not self._plan.attributes:
            return {}
        attributes: dict[str, dict[str, int]] = {}
        for module, formulas in self._fitting(self._plan.attributes):
            # Those of a norm beside the heads are the heads'.
            heads = meshes.get(module) or meshes.get(module.rpartition(".")[0]) or (("kv", 1), ("rep", 1))
            mesh = {"tp": self._world.size, **dict(heads)}
            changed: dict[str, int] = {}
            for name, formula in formulas.items():
                alone = self._evaluate(formula, dict.fromkeys((*mesh, "kv", "rep"), 1), module)
                local = self._evaluate(formula, mesh, module)
                if local != alone:
                    changed[name] = local
            if changed:
                attributes[module] = changed
        return attributes

    def with_inputs(self, modules: Mapping[str, Module], meshes: Mapping[str, Mesh]) -> dict[str, Module]:
        """Return the modules with the arguments of which every rank takes its part; of one rank it is all."""
        completed = dict(modules)
        if self._world.size == 1:
            return completed
        for module, bindings in self._fitting(self._plan.inputs):
            own = completed.get(module, Module("replicate"))
            inputs = tuple(self._input(binding, module, meshes) for binding in bindings)
            completed[module] = msgspec.structs.replace(own, inputs=inputs)
        return completed

    def _input(self, binding: InputBinding, module: str, meshes: Mapping[str, Mesh]) -> Input:
        try:
            axis = parse_axis(binding.layout, self._wishes.axes.sizes_in(module))
        except PlanError as error:
            raise PlanError(f"{self._plan.label}: inputs of {module}: {error}") from error
        grouped = axis.mesh_axes() & {"kv", "rep"}
        mesh = meshes.get(module, (("kv", 1), ("rep", 1))) if grouped else self._world.plain_mesh
        return Input(binding.name, binding.dim, str(axis), mesh)

    def _fitting(self, patterns: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
        """Yield the modules that patterns fit, each with what the most literal of them has for it."""
        names = list(self._wishes.tensors)
        # A rule's style keeps the pattern that it comes from.
        matcher = Matcher(expand_conditions([Rule(pattern, pattern) for pattern in patterns], names))
        for module in modules_of(names):
            if (rule := matcher.find(module)) is not None:
                yield module, patterns[rule.style]

    def _evaluate(self, formula: str, mesh: Mapping[str, int], module: str) -> int:
        try:
            sizes = self._wishes.axes.sizes_in(module)
            return evaluate(formula, lambda name: mesh[name] if name in mesh else sizes(name))
        except PlanError as error:
            raise PlanError(f"{self._plan.label}: attributes of {module}: {error}") from error
