"""Scale: planning of the largest checkpoints, from sparse files with true headers; and split time against size."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from tools.bench.common import MIB, RESULTS, ROOT, Options, middle, rows
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
            found["sizes"][nbytes] = middle(_split_seconds(source, Path(work, "out")) for _ in range(options.rounds))
            subprocess.run(["rm", "-r", str(source)], check=True)
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
    seconds, peaks = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        seconds.append(time.perf_counter() - started)
        peaks.append(usage.ru_maxrss << 10)
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


def _split_seconds(source: Path, out: Path) -> float:
    command = [sys.executable, "-m", "reshard", str(source), "--tp", "2", "-o", str(out), "-q"]
    seconds = _seconds(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL))
    subprocess.run(["rm", "-r", str(out)], check=True)
    return seconds


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
    sizes = [
        [f"{int(nbytes) / (1 << 30):.2f}", f"{seconds:.2f}", f"{seconds / (int(nbytes) / (1 << 30)):.2f}"]
        for nbytes, seconds in result["sizes"].items()
    ]
    return [
        "## Scale",
        "",
        "The dry run at tp 8 of sparse files with true headers, as a command; the manifest that the split would have, "
        "with as many hashes; decoded whole, and as a loader decodes it.",
        "",
        *rows(["checkpoint", "tensors", "dry run s", "peak MiB", "manifest MiB", "decode ms", "loader ms"], plans),
        "",
        "A dense checkpoint on disk, split for 2 ranks, start-up included:",
        "",
        *rows(["GiB", "s", "s / GiB"], sizes),
    ]
