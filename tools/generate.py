"""Generate greedily, in float32: from a checkpoint in one process, from a split in as many as it has ranks.

    python tools/generate.py MODEL --prompt "..." --save one.json
    torchrun --nproc-per-node 3 tools/generate.py MODEL-tp3 --prompt "..." --save three.json

float32, because in bfloat16 the order of a sum decides between two nearly equal tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import loader


def main() -> None:
    """Generate, and save the tokens and the text on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--save", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = generate(load(arguments.model), tokenizer, arguments.prompt, arguments.tokens)
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        arguments.save.write_text(json.dumps({"tokens": tokens, "text": text}))
    if dist.is_initialized():
        dist.destroy_process_group()


def load(folder: Path) -> Any:
    """Return the model of a split, this process's rank of it, or that of a checkpoint."""
    if (folder / "manifest.json").exists():
        return loader.load_model(folder, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(model: Any, tokenizer: Any, prompt: str, count: int) -> list[int]:
    """Return exactly ``count`` greedy tokens."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    new: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return new


if __name__ == "__main__":
    main()
