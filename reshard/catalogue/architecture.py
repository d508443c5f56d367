"""What is known of one model class: where its parts are, and how stored tensors become its own."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Scope(NamedTuple):
    """A sub-model of a class: a composite has several, each with a plan and sizes of its own.

    Attributes:
        prefix: Where the sub-model's base model sits in the class; empty if it is the whole.
        model_type: The type whose plan it has.
        config_path: Where its configuration is in the class's (``text_config``); empty for the whole.
    """

    prefix: str
    model_type: str
    config_path: str


class Rename(NamedTuple):
    r"""One renaming of stored names.

    Attributes:
        sources: Patterns of stored names.
        targets: What a match is replaced with; ``\1`` is what a group of the pattern took.
        kind: "plain"; "group": pairs that hold only once the first of them has matched; "offset": the number that was
            taken is raised by ``offset``; "layer_pairs": layers 2i and 2i+1 are the two halves of layer i.
        offset: For the kind "offset".
        scope: Sub-model whose names it is restricted to, relative to the base model, or None.
        base: Where the base model sits, for a scope that may be stored with or without it.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    kind: str = "plain"
    offset: int = 0
    scope: str | None = None
    base: str = ""


Operation = tuple[Any, ...]
"""An operation's name and its arguments; see `reshard.recipes.operations`."""


class Converter(NamedTuple):
    """How stored tensors become tensors of the running model.

    Attributes:
        sources: Patterns of stored names, in the order in which their tensors are joined.
        targets: What a matched pattern is replaced with; a converter that takes apart has several.
        operations: Applied in order. Sizes in them are formulas over the configuration of the target's sub-model.
        scope: As in `Rename`.
        base: As in `Rename`.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...]
    scope: str | None = None
    base: str = ""


class Architecture(NamedTuple):
    """One model class of the catalogue.

    Attributes:
        model_type: The configuration's model type.
        name: The class.
        prefix: Where the base model sits in the class; empty if it is the base model.
        base_prefix: Where the base model sits in the type's other classes.
        heads: First parts of the names of the class's own modules, beside the base model.
        ties: Parameters that are another one if the configuration ties them: name to name. A ``**`` is any number of
            parts of a name, the same in both.
        defaults: The configuration class's own values, for names that a configuration may leave out.
        aliases: Other names of configuration values.
        ignored: Patterns of names that the class does not have; ``{first:end}`` is a number in this range of formulas.
        renames: Patterns of stored names and their replacement, applied in order.
        converters: Applied after them; the first that fits a name takes it.
        library: What builds it: "transformers" or "diffusers".
        plan: The rules that its classes have beside those of its sub-models, by pattern.
        scopes: Its sub-models that have a plan, the whole included if it is one.
        tie_flags: Where the flag is that decides on a tie, for those that the configuration's own does not decide.
        kept: Parameters that a renaming would spoil, numbers as ``*``: a stored tensor of such a name stays as it is.
        float32: Patterns of parameters that stay in float32 whatever dtype is asked for; a ``*`` is anything.
        float32_for_float16: The same, of those that do so only if float16 is asked for.
        blocks: Values of the configuration that blocks have of their own, by the module that each is.
        variant: The configuration's values on which tables of the catalogue depend, by name.
    """

    model_type: str
    name: str
    prefix: str
    base_prefix: str
    heads: tuple[str, ...]
    ties: Mapping[str, str]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    ignored: tuple[str, ...]
    renames: tuple[Rename, ...]
    converters: tuple[Converter, ...]
    library: str = "transformers"
    plan: Mapping[str, str] = {}
    scopes: tuple[Scope, ...] = ()
    tie_flags: Mapping[str, str] = {}
    kept: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    float32_for_float16: tuple[str, ...] = ()
    blocks: Mapping[str, Mapping[str, Any]] = {}
    variant: tuple[tuple[str, str], ...] = ()
