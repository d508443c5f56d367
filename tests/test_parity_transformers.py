"""Parity with transformers: every type of the catalogue, more ranks than key and value heads, and shards bit for bit.

The comparisons are made by `parity_worker.py`, in one process a rank, for all cases of a number of ranks in one launch.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reshard.catalogue import model_types
from tests.parity_worker import Case

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
TOLERANCE = 1e-4

Outcomes = dict[str, list[dict[str, Any]]]

TYPES = [Case(name, name) for name in model_types()]

# Types for which the catalogue has a plan of its own. That of transformers for cohere does not cut the norm that every
# head has with use_qk_norm, and fails in transformers too.
OTHER_PLANS = [
    Case("cohere-other", "cohere", plan_source="transformers", config={"use_qk_norm": False}),
    *(Case(f"{name}-other", name, plan_source="transformers") for name in ("glm", "glm4", "phi3")),
]

SHARDS = [Case(f"{name}-shards", name, kind="shards", plan_source="transformers") for name in model_types()]

GREEDY = {"greedy": {}}
STATIC = {"static": {"cache_implementation": "static"}}
# The prompt in chunks: only then is a static cache allocated by the configuration's heads, before the first keys.
CHUNKED = {"chunked": {"cache_implementation": "static", "prefill_chunk_size": 5}}
SAMPLED = {"sampled": {"do_sample": True, "temperature": 2.0}}

# On 4 ranks; a tiny model has 4 heads in 2 groups, so every head of keys and values is on 2 ranks.
FEW_HEADS = [
    Case("llama", "llama", generations={**GREEDY, **STATIC, **CHUNKED, **SAMPLED}),
    Case("qwen2", "qwen2", generations={**GREEDY, **STATIC}),
    *(Case(name, name) for name in ("cohere", "gemma2", "glm4", "mixtral", "olmo2", "phi3", "qwen3", "starcoder2")),
    # Groups of 4 heads, of which a rank has 2; and one group for all ranks.
    *(Case(f"{name}-8-to-2", name, config={"num_attention_heads": 8}) for name in ("llama", "phi3")),
    *(Case(f"{name}-4-to-1", name, config={"num_key_value_heads": 1}) for name in ("llama", "phi3")),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    # The shards first: the peer knows only the default group, which a failed case may leave broken.
    return run_ranks(2, [*SHARDS, *TYPES, *OTHER_PLANS], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(4, FEW_HEADS, tmp_path_factory.mktemp("four"))


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", TYPES, ids=name_of)
def test_logits_and_tokens_are_those_of_one_process(two_ranks: Outcomes, case: Case):
    check_run(two_ranks[case.name])


@pytest.mark.parametrize("case", OTHER_PLANS, ids=name_of)
def test_logits_and_tokens_with_the_plan_of_transformers(two_ranks: Outcomes, case: Case):
    check_run(two_ranks[case.name])


@pytest.mark.parametrize("case", FEW_HEADS, ids=name_of)
def test_more_ranks_than_key_and_value_heads(four_ranks: Outcomes, case: Case):
    check_run(four_ranks[case.name])


@pytest.mark.parametrize("case", SHARDS, ids=name_of)
def test_shards_are_those_of_transformers(two_ranks: Outcomes, case: Case):
    refuse_errors(two_ranks[case.name])
    for outcome in two_ranks[case.name]:
        assert outcome["names"] == outcome["peer_names"]
        assert outcome["different"] == []
        assert outcome["cut"]


def check_run(outcomes: list[dict[str, Any]]) -> None:
    refuse_errors(outcomes)
    for outcome in outcomes:
        assert outcome["shape"] == outcome["expected_shape"]
        assert outcome["difference"] <= TOLERANCE * max(1.0, outcome["largest"])
        assert outcome["tokens"] == outcome["expected_tokens"]


def refuse_errors(outcomes: list[dict[str, Any]]) -> None:
    errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(outcomes) if outcome["error"]]
    assert not errors, "\n".join(errors)


def run_ranks(world_size: int, cases: list[Case], folder: Path) -> Outcomes:
    """Work through cases in as many processes as ranks; the first to fail ends all, and so does the time limit."""
    (folder / "cases.json").write_text(json.dumps([case._asdict() for case in cases]))
    arguments = [folder / "cases.json", folder, folder / "outcomes.json"]
    # The ranks meet in a store of this process, on a port that the system chooses and that is never given up between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
    started = time.monotonic()
    processes = [start_rank(rank, world_size, store.port, arguments, log) for rank, log in enumerate(logs)]
    try:
        wait(processes, started + TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    tails = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
    assert codes == [0] * world_size, f"ranks ended with {codes} after {time.monotonic() - started:.0f} s:\n{tails}"
    outcomes: Outcomes = json.loads((folder / "outcomes.json").read_text())
    return outcomes


def start_rank(rank: int, world_size: int, port: int, arguments: list[Path], log: Path) -> "subprocess.Popen[bytes]":
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "tests.parity_worker", *map(str, arguments)]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=stream, stderr=subprocess.STDOUT
        )


def wait(processes: "list[subprocess.Popen[bytes]]", deadline: float) -> None:
    """Return when all processes have ended, one has failed, or it is late."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)
