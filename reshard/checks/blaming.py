"""Blaming: from what the ranks made of a model to the module that parts first and the rules that are to blame.

Modules that do not part clear the rules before them: what is right on every rank was cut and summed rightly. So the
first module that parts is named, a module before the one that holds it, and with it the rules of what feeds it. What
the rules and the shapes say beyond that is put in words; it is a hint, the numbers are the finding.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from manifests.manifest import Module, Rule, Tensor
from manifests.styles import Style, resolve_style
from reshard.checks.traces import Compared, Comparison
from reshard.plans import Matcher

Facts = dict[str, Any]

SUMS = ("all_reduce", "reduce_scatter_sequence", "own")
"""The steps behind a forward that add up what the ranks have."""


class Blamed(NamedTuple):
    """A module that may be to blame.

    Attributes:
        module: Its name; empty for the model itself.
        rules: The rules that name it or a parameter that it owns, as "pattern = style", with " by" and what else they
            say; empty if none does.
        role: "the module", "in it" or "feeds it".
        gives: What its output is, in words; empty if it is not known.
    """

    module: str
    rules: tuple[str, ...]
    role: str
    gives: str = ""


class Finding(NamedTuple):
    """Where the ranks part from one process.

    Attributes:
        module: The module; empty for the model itself.
        what: "raises", "input" or "output".
        rank: The rank of the largest difference, or the first that raised.
        message: The fact, with numbers.
        blamed: The modules that may be to blame, with their rules, the likeliest first.
        hint: What it looks like, in words; empty if nothing is recognised.
        after: The last module before it that was right.
    """

    module: str
    what: str
    rank: int
    message: str
    blamed: tuple[Blamed, ...]
    hint: str
    after: str


class Judge:
    """Knows the rules and the comparison, and names what is to blame."""

    def __init__(
        self,
        comparison: Comparison,
        rules: Iterable[Rule],
        tensors: Mapping[str, Tensor],
        modules: Mapping[str, Module],
    ) -> None:
        self.comparison = comparison
        self.compared = list(comparison.run())
        self._matcher = Matcher(rules)
        self._tensors = tensors
        self._steps = modules
        self._outputs = {c.module: c for c in reversed(self.compared) if c.side == "output"}
        self._in_order = list(dict.fromkeys(c.module for c in self.compared))
        self._owned: dict[str, list[str]] = {}
        for name in tensors:
            self._owned.setdefault(name.rpartition(".")[0], []).append(name)

    def find(self) -> Finding | None:
        """Return where the ranks part first, or None where they do not."""
        raised = [(rank, trace.raised) for rank, trace in enumerate(self.comparison.ranks) if trace.raised is not None]
        parted = self._first_parted()
        if parted is not None:
            return self._judge_parted(parted)
        if raised:
            # An error out of a collective is the echo of another rank's.
            rank, error = min(raised, key=lambda item: item[1]["in_collective"])
            return self._judge_raised(rank, error)
        root = self._outputs.get("")
        if root is not None and root.outcome == "part":
            return self._judge_divided_root(root)
        return None

    def _first_parted(self) -> Compared | None:
        """Return the first tensor that differs; summands of a sum that comes out right do not."""
        inside: dict[str, Compared] = {}
        for compared in self.compared:
            if not compared.parted:
                continue
            summing = self._summing_above(compared.module)
            if summing is None:
                # The first within it says more, if it is a module that sums itself.
                return inside.get(compared.module, compared)
            if not compared.sums:
                inside.setdefault(summing, compared)
        # The forward ended before the sum did.
        return next((first for summing, first in inside.items() if summing not in self._outputs), None)

    def _summing_above(self, module: str) -> str | None:
        """Return the nearest module around this one behind which the ranks' outputs are added up."""
        scope = module
        while scope:
            scope = scope.rpartition(".")[0]
            if (step := self._steps.get(scope)) is not None and step.after in SUMS:
                return scope
        return None

    def _judge_parted(self, found: Compared) -> Finding:
        module, own = found.module, self._blame(found.module, "the module")
        inner = [self._blame(name, "in it") for name in self._within(module) if self._rules_of(name)]
        fed = [self._blame(name, "feeds it") for name in self._feeding(module)]
        if found.side == "input":
            # A rule with a layout or blocks of its own is likelier to be wrong than one without.
            blamed = [*sorted(fed, key=lambda one: not any(" by " in rule for rule in one.rules)), own]
        elif found.sums or found.times:
            blamed = [own, *inner]
        elif own.rules:
            blamed = [own, *(inner or fed)]
        else:
            blamed = [*(inner or fed), own]
        message, hint = self._describe(found), self._hint(found)
        return Finding(module, found.side, found.rank, message, tuple(blamed), hint, self._right_before(module))

    def _describe(self, found: Compared) -> str:
        side = f"its {found.side}"
        by = "" if found.difference == float("inf") else f" by {found.difference:.1e} of the largest value"
        allowed = f"{by}, {self.comparison.tolerance:.0e} is allowed" if by else ""
        if found.outcome == "divided":
            part = f"{side} {list(found.local)} of {list(found.whole)} is not rank {found.rank}'s part"
            return f"{part}: it differs{allowed}" if by else part
        return f"{side} {list(found.whole)} differs on rank {found.rank}{allowed}"

    def _hint(self, found: Compared) -> str:
        """Return what a difference looks like."""
        module, leaf = found.module, _leaf(found.module)
        if found.sums:
            summed = "the ranks' outputs add up to the right one, and nothing adds them up"
            named = self._parameter_rule(module)
            if named is None:
                return f"{summed}: a style with an all_reduce would"
            if named.pattern.endswith(".weight"):
                return f"{summed}: {named.pattern} names a parameter, so no step runs; write {module} = {named.style}"
            return f"{summed}: the rules of its parameters only cut; give {leaf} itself moe_tp_experts"
        if found.times:
            return f"every rank has {found.times} times the right value: it is added up here, and was already"
        if found.outcome == "divided" and found.side == "input":
            return (
                f"the weight of {leaf} is cut for other heads or blocks than it gets: "
                "the layouts of the two differ, or one is cut as plain rows"
            )
        if found.outcome == "divided" and not self._owns(module):
            size = found.whole[-1]
            fused = [name for feeder in self._feeding(module) for name in self._fused(feeder, size)]
            if fused:
                return (
                    f"{fused[0]} holds several blocks of {size} features, and each must be cut by itself: "
                    "packed_colwise with its blocks, or a layout"
                )
        return ""

    def _fused(self, module: str, size: int) -> list[str]:
        """Return the parameters of a module that are cut along an axis of several blocks of a size."""
        return [
            name
            for name in self._owned.get(module, ())
            for cut in self._tensors[name].placement.cuts
            if self._tensors[name].shape[cut.dim] in range(2 * size, 8 * size + 1, size)
        ]

    def _judge_raised(self, rank: int, raised: Facts) -> Finding:
        module = raised["open"][-1] if raised["open"] else ""
        error = raised["error"].strip().splitlines()[0]
        gets, hint = self._gets(module, raised)
        own = self._blame(module, "the module")
        fed = [self._blame(name, "feeds it") for name in self._feeding(module)]
        inner = [self._blame(name, "in it") for name in self._children(module)]
        if self._owns(module):
            blamed = [own, *fed]
        elif own.rules and raised["ours"]:
            # A step of its own raised.
            blamed = [own, *inner]
        else:
            called = [one for one in inner if one.gives]
            # Where parts and whole outputs meet, those without a rule come first, then the whole ones.
            called.sort(key=lambda one: (bool(one.rules), not one.gives.startswith("whole")))
            blamed = [*called, own] if called else [own, *fed]
            hint = hint or _hint_mixed(called)
        message = f"raises on rank {rank}: {gets}{error}"
        return Finding(module, "raises", rank, message, tuple(blamed), hint, self._right_before(module))

    def _gets(self, module: str, raised: Facts) -> tuple[str, str]:
        """Return what a module with a weight got, and what that says of its rule."""
        event, given = self.comparison.whole.find(module, raised["call"]), raised["input"]
        if not self._owns(module) or not given or not given["shape"] or event is None or not event["input"]:
            return "", ""
        leaf = _leaf(module)
        if event["input"].get("dtype") == "i8":
            cut = self.comparison.divisions.cut(module)
            hint = (
                f"{leaf} has a rank's rows and gets ids of all; {module} = embedding_rowwise masks the others' and sums"
            )
            return "", hint if cut else ""
        local, whole = given["shape"][-1], event["input"]["shape"][-1]
        style = self._style_of(module)
        expects_part = style is not None and style.cuts == "in" and whole in self.comparison.divisions.sizes(module)
        if local < whole and style is not None and style.before == "slice_input":
            return f"it gets {local} of {whole} features, and {style.name} takes all of them; ", (
                f"{_listed(self._feeding(module))} give each rank its part already, so {leaf} is rowwise"
            )
        if local < whole and not expects_part:
            why = "no rule names it" if style is None else f"{style.name} does not cut its inputs"
            feeding = _listed(self._feeding(module))
            return f"it gets {local} of {whole} features, its weight has all {whole} inputs: {why}; ", (
                f"{feeding} give each rank a part, so {leaf} is the other half of the pair: rowwise"
            )
        if local == whole and expects_part and style is not None and not style.before:
            return f"it gets all {whole} features, and {style.name} takes a rank's part of them; ", (
                f"nothing before {leaf} gives the ranks parts: colwise, if it is the first of its pair, "
                "or rowwise_split_input"
            )
        return "", ""

    def _judge_divided_root(self, root: Compared) -> Finding:
        last = [name for name in self._children("") if self._gives_part(name)]
        blamed = [self._blame(name, "in it") for name in reversed(last)] or [self._blame("", "the module")]
        message = f"the model's output is {list(root.local)} of {list(root.whole)} on every rank"
        hint = "every rank has a part and nothing joins them; colwise_gather_output would"
        return Finding("", "output", 0, message, tuple(blamed), hint, self._right_before(""))

    def _blame(self, module: str, role: str) -> Blamed:
        compared = self._outputs.get(module)
        gives = ""
        if compared is not None and compared.outcome == "equal":
            gives = f"whole {list(compared.whole)}"
        elif compared is not None and compared.outcome in ("part", "divided"):
            gives = f"{list(compared.local)} of {list(compared.whole)}"
        return Blamed(module, tuple(_shown(rule) for rule in self._rules_of(module)), role, gives)

    def _rules_of(self, module: str) -> list[Rule]:
        """Return the rule of a module, and those of the parameters that it owns."""
        names = [*filter(None, [module]), *self._owned.get(module, ())]
        found = {rule.pattern: rule for name in names if (rule := self._matcher.find(name)) is not None}
        return list(found.values())

    def _parameter_rule(self, module: str) -> Rule | None:
        """Return the rule that cuts a parameter of a module by its inputs, if the module itself has none."""
        rules = self._rules_of(module) if self._matcher.find(module) is None else []
        return next((rule for rule in rules if resolve_style(rule.style).cuts in ("in", "vocab")), None)

    def _style_of(self, module: str) -> Style | None:
        rules = self._rules_of(module)
        return resolve_style(rules[0].style) if rules else None

    def _owns(self, module: str) -> bool:
        return module in self._owned

    def _gives_part(self, module: str) -> bool:
        return module in self._outputs and self._outputs[module].outcome in ("part", "divided")

    def _within(self, module: str) -> list[str]:
        """Return the modules within a module that were called, in order."""
        prefix = f"{module}." if module else ""
        return [name for name in self._in_order if name.startswith(prefix) and name != module]

    def _children(self, module: str) -> list[str]:
        """Return a module's own children that own or hold parameters, in the order of their calls."""
        depth = module.count(".") + 1 if module else 0
        return [name for name in self._within(module) if name.count(".") == depth and self._matters(name)]

    def _matters(self, module: str) -> bool:
        return any(owner == module or owner.startswith(f"{module}.") for owner in self._owned)

    def _feeding(self, module: str) -> list[str]:
        """Return the modules with parameters that were called before a module, and give the ranks parts.

        Those in the module around it; if there are none, those around that, back to the last whole output.
        """
        if module not in self._in_order:
            return []
        before = [name for name in self._in_order[: self._in_order.index(module)] if self._owns(name)]
        scope = module.rpartition(".")[0]
        if not self._owns(module) and self._owns(scope):
            return [scope]
        near = [name for name in before if name.startswith(f"{scope}.") and self._gives_part(name)]
        if near:
            return near
        feeding: list[str] = []
        for name in reversed(before):
            if not self._gives_part(name):
                break
            feeding.insert(0, name)
        return feeding

    def _right_before(self, module: str) -> str:
        """Return the last module that was right before the first that was not."""
        right = ""
        for compared in self.compared:
            if compared.parted or compared.module == module:
                break
            if compared.side == "output" and compared.outcome in ("equal", "part"):
                right = compared.module
        return right


def _shown(rule: Rule) -> str:
    also = [rule.layout] if rule.layout else []
    also += [f"blocks {list(rule.blocks)}"] if rule.blocks else []
    also += [f"dim {rule.dim}"] if rule.dim is not None else []
    return f"{rule.pattern} = {rule.style}" + (f" by {', '.join(also)}" if also else "")


def _hint_mixed(blamed: Sequence[Blamed]) -> str:
    """Return what it looks like where some modules give whole features and others the ranks' parts."""
    whole = [one.module for one in blamed if one.gives.startswith("whole")]
    parts = [one.module for one in blamed if one.gives and not one.gives.startswith("whole")]
    if not whole or not parts:
        return ""
    return f"the ranks get parts from {_listed(parts)} and the whole from {_listed(whole)}: they must be cut alike"


def _listed(modules: Sequence[str]) -> str:
    return ", ".join(_leaf(module) for module in modules) or "the modules before it"


def _leaf(module: str) -> str:
    return module.rpartition(".")[2] or "the model"
