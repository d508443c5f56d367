"""Scale: planning of the largest checkpoints, from sparse files with true headers; and split time against size."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import linear_regression
from typing import Any

from tools.bench.commands import copy, measure
from tools.bench.common import MIB, RESULTS, Options, middle, ratio, rows
from tools.bench.sources import make_source, write_files

Tensors = list[tuple[str, str, tuple[int, ...], int]]

FP8_BLOCK = 128
SIZES = tuple(1 << shift for shift in range(28, 34))
"""0.25 to 8 GiB."""


def run(options: Options) -> dict[str, Any]:
    """Plan the two, and split a dense checkpoint of growing size."""
    found: dict[str, Any] = {"plans": {}, "sizes": {}}
    with tempfile.TemporaryDirectory(dir=RESULTS, prefix="scale-") as work:
        for name, (config, tensors) in {"deepseek": deepseek(), "dense-405b": llama_405b()}.items():
            source = Path(work, name)
            source.mkdir()
            write_files(source, tensors, file_nbytes=4 << 30, sparse=True)
            (source / "config.json").write_text(config)
            found["plans"][name] = {"tensors": len(tensors), **_plan(source, options.rounds)}
        for nbytes in SIZES[:2] if options.small else SIZES:
            source = make_source("dense", Path(work, "line"), nbytes)
            found["sizes"][nbytes] = _split_beside_copy(source, Path(work, "out"), options.rounds)
            shutil.rmtree(source)
    return found


def deepseek() -> tuple[str, Tensors]:
    """Return the configuration and the tensors of a checkpoint of DeepSeek-V3's shape: FP8 with scales of blocks."""
    config = (
        '{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, '
        '"intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, '
        '"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, '
        '"first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, '
        '"qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": false, '
        '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    hidden = 7168
    tensors: Tensors = [
        ("model.embed_tokens.weight", "BF16", (129280, hidden), 2),
        ("model.norm.weight", "BF16", (hidden,), 2),
        ("lm_head.weight", "BF16", (129280, hidden), 2),
    ]
    for layer in range(61):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "q_a_proj": (1536, hidden),
            "q_b_proj": (128 * 192, 1536),
            "kv_a_proj_with_mqa": (576, hidden),
            "kv_b_proj": (128 * 256, 512),
            "o_proj": (hidden, 128 * 128),
        }.items():
            tensors += _fp8(f"{prefix}.self_attn.{name}", shape)
        tensors += [
            (f"{prefix}.{name}.weight", "BF16", (size,), 2)
            for name, size in {
                "self_attn.q_a_layernorm": 1536,
                "self_attn.kv_a_layernorm": 512,
                "input_layernorm": hidden,
                "post_attention_layernorm": hidden,
            }.items()
        ]
        if layer < 3:
            tensors += _mlp(f"{prefix}.mlp", hidden, 18432)
            continue
        tensors += [
            (f"{prefix}.mlp.gate.weight", "BF16", (256, hidden), 2),
            (f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (256,), 4),
        ]
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(256))):
            tensors += _mlp(f"{prefix}.mlp.{expert}", hidden, 2048)
    return config, tensors


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield from _fp8(f"{prefix}.{name}", shape)


def _fp8(name: str, shape: tuple[int, int]) -> Tensors:
    blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    return [(f"{name}.weight", "F8_E4M3", shape, 1), (f"{name}.weight_scale_inv", "F32", blocks, 4)]


def llama_405b() -> tuple[str, Tensors]:
    """Return the configuration and the tensors of a checkpoint of Llama 3.1 405B's shape."""
    config = (
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, '
        '"intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, '
        '"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false}'
    )
    hidden, inner = 16384, 53248
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (128256, hidden),
        "model.norm": (hidden,),
        "lm_head": (128256, hidden),
    }
    for layer in range(126):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (hidden, hidden),
            f"{prefix}.self_attn.k_proj": (1024, hidden),
            f"{prefix}.self_attn.v_proj": (1024, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, hidden),
            f"{prefix}.mlp.gate_proj": (inner, hidden),
            f"{prefix}.mlp.up_proj": (inner, hidden),
            f"{prefix}.mlp.down_proj": (hidden, inner),
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
        }
    return config, [(f"{name}.weight", "BF16", shape, 2) for name, shape in shapes.items()]


def _plan(source: Path, rounds: int) -> dict[str, float]:
    """Measure the dry run as a command, and the manifest that the split would have."""
    command = [sys.executable, "-m", "reshard", str(source), "--tp", "8", "--dry-run", "-o", str(source.with_name("o"))]
    samples = [measure(command) for _ in range(rounds)]
    seconds, peaks = ([sample[name] for sample in samples] for name in ("seconds", "peak_nbytes"))
    return {"seconds": middle(seconds), "peak_nbytes": max(peaks), **_manifest(source, rounds)}


def _manifest(source: Path, rounds: int) -> dict[str, float]:
    """Measure the manifest, its hashes made up: as many of them as the split would have."""
    from manifests.manifest import MANIFEST_NAME, TILE_NBYTES, decode_manifest, encode_manifest
    from manifests.runtime import read_runtime
    from reshard import plan
    from reshard.engine import Hashes
    from reshard.splitting import _build_manifest

    planned = plan(source, tp=8)

    def tiles(nbytes: int) -> tuple[str, ...]:
        return tuple(f"{number:032x}" for number in range(-(-nbytes // TILE_NBYTES)))

    program = planned.program
    read = {gather.source: tiles(gather.source.nbytes) for move in program.moves for gather in move.gathers}
    written = tuple(
        tuple(
            tiles(prod(sum(run.length * run.repeat for run in runs) for runs in scatter.runs) * move.item_nbytes)
            for scatter in move.scatters
        )
        for move in program.moves
    )
    text = encode_manifest(_build_manifest(planned, Hashes(read, written), {}))
    (source / MANIFEST_NAME).write_bytes(text)
    return {
        "manifest_nbytes": len(text),
        "decode_seconds": middle(_seconds(lambda: decode_manifest(text)) for _ in range(rounds)),
        "runtime_seconds": middle(_seconds(lambda: read_runtime(source)) for _ in range(rounds)),
    }


def _seconds(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _split_beside_copy(source: Path, out: Path, rounds: int) -> dict[str, list[float]]:
    """Measure a split, and a copy that is synced as it is, in turns."""
    split = [sys.executable, "-m", "reshard", str(source), "--tp", "2", "-o", str(out), "-q"]
    found: dict[str, list[float]] = {"seconds": [], "cpu_seconds": [], "copy_seconds": []}
    for _ in range(rounds):
        took, copied = (_measure_once(command, out) for command in (split, copy(source, out, synced=True)))
        found["seconds"].append(took["seconds"])
        found["cpu_seconds"].append(took["cpu_seconds"])
        found["copy_seconds"].append(copied["seconds"])
    return found


def _measure_once(command: list[str], out: Path) -> dict[str, float]:
    took = measure(command)
    shutil.rmtree(out)
    return took


def table(result: dict[str, Any]) -> list[str]:
    """Return what the page says."""
    plans = [
        [
            name,
            found["tensors"],
            f"{found['seconds']:.2f}",
            f"{found['peak_nbytes'] / MIB:.0f}",
            f"{found['manifest_nbytes'] / MIB:.1f}",
            f"{1000 * found['decode_seconds']:.0f}",
            f"{1000 * found['runtime_seconds']:.0f}",
        ]
        for name, found in result["plans"].items()
    ]
    sizes = {int(nbytes) / (1 << 30): taken for nbytes, taken in result["sizes"].items()}
    lines = [
        [
            f"{gib:.2f}",
            f"{middle(taken['seconds']):.2f}",
            f"{middle(taken['cpu_seconds']):.2f}",
            f"{middle(taken['cpu_seconds']) / gib:.2f}",
            f"{middle(taken['copy_seconds']):.2f}",
            f"{ratio(taken['seconds'], taken['copy_seconds']):.2f}",
        ]
        for gib, taken in sizes.items()
    ]
    return [
        "## Scale",
        "",
        "The dry run at tp 8 of sparse files with true headers, as a command; the manifest that the split would have, "
        "with as many hashes; decoded whole, and as a loader decodes it.",
        "",
        *rows(["checkpoint", "tensors", "dry run s", "peak MiB", "manifest MiB", "decode ms", "loader ms"], plans),
        "",
        "A dense checkpoint on disk, split for 2 ranks, start-up included, in turns with `cp -r` and a `sync` of its "
        f"files. {_line('Processor time', sizes, 'cpu_seconds')} {_line('Time', sizes, 'seconds')} What does not fit "
        "into memory goes as fast as the disk; `cp` beside it shows how fast that is.",
        "",
        *rows(["GiB", "s", "cpu s", "cpu s / GiB", "cp s", "s / cp"], lines),
    ]


def _line(what: str, sizes: Mapping[float, Mapping[str, Sequence[float]]], name: str) -> str:
    """Return the straight line through the medians, and how far the farthest is from it."""
    seconds = {gib: middle(taken[name]) for gib, taken in sizes.items()}
    slope, start = linear_regression([*seconds], [*seconds.values()])
    off = max(abs(start + slope * gib - taken) / taken for gib, taken in seconds.items())
    return f"{what} is {start:.2f} s and {slope:.2f} s a GiB, within {100 * off:.0f} %."
