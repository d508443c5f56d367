r"""Export what the splitter must know about each model type from the installed transformers, as JSON.

The output is data for ``reshard.catalogue``: plans, where the base model sits in each class, ties, default sizes, and
how stored names become those of the running model. Nothing here decides how a tensor is cut.

How transformers turns stored names into those of the model, which a reader of ``renames`` and ``converters`` repeats
(``rename_source_key``, ``WeightTransform`` and ``convert_and_load_state_dict_in_model`` in core_model_loading.py):

1.  Stored names are visited in natural order (``dot_natural_key``): by dotted parts, numbers numerically and before
    texts, a text that ends in digits by the text, then by the number.
2.  Every rename is applied once, in order, each to the result of the one before. A pattern is a regular expression,
    with ``*.`` rewritten to ``.*\.`` and ``(?!\w)`` appended if it ends with an ASCII letter or digit. It is searched
    anywhere in the name (``re.search``), so "." is any character and "*." any text, also of several parts, up to a
    dot. The first occurrence of the matched text is replaced by the literal replacement, in which ``\1`` stands for
    the first group.
3.  Then at most one converter is applied: the first in order of which a source is found, by the same rules. Its
    sources are one alternation, the longest pattern first. The matched text is replaced by the target; what stands
    before and after it stays.
4.  The tensors of one resulting name are collected by source, in the order of step 1 within each. No index is parsed
    from the names: a missing expert makes a shorter stack, which only the parameter's shape betrays. The operations
    follow in order: "stack" makes of each source's tensors one with a new dimension (``torch.stack``), "concat" joins
    the sources in the order in which the converter lists them (``torch.cat``).
5.  ``base_model_prefix`` is removed from a name that the model has without it, else put before one that it has with it.
6.  If the model lacks the result but has the stored name, the stored name goes through step 5 alone.
7.  What is still not the model's is dropped silently if one of ``ignored`` is found in its name (``re.search``), which
    is the name after steps 2 to 5 (``_adjust_missing_and_unexpected_keys`` in modeling_utils.py).

The "legacy" renames that transformers appends for every model (LayerNorm.gamma and .beta, .weight_g and .weight_v, a
doubled language_model prefix) are left out: they concern no type exported here.
"""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

OUT = Path(__file__).parent.parent / "reshard" / "catalogue" / "transformers.json"

# Text decoders without experts that have a plan, of styles the splitter knows, that AutoModelForCausalLM builds, whose
# stored tensors are the model's up to renaming, and that are published by themselves, not in a composite; and mixtral.
# Left out by that are doge (experts), dory (its rename halves layer numbers), hrm_text and olmo_hybrid (converters),
# granite_swa and minicpm3 (styles), and the text halves of apertus1p5, cohere_compass, emu3, gemma3n, gemma4_unified
# and qwen3_5, which are published with their other halves, as is phi4_multimodal; and bamba, diffllama, falcon_h1,
# hunyuan_v1_dense, lfm2 and lfm3, of which the plan divides the embedding alone.
TYPES = (
    "apertus",
    "arcee",
    "codegen",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "helium",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
    "youtu",
)

SIZES = (
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_embd",
    "n_head",
    "n_inner",
)
"""Configuration values from which the sizes of tensors are computed, by the names that classes give them."""

OPERATIONS = {MergeModulelist: "stack", Concatenate: "concat"}


def export_catalogue(model_types: Iterable[str] = TYPES) -> dict[str, Any]:
    """Return the whole catalogue."""
    return {
        "source": f"transformers {transformers.__version__}",
        "types": {model_type: export_type(model_type) for model_type in model_types},
    }


def export_type(model_type: str) -> dict[str, Any]:
    """Return the entry of one model type, without the keys that would be empty.

    Raises:
        ValueError: Something of the type cannot be said in the catalogue's terms.
    """
    config_class = CONFIG_MAPPING[model_type]
    base, causal = MODEL_MAPPING[config_class], MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    config = build_config(config_class)
    models = {cls.__name__: build_model(cls, config) for cls in model_classes(base)}
    plan = base_plan(models[base.__name__])
    transforms = get_model_conversion_mapping(models[causal.__name__], add_legacy=False)
    entry = {
        "base_prefix": base.base_model_prefix,
        "plan": plan,
        "classes": {name: export_class(model, base, plan) for name, model in models.items()},
        "defaults": export_defaults(config_class),
        "aliases": dict(config_class.attribute_map),
        "ignored": ignored_names(models[causal.__name__]),
        "renames": [export_rename(transform) for transform in transforms if isinstance(transform, WeightRenaming)],
        "converters": [
            export_converter(transform) for transform in transforms if isinstance(transform, WeightConverter)
        ],
    }
    return without_empty(entry)


def build_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the class's default configuration with 2 layers, and with the head sizes that some classes leave open."""
    config = config_class()
    heads = config.num_attention_heads
    filled = {"num_key_value_heads": heads, "head_dim": config.hidden_size // heads}
    unset = {name: size for name, size in filled.items() if getattr(config, name, size) is None}
    return config_class(num_hidden_layers=2, **unset)


def model_classes(base: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    """Return the public model classes beside a base model that take the same configuration.

    Types without a modeling file of their own (exaone, internlm3, iquestcoder) run the classes of llama, so these are
    the classes for the configuration of the base model, which is not always the type's.
    """
    module = importlib.import_module(base.__module__)
    public = [getattr(module, name) for name in module.__all__ if not name.endswith("PreTrainedModel")]
    return [cls for cls in public if issubclass(cls, PreTrainedModel) and cls.config_class is base.config_class]


def build_model(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without memory for its parameters."""
    with torch.device("meta"):
        return cls(config)


def base_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan of a base model, relative to it.

    Source: ``base_model_tp_plan`` in the type's configuration file, and the rule for ``embed_tokens`` in
    ``init_parallel_plans`` of distributed/mixin.py.
    """
    plan = dict(model.config.base_model_tp_plan)
    if isinstance(getattr(model, "embed_tokens", None), torch.nn.Embedding):
        plan.setdefault("embed_tokens", "embedding_rowwise")
    return plan


def export_class(model: PreTrainedModel, base: type[PreTrainedModel], plan: dict[str, str]) -> dict[str, Any]:
    """Return the entry of one model class.

    ``prefix`` is found in the built model, as ``base_model_prefix`` need not be the name of an attribute. ``modules``
    are the parts beside the base model that own parameters. ``plan`` and ``ties`` are ``_tp_plan`` and
    ``_tied_weights_keys`` in the type's modeling file, with names relative to the class.

    Raises:
        ValueError: The class has no single base model, or its plan is not the base model's under the prefix with the
            class's own.
    """
    (prefix,) = [name for name, module in model.named_modules() if isinstance(module, base)]
    own = dict(type(model)._tp_plan or {})
    if model.tp_plan != own | {f"{prefix}.{name}".removeprefix("."): style for name, style in plan.items()}:
        raise ValueError(f"{type(model).__name__}: its plan is not the base model's under {prefix!r} and {own}")
    entry = {
        "modules": own_modules(model, prefix) if prefix else [],
        "plan": own,
        "ties": dict(type(model)._tied_weights_keys or {}),
    }
    return {"prefix": prefix} | without_empty(entry)


def own_modules(model: PreTrainedModel, prefix: str) -> list[str]:
    """Return the names of the modules with parameters beside the base model."""
    with_parameters = {name.split(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(with_parameters - {prefix.split(".")[0]})


def export_defaults(config_class: type[PreTrainedConfig]) -> dict[str, int | bool | None]:
    """Return the class's own values for sizes, None where a value is computed from others.

    Many classes fill a size that is not given in ``__post_init__``. Such a size changes when another number of heads
    on another width is asked for: 2 times the heads on 4 times the width, which also doubles the size of a head.
    """
    config = config_class()
    given = {
        config_class.attribute_map.get(name, name): getattr(config, name) * factor
        for name, factor in (("num_attention_heads", 2), ("hidden_size", 4))
    }
    probe = config_class(**given)
    names = {field.name for field in dataclasses.fields(config_class)}.intersection(SIZES)
    computed = {name for name in names - given.keys() if getattr(probe, name) != getattr(config, name)}
    sizes = {name: None if name in computed else getattr(config, name) for name in names}
    return sizes | {"tie_word_embeddings": config.tie_word_embeddings}


def ignored_names(model: PreTrainedModel) -> list[str]:
    """Return the patterns of stored names that the model drops silently.

    A reader has no model to ask whether it has a parameter, so none of its parameters may match.

    Source: ``_keys_to_ignore_on_load_unexpected`` in the type's modeling file, and the two patterns that
    ``_adjust_missing_and_unexpected_keys`` of modeling_utils.py adds for buffers that were once stored.

    Raises:
        ValueError: A parameter of the model matches.
    """
    buffers = [name for name, _ in model.named_buffers()]
    patterns = set(model._keys_to_ignore_on_load_unexpected)
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    for name in model.state_dict():
        if any(re.search(pattern, name) for pattern in patterns):
            raise ValueError(f"{type(model).__name__}: {name}: is a parameter and matches one of {sorted(patterns)}")
    return sorted(patterns)


def export_rename(transform: WeightTransform) -> list[str]:
    """Return a renaming as [pattern, replacement].

    Source: conversion_mapping.py, looked up as it is for the type's ForCausalLM class: by the class's name, then by the
    model type. Only gpt_neox has one by class, for the head that its other classes lack.

    Raises:
        ValueError: The renaming is more than one pattern and its replacement.
    """
    if type(transform) is not WeightRenaming or len(transform.source_patterns) != 1 or transform.scope_prefix:
        raise ValueError(f"{transform}: not one pattern and its replacement")
    return [transform.source_patterns[0], transform.target_patterns[0]]


def export_converter(transform: WeightConverter) -> dict[str, Any]:
    """Return a converter: the patterns as they match after all renames, the target, and operations as [name, dim].

    Source: conversion_mapping.py for the patterns, core_model_loading.py for what the operations do.

    Raises:
        ValueError: The converter has an operation other than MergeModulelist and Concatenate, or several targets.
    """
    unknown = [operation for operation in transform.operations if type(operation) not in OPERATIONS]
    if unknown or len(transform.target_patterns) != 1 or transform.scope_prefix:
        raise ValueError(f"{transform}: {transform.operations}: only stacks and joins into one target are exported")
    return {
        "sources": transform.source_patterns,
        "target": transform.target_patterns,
        "ops": [[OPERATIONS[type(operation)], operation.dim] for operation in transform.operations],
    }


def without_empty(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry without its empty lists and tables."""
    return {key: content for key, content in entry.items() if content not in ([], {})}


@click.command()
@click.option("--out", default=OUT, show_default=True, type=click.Path(dir_okay=False, path_type=Path), help="File.")
def main(out: Path) -> None:
    """Write the catalogue of the installed transformers."""
    transformers.logging.set_verbosity_error()
    catalogue = export_catalogue()
    out.write_text(json.dumps(catalogue, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    click.echo(f"{out}: {len(catalogue['types'])} types of {catalogue['source']}", err=True)


if __name__ == "__main__":
    main()
