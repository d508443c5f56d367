"""One process of the tests on trained models that are no decoders: uses each, and leaves what it found."""

import os
import re
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import loader

SENTENCES = ["A man is eating food.", "Someone has a meal.", "The stock market fell sharply today."]
HEAVY_CHAIN = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"
SMILES_TOKEN = r"\[[^\]]+\]|Br|Cl|>>|[BCNOSPFIbcnosp=#()+\-\\/:~@?>*$.%0-9]"
HIDDEN = 7
"""Every so many tokens one is hidden."""
SPEECH = Path(__file__).parent.parent / "build" / "models" / "speech" / "speech.wav"


def main(results: str, *folders: str) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    for folder in map(Path, folders):
        with torch.inference_mode():
            found[folder.name] = USES[folder.name](load(folder), folder)
    torch.save(found, f"{results}-{os.environ.get('RANK', '0')}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def load(folder: Path) -> Any:
    """Return this rank of a split, or the whole model of a checkpoint, in float32."""
    if (folder / "manifest.json").exists():
        return loader.load_model(folder, dtype=torch.float32)
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()


def embed(model: Any, folder: Path) -> dict[str, Any]:
    """Return the embeddings of sentences, as sentence-transformers makes them."""
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    states = model(**batch).last_hidden_state
    counted = batch["attention_mask"].unsqueeze(-1)
    return {"output": torch.nn.functional.normalize((states * counted).sum(1) / counted.sum(1), dim=-1)}


def recover(model: Any, folder: Path, tokens: list[str]) -> dict[str, Any]:
    """Return what the model makes of a sequence with hidden tokens."""
    vocabulary = (folder / "vocab.txt").read_text().split("\n")
    ids = torch.tensor([[vocabulary.index(token) for token in ("[CLS]", *tokens, "[SEP]")]])
    hidden = torch.arange(HIDDEN, ids.shape[1] - 1, HIDDEN)
    asked = ids.clone()
    asked[0, hidden] = vocabulary.index("[MASK]")
    logits = model(asked).logits
    found = logits[0, hidden].argmax(-1)
    return {"output": logits, "tokens": found.tolist(), "hidden": ids[0, hidden].tolist()}


def recover_residues(model: Any, folder: Path) -> dict[str, Any]:
    """Return what the model makes of an antibody's heavy chain."""
    return recover(model, folder, list(HEAVY_CHAIN))


def recover_atoms(model: Any, folder: Path) -> dict[str, Any]:
    """Return what the model makes of a reaction."""
    return recover(model, folder, re.findall(SMILES_TOKEN, REACTION))


def transcribe(model: Any, folder: Path) -> dict[str, Any]:
    """Return the output for a recording, and the transcript."""
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    with wave.open(str(SPEECH)) as recording:
        sound = np.frombuffer(recording.readframes(recording.getnframes()), np.int16) / np.float32(1 << 15)
        rate = recording.getframerate()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(sound, sampling_rate=rate, return_tensors="pt").input_features
    start = torch.tensor([[50258, 50259, 50359, 50363]])
    output = model(features, decoder_input_ids=start).logits
    made = model.generate(features, language="en", task="transcribe", max_new_tokens=48)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return {"output": output, "tokens": made[0].tolist(), "text": tokenizer.decode(made[0], skip_special_tokens=True)}


USES = {"minilm": embed, "antiberty": recover_residues, "rxnmapper": recover_atoms, "whisper": transcribe}


if __name__ == "__main__":
    main(*sys.argv[1:])
