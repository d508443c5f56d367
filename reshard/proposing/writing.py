"""Writing a proposal as a plan file, with what speaks for every rule."""

import json
from collections.abc import Iterator

from reshard.proposing.proposal import ProposedRule, Proposal


def format_plan(proposal: Proposal, label: str) -> str:
    """Return a plan file in TOML: the rules, guesses as comments, and what is left whole.

    Args:
        proposal: The proposal.
        label: The model that it is for.
    """
    return "\n".join(_lines(proposal, label)) + "\n"


def _lines(proposal: Proposal, label: str) -> Iterator[str]:
    ranks = proposal.world_size
    yield f"# Proposed for {label} at tp {ranks}, from names, shapes and config.json; not proved."
    yield f"# reshard check MODEL --tp {ranks} --plan THIS_FILE proves it."
    yield ""
    yield "[plan]"
    for rule in proposal.rules:
        yield f"# {rule.confidence}: {rule.reason}"
        yield ("# " if rule.confidence == "guess" else "") + f"{json.dumps(rule.pattern)} = {_choice(rule)}"
    if proposal.attributes:
        yield ""
        yield "[attributes]"
    for pattern, values in proposal.attributes.items():
        yield f"{json.dumps(pattern)} = {_table(values)}"
    if proposal.whole:
        yield ""
        yield "# Left whole:"
    for whole in proposal.whole:
        yield f"# {whole.pattern}, {100 * whole.numel / proposal.numel:.1f} % of the model: {whole.reason}"


def _choice(rule: ProposedRule) -> str:
    return json.dumps(rule.line) if isinstance(rule.line, str) else _table(rule.line)


def _table(values: object) -> str:
    pairs = values.items() if isinstance(values, dict) else ()
    return "{ " + ", ".join(f"{json.dumps(key) if '.' in key else key} = {json.dumps(value)}" for key, value in pairs) + " }"
