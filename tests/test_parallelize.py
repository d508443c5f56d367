"""`loader.parallelize` on 2 ranks, compared with one process; what is refused; the collectives of a forward, counted.

All of it is run by `parallel_worker.py` in one launch of one process a rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import run_ranks
from tests.parallel_worker import MODELS, Model, Outcome

WORLD_SIZE = 2
TIMEOUT_S = 500
TOLERANCE = 1e-4
LAYERS = 2

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What every rank found, by the name of a model or check."""
    folder = tmp_path_factory.mktemp("parallelize")
    run_ranks("tests.parallel_worker", folder, "parallelize", world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(WORLD_SIZE)]
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def found(outcomes: Outcomes, name: str) -> list[Outcome]:
    for rank, outcome in enumerate(outcomes[name]):
        assert not outcome["error"], f"rank {rank}: {outcome['error']}"
    return outcomes[name]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_logits_and_tokens_are_those_of_one_process(outcomes: Outcomes, case: Model):
    for outcome in found(outcomes, case.name):
        assert outcome["difference"] <= TOLERANCE * max(1.0, outcome["largest"])
        assert outcome["tokens"] == outcome["expected_tokens"]
        assert outcome["tied"] == case.config.get("tie_word_embeddings", False)


def test_a_rank_keeps_its_part(outcomes: Outcomes):
    # Of the tiny llama all but the norms is cut: 5 norms of 64 features in 2 layers.
    shares = {name: [outcome["share"] for outcome in found(outcomes, name)] for name in ("llama", "phi3", "mixtral")}
    assert all(0.5 < share < 0.51 for ranks in shares.values() for share in ranks)


# The peer's counts are those of `shared/hf.md`, section 4: 2 layers, 2 ranks, seen with CommDebugMode.
PEER = {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}
COUNTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    # By hand: the embedding, attention and MLP of each layer are summed, the head is gathered.
    "llama": ({"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1}, PEER),
    "qwen2": ({"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1}, PEER),
    "mixtral": ({"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1}, PEER),
    "mixtral, ep": ({"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1}, PEER),
    # The peer gathers both fused projections of each layer; cut by their blocks they stay divided.
    "phi3": ({"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1}, {**PEER, "all_gather": 1 + 2 * LAYERS}),
    # Queries, keys and values are gathered for norms over all heads; the peer's plan.
    "olmo2": (
        {"allreduce_": 1 + 2 * LAYERS, "_allgather_base_": 1 + 3 * LAYERS},
        {**PEER, "all_gather": 1 + 3 * LAYERS},
    ),
    # Every sum of a layer is a scatter, every norm ends with a gather; embedding and head are whole.
    "llama, sequence": (
        {"_reduce_scatter_base_": 2 * LAYERS, "_allgather_base_": 2 * LAYERS + 1},
        {"all_reduce": 0, "all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS},
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_collectives_of_a_forward(outcomes: Outcomes, name: str):
    expected, peer = COUNTS[name]
    for outcome in found(outcomes, name):
        counted = outcome["collectives"]
        assert counted == expected
        assert counted.get("allreduce_", 0) <= peer["all_reduce"]
        assert counted.get("_allgather_base_", 0) <= peer["all_gather"]


SHAPES: dict[str, dict[str, list[int]]] = {
    "plain": {"gate_up.weight": [8, 6], "gate_up.bias": [8], "down.weight": [5, 4], "down.bias": [5]},
    "tied": {"embed.weight": [5, 4]},
    "one block twice": {
        "0.gate_up.weight": [8, 6],
        "0.gate_up.bias": [8],
        "0.down.weight": [6, 4],
        "0.down.bias": [6],
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_plain_modules(outcomes: Outcomes, name: str):
    for outcome in found(outcomes, name):
        assert torch.equal(outcome["output"], outcome["expected"])
        assert outcome["shapes"] == SHAPES[name]


REFUSED: dict[str, tuple[str, ...]] = {
    "second call": ("LoadError", "has its hooks already"),
    "compiled": ("LoadError", "is compiled"),
    "quantized": ("LoadError", "is quantized"),
    "other tp": ("LoadError", "tp 4", "has 2 ranks"),
    "other ep": ("PlanError", "ep", "3", "2 ranks"),
    "no plan": ("PlanError", "no built-in plan"),
    "dead rule": ("PlanError", "top = colwise"),
    "odd": ("DegreeError", "down.weight", "5"),
    "other model": ("LoadError", "another split"),
    "save": ("LoadError", "save_pretrained", "before it is cut"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_changed(outcomes: Outcomes, name: str):
    for outcome in found(outcomes, name):
        assert all(word in outcome["refused"] for word in REFUSED[name]), outcome["refused"]
        assert outcome["unchanged"]


def test_without_a_group_there_is_one_rank(tmp_path: Path):
    from loader import parallelize
    from manifests.errors import LoadError

    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 5))
    with pytest.raises(LoadError, match="tp 2: the process group has 1 ranks"):
        parallelize(module, {"0": "colwise"}, tp=2)
    weight = module[0].weight.detach().clone()
    plan = tmp_path / "plan.toml"
    plan.write_text('"0" = "colwise"\n')
    parallelize(module, plan)
    assert torch.equal(module[0].weight, weight)
    assert not module[0].weight.requires_grad
