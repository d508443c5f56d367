"""Small checkpoints, written by the safetensors library, and the bytes that it finds in a file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import deserialize
from safetensors.torch import save_file

from manifests.errors import ReshardError

Stored = tuple[str, tuple[int, ...], bytes]
"""The dtype, the shape in the header's elements and the bytes of a tensor in a file."""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "tie_word_embeddings": False,
}


def count(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Return a tensor whose bytes differ wherever its size allows it, so that any wrong slice shows."""
    numel = torch.Size(shape).numel()
    if dtype.itemsize == 1:
        return (torch.arange(start, start + numel) % 251).to(torch.uint8).reshape(shape).view(dtype)
    return torch.arange(start, start + numel).to(dtype).reshape(shape)


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, **others: str
) -> Path:
    """Write a checkpoint of one file into a new folder; ``others`` are further files by their stem of a JSON file."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {}))
    for stem, content in others.items():
        (folder / f"{stem}.json").write_text(content)
    return folder


def save_indexed(
    folder: Path,
    *parts: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    stem: str = "model",
    index: str = "",
) -> Path:
    """Write a checkpoint of several files, named as the Hugging Face libraries name them, and its index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for position, tensors in enumerate(parts):
        name = f"{stem}-{position + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / (index or f"{stem}.safetensors.index.json")).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path) -> dict[str, Stored]:
    """Return what the safetensors library finds in a file, for any dtype, also those that torch cannot slice."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(path.read_bytes())
    }


def of_rank(folder: Path, rank: int, world_size: int) -> dict[str, Stored]:
    """Return every tensor that a rank opens: those of its own files and of the common ones."""
    found: dict[str, Stored] = {}
    for pattern in (f"rank-{rank:05d}-of-{world_size:05d}*.safetensors", "common*.safetensors"):
        for path in sorted(folder.glob(pattern)):
            tensors = stored(path)
            assert not found.keys() & tensors.keys()
            found |= tensors
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, hidden ones included."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mentions(error: ReshardError, *words: object) -> bool:
    """Tell whether a message has all the words."""
    missing = [word for word in words if str(word) not in str(error)]
    assert not missing, f"{missing} not in {error}"
    return True
