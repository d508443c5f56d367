"""One process of the tests on real models: loads, generates, and leaves what it found."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import loader

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "List the planets of the solar system.",
    "Write a short story about a cat who learns to read.",
)
NEW_TOKENS = int(os.environ.get("NEW_TOKENS", "40"))


def main(folder: str, results: str, *dtypes: str) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    opened = watch_opened_weights()
    rank = int(os.environ.get("RANK", "0"))
    found: dict[str, Any] = {}
    for dtype in dtypes:
        model = load(Path(folder), getattr(torch, dtype))
        found[dtype] = measure(model, tokenizer, NEW_TOKENS if dtype == "float32" else 0)
        found[dtype]["numel"] = sum(parameter.numel() for parameter in model.parameters())
    found["files"] = sorted(opened)
    torch.save(found, f"{results}-{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def watch_opened_weights() -> set[str]:
    """Return a set that takes the name of every safetensors file that this process opens from now on."""
    opened: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            opened.add(Path(arguments[0]).name)

    sys.addaudithook(note)
    return opened


def load(folder: Path, dtype: torch.dtype) -> Any:
    """Return this rank of a split, or the whole model of a checkpoint."""
    if (folder / "manifest.json").exists():
        return loader.load_model(folder, dtype=dtype)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, new_tokens: int) -> dict[str, Any]:
    """Return the logits after each prompt by itself, and greedy tokens of all prompts as one batch."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    alone = [tokenizer.apply_chat_template(chat, **template) for chat in chats]
    logits = torch.stack([model(**inputs).logits[0, -1].float() for inputs in alone])
    if not new_tokens:
        return {"logits": logits}
    batch = tokenizer.apply_chat_template(chats, padding=True, **template)
    made = model.generate(**batch, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return {"logits": logits, "tokens": made[:, batch["input_ids"].shape[1] :].tolist()}


if __name__ == "__main__":
    main(*sys.argv[1:])
