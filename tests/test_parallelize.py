"""`loader.parallelize` on 2 ranks, compared with one process; what is refused; the collectives of a forward, counted.

All of it is run by `parallel_worker.py` in one launch of one process a rank.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import gathered, run_ranks
from tests.parallel_worker import MODELS, Model, Outcome

WORLD_SIZE = 2
TIMEOUT_S = 500
TOLERANCE = 1e-4

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What every rank found, by the name of a model or check."""
    folder = tmp_path_factory.mktemp("parallelize")
    run_ranks("tests.parallel_worker", folder, "parallelize", world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    return gathered(folder, WORLD_SIZE)


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
    # All but norms and routers is cut.
    shares = {name: [outcome["share"] for outcome in found(outcomes, name)] for name in ("llama", "phi3", "mixtral")}
    assert all(0.5 < share < 0.51 for ranks in shares.values() for share in ranks)


# By hand, for L layers: one sum for the embedding, one for the attention and one for the MLP or experts of every layer,
# and the head is gathered. The peer's are those of section 4 of `shared/hf.md`, which it took at 2 layers and 2 ranks.
Counts = Callable[[int], dict[str, int]]


def usual(layers: int) -> dict[str, int]:
    return {"all_reduce": 1 + 2 * layers, "all_gather": 1}


COUNTS: dict[str, tuple[Counts, dict[str, int] | None]] = {
    "llama": (usual, {"all_reduce": 5, "all_gather": 1}),
    "qwen2": (usual, None),
    "mixtral": (usual, {"all_reduce": 5, "all_gather": 1}),
    "mixtral, ep": (usual, {"all_reduce": 5, "all_gather": 1}),
    "deepseek_v2, dense": (usual, {"all_reduce": 5, "all_gather": 1}),
    # The peer gathers both fused projections of each layer; cut by their blocks they stay divided.
    "phi3": (usual, {"all_reduce": 5, "all_gather": 5}),
    # The peer gathers queries, keys and values for norms over all heads; ours sums the squares of queries and of keys.
    "olmo2": (
        lambda layers: {"all_reduce": 1 + 4 * layers, "all_gather": 1},
        {"all_reduce": 5, "all_gather": 7},
    ),
    # Where the experts of a layer, all but the first, have shared ones beside them, these are summed by themselves.
    "deepseek_v2": (lambda layers: {"all_reduce": 1 + 2 * layers + (layers - 1), "all_gather": 1}, None),
    # Every sum of a layer is a scatter, every norm ends with a gather; embedding and head are whole.
    "llama, sequence": (lambda layers: {"reduce_scatter": 2 * layers, "all_gather": 2 * layers + 1}, None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_collectives_of_a_forward(outcomes: Outcomes, name: str):
    expected, peer = COUNTS[name]
    for outcome in found(outcomes, name):
        assert outcome["collectives"] == expected(outcome["layers"])
        if peer:
            assert sum(expected(2).values()) <= sum(peer.values())


SHAPES: dict[str, dict[str, list[int]]] = {
    "plain": {"gate_up.weight": [8, 6], "gate_up.bias": [8], "down.weight": [5, 4], "down.bias": [5]},
    "nothing on a rank": {"gate_up.weight": [16, 6], "gate_up.bias": [16], "down.weight": [5, 8], "down.bias": [5]},
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
