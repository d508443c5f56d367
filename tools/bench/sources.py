"""The checkpoints that are split: files of random bytes with true headers, no two blocks alike."""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

Shapes = Sequence[tuple[str, tuple[int, ...]]]

ITEM_NBYTES = 2
"""All tensors are bfloat16."""
BLOCK_NBYTES = 8 << 20
FILE_NBYTES = 512 << 20


def dense(nbytes: int) -> tuple[dict[str, Any], Shapes]:
    """Return a llama's configuration and tensors, of about so many bytes."""
    hidden, inner, heads, kv_heads = 2048, 8192, 32, 8
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }
    rows = {"q": hidden, "k": hidden * kv_heads // heads, "v": hidden * kv_heads // heads}
    layer: Shapes = [
        *((f"self_attn.{name}_proj", (size, hidden)) for name, size in rows.items()),
        ("self_attn.o_proj", (hidden, hidden)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("mlp.down_proj", (hidden, inner)),
        ("input_layernorm", (hidden,)),
        ("post_attention_layernorm", (hidden,)),
    ]
    shapes = [("model.embed_tokens.weight", (32000, hidden)), ("model.norm.weight", (hidden,))]
    return config, [*shapes, *_layers("model.layers", [(f"{name}.weight", shape) for name, shape in layer], nbytes)]


def rowwise(nbytes: int) -> tuple[dict[str, Any], Shapes]:
    """Return matrices that are all cut by their inputs, so that every row is scattered to all ranks."""
    return {}, list(_layers("m", [("weight", (2048, 8192))], nbytes))


def experts(nbytes: int) -> tuple[dict[str, Any], Shapes]:
    """Return a mixtral's experts, each stored by itself; the running model has them stacked, gate and up joined."""
    hidden, inner, count = 1024, 3584, 8
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": count}
    layer = [
        (f"block_sparse_moe.experts.{expert}.{name}.weight", shape)
        for expert in range(count)
        for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
    ]
    return config, list(_layers("model.layers", layer, nbytes))


def transposed(nbytes: int) -> tuple[dict[str, Any], Shapes]:
    """Return stacked experts that are stored transposed."""
    hidden, inner, count = 1024, 1024, 8
    text = {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_experts": count,
    }
    config = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": True,
    }
    layer = [
        ("mlp.experts.gate_up_proj", (count, hidden, 2 * inner)),
        ("mlp.experts.down_proj", (count, inner, hidden)),
    ]
    return config, list(_layers("model.language_model.layers", layer, nbytes))


def small(nbytes: int) -> tuple[dict[str, Any], Shapes]:
    """Return tensors of 16 KB."""
    return {}, list(_layers("m", [("weight", (64, 128))], nbytes))


KINDS = {"dense": dense, "rowwise": rowwise, "experts": experts, "transposed": transposed, "small": small}
PLANS: dict[str, Mapping[str, str]] = {"rowwise": {"m.*": "rowwise"}, "small": {"m.*": "colwise"}}
"""Plans of those that no catalogue knows."""


def _layers(
    prefix: str, layer: Iterable[tuple[str, tuple[int, ...]]], nbytes: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer = list(layer)
    each = sum(prod(shape) for _, shape in layer) * ITEM_NBYTES
    for index in range(max(1, nbytes // each)):
        yield from ((f"{prefix}.{index}.{name}", shape) for name, shape in layer)


def make_source(kind: str, folder: Path, nbytes: int) -> Path:
    """Write a checkpoint of a kind, of about so many bytes, unless it is there; return its folder."""
    if folder.exists():
        return folder
    config, shapes = KINDS[kind](nbytes)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_files(partial, [(name, "BF16", shape, ITEM_NBYTES) for name, shape in shapes])
    (partial / "config.json").write_text(json.dumps(config))
    if kind in PLANS:
        (partial / "plan.json").write_text(json.dumps(PLANS[kind]))
    partial.rename(folder)
    return folder


def write_files(
    folder: Path,
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    *,
    file_nbytes: int = FILE_NBYTES,
    sparse: bool = False,
) -> None:
    """Write tensors (name, dtype, shape, bytes of an element) into safetensors files and their index."""
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    filled = 0
    for name, dtype, shape, item_nbytes in tensors:
        nbytes = prod(shape) * item_nbytes
        if groups[-1] and filled + nbytes > file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, dtype, shape, nbytes))
        filled += nbytes
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    for file_name, group in zip(names, groups, strict=True):
        _write_file(folder / file_name, group, sparse=sparse)
    weight_map = {name: file_name for file_name, group in zip(names, groups, strict=True) for name, *_ in group}
    index = {"metadata": {"total_size": sum(item[3] for group in groups for item in group)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(path: Path, group: Sequence[tuple[str, str, tuple[int, ...], int]], *, sparse: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in group:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            stream.truncate(8 + len(text) + end)
            return
        for begin in range(0, end, BLOCK_NBYTES):
            stream.write(os.urandom(min(BLOCK_NBYTES, end - begin)))
