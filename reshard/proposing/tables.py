"""Tables of words: the embedding and the output layer, which have the same shape and different steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.proposing.numbers import Numbers
from reshard.proposing.proposal import Confidence, Suggestion
from reshard.proposing.tree import Linear

EMBEDDING_NAMES = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings"})
OUTPUT_NAMES = frozenset({"lm_head", "embed_out", "output", "decoder"})


def suggest_tables(
    linears: Sequence[Linear], lists: Mapping[str, int], config: Mapping[str, Any], numbers: Numbers, ranks: int
) -> list[Suggestion]:
    """Return what the tables of a model should have.

    Args:
        linears: What has a weight of two dimensions and is in no list of blocks.
        lists: The lists of blocks, with the width of each.
        config: The configuration.
        numbers: What it counts.
        ranks: Number of ranks.
    """
    widths = set(lists.values())
    words = set(numbers.words) or {max((one.out for one in linears if one.into in widths), default=0)}
    tables = [one for one in linears if one.out in words and not one.turned and one.into in widths]
    suggestions: list[Suggestion] = []
    for size, width in sorted({(one.out, one.into) for one in tables}):
        alike = [one for one in tables if (one.out, one.into) == (size, width)]
        if size % ranks and size not in numbers.words:
            suggestions += [_whole(one, f"{ranks} ranks do not divide its {size} rows") for one in alike]
        elif len(alike) == 1:
            suggestions.append(_single(alike[0], config))
        else:
            suggestions += _pair(alike, [name for name, inner in lists.items() if inner == width])
    return suggestions


def _single(table: Linear, config: Mapping[str, Any]) -> Suggestion:
    """Return what the only table should have: the output layer may be the same one."""
    if table.biased:
        return _output(table, "it has a bias")
    shape = f"the only table of {table.out} words"
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if name.endswith("Model") and "Head" not in name:
        return _embedding(table, f"{shape}, and {name} has no output layer")
    if config.get("tie_word_embeddings") is False and not name:
        return _embedding(table, f"{shape}, and config.json says that nothing is tied to it")
    return _whole(table, f"{shape}: an output layer that no tensor shows may be tied to it")


def _pair(tables: list[Linear], lists: Sequence[str]) -> list[Suggestion]:
    """Return what two tables should have: the embedding is in the module that the blocks are in."""
    heads = [one for one in tables if one.biased] or [one for one in tables if not _shares(one.name, lists)]
    why = "it has a bias" if any(one.biased for one in tables) else "it is outside of the module that holds the blocks"
    if len(heads) != 1:
        heads = [one for one in tables if one.name.rpartition(".")[2] in OUTPUT_NAMES]
        why = "its name says so"
    if len(tables) != 2 or len(heads) != 1:
        return [
            _whole(one, f"one of {len(tables)} tables of {one.out} words; which is which is not known")
            for one in tables
        ]
    (embedding,) = [one for one in tables if one is not heads[0]]
    return [_embedding(embedding, f"the other of two tables of {embedding.out} words"), _output(heads[0], why)]


def _shares(name: str, lists: Sequence[str]) -> bool:
    return any(name.split(".")[0] == other.split(".")[0] for other in lists if "." in other)


def _embedding(table: Linear, why: str) -> Suggestion:
    return Suggestion(table.name, "embedding_rowwise", f"embedding {table.out} x {table.into}: {why}", "likely")


def _output(table: Linear, why: str) -> Suggestion:
    confidence: Confidence = "certain" if table.biased else "likely"
    reason = f"output layer {table.into}->{table.out}: {why}"
    return Suggestion(table.name, "colwise_gather_output", reason, confidence)


def _whole(table: Linear, reason: str) -> Suggestion:
    return Suggestion(table.name, "", reason)
