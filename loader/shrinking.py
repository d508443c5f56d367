"""Shrinking: a model's configuration made small, with what a plan divides kept as it was.

Sizes are of four kinds, told by their names: counts of heads, sizes of one head, widths, and counts of experts or
words. Heads' sizes are divided by one number, counts of heads by another and widths by the product of both, so that a
width that is heads times their size stays so. Whatever the number of ranks divides it divides afterwards, and what it
does not divide it does not. Layers are cut off at the end, so that rules such as "every fourth" or "the first three"
keep their meaning.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any, NamedTuple

Config = dict[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
SHARED_FROM_THE_END = ("num_kv_shared_layers",)
"""Layers counted from the end."""

_HEADS = re.compile(r"(^|_)(n_|num_)?heads?$|n_head|num_.*heads$|multi_query_group_num|^(mamba_)?n_groups$")
_PER_HEAD = re.compile(r"head_dim|head_size|d_head|rotary_dim|kv_channels|^d_kv$|^v_head_dim$")
_WIDTHS = re.compile(
    r"hidden_size|intermediate_size|(^|_)d_model$|n_embd|embd_dim|n_inner|ffn_dim|ffn_hidden|d_ff|inner_dim|hidden_dim|"
    r"lora_rank|lora_dim|laurel_rank|embed_dim|embedding_size|mlp_dim|lru_width|projection_dim|d_inner|d_ssm"
)
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts)$")
_CHOSEN = re.compile(r"^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|num_selected_experts)$")
_WORDS = re.compile(r"^vocab_size|_vocab_size$|^vocab_size_per_layer_input$")
_ROPE_LISTS = ("long_factor", "short_factor")

FEW_EXPERTS, FEW_WORDS, FEW_CHOSEN = 8, 192, 2
HEAD_NUMEL, ROTARY_NUMEL = 16, 8
"""Smallest sizes of a head and of its rotated part that are made."""
ROW_NUMEL = 4
"""Elements of float32 in 16 bytes."""


class Shrinkage(NamedTuple):
    """By what sizes are divided.

    Attributes:
        heads: Counts of heads.
        per_head: Sizes of one head; widths by the product of the two.
        ranks: Number of ranks, whose division of every size is kept.
    """

    heads: int
    per_head: int
    ranks: int


def shrink_sizes(config: Config, ranks: int) -> Config:
    """Return a configuration with smaller sizes, those of its parts included.

    >>> small = shrink_sizes({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    ...                       "intermediate_size": 14336, "vocab_size": 128256}, ranks=4)
    >>> small["hidden_size"], small["num_attention_heads"], small["num_key_value_heads"]
    (512, 32, 8)
    >>> small["intermediate_size"], small["vocab_size"]
    (1792, 192)
    """
    by = Shrinkage(_heads_divisor(config, ranks), _per_head_divisor(config), ranks)
    products = {whole: small for part in _parts(config) for whole, small in _products(part, by)}
    return _mapped(config, lambda name, value: _size(name, value, by, products))


def shrink_counts(config: Config, ranks: int) -> Config:
    """Return a configuration with fewer experts and words, its widths as they were."""
    by = Shrinkage(1, 1, ranks)
    return _mapped(config, lambda name, value: value if _is_width(name) else _size(name, value, by, {}))


def cut_layers(config: Config, kept: Mapping[int, int]) -> Config:
    """Return a configuration with fewer layers: ``kept`` maps numbers of layers to smaller ones.

    Lists with a value for every layer are cut with them.

    >>> cut_layers({"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]}, {4: 2})
    {'num_hidden_layers': 2, 'layer_types': ['a', 'b']}
    """
    counted = {name: kept.get(config[name], config[name]) for name in LAYERS if type(config.get(name)) is int}
    whole = next((config[name] for name in counted), 0)
    small = next(iter(counted.values()), 0)
    cut: Config = {}
    for name, value in config.items():
        if name in counted:
            cut[name] = counted[name]
        elif isinstance(value, dict) and value and all(str(key).isdecimal() for key in value):
            # By the number of the layer.
            cut[name] = {key: item for key, item in value.items() if whole == small or int(key) < small}
        elif isinstance(value, dict):
            cut[name] = cut_layers(value, kept)
        elif isinstance(value, list) and len(value) == whole != small:
            cut[name] = value[:small]
        elif name in SHARED_FROM_THE_END and type(value) is int and value:
            cut[name] = max(small - (whole - value), 0)
        else:
            cut[name] = value
    return cut


def layer_counts(config: Config) -> set[int]:
    """Return the numbers of layers that a configuration has, those of its parts included."""
    return {part[name] for part in _parts(config) for name in LAYERS if type(part.get(name)) is int and part[name] > 1}


def per_layer(config: Config, count: int) -> list[tuple[Any, ...]]:
    """Return for every layer what the lists of a configuration say of it."""
    lists = [
        value
        for part in _parts(config)
        if any(part.get(name) == count for name in LAYERS)
        for value in part.values()
        # One with no value twice counts the layers, and tells none from another.
        if isinstance(value, list) and len({str(one) for one in value}) < len(value) == count
    ]
    return [tuple(str(one[layer]) for one in lists) for layer in range(count)]


def kv_mesh(heads: int, groups: int, ranks: int) -> int:
    """Return over how many ranks the key and value heads are divided; 0 if no arrangement divides them.

    >>> kv_mesh(32, 8, 16), kv_mesh(28, 4, 8)
    (8, 0)
    """
    group = heads // groups
    fitting = [kv for kv in range(1, ranks + 1) if ranks % kv == groups % kv == 0]
    return max((kv for kv in fitting if group % (ranks // kv) == 0), default=0)


def _parts(config: Config) -> Iterator[Config]:
    yield {name: value for name, value in config.items() if isinstance(name, str)}
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _mapped(config: Config, change: Callable[[str, int], int]) -> Config:
    """Return a configuration with every whole number changed by its name; special ids stay in the vocabulary."""
    words = [size for part in _parts(config) for name, size in part.items() if name == "vocab_size"]
    limit = min((change("vocab_size", size) for size in words), default=0)
    ids: dict[int, int] = {}

    def walk(value: Any, name: str) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {key: walk(item, str(key)) for key, item in value.items()}
        if isinstance(value, list) and (name in _ROPE_LISTS or name.endswith("mrope_section")):
            return _rotary_list(value, name, change)
        if isinstance(value, list):
            return [walk(item, name) for item in value]
        if type(value) is not int:
            return value
        if re.search(r"(token|audio|image|video)_(id|index)s?$", name):
            return value if value < limit or not limit else ids.setdefault(value, limit - 1 - len(ids))
        return change(name, value)

    mapped: Config = walk(config, "")
    return mapped


def _rotary_list(values: list[Any], name: str, change: Callable[[str, int], int]) -> list[Any]:
    """Return a list over the pairs of a rotated head, or over the parts into which they fall, for smaller heads."""
    if name in _ROPE_LISTS:
        return values[: max(1, change("head_dim", len(values)))]
    small = [max(1, change("head_dim", value)) for value in values]
    small[0] += max(1, change("head_dim", sum(values))) - sum(small)
    return small


def _is_width(name: str) -> bool:
    return bool(_HEADS.search(name) or _PER_HEAD.search(name) or _WIDTHS.search(name))


def _size(name: str, value: int, by: Shrinkage, products: Mapping[int, int]) -> int:
    if value <= 1:
        return value
    if _EXPERTS.search(name):
        return value if value <= FEW_EXPERTS else _like(value, FEW_EXPERTS, by.ranks, 2)
    if _CHOSEN.search(name):
        return min(value, FEW_CHOSEN)
    if name in ("n_group", "num_expert_group", "topk_group"):
        return min(value, 2)
    if _WORDS.search(name):
        return value if value <= 2 * FEW_WORDS else _like(value, FEW_WORDS, by.ranks, 2)
    if _PER_HEAD.search(name):
        return value // by.per_head if value % by.per_head == 0 else value
    if _HEADS.search(name):
        return value // by.heads if value % by.heads == 0 else value
    if _WIDTHS.search(name):
        if value in products:
            return products[value]
        # Rows stay on 16 bytes where they were, those of a rank too: grouped matrix products want that.
        divisor, row = by.heads * by.per_head, by.ranks * ROW_NUMEL
        if value % row == 0:
            return -(-value // (divisor * row)) * row
        return _like(value, max(-(-value // divisor), ROW_NUMEL), by.ranks, ROW_NUMEL)
    return value


def _like(value: int, least: int, ranks: int, unit: int) -> int:
    """Return the smallest number from ``least`` that the ranks and a unit divide as they divide a value."""
    step = gcd(value, unit)
    return next(
        number
        for number in range(least, least + ranks * step + 1)
        if number % ranks == value % ranks and number % step == 0
    )


def _products(part: Config, by: Shrinkage) -> Iterator[tuple[int, int]]:
    """Yield the widths that are heads times their size, with what becomes of them."""
    heads = [value for name, value in part.items() if type(value) is int and value > 1 and _HEADS.search(name)]
    for count in heads:
        for size in _head_sizes(part):
            if count % by.heads == 0 and size % by.per_head == 0:
                yield count * size, (count // by.heads) * (size // by.per_head)


def _head_sizes(part: Config) -> Iterator[int]:
    for name, value in part.items():
        if type(value) is int and value > 1 and _PER_HEAD.search(name):
            yield value
    if implied := _implied_head_size(part):
        yield implied


def _implied_head_size(part: Config) -> int:
    """Return the size of a head that is not named, but is what a width has for every head; else 0."""
    heads = next((part[name] for name in _COUNTS if type(part.get(name)) is int and part[name]), 0)
    width = next((part[name] for name in ("hidden_size", "n_embd", "d_model") if type(part.get(name)) is int), 0)
    known = isinstance(part.get("head_dim"), int) or not heads or width % heads
    return 0 if known else width // heads


_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def _per_head_divisor(config: Config) -> int:
    """Return the largest power of two by which every head's size can be divided."""
    divisor = 64
    for part in _parts(config):
        for name, value in part.items():
            if type(value) is int and value > 1 and _PER_HEAD.search(name):
                least = ROTARY_NUMEL if "rot" in name or "rope" in name else HEAD_NUMEL
                divisor = min(divisor, _power_of_two(value, least))
            if name.endswith("mrope_section") and isinstance(value, list):
                divisor = min(divisor, *(_power_of_two(size, 1) for size in value if type(size) is int))
        if implied := _implied_head_size(part):
            divisor = min(divisor, _power_of_two(implied, HEAD_NUMEL))
        rotated = _rotated_share(part)
        for size in _head_sizes(part):
            while divisor > 1 and int(size // divisor * rotated) % 2:
                divisor //= 2
    return divisor


def _rotated_share(part: Config) -> float:
    shares = [value for inner in _parts(part) for name, value in inner.items() if name == "partial_rotary_factor"]
    return min((float(share) for share in shares if share), default=1.0)


def _power_of_two(size: int, least: int) -> int:
    divisor = 1
    while size % (2 * divisor) == 0 and size // (2 * divisor) >= least:
        divisor *= 2
    return divisor


def _heads_divisor(config: Config, ranks: int) -> int:
    """Return the largest number by which all counts of heads can be divided, and lie on the ranks as before."""
    counts = [
        value
        for part in _parts(config)
        for name, value in part.items()
        if type(value) is int and value > 1 and _HEADS.search(name)
    ]
    return max((d for d in range(1, gcd(*counts) + 1) if gcd(*counts) % d == 0 and _fits(config, d, ranks)), default=1)


def _fits(config: Config, divisor: int, ranks: int) -> bool:
    for part in _parts(config):
        counts = {
            name: value
            for name, value in part.items()
            if type(value) is int and value > 1 and _HEADS.search(name) and "group" not in name
        }
        for value in counts.values():
            small = value // divisor
            same = (small % ranks == 0) == (value % ranks == 0) and small >= min(value, 2 * ranks)
            # Fewer heads than ranks may stay, if they are arranged as before.
            if not same and (value % ranks == 0 or small < min(value, 2)):
                return False
        heads = next((counts[name] for name in _COUNTS if name in counts), 0)
        groups = counts.get("num_key_value_heads", 0)
        known = heads and groups and heads % groups == 0
        if known and kv_mesh(heads, groups, ranks) != kv_mesh(heads // divisor, groups // divisor, ranks):
            return False
    return True
