"""`load_model` from a cache: what it finds, what it says where it finds nothing, and building once for many ranks."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loader import load_model, open_shard
from manifests import uses
from manifests.errors import CheckpointError, LoadError
from manifests.process import this_process
from reshard.cache.listing import items_of
from tests.checkpoints import mentions
from tests.launching import ROOT
from tests.test_refusals import Outcome, Ranks
from tools.sweep.tiny import tiny_model

IDS = torch.tensor([[5, 6, 7]])
HOLD = "import sys, loader; shard = loader.open_shard(sys.argv[1], 0); print('held', flush=True); sys.stdin.readline()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", {"tie_word_embeddings": True}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    with torch.inference_mode():
        return pytest.approx(float(total(AutoModelForCausalLM.from_pretrained(model))), rel=1e-4, abs=1e-3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def total(model: Any) -> float:
    with torch.inference_mode():
        return float(model(IDS).logits.double().sum())


def refusal(*arguments: Any, **options: Any) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load_model(*arguments, **options)
    return caught.value


def entries(cache: Path) -> list[str]:
    """Return the names in a cache, that of the uses left out."""
    return sorted(path.name for path in cache.iterdir() if path.name != uses.FOLDER)


def run(command: str, **environment: str) -> str:
    """Run a command as a shell would, and return what it prints to stdout."""
    words = [sys.executable, "-m", "reshard", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_refusal_has_the_command_that_makes_it(model: Path, tmp_path: Path, expected: Any) -> None:
    cache = tmp_path / "my splits"
    options = {"self_contained": True, "max_file_nbytes": 10_000}
    error = refusal(model, tp=1, cache=cache, split=options)
    assert mentions(error, "holds no split of", model, "build=True")
    found = re.search("`(reshard .*)`", str(error))
    assert found
    out = run(found[1])
    assert entries(cache) == [Path(out).name]
    assert total(load_model(model, tp=1, cache=cache, split=options)) == expected
    # Without the options it is another split.
    assert mentions(refusal(model, tp=1, cache=cache), "holds no split")
    assert entries(cache) == [Path(out).name]


def test_it_is_built_once_on_request(model: Path, tmp_path: Path, expected: Any) -> None:
    cache = tmp_path / "cache"
    assert total(load_model(model, tp=1, cache=cache, build=True)) == expected
    (name,) = entries(cache)
    before = {path.name: path.stat().st_mtime_ns for path in (cache / name).iterdir()}
    assert total(load_model(model, tp=1, cache=cache, build=True)) == expected
    assert total(load_model(model, cache=cache)) == expected
    assert {path.name: path.stat().st_mtime_ns for path in (cache / name).iterdir()} == before
    assert run(f"reshard {model} --tp 1 --cache {cache} -q") == str(cache / name)
    assert total(load_model(cache / name)) == expected


def test_the_variable_names_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    assert mentions(refusal(model, tp=1), "give cache", "RESHARD_CACHE")
    monkeypatch.setenv("RESHARD_CACHE", str(tmp_path / "cache"))
    assert total(load_model(model, tp=1, build=True)) == expected
    assert len(entries(tmp_path / "cache")) == 1
    # A folder that is given by its path is loaded as ever.
    assert total(load_model(tmp_path / "cache" / entries(tmp_path / "cache")[0])) == expected


def test_a_damaged_split_is_not_loaded(model: Path, tmp_path: Path, expected: Any) -> None:
    cache = tmp_path / "cache"
    load_model(model, tp=1, cache=cache, build=True)
    (name,) = entries(cache)
    file = cache / name / "rank-00000-of-00001.safetensors"
    nbytes = file.stat().st_size
    os.truncate(file, nbytes - 1)
    error = refusal(model, tp=1, cache=cache)
    assert mentions(error, file, f"{nbytes - 1} bytes, {nbytes} expected", "`reshard ")
    assert total(load_model(model, tp=1, cache=cache, build=True)) == expected
    assert file.stat().st_size == nbytes
    assert entries(cache) == [name]


def test_what_planning_refuses_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(model / "nothing" / "there", tp=1, cache=tmp_path)
    assert mentions(refusal(model, tp=2, cache=tmp_path), "for 2 ranks", "torchrun --nproc-per-node 2")
    assert not entries(tmp_path)


def asking(model: Path, cache: Path, size: int = 2, **options: Any) -> list[Outcome]:
    return [{"folder": model, "options": {"tp": size, "cache": str(cache), **options}}] * size


def test_all_ranks_get_what_the_first_finds(ranks: Ranks, model: Path, tmp_path: Path, expected: Any) -> None:
    outcomes = ranks.run(*asking(model, tmp_path))
    for outcome in outcomes:
        assert outcome["kind"] == "LoadError"
        assert all(word in outcome["message"] for word in ("holds no split of", "--tp 2 --cache", "build=True"))
        assert outcome["seconds"] < 10
    for build in (True, False):
        for outcome in ranks.run(*asking(model, tmp_path, build=build)):
            assert (outcome["kind"], outcome["message"]) == ("", "")
            assert outcome["logits"] == expected
    assert len(entries(tmp_path)) == 1


def test_ranks_that_ask_for_different_splits_refuse(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    first, second = asking(model, tmp_path, build=True)
    other = {**second, "options": {**second["options"], "split": {"self_contained": True}}}
    for outcome in ranks.run(first, other):
        assert outcome["kind"] == "LoadError"
        assert "options of the split" in outcome["message"]
    alone = {**second, "options": {"tp": 2, "build": True}}
    for outcome in ranks.run(first, alone):
        assert outcome["kind"] == "LoadError"
        assert "RESHARD_CACHE" in outcome["message"]
        assert outcome["seconds"] < 20


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_comes_is_not_waited_for(ranks: Ranks, model: Path, tmp_path: Path, missing: int) -> None:
    asked = asking(model, tmp_path, build=True, wait_s=3)
    asked[missing] = {**asked[missing], "before": "never"}
    outcome = ranks.run(*asked)[1 - missing]
    assert outcome["kind"] == "LoadError"
    assert "rank 0" in outcome["message"] if missing == 0 else "has not come" in outcome["message"]
    assert outcome["seconds"] < 20


def test_groups_that_ask_at_once_build_once(ranks: Ranks, model: Path, tmp_path: Path, expected: Any) -> None:
    several = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = {"WORLD_SIZE": "2", "MASTER_PORT": str(server.getsockname()[1])}
        asked = asking(model, tmp_path, build=True)
        several += [{**rank, "environment": place | {"RANK": str(at)}} for at, rank in enumerate(asked)]
    found = ranks.run(*several)
    assert [(outcome["kind"], outcome["message"]) for outcome in found] == [("", "")] * 6
    assert all(outcome["logits"] == expected for outcome in found)
    assert len(entries(tmp_path)) == 1


def test_a_process_that_loads_by_path_is_a_user(model: Path, tmp_path: Path) -> None:
    load_model(model, tp=1, cache=tmp_path, build=True)
    (name,) = entries(tmp_path)
    assert uses.users_here(tmp_path / name) == [this_process()]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        assert {user.pid for user in uses.users_here(tmp_path / name)} == {os.getpid(), process.pid}
        listed = json.loads(run(f"reshard cache ls --cache {tmp_path} --json"))["items"]
        assert {user["pid"] for user in listed[0]["users"]} == {os.getpid(), process.pid}
        process.kill()
    assert [user.pid for user in uses.users_here(tmp_path / name)] == [os.getpid()]
    (item,) = items_of(tmp_path)
    assert item.state == "whole"


def test_a_split_outside_of_a_cache_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    run(f"reshard {model} --tp 1 -o {tmp_path / 'out'}")
    open_shard(tmp_path / "out", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
