"""Plans: rules from name patterns to styles, and which rule takes which name.

A pattern is a dotted name in which ``*`` stands for one whole part. It names a module, and then takes the parameters
that the module itself owns, or a parameter. Where several patterns fit, they are compared part by part from the left,
and a literal beats ``*``; a pattern that names the parameter beats one that names its module. A part may have a
condition: ``attn[q]`` fits a module ``attn`` that has a child ``q``, ``layer[attn.q]`` one whose child ``attn`` has it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from manifests.errors import PlanError
from manifests.expression import MAX_SIZE
from manifests.manifest import Rule
from manifests.names import tensor_name_problem
from manifests.natural import alike
from manifests.shown import shown, shown_name
from manifests.styles import resolve_style

UNCUT = ("cut_buffers", "all_gather")
"""Styles that cut no parameter, and whose layout is that of what their step is about."""
_CONDITION = re.compile(r"\[(?P<child>[^\[\]]*)\]")
_PART = re.compile(r"(?:[^.\[\]]|\[[^\[\]]*\])+")


class AxisBinding(NamedTuple):
    """The axes of modules, by name.

    Attributes:
        suffix: The last parts of the modules' names.
        out: The axis of the output; empty if it is not bound.
        into: The axis of the input; empty if it is not bound.
        under: The module that they are in; empty for the whole model.
    """

    suffix: str
    out: str = ""
    into: str = ""
    under: str = ""

    def fits(self, module: str) -> bool:
        """Tell whether a module has these axes.

        >>> AxisBinding("attn.q", under="model").fits("model.0.attn.q"), AxisBinding("q").fits("my_q")
        (True, False)
        """
        return f".{module}".endswith(f".{self.suffix}") and (not self.under or module.startswith(f"{self.under}."))


class InputBinding(NamedTuple):
    """An argument of a module that comes with entries for all heads.

    Attributes:
        name: The argument.
        layout: The axis of one of its dimensions.
        dim: The dimension.
    """

    name: str
    layout: str
    dim: int = 0


class Plan(NamedTuple):
    """Rules and what they need to know of the model.

    Attributes:
        label: Where it came from, for messages.
        rules: The rules.
        sizes: Formulas over the configuration, by the names that layouts use.
        bindings: The axes of modules, for rules that give no layout of their own.
        attributes: Module pattern to attribute to formula over the sizes and the mesh axes.
        inputs: Module pattern to the arguments of which every rank takes its part.
        exhaustive: Whether every rule must take something.
        expert_rules: Rules that take the place of others where the experts are divided over ranks.
        ties: Parameters that are another one: name to name.
    """

    label: str
    rules: tuple[Rule, ...]
    sizes: Mapping[str, str] = {}
    bindings: tuple[AxisBinding, ...] = ()
    attributes: Mapping[str, Mapping[str, str]] = {}
    inputs: Mapping[str, tuple[InputBinding, ...]] = {}
    exhaustive: bool = True
    expert_rules: tuple[Rule, ...] = ()
    ties: Mapping[str, str] = {}


def build_rule(pattern: str, choice: object, label: str) -> Rule:
    """Return the rule of one line of a plan: a style's name, or a table with style, layout, blocks, dim.

    Raises:
        PlanError: The line is malformed or names an unknown style.
    """
    if not isinstance(pattern, str) or not pattern or any(not part for part in pattern.split(".")):
        raise PlanError(f"{label}: {shown(pattern)} is not a dotted name")
    if problem := tensor_name_problem(pattern):
        raise PlanError(f"{label}: a rule has {problem}: {shown(pattern)}")
    table: Any = {"style": choice} if isinstance(choice, str) else choice
    if not isinstance(table, dict) or not isinstance(table.get("style"), str):
        raise PlanError(
            f"{label}: {shown_name(pattern)}: a style's name or a table with `style` expected, got {shown(choice)}"
        )
    unknown = [key for key in table if key not in ("style", "layout", "blocks", "dim")]
    if unknown:
        raise PlanError(
            f"{label}: {shown_name(pattern)}: unknown key {shown(unknown[0])}; known are style, layout, blocks, dim"
        )
    layout, blocks, dim = table.get("layout", ""), table.get("blocks", []), table.get("dim")
    if not isinstance(layout, str):
        raise PlanError(f"{label}: {shown_name(pattern)}: layout {shown(layout)} is not a text")
    if not isinstance(blocks, list) or not all(type(block) is int and 0 < block < MAX_SIZE for block in blocks):
        raise PlanError(
            f"{label}: {shown_name(pattern)}: blocks {shown(blocks)} are not a list of whole numbers from 1"
        )
    if dim is not None and (type(dim) is not int or abs(dim) >= MAX_SIZE):
        raise PlanError(f"{label}: {shown_name(pattern)}: dim {shown(dim)} is not a whole number")
    try:
        style = resolve_style(table["style"])
    except PlanError as error:
        raise PlanError(f"{label}: {shown_name(pattern)}: {error}") from error
    if blocks and not style.packed:
        raise PlanError(
            f"{label}: {shown_name(pattern)}: {style.name} takes no blocks; packed_colwise and packed_rowwise do"
        )
    if layout and (blocks or style.contiguous or not (style.cuts or style.name in UNCUT)):
        raise PlanError(
            f"{label}: {shown_name(pattern)}: {style.name} takes no layout" + (" beside blocks" if blocks else "")
        )
    return Rule(pattern, style.name, layout, tuple(blocks), dim)


def build_inputs(table: Mapping[str, object], label: str) -> tuple[InputBinding, ...]:
    """Return the arguments of one line of the table ``inputs``: each a layout, or a table with layout and dim.

    Raises:
        PlanError: The line is malformed.
    """
    found: list[InputBinding] = []
    for name, choice in table.items():
        entry: Any = {"layout": choice} if isinstance(choice, str) else choice
        if (
            not isinstance(entry, dict)
            or not entry.keys() <= {"layout", "dim"}
            or not isinstance(entry.get("layout"), str)
        ):
            raise PlanError(f"{label}.{name}: a layout or a table with layout and dim expected, got {choice!r}")
        if type(dim := entry.get("dim", 0)) is not int:
            raise PlanError(f"{label}.{name}: dim {dim!r} is not a whole number")
        found.append(InputBinding(name, entry["layout"], dim))
    return tuple(found)


class Matcher:
    """Finds the rule that takes a name.

    >>> matcher = Matcher([Rule("a.*.w", "colwise"), Rule("a.1.w", "rowwise")])
    >>> matcher.find("a.1.w").style, matcher.find("a.11.w").style, matcher.find("a.w")
    ('rowwise', 'colwise', None)
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._root: dict[str | None, Any] = {}
        self.numbers: set[str] = set()
        """The parts of patterns that are numbers: names that differ only in other numbers have one rule."""
        for rule in rules:
            node = self._root
            for part in rule.pattern.split("."):
                if part.isdecimal():
                    self.numbers.add(part)
                node = node.setdefault(part, {})
            if None in node:
                raise PlanError(f"{rule.pattern}: two rules have this pattern")
            node[None] = rule

    def find(self, name: str) -> Rule | None:
        """Return the rule whose pattern fits the whole name, the most literal from the left."""
        return _descend(self._root, name.split("."), 0) if self._root else None

    def find_for_parameter(self, name: str) -> tuple[Rule | None, bool]:
        """Return the rule that takes a parameter, and whether it names the parameter rather than its module."""
        rule = self.find(name)
        if rule is not None:
            return rule, True
        return self.find(name.rpartition(".")[0]), False


def _descend(node: Mapping[str | None, Any], parts: list[str], at: int) -> Rule | None:
    if at == len(parts):
        return node.get(None)
    for step in (parts[at], "*"):
        if step in node and (found := _descend(node[step], parts, at + 1)) is not None:
            return found
    return None


def expand_conditions(rules: Iterable[Rule], names: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules with those that have conditions replaced by one for each module that meets them.

    A rule whose conditions nothing meets stays as it is.

    >>> rules = [Rule("*.attn[q].o", "rowwise")]
    >>> [rule.pattern for rule in expand_conditions(rules, ["0.attn.q.weight", "0.attn.o.weight", "1.attn.o.weight"])]
    ['0.attn.o']
    >>> [rule.pattern for rule in expand_conditions([Rule("*[attn.q].mlp", "")], ["0.attn.q.weight", "0.mlp.weight"])]
    ['0.mlp']
    """
    rules, known = list(rules), list(names)
    if not any("[" in rule.pattern for rule in rules):
        return tuple(rules)
    known += modules_of(known)
    children = set(known)
    expanded: dict[str, Rule] = {}
    plain = {rule.pattern for rule in rules}
    for rule in rules:
        matcher = Matcher([msgspec.structs.replace(rule, pattern=without_conditions(rule.pattern))])
        met = [name for name in known if "[" in rule.pattern and matcher.find(name) and _meets(rule, name, children)]
        for pattern in met:
            if pattern not in plain:
                expanded[pattern] = msgspec.structs.replace(rule, pattern=pattern)
        if not met:
            expanded[rule.pattern] = rule
    return tuple(expanded.values())


def without_conditions(pattern: str) -> str:
    """Return a pattern without its conditions.

    >>> without_conditions("layers.*.attn[q].o")
    'layers.*.attn.o'
    """
    return _CONDITION.sub("", pattern)


def _meets(rule: Rule, name: str, known: set[str]) -> bool:
    parts = name.split(".")
    for at, part in enumerate(_PART.findall(rule.pattern)):
        found = _CONDITION.search(part)
        if found and ".".join([*parts[: at + 1], found["child"]]) not in known:
            return False
    return True


def modules_of(names: Iterable[str]) -> list[str]:
    """Return every module that owns one of the tensors or contains one that does, in order of first appearance.

    >>> modules_of(["a.b.weight", "a.c.weight"])
    ['a', 'a.b', 'a.c']
    """
    modules: dict[str, None] = {"": None}
    for name in names:
        module = name.rpartition(".")[0]
        if module in modules:
            continue
        above = module.rpartition(".")[0]
        if above not in modules:
            between = [above]
            while (above := above.rpartition(".")[0]) not in modules:
                between.append(above)
            modules.update(dict.fromkeys(reversed(between)))
        modules[module] = None
    del modules[""]
    return list(modules)


def anchor_rules(plan: Plan, names: Iterable[str], base_prefix: str) -> Plan:
    """Return the plan with its rules under the names of this model.

    A rule that fits no name as it is may be relative to the base model, as the plans in model configurations are: then
    it is put under ``base_prefix`` or, if that is empty, under the only prefix that makes it fit.

    Raises:
        PlanError: Two prefixes make a rule fit.
    """
    rules = (*plan.rules, *plan.expert_rules)
    numbers = {part for rule in rules for part in without_conditions(rule.pattern).split(".") if part.isdecimal()}
    names = [*dict.fromkeys(alike(names, numbers))]
    tree = _tree(names)
    prefixes = ("", *([base_prefix] if base_prefix else _prefixes(names)))
    return plan._replace(
        rules=tuple(_anchor(rule, tree, prefixes, plan.label) for rule in plan.rules),
        expert_rules=tuple(_anchor(rule, tree, prefixes, plan.label) for rule in plan.expert_rules),
    )


_Tree = dict[str, Any]
"""The names of tensors and of their modules, part by part."""


def _tree(names: Iterable[str]) -> _Tree:
    root: _Tree = {}
    for name in names:
        node = root
        for part in name.split("."):
            node = node.setdefault(part, {})
    return root


def _anchor(rule: Rule, tree: _Tree, prefixes: tuple[str, ...], label: str) -> Rule:
    fitting = [prefix for prefix in prefixes if _fits_any(_under(prefix, rule.pattern), tree)]
    if len(fitting) > 1 and fitting[0] != "":
        raise PlanError(f"{label}: {rule.pattern}: fits under {' and under '.join(fitting)}; write the whole name")
    return msgspec.structs.replace(rule, pattern=_under(fitting[0], rule.pattern)) if fitting else rule


def _under(prefix: str, pattern: str) -> str:
    return f"{prefix}.{pattern}" if prefix else pattern


def _prefixes(names: Iterable[str]) -> list[str]:
    heads: set[str] = set()
    for name in names:
        first, _, rest = name.partition(".")
        second, _, more = rest.partition(".")
        heads.update(([first] if rest else []) + ([f"{first}.{second}"] if more else []))
    return sorted(head for head in heads if not any(part.isdecimal() for part in head.split(".")))


def _fits_any(pattern: str, tree: _Tree) -> bool:
    """Tell whether a pattern fits some name."""
    return _reaches(tree, without_conditions(pattern).split("."), 0)


def _reaches(tree: _Tree, parts: list[str], at: int) -> bool:
    if at == len(parts):
        return True
    if parts[at] == "*":
        return any(_reaches(node, parts, at + 1) for node in tree.values())
    return parts[at] in tree and _reaches(tree[parts[at]], parts, at + 1)
