"""Merging: from what single modules should have to rules, and to what is left whole."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from math import prod

from manifests.manifest import Rule
from reshard.plans import Matcher
from reshard.proposing.proposal import Proposal, ProposedRule, Suggestion, Whole

UNKNOWN = "not a linear layer of a known group"


def merge_suggestions(
    suggestions: Mapping[str, Suggestion], shapes: Mapping[str, tuple[int, ...]], ranks: int
) -> Proposal:
    """Return the proposal that single suggestions amount to.

    Modules whose names differ in numbers only share a rule; those that differ from most of them have one of their own.
    """
    takers = sorted({*suggestions, *(name.rpartition(".")[0] for name in shapes)} - {""})
    rules = _rules(suggestions)
    rules |= _exceptions(rules, suggestions, takers)
    matcher = Matcher(Rule(pattern, "") for pattern in rules)
    counts = Counter(rule.pattern for name in takers if (rule := matcher.find(name)))
    proposed = tuple(
        ProposedRule(
            pattern, one.style or "replicate", one.layout, one.dim, one.confidence, one.reason, counts[pattern]
        )
        for pattern, one in rules.items()
    )
    attributes = {pattern: dict(one.attributes) for pattern, one in rules.items() if one.attributes}
    whole = _whole(suggestions, shapes)
    return Proposal(ranks, proposed, attributes, whole, sum(map(prod, shapes.values())))


def starred(name: str) -> str:
    """Return a name with its numbers as ``*``.

    >>> starred("layers.12.experts.3.up1")
    'layers.*.experts.*.up1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _rules(suggestions: Mapping[str, Suggestion]) -> dict[str, Suggestion]:
    """Return for every pattern what most of its names should have."""
    alike: dict[str, list[Suggestion]] = defaultdict(list)
    for name, suggestion in suggestions.items():
        alike[starred(name)].append(suggestion)
    rules: dict[str, Suggestion] = {}
    for pattern, members in alike.items():
        (choice, _), *_ = Counter(one.choice for one in members).most_common(1)
        chosen = next(one for one in members if one.choice == choice)
        if chosen.style:
            rules[pattern] = chosen
    return rules


def _exceptions(
    rules: Mapping[str, Suggestion], suggestions: Mapping[str, Suggestion], takers: list[str]
) -> dict[str, Suggestion]:
    """Return the rules of single modules that a pattern takes and that should have something else."""
    matcher = Matcher(Rule(pattern, "") for pattern in rules)
    exceptions: dict[str, Suggestion] = {}
    for name in takers:
        wanted = suggestions.get(name, Suggestion(name, "", UNKNOWN))
        rule = matcher.find(name)
        if (rules[rule.pattern].choice if rule else ("", "", None)) != wanted.choice:
            exceptions[name] = wanted
    return exceptions


def _whole(suggestions: Mapping[str, Suggestion], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Whole, ...]:
    sums: Counter[tuple[str, str]] = Counter()
    for name, shape in shapes.items():
        suggestion = suggestions.get(name) or suggestions.get(name.rpartition(".")[0])
        guessed = suggestion is not None and suggestion.confidence == "guess"
        if suggestion is not None and suggestion.style not in ("", "moe_tp_experts") and not guessed:
            continue
        if guessed:
            reason = "a guess, which is a comment above"
        elif suggestion is None or suggestion.style:
            reason = UNKNOWN if len(shape) > 1 else "a vector"
        else:
            reason = suggestion.reason
        sums[starred(name), reason] += prod(shape)
    return tuple(Whole(pattern, reason, numel) for (pattern, reason), numel in sums.most_common())
