"""What `load_model` refuses, on every rank, with the cause, in seconds; and which slow ranks it waits for.

The ranks are processes (`refusals_worker.py`) that meet by torchrun's variables, or in a group of their own.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from loader import load_model, open_shard
from manifests.errors import LoadError, ManifestError
from reshard import split
from tests.checkpoints import mentions
from tests.launching import ROOT
from tools.sweep.tiny import tiny_model

LIMIT_S = 10
"""Seconds within which all ranks have to end, from when one of them can know."""

Outcome = dict[str, Any]
Place = Callable[[Path], None]
RANK_0, RANK_1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"


class Ranks:
    """Runs cases of several ranks."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.refusals_worker", str(folder)],
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What runs in the background ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def run(self, *ranks: dict[str, Any], limit_s: float = 40) -> list[Outcome]:
        """Return what became of the ranks: each has a ``folder``, and what is not usual."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        usual = {"options": {}, "before": ""}
        places = [
            {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(len(ranks))
        ]
        case = [
            {**usual, **rank, "folder": str(rank["folder"]), "environment": place | rank.get("environment", {})}
            for rank, place in zip(ranks, places, strict=True)
        ]
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"ranks": case, "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()
        outcomes: list[Outcome] = json.loads(self._process.stdout.readline())
        return outcomes

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, its splits for 1, 2 and 4 ranks, and that of another llama of the same shapes."""
    root = tmp_path_factory.mktemp("splits")
    tiny_model("llama", {"tie_word_embeddings": True}).save_pretrained(root / "source")
    other = tiny_model("llama", {"tie_word_embeddings": True})
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save_pretrained(root / "another")
    for tp in (1, 2, 4):
        split(root / "source", root / f"tp{tp}", tp=tp)
    split(root / "another", root / "other", tp=2)
    return root


def check_refused(outcomes: list[Outcome], *words: object, kinds: tuple[str, ...] = ("LoadError",)) -> None:
    """Check that every rank has ended, in time, with an error that has the words."""
    assert all(outcome["kind"] in kinds for outcome in outcomes), outcomes
    for rank, outcome in enumerate(outcomes):
        missing = [word for word in words if str(word) not in outcome["message"]]
        assert not missing, (rank, missing, outcome)
        assert outcome["seconds"] < LIMIT_S, (rank, outcome)


def test_ranks_that_agree_compute(ranks: Ranks, splits: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(splits / "source")(torch.tensor([[5, 6, 7]])).logits
    expected = pytest.approx(float(logits.double().sum()), rel=1e-4, abs=1e-3)
    for before in ("", "elsewhere", "group"):
        for outcome in ranks.run(*[{"folder": splits / "tp2", "before": before}] * 2):
            assert (outcome["kind"], outcome["message"]) == ("", "")
            assert outcome["logits"] == expected


@pytest.mark.parametrize("started", [1, 2, 8])
def test_another_number_of_processes(ranks: Ranks, splits: Path, started: int) -> None:
    outcomes = ranks.run(*[{"folder": splits / "tp4"}] * started)
    check_refused(outcomes, "for 4 ranks", f"{started} processes", "torchrun --nproc-per-node 4", f"--tp {started}")


def test_no_variables(ranks: Ranks, splits: Path) -> None:
    alone = {"folder": splits / "tp4", "environment": {"RANK": "", "WORLD_SIZE": ""}}
    check_refused(ranks.run(alone), "for 4 ranks", "1 processes", "WORLD_SIZE is not set")


def test_more_processes_than_ranks_in_a_group(ranks: Ranks, splits: Path) -> None:
    outcomes = ranks.run(*[{"folder": splits / "tp1", "before": "group"}] * 2)
    check_refused(outcomes, "for 1 ranks", "the process group has 2", "--tp 2")


PLACES: dict[str, tuple[list[dict[str, str]], tuple[str, ...]]] = {
    "RANK 0 twice": ([{}, {"RANK": "0"}], ("both have rank 0 of 2", "RANK of its own")),
    "RANK 1 twice": ([{}, {}, {"RANK": "1"}, {}], ("both have rank 1 of 4", "RANK of its own")),
    "too high": ([{"RANK": "2"}, {"RANK": "3"}], ("of WORLD_SIZE 2", "from 0 to 1")),
    "no RANK": ([{"RANK": ""}, {"RANK": ""}], ("WORLD_SIZE is 2", "RANK is not set", "torchrun")),
    "no address": ([{"MASTER_ADDR": ""}] * 2, ("MASTER_ADDR is not set",)),
    "no port": ([{"MASTER_PORT": ""}] * 2, ("MASTER_PORT is not set",)),
    "a name for a port": ([{"MASTER_PORT": "http"}] * 2, ("MASTER_PORT is 'http'",)),
    "a name for a size": ([{"WORLD_SIZE": "two"}] * 2, ("WORLD_SIZE is 'two'",)),
    "a negative RANK": ([{"RANK": "-1"}] * 2, ("RANK is '-1'",)),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_place_that_is_none(ranks: Ranks, splits: Path, kind: str) -> None:
    environments, words = PLACES[kind]
    folder = splits / f"tp{len(environments)}"
    check_refused(ranks.run(*[{"folder": folder, "environment": one} for one in environments]), *words)


def edit_manifest(folder: Path, **members: Any) -> None:
    """Change members of a manifest and bring its digest in line, as FORMAT.md has it."""
    path = folder / "manifest.json"
    lines = path.read_bytes().removesuffix(b"\n")
    head = lines[: -len('"}') - 32]
    for name, (old, new) in members.items():
        assert head.count(f'"{name}":{old}'.encode()) == 1
        head = head.replace(f'"{name}":{old}'.encode(), f'"{name}":{new}'.encode())
    path.write_bytes(head + xxhash.xxh3_128_hexdigest(head + b'"}').encode() + b'"}\n')


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def swap_names(folder: Path) -> None:
    (folder / RANK_0).rename(folder / "x")
    (folder / RANK_1).rename(folder / RANK_0)
    (folder / "x").rename(folder / RANK_1)


def resize(by: int) -> Place:
    return lambda folder: os.truncate(folder / RANK_1, (folder / RANK_1).stat().st_size + by)


def become_folder(folder: Path) -> None:
    (folder / RANK_1).unlink()
    (folder / RANK_1).mkdir()


# What rank 1's folder suffers, and what every rank has to say of it.
BROKEN: dict[str, tuple[Place, tuple[str, ...]]] = {
    "missing file": (lambda folder: (folder / RANK_1).unlink(), (RANK_1, "missing")),
    "missing common file": (
        lambda folder: (folder / "common.safetensors").unlink(),
        ("common.safetensors", "missing"),
    ),
    "short file": (resize(-1), (RANK_1, "bytes", "expected")),
    "long file": (resize(1), (RANK_1, "bytes", "expected")),
    "empty file": (lambda folder: os.truncate(folder / RANK_1, 0), (RANK_1, "0 bytes", "expected")),
    "a folder for a file": (become_folder, (RANK_1, "cannot be opened", "Is a directory")),
    "swapped names": (swap_names, (RANK_1, "is the file of rank 0, that of rank 1 is expected")),
    "header": (lambda folder: flip(folder / RANK_1, 60), (RANK_1, "expected")),
    "padding of the header": (lambda folder: flip(folder / RANK_1, 4090), (RANK_1,)),
    "no manifest": (remove_manifest, ("no manifest.json", "copy it again")),
    "cut manifest": (lambda folder: os.truncate(folder / "manifest.json", 500), ("not a readable manifest",)),
    "empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), ("not a readable manifest",)),
    "changed manifest": (lambda folder: flip(folder / "manifest.json", 40), ("manifest.json",)),
    "other version": (lambda folder: edit_manifest(folder, version=("2", "3")), ("format version 3", "version 2")),
    "other format": (lambda folder: edit_manifest(folder, format=('"reshard"', '"other"')), ("not a manifest",)),
    "other config": (
        lambda folder: flip(folder / "config.json", 20),
        ("config.json", "was changed after the split"),
    ),
    "other attributes": (lambda folder: edit_manifest(folder, sizes=("{", '{"x":7,')), ("another manifest.json",)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_one_rank_finds_ends_all(ranks: Ranks, splits: Path, tmp_path: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    shutil.copytree(splits / "tp2", tmp_path / "out")
    change(tmp_path / "out")
    outcomes = ranks.run({"folder": splits / "tp2"}, {"folder": tmp_path / "out"})
    check_refused(outcomes, *words, kinds=("LoadError", "ManifestError"))
    assert "rank 1 cannot go on" in outcomes[0]["message"]


def test_a_file_of_another_split(ranks: Ranks, splits: Path, tmp_path: Path) -> None:
    shutil.copytree(splits / "tp2", tmp_path / "out")
    shutil.copy(splits / "other" / RANK_0, tmp_path / "out" / RANK_0)
    outcomes = ranks.run({"folder": tmp_path / "out"}, {"folder": splits / "tp2"})
    check_refused(outcomes, RANK_0, "belongs to another split: its key is", "is expected")
    assert "rank 0 cannot go on" in outcomes[1]["message"]


def test_ranks_of_different_splits(ranks: Ranks, splits: Path) -> None:
    outcomes = ranks.run({"folder": splits / "tp2"}, {"folder": splits / "other"})
    check_refused(outcomes, "rank 1 cannot go on: another split than rank 0: key")


@pytest.mark.parametrize("option", [{"dtype": "float64"}, {"use_cache": False}])
def test_ranks_that_load_differently(ranks: Ranks, splits: Path, option: dict[str, Any]) -> None:
    outcomes = ranks.run({"folder": splits / "tp2"}, {"folder": splits / "tp2", "options": option})
    check_refused(outcomes, "rank 1 cannot go on: another", *option.values())


def test_a_model_of_other_names(ranks: Ranks, splits: Path) -> None:
    options = {"options": {"num_hidden_layers": 2, "intermediate_size": 48}}
    outcomes = ranks.run(*[{"folder": splits / "tp2", **options}] * 2)
    check_refused(outcomes, "layers.2", "in the split, but no parameter", "[48, ", "in the model")


@pytest.mark.parametrize("kind", ["checkpoint", "hidden", "nowhere"])
def test_a_folder_that_is_no_split(ranks: Ranks, splits: Path, tmp_path: Path, kind: str) -> None:
    hidden = tmp_path / ".out.partial-0123456789ab"
    shutil.copytree(splits / "tp2", hidden)
    folder, words = {
        "checkpoint": (splits / "source", ("it is a checkpoint, no split", f"reshard {splits / 'source'} --tp N")),
        "hidden": (hidden, ("has not finished", str(tmp_path / "out"))),
        "nowhere": (tmp_path / "nowhere", ("no such folder", "reshard MODEL --tp N")),
    }[kind]
    outcomes = ranks.run({"folder": splits / "tp2"}, {"folder": folder})
    check_refused(outcomes, folder, *words, kinds=("LoadError", "ManifestError"))
    with pytest.raises(ManifestError) as caught:
        open_shard(folder, 0)
    assert mentions(caught.value, folder, *words)


DEATHS = [(0, "kill"), (1, "segfault"), (3, "exit")]
if os.environ.get("FULL"):
    DEATHS = [(rank, how) for rank in range(4) for how in ("kill", "exit", "segfault")]


@pytest.mark.parametrize(("dying", "how"), DEATHS)
def test_a_rank_that_dies_ends_all(ranks: Ranks, splits: Path, dying: int, how: str) -> None:
    outcomes = ranks.run(*[{"folder": splits / "tp4", "before": how if rank == dying else ""} for rank in range(4)])
    assert outcomes.pop(dying)["kind"] == "none"
    # Where rank 0 dies, the store may be lost first.
    check_refused(outcomes, "rank 0" if dying == 0 else f"rank {dying} cannot go on", "ended" if dying else "")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_in_a_group_ends_all(ranks: Ranks, splits: Path, dying: int) -> None:
    before = ["killed in group" if rank == dying else "group" for rank in range(2)]
    outcomes = ranks.run(*[{"folder": splits / "tp2", "before": one} for one in before])
    check_refused([outcomes[1 - dying]], f"rank {dying}", "end")


def test_a_rank_that_is_interrupted_ends_all(ranks: Ranks, splits: Path) -> None:
    outcomes = ranks.run({"folder": splits / "tp2"}, {"folder": splits / "tp2", "before": "interrupt"})
    assert outcomes[1]["kind"] == "KeyboardInterrupt"
    check_refused(outcomes[:1], "rank 1 cannot go on: KeyboardInterrupt")


@pytest.mark.parametrize("dying", [1, 2])
def test_a_rank_of_another_machine_that_dies_ends_all(ranks: Ranks, splits: Path, dying: int) -> None:
    """After `SILENCE_S`, which is 2 here."""
    before = ["lost machine" if rank == dying else "elsewhere" for rank in range(4)]
    outcomes = ranks.run(*[{"folder": splits / "tp4", "before": one} for one in before])
    outcomes.pop(dying)
    check_refused(outcomes, f"rank {dying} cannot go on: no sign of process")


def test_a_rank_that_reads_slowly_is_told_of_a_refusal(ranks: Ranks, splits: Path) -> None:
    slow = {"folder": splits / "tp2", "before": "slow", "options": {"read": "read"}}
    (alone, _) = ranks.run(slow, {"folder": splits / "tp2"})
    assert alone["kind"] == ""
    outcome, _ = ranks.run(slow, {"folder": splits / "tp2", "before": "interrupt"})
    check_refused([outcome], "rank 1 cannot go on: KeyboardInterrupt")
    assert outcome["seconds"] < alone["seconds"] - 2


@pytest.mark.parametrize("before", ["sleep", "late"])
def test_a_slow_rank_is_waited_for(ranks: Ranks, splits: Path, before: str) -> None:
    for slow in (0, 1):
        outcomes = ranks.run(*[{"folder": splits / "tp2", "before": before if rank == slow else ""} for rank in (0, 1)])
        assert [outcome["kind"] for outcome in outcomes] == ["", ""]
        assert all(outcome["seconds"] > 2.5 for outcome in outcomes)


def test_a_slow_rank_is_waited_for_as_long_as_is_asked_for(ranks: Ranks, splits: Path) -> None:
    slow = {"folder": splits / "tp2", "before": "sleep"}
    outcomes = ranks.run({"folder": splits / "tp2", "options": {"wait_s": 1.0}}, slow)
    check_refused(outcomes, "rank 1 cannot go on: is not ready, 1 s after rank 0 was ready", "wait_s")


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(ranks: Ranks, splits: Path, absent: int) -> None:
    folder = {"folder": splits / "tp2", "options": {"wait_s": 2.0}}
    outcomes = ranks.run(*[{**folder, "before": "never" if rank == absent else ""} for rank in (0, 1)])
    words = ("has not come to load the split", "2 s after rank 0") if absent else ("rank 0", "cannot be reached", "2 s")
    check_refused([outcomes[1 - absent]], f"rank {absent}", *words)


def test_a_refusal_reaches_a_rank_that_comes_later(ranks: Ranks, splits: Path, tmp_path: Path) -> None:
    outcomes = ranks.run({"folder": tmp_path / "none"}, {"folder": splits / "tp2", "before": "late"})
    check_refused(outcomes, "no such folder", tmp_path / "none", kinds=("LoadError", "ManifestError"))


def test_a_process_that_is_not_in_the_group(splits: Path) -> None:
    outsider: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(LoadError, match="no rank of the group"):
        load_model(splits / "tp2", group=outsider)
