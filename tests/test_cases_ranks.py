"""The cases that need processes: a whole small model, loaded by its ranks, and splits that are not for them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from loader import load_model, open_shard
from manifests.errors import DamageError, LoadError, OutputError, ReshardError
from manifests.manifest import encode_manifest, read_manifest
from reshard import merge, split, verify
from tests.checkpoints import LLAMA, count, mentions, save
from tests.launching import ROOT, run_ranks

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


def llama(folder: Path, *job: str, tied: bool = False) -> Path:
    """Make a split of a tiny Llama for two ranks, the logits of the whole one, and say what is to be done with them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
    model.save_pretrained(folder / "in")
    ids = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(ids).logits}, folder / "whole.pt")
    split(folder / "in", folder / "split", tp=2)
    (folder / "job.json").write_text(json.dumps(job))
    return folder


def swapped(folder: Path) -> None:
    out = llama(folder, "refused", "rank-0000") / "split"
    names = [out / f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    names[0].rename(folder / "kept")
    names[1].rename(names[0])
    (folder / "kept").rename(names[1])


def short(folder: Path) -> None:
    """Cut rank 1's file in half: a map of it would end the process with a bus error. Rank 0 says it too."""
    path = llama(folder) / "split" / "rank-00001-of-00002.safetensors"
    nbytes = path.stat().st_size
    os.truncate(path, nbytes // 2)
    words = ("refused", path.name, f"{nbytes // 2} bytes", f"{nbytes} expected")
    (folder / "job.json").write_text(json.dumps(words))


JOBS: dict[str, Callable[[Path], object]] = {
    "b01 a tied head": lambda folder: llama(folder, "right", tied=True),
    "h01 a shorter file": short,
    "i02 buffers of no file": lambda folder: llama(folder, "right"),
    "m01 swapped files": swapped,
    "m03 compiled after its hooks": lambda folder: llama(folder, "compiled"),
}


def run_jobs(work: Path, jobs: dict[str, Callable[[Path], object]], world_size: int) -> dict[str, list[str]]:
    """Return, for every job, what went wrong on each rank."""
    for name, make in jobs.items():
        make(work / name)
    run_ranks("tests.cases_worker", work, world_size=world_size, timeout_s=120)
    found = [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    return {name: [rank[name] for rank in found] for name in jobs}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_jobs(tmp_path_factory.mktemp("two"), JOBS, 2)


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks(of_two_ranks: dict[str, list[str]], name: str) -> None:
    assert of_two_ranks[name] == ["", ""]


def test_m01_another_number_of_ranks(tmp_path: Path) -> None:
    """Every rank says both numbers, and none waits for another."""
    jobs: dict[str, Callable[[Path], object]] = {"three": lambda folder: llama(folder, "refused", " 2 ", " 3")}
    assert run_jobs(tmp_path, jobs, 3) == {"three": [""] * 3}


def test_m01_without_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    llama(tmp_path)
    with pytest.raises(LoadError) as caught:
        load_model(tmp_path / "split")
    assert mentions(caught.value, " 2 ")


def test_b01_a_tied_head_is_not_given_back(tmp_path: Path) -> None:
    llama(tmp_path, tied=True)
    merge(tmp_path / "split", tmp_path / "again")
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")


RULES = {"model.norm": "replicate", "model.w": "colwise"}


def replicas(folder: Path) -> Path:
    """Make a split whose rank 1 has another norm than rank 0, by one bit."""
    save(folder / "in", {"model.norm.weight": count(4, start=1), "model.w.weight": count(4, 4)}, LLAMA)
    out = folder / "split"
    split(folder / "in", out, tp=2, plan=RULES, layout="checkpoint", self_contained=True)
    path = out / "rank-00001-of-00002.safetensors"
    file = next(file for file in read_manifest(out).files if file.name == path.name)
    with path.open("r+b") as stream:
        stream.seek(file.data_offset + file.tensors["model.norm.weight"].offset)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    return out


def test_n01_one_bit_of_a_copy(tmp_path: Path) -> None:
    out = replicas(tmp_path)
    for attempt in (lambda: verify(out), lambda: merge(out, tmp_path / "again")):
        with pytest.raises(DamageError) as caught:
            attempt()
        assert mentions(caught.value, "rank-00001-of-00002.safetensors", "model.norm.weight")
    assert not (tmp_path / "again").exists()


def test_n01_the_hashes_were_brought_in_line(tmp_path: Path) -> None:
    out = replicas(tmp_path)
    manifest = read_manifest(out)
    files = []
    for file in manifest.files:
        data = (out / file.name).read_bytes()[file.data_offset :]
        extents = {
            name: msgspec.structs.replace(
                extent, tiles=(xxhash.xxh3_128_hexdigest(data[extent.offset : extent.offset + extent.nbytes]),)
            )
            for name, extent in file.tensors.items()
        }
        files.append(msgspec.structs.replace(file, tensors=extents))
    (out / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=tuple(files))))
    for attempt in (lambda: verify(out), lambda: merge(out, tmp_path / "again")):
        with pytest.raises(DamageError) as caught:
            attempt()
        assert mentions(caught.value, "model.norm.weight", "rank-00000", "rank-00001")
    assert not (tmp_path / "again").exists()


def test_f01_the_disk_fills(tmp_path: Path) -> None:
    """2 MB, and no file may have more than 600 kB."""
    save(tmp_path / "in", {f"model.w{i}.weight": count(256, 256, start=i) for i in range(8)}, LLAMA)
    (tmp_path / "plan.toml").write_text('"model.*" = "colwise"\n')
    command = f"ulimit -f 600; exec {sys.executable} -m reshard in --tp 2 --plan plan.toml --layout checkpoint -o out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    limited = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True,
                             timeout=60, check=False)  # fmt: skip
    assert limited.returncode == OutputError.exit_code, limited.stderr
    assert "out" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReshardError):
        verify(tmp_path / "out")
    split(tmp_path / "in", tmp_path / "out", tp=2, plan=tmp_path / "plan.toml", layout="checkpoint")
    verify(tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "again")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "in" / "model.safetensors")[name])


def test_h02_a_rank_opens_its_own_files(tmp_path: Path) -> None:
    """The other rank's file is not even there."""
    save(tmp_path / "in", {"model.w.weight": count(8, 8)}, LLAMA)
    split(tmp_path / "in", tmp_path / "split", tp=2, plan={"model.w": "colwise"}, layout="checkpoint")
    shutil.move(tmp_path / "split" / "rank-00001-of-00002.safetensors", tmp_path / "elsewhere")
    assert torch.equal(open_shard(tmp_path / "split", 0)["model.w.weight"], count(4, 8))
