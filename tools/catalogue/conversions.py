r"""How stored names and tensors become those of the model, said as data.

How transformers does it, which a reader of ``renames`` and ``converters`` repeats (``rename_source_key``,
``WeightTransform`` and ``convert_and_load_state_dict_in_model`` in core_model_loading.py of transformers 5.24):

1.  Stored names are visited in natural order (``dot_natural_key``): by dotted parts, numbers numerically and before
    texts, a text that ends in digits by the text, then by the number.
2.  Every rename is applied once, in order, each to the result of the one before. A pattern is a regular expression,
    with ``*.`` rewritten to ``.*\.`` and ``(?!\w)`` appended if it ends with an ASCII letter or digit. It is searched
    anywhere in the name (``re.search``), so "." is any character and "*." any text, also of several parts, up to a
    dot. The first occurrence of the matched text is replaced by the literal replacement, in which ``\1`` stands for
    the first group. Of several patterns the longest is tried first; all have the first replacement.
3.  One with a scope applies to names that start with base and scope, or with the scope alone, and to what follows.
    An empty scope is the base model.
4.  Renames of other kinds: "group" has a replacement for each pattern, and the patterns after the first hold only for
    names that are visited after the first has matched; "offset" raises the number that is the first group; and
    "layer_pairs" makes of ``layers.2i`` and ``layers.2i+1``, an attention and a feed-forward block, one layer
    (``LayerPairCollapse``).
5.  Then at most one converter is applied: the first in order of which a source is found, by the same rules. The
    matched text is replaced by the first target; what stands before and after it stays.
6.  The tensors of one resulting name are collected by source, in the order of step 1 within each. No index is parsed
    from the names: a missing expert makes a shorter stack, which only the parameter's shape betrays. The operations
    follow in order. Where there are several targets, the others' names are made from the first's.
7.  ``base_model_prefix`` is removed from a name that the model has without it, else put before one that it has with it.
8.  If the model lacks the result but has the stored name, the stored name goes through step 7 alone. These names are
    ``kept``, with numbers as ``*``.
9.  What is still not the model's is dropped silently if one of ``ignored`` is found in its name (``re.search``), which
    is the name after steps 2 to 7 (``_adjust_missing_and_unexpected_keys`` in modeling_utils.py).

The "legacy" renames that transformers appends for every model (LayerNorm.gamma and .beta, .weight_g and .weight_v) are
left out of classes that they do not concern, and that of a doubled language_model prefix of all.
"""

import re
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    Inkling2LoopDequantizeExperts,
    Inkling2LoopMergeMessageQueries,
    Inkling2UnpadVocab,
    Interleave,
    LayerPairCollapse,
    MergeModulelist,
    PermuteForRope,
    PrefixChange,
    Split,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from manifests.natural import kind_of

KINDS = {
    WeightRenaming: "plain",
    PrefixChange: "plain",
    GroupWeightRename: "group",
    Inkling2IndexOffsetWeightRename: "offset",
    LayerPairCollapse: "layer_pairs",
}

SPLITS = {
    "q_proj": "H*hd",
    "k_proj": "KV*hd",
    "v_proj": "KV*hd",
    "linear_attn.in_proj_qkv": (
        "2*linear_num_key_heads*linear_key_head_dim + linear_num_value_heads*linear_value_head_dim"
    ),
    "linear_attn.in_proj_z": "linear_num_value_heads*linear_value_head_dim",
    "linear_attn.in_proj_b": "linear_num_value_heads",
    "linear_attn.in_proj_a": "linear_num_value_heads",
}
"""The size of each part that is split off, by its target; transformers takes it from the parameter's shape."""

SHAPES = {
    "mlp.experts.gate_up_proj": ["num_experts", "2*moe_intermediate_size", "hidden_size"],
    "mlp.experts.down_proj": ["num_experts", "hidden_size", "moe_intermediate_size"],
}
"""The shape of parameters that are transposed only where the stored shape is another, by their target."""


NEXT = "num_hidden_layers:num_hidden_layers + num_{}_layers"
SHARED_KV = "layers.{num_hidden_layers - num_kv_shared_layers:num_hidden_layers}.self_attn."
NUMBERED = {
    "bailing_hybrid": [rf"(^|\.)layers\.{{{NEXT.format('mtp')}}}\."],
    "step3p7_text": [rf"(^|\.)layers\.{{{NEXT.format('nextn_predict')}}}\."],
    "gemma3n_text": [SHARED_KV + name for name in ("k_proj", "v_proj", "k_norm", "v_norm")],
    "gemma4_text": [SHARED_KV + name for name in ("k_proj", "v_proj", "k_norm", "v_norm")],
}
"""Ignored names with the number of a layer, by the type that makes them; {first:end} is a number in this range."""


LEGACY = (
    "LayerNorm.weight",
    "LayerNorm.bias",
    ".parametrizations.weight.original0",
    ".parametrizations.weight.original1",
)
"""What the legacy renames make of names that are no longer written."""


class UnsaidError(Exception):
    """A conversion cannot be said in the catalogue's terms."""


def export_conversions(model: PreTrainedModel) -> dict[str, Any]:
    """Return the renames, converters, ignored and kept names of a class, and what of it stays in float32.

    Raises:
        UnsaidError: One cannot be said.
    """
    transforms = conversions_of(model)
    return {
        "renames": [_rename(model, one) for one in transforms if isinstance(one, WeightRenaming)],
        "converters": [_converter(model, one) for one in transforms if isinstance(one, WeightConverter)],
        "ignored": ignored_names(model),
        "kept": kept_names(model),
        # `_get_dtype_plan` of modeling_utils.py: these stay in float32 whatever dtype is asked for, or if float16 is.
        "float32": sorted(model._keep_in_fp32_modules_strict or []),
        "float32_for_float16": sorted(model._keep_in_fp32_modules or []),
    }


def conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """Return what transformers does to a model's stored names and tensors, in order."""
    names = list(model.state_dict())
    legacy = [
        one
        for one in get_checkpoint_conversion_mapping("legacy")
        if one.target_patterns[0] in LEGACY and any(one.target_patterns[0] in name for name in names)
    ]
    return [*get_model_conversion_mapping(model, add_legacy=False), *legacy]


def _rename(model: PreTrainedModel, transform: WeightTransform) -> list[str] | dict[str, Any]:
    """Return a renaming: [pattern, replacement] if that is all, else a table."""
    if type(transform) not in KINDS:
        raise UnsaidError(f"{type(model).__name__}: {transform}: a renaming of an unknown kind")
    kind, scope = KINDS[type(transform)], _scope(transform)
    if kind == "plain" and not scope and len(transform.source_patterns) == len(transform.target_patterns) == 1:
        return [transform.source_patterns[0], transform.target_patterns[0]]
    table = {"sources": transform.source_patterns, "targets": transform.target_patterns, **scope}
    if kind != "plain":
        table["kind"] = kind
    if kind == "offset":
        table["offset"] = transform.offset
    return table


def _converter(model: PreTrainedModel, transform: WeightConverter) -> dict[str, Any]:
    return {
        "sources": transform.source_patterns,
        "targets": transform.target_patterns,
        "ops": [_operation(model, one, transform) for one in transform.operations],
        **_scope(transform),
    }


def _scope(transform: WeightTransform) -> dict[str, str]:
    if transform.scope_prefix is None:
        return {}
    base = {"base": transform.base_model_prefix} if transform.base_model_prefix else {}
    return {"scope": transform.scope_prefix, **base}


def _operation(model: PreTrainedModel, operation: ConversionOps, transform: WeightConverter) -> list[Any]:
    """Return an operation: its name and what it needs. Sizes are formulas over the target's part of the configuration.

    Raises:
        UnsaidError: It is of an unknown kind, or needs what no formula here gives.
    """
    match operation:
        case MergeModulelist():
            return ["stack", operation.dim]
        case SplitModulelist():
            return ["unstack", operation.dim]
        case Concatenate():
            return ["concat", operation.dim]
        case Chunk(num_shards_attribute=None):
            return ["chunk", operation.dim]
        case Split():
            return ["split", operation.dim, [SPLITS[target] for target in transform.target_patterns]]
        case Interleave(inverse=False):
            return ["interleave", operation.dim]
        case Transpose(check_dims=False):
            return ["transpose", operation.dim0, operation.dim1]
        case Transpose():
            return ["transpose", operation.dim0, operation.dim1, SHAPES[transform.target_patterns[0]]]
        case PermuteForRope(inverse=False):
            names = operation.permute_layer_names
            return ["rope_permute", _heads(model, operation.subconfig_key), *([names] if names else [])]
        case ErnieFuseAndSplitTextVisionExperts():
            return ["ernie_experts", operation.stack_dim, operation.concat_dim]
        case Inkling2UnpadVocab(inverse=False):
            return ["unpad_vocab", "unpadded_vocab_size"]
        case Inkling2LoopMergeMessageQueries(inverse=False):
            return ["merge_message_queries"]
        case Inkling2LoopDequantizeExperts():
            return ["computes", type(operation).__name__]
    raise UnsaidError(f"{type(model).__name__}: {transform}: {operation}: not an operation that is exported")


def _heads(model: PreTrainedModel, part: str | None) -> str:
    """Return the formula for the number of heads that a permutation for rotary embeddings reads."""
    config = getattr(model.config, part) if part else model.config
    name = config.attribute_map.get("num_attention_heads", "num_attention_heads")
    return f"{part}.{name}" if part else name


def kept_names(model: PreTrainedModel) -> list[str]:
    """Return the model's own names that the renames and converters would make names of nothing, numbers as ``*``."""
    transforms = conversions_of(model)
    renames = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    own = model.state_dict()
    return sorted(
        {
            kind_of(name)
            for name in sorted(own, key=dot_natural_key)
            if rename_source_key(name, renames, converters, model.base_model_prefix, own)[0] not in own
        }
    )


def ignored_names(model: PreTrainedModel) -> list[str]:
    """Return the patterns of stored names that the model drops silently.

    A reader has no model to ask whether it has a parameter, so a pattern that a parameter of it matches is left out.

    Source: ``_keys_to_ignore_on_load_unexpected`` in the type's modeling file, and the two patterns that
    ``_adjust_missing_and_unexpected_keys`` of modeling_utils.py adds for buffers that were once stored.
    """
    buffers = [name for name, _ in model.named_buffers()]
    patterns = set(model._keys_to_ignore_on_load_unexpected or [])
    for part in (one for one in model.modules() if isinstance(one, PreTrainedModel)):
        for pattern in NUMBERED.get(part.config.model_type, ()):
            literal = re.compile(r"\d+".join(map(re.escape, re.split(r"\{.*?\}", pattern))))
            patterns = {one for one in patterns if not literal.fullmatch(one)} | {pattern}
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    names = list(model.state_dict())
    return sorted(pattern for pattern in patterns if not any(re.search(pattern, name) for name in names))
