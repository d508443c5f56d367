"""What a configuration counts, by the words that nearly all of them use."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_KINDS = {
    "heads": r"(\w+_)?(num|n)_(\w+_)?heads?|(\w+_)?attention_heads|num_heads",
    "kv_heads": r"\w*(key_value|kv)_heads?|multi_query_group_num",
    "head_dims": r"(\w+_)?head_dim|d_kv|kv_channels",
    "experts": r"(\w+_)?(num|n)_(\w+_)?experts|(num|n)_experts",
    "words": r"(\w+_)?vocab_size(_\w+)?",
    "inner": r"(\w+_)?(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|hidden_dim|mlp_dim)(_\w+)?",
    "widths": r"hidden_size|n_embd|d_model|embed_dim|dim|width|hidden_dim",
}
_NOT_HEADS = re.compile(r"key_value|kv|index|linear|mamba|ssm|dim|per_")
_NOT_EXPERTS = re.compile(r"per_tok|shared|top|zero|activ")


class Numbers(NamedTuple):
    """The whole numbers of a configuration that tell what dimensions are, by the names that they have there.

    Attributes:
        heads: Numbers of attention heads.
        kv_heads: Numbers of key and value heads.
        head_dims: Widths of heads.
        experts: Numbers of experts.
        words: Sizes of vocabularies.
        inner: Widths inside of feed-forward modules.
        widths: Widths of hidden states.
        mixing: A name that says that features of a feed-forward module are looked at together, or "".
    """

    heads: Mapping[int, str]
    kv_heads: Mapping[int, str]
    head_dims: Mapping[int, str]
    experts: Mapping[int, str]
    words: Mapping[int, str]
    inner: Mapping[int, str]
    widths: Mapping[int, str]
    mixing: str = ""


def read_numbers(config: Mapping[str, Any]) -> Numbers:
    """Return what a configuration and those of its parts count.

    >>> numbers = read_numbers({"num_attention_heads": 32, "text": {"num_key_value_heads": 8}})
    >>> dict(numbers.heads), dict(numbers.kv_heads)
    ({32: 'num_attention_heads'}, {8: 'num_key_value_heads'})
    """
    found: dict[str, dict[int, str]] = {kind: {} for kind in _KINDS}
    for key, value in _leaves(config):
        for kind, pattern in _KINDS.items():
            if re.fullmatch(pattern, key) and _is_of(kind, key):
                found[kind].setdefault(value, key)
    mixing = next((key for key in _set_keys(config) if "sparsity" in key), "")
    return Numbers(**found, mixing=mixing)


def _is_of(kind: str, key: str) -> bool:
    if kind == "heads":
        return not _NOT_HEADS.search(key)
    if kind == "words":
        return "type" not in key
    return kind != "experts" or not _NOT_EXPERTS.search(key)


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
            continue
        for one in value if isinstance(value, list) else [value]:
            if type(one) is int and one > 0:
                yield key, one


def _set_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of values that are set: not nothing, zero or a list of these."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _set_keys(value)
        elif any(value) if isinstance(value, list) else value:
            yield key
