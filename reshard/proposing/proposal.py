"""What a proposal is."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Confidence = Literal["certain", "likely", "guess"]


class Suggestion(NamedTuple):
    """What one module or parameter should have.

    Attributes:
        name: The module, or the parameter.
        style: The style; empty to leave it whole.
        reason: Why, in words.
        confidence: How sure that is.
        layout: As in a plan.
        dim: As in a plan.
        attributes: What to set on the module, as in a plan.
    """

    name: str
    style: str
    reason: str
    confidence: Confidence = "certain"
    layout: str = ""
    dim: int | None = None
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def choice(self) -> tuple[str, str, int | None]:
        """What a plan says of it."""
        return self.style, self.layout, self.dim


class ProposedRule(NamedTuple):
    """A rule of a proposed plan.

    Attributes:
        pattern: The names that it takes.
        style: As in a plan.
        layout: As in a plan; empty for none.
        dim: As in a plan.
        confidence: How sure it is; a guess is not part of the plan.
        reason: Why, in words.
        taken: How many modules or parameters it takes.
    """

    pattern: str
    style: str
    layout: str
    dim: int | None
    confidence: Confidence
    reason: str
    taken: int

    @property
    def line(self) -> Any:  # noqa: ANN401 - as a plan file has it
        """The rule as a plan file has it: a style's name, or a table."""
        if not self.layout and self.dim is None:
            return self.style
        table: dict[str, Any] = {"style": self.style}
        if self.layout:
            table["layout"] = self.layout
        if self.dim is not None:
            table["dim"] = self.dim
        return table


class Whole(NamedTuple):
    """Tensors that a proposal leaves whole.

    Attributes:
        pattern: Their names.
        reason: Why, in words.
        numel: How many numbers they hold.
    """

    pattern: str
    reason: str
    numel: int


class Proposal(NamedTuple):
    """A plan that is proposed.

    Attributes:
        world_size: The number of ranks that it is for.
        rules: Its rules, and guesses that are none.
        attributes: What to set on modules, as in a plan.
        whole: What it leaves whole, the most first.
        numel: Numbers in the model.
    """

    world_size: int
    rules: tuple[ProposedRule, ...]
    attributes: Mapping[str, Mapping[str, str]]
    whole: tuple[Whole, ...]
    numel: int

    @property
    def document(self) -> dict[str, Any]:
        """The plan, as a plan file has it."""
        plan = {rule.pattern: rule.line for rule in self.rules if rule.confidence != "guess"}
        attributes = {pattern: dict(values) for pattern, values in self.attributes.items()}
        return {"plan": plan} | ({"attributes": attributes} if attributes else {})
