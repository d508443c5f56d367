"""Writing a proposal as a plan file, with what speaks for every rule."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from textwrap import wrap

from reshard.proposing.proposal import Proposal, ProposedRule

WIDTH = 116


def format_plan(proposal: Proposal, label: str) -> str:
    """Return a plan file in TOML: the rules, guesses as comments, and what is left whole.

    Args:
        proposal: The proposal.
        label: The model that it is for.
    """
    return "\n".join(_lines(proposal, label)) + "\n"


def _lines(proposal: Proposal, label: str) -> Iterator[str]:
    ranks = proposal.world_size
    yield from _comment(f"Proposed for {label} at tp {ranks}, from names, shapes and config.json. Not proved yet:")
    yield f"#   reshard check {label} --tp {ranks} --plan THIS_FILE"
    yield ""
    yield "[plan]"
    for (confidence, reason), rules in groupby(proposal.rules, key=lambda rule: (rule.confidence, rule.reason)):
        yield from _comment(f"{confidence}: {reason}")
        for rule in rules:
            yield ("# " if confidence == "guess" else "") + f"{json.dumps(rule.pattern)} = {_choice(rule)}"
    if proposal.attributes:
        yield ""
        yield "[attributes]"
    for pattern, values in proposal.attributes.items():
        yield f"{json.dumps(pattern)} = {_table(values)}"
    if proposal.whole:
        yield ""
        yield f"# Left whole, {100 * sum(one.numel for one in proposal.whole) / proposal.numel:.1f} % of the model:"
    for whole in proposal.whole:
        yield from _comment(f"{whole.pattern}, {100 * whole.numel / proposal.numel:.1f} %: {whole.reason}")


def _comment(text: str) -> Iterator[str]:
    for line in wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


def _choice(rule: ProposedRule) -> str:
    return json.dumps(rule.line) if isinstance(rule.line, str) else _table(rule.line)


def _table(values: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"
