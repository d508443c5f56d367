"""The checkpoints that are loaded: random weights of known shapes, made once and kept in build/bench/models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.common import MODELS, ROOT

LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
MIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "max_position_embeddings": 2048,
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
FORWARD: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "num_hidden_layers": 12,
}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("llama", LLAMA | {"num_hidden_layers": 14}, "bfloat16"),
    "moe": ("mixtral", MIXTRAL | {"num_hidden_layers": 11}, "bfloat16"),
    "half": ("llama", LLAMA | {"num_hidden_layers": 7}, "bfloat16"),
    "llama": ("llama", FORWARD, "float32"),
    "phi3": ("phi3", FORWARD | {"pad_token_id": 0}, "float32"),
}
"""Name to model type, configuration and dtype."""


def checkpoint(name: str, *, small: bool = False) -> Path:
    """Return the folder of a checkpoint, made if it is not there."""
    folder = MODELS / (f"{name}-small" if small else name)
    if not (folder / "config.json").exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        _make(name, partial, small=small)
        partial.rename(folder)
    return folder


def _make(name: str, folder: Path, *, small: bool) -> None:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    transformers.utils.logging.disable_progress_bar()
    kind, values, dtype_name = CHECKPOINTS[name]
    dtype = getattr(torch, dtype_name)
    config = transformers.AutoConfig.for_model(kind, **values | (TINY if small else {}))
    config.architectures = [{"llama": "Llama", "mixtral": "Mixtral", "phi3": "Phi3"}[kind] + "ForCausalLM"]
    model_class = getattr(transformers, config.architectures[0])
    torch.manual_seed(0)
    with no_init_weights():
        model = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.ndim == 1 else parameter.uniform_(-0.03, 0.03)
    model.save_pretrained(folder, max_shard_size="512MB")


def split_of(source: Path, tp: int, dtype: str | None = None) -> Path:
    """Return the folder of a split, made if it is not there or is of an earlier format.

    A dtype is one that the splitter converts to.
    """
    from manifests.errors import ReshardError
    from manifests.runtime import read_runtime

    out = source.with_name(f"{source.name}-tp{tp}" + (f"-{dtype}" if dtype else ""))
    try:
        read_runtime(out)
    except ReshardError:
        command = [sys.executable, "-m", "reshard", str(source), "--tp", str(tp), "-o", str(out), "--force", "-q"]
        command += ["--dtype", dtype] if dtype else []
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return out
