"""Decoders of transformers without a plan, and those with one that the sweep does not run: lists of docs/shares.md.

A decoder is what a table of transformers' classes that generate text names; a table may name a type that is saved as
another one. Neither list is written by hand.
"""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from reshard.catalogue import model_types
from tools.sweep.cases import subjects

TABLES = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
HEADING = "## Decoders without a plan\n"


WIDTH = 118
UNWRITTEN = "nobody has written one"
WHY: dict[str, str] = {
    **dict.fromkeys(
        ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"),
        "their two models are whichever the configuration names",
    ),
    **dict.fromkeys(
        ("dbrx", "zamba", "zamba2"),
        "said in [coverage.md](coverage.md#what-stays-whole)",
    ),
}
"""Why a type has no plan, where that is known."""


def decoders() -> set[str]:
    """Return the types that generate text."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES") for table in TABLES]
    return {CONFIG_MAPPING[name].model_type for table in tables for name in table}


def without_plan() -> list[str]:
    """Return the decoders that the catalogue has no plan for."""
    return sorted(decoders() - set(model_types()))


def not_run(work: Path) -> list[str]:
    """Return the decoders with a plan that the sweep does not run itself."""
    run = {row.model_type for row in subjects(work)}
    return sorted((decoders() & set(model_types())) - run)


def section(work: Path) -> Iterator[str]:
    """Yield the lines of the page."""
    lacking, apart = without_plan(), not_run(work)
    yield HEADING
    yield from textwrap.wrap(
        f"Of the {len(decoders())} types that generate text in transformers, {len(lacking)} have no plan, neither of "
        "transformers nor of ours. What you can do: a [plan of your own](plans.md), or [one that is proposed](auto.md) "
        "from names and shapes; [checking](plans.md#checking-a-plan) proves either. Why they have none:",
        WIDTH,
    )
    yield ""
    for why in dict.fromkeys((*WHY.values(), UNWRITTEN)):
        names = [f"`{name}`" for name in lacking if WHY.get(name, UNWRITTEN) == why]
        yield from wrapped(names, f"* {why}: ") if names else ()
    yield ""
    yield f"{len(apart)} more have a plan and no row in the sweep; all of their parts that are divided have one:"
    yield ""
    yield from wrapped(f"`{name}`" for name in apart)
    yield ""


def wrapped(words: Iterable[str], start: str = "") -> list[str]:
    """Return words with commas between them, in lines."""
    inner = "  " if start else ""
    return textwrap.wrap(f"{start}{', '.join(words)}.", WIDTH, subsequent_indent=inner, break_on_hyphens=False)
