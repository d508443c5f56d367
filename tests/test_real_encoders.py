"""Trained models that are no decoders, in several processes against one: embeddings, recovered tokens, a transcript.

`tools/fetch_encoders.py` fetches them; a missing one is fetched here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "build" / "models"
WORKER = Path(__file__).with_name("encoders_worker.py")
NAMES = ("minilm", "antiberty", "rxnmapper", "whisper")

Found = dict[str, dict[str, Any]]


def model_folder(name: str) -> Path:
    if not (MODELS / name).exists():
        subprocess.run([sys.executable, ROOT / "tools" / "fetch_encoders.py", name, "--out", MODELS], check=True)
    return MODELS / name


def run_processes(count: int, folders: list[Path], results: Path) -> list[Found]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, *launcher, WORKER, results, *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{results}-{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one process makes of each, and of the recording that Whisper hears."""
    model_folder("speech")
    return run_processes(1, [model_folder(name) for name in NAMES], tmp_path_factory.mktemp("alone") / "r")[0]


def test_the_models_are_trained(alone: Found) -> None:
    """Sentences that mean the same are close, and most hidden tokens are found."""
    likeness = alone["minilm"]["output"] @ alone["minilm"]["output"].T
    assert likeness[0, 1] > 0.6 > 0.2 > likeness[0, 2]
    for name in ("antiberty", "rxnmapper"):
        found = [one == other for one, other in zip(alone[name]["tokens"], alone[name]["hidden"], strict=True)]
        assert sum(found) > 0.7 * len(found), (name, found)
    # Of the first two words of the recording, "ever tried", Whisper base mishears one.
    words = " ".join(re.findall(r"\w+", alone["whisper"]["text"].lower()))
    assert words.endswith("tried ever failed no matter try again fail again fail better")


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_give_what_one_gives(ranks: int, alone: Found, tmp_path: Path) -> None:
    """Vocabularies of 25 and 591 words are no multiples of the ranks."""
    for name in NAMES:
        reshard.split(model_folder(name), tmp_path / name, tp=ranks)
    for found in run_processes(ranks, [tmp_path / name for name in NAMES], tmp_path / "r"):
        for name, expected in alone.items():
            assert found[name].get("tokens") == expected.get("tokens"), name
            assert found[name].get("text") == expected.get("text"), name
            difference = (found[name]["output"] - expected["output"]).abs().max() / expected["output"].abs().max()
            assert difference < 1e-5, (name, difference)
