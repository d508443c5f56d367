"""Parity with transformers: a quarter of the sweep, more ranks than key and value heads, and shards bit for bit.

`make sweep` does it for every type. The comparisons are made by `tools.sweep.worker`, in one process a rank, for all
cases of a number of ranks in one launch.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.sweep.cases import Case
from tools.sweep.pool import Outcomes, work_through
from tools.sweep.records import Record, record
from tools.sweep.report import needs_more

PEER_FILE = Path(__file__).parents[1] / "tools" / "sweep" / "peer.json"

# One or two types of every kind: how heads, norms, experts, states and parts are laid out, stored and placed.
QUARTER = (
    "cohere",  # a norm for every head
    "gemma2",
    "gpt_neox",  # queries, keys and values of a head side by side
    "gptj",
    "llama",
    "phi3",  # fused projections
    "starcoder2",
    "olmo2",  # norms over all heads
    "glm4",
    "helium",
    "hrm_text",  # one stored tensor is several
    "gemma4_text",  # layers whose heads differ
    "gemma3n_text",
    "gpt_oss",  # sinks; experts with biases
    "beam",
    "step3p5",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "minimax_m2",
    "ernie4_5_moe",
    "deepseek_v2",  # latent attention
    "deepseek_v3",
    "glm_moe_dsa",
    "longcat_flash",  # experts that do nothing
    "kimi_linear",  # states
    "qwen3_next",
    "nemotron_h",
    "jamba",
    "falcon_h1",
    "minimax",
    "lfm2_moe",
    "zaya",
    "llama4_text",  # packed rows
    "sarvam_moe",  # stored fused, split when loaded
    "inkling2_text",  # padded vocabulary
    "youtu",
    "qwen2_5_vl",  # composites
    "gemma3",
    "qwen3_vl_moe",
    "ernie4_5_vl_moe",
    "t5gemma",
    "voxtral",
)
TYPES = [Case(name, name) for name in QUARTER]

# Types for which the catalogue has a plan of its own. That of transformers for cohere does not cut the norm that every
# head has with use_qk_norm, and fails in transformers too.
OTHER_PLANS = [
    Case("cohere-other", "cohere", plan_source="transformers", values={"use_qk_norm": False}),
    *(Case(f"{name}-other", name, plan_source="transformers") for name in ("glm", "glm4", "phi3")),
    # What is set and taken for parts that ours divides is not where theirs leaves them whole.
    *(Case(f"{name}-other", name, plan_source="transformers") for name in ("qwen3_vl", "embedding_gemma2_text")),
]

EXPERTS = [
    Case(f"{name}-ep2", name, experts=2)
    for name in (
        "aria_text",
        "deepseek_v3",
        "ernie4_5_vl_moe",
        "gpt_oss",
        "granitemoe",
        "lfm2_moe",
        "mixtral",
        "nemotron_h",
        "openai_privacy_filter",
        "qwen3_moe",
        "zaya",
    )
]

# Where the peer is right, and a few that cost little.
WRONG_SHARDS = ("cohere", "gemma3n_text", "hrm_text", "qwen3_vl_moe", "sarvam_moe", "zaya", "youtu")
CHEAP = ("codegen", "exaone4", "gemma", "glm", "granite", "mistral", "olmo", "phi", "qwen2", "qwen3", "smollm3")
SHARDS = [
    Case(f"{name}-shards", name, kind="shards", plan_source="transformers")
    for name in (*(name for name in QUARTER if name not in WRONG_SHARDS), *CHEAP)
]

# What transformers cuts before it takes it apart: no error, other weights.
SILENTLY_WRONG = Case("hrm_text-peer", "hrm_text", kind="peer")

GREEDY = {"greedy": {}}
STATIC = {"static": {"cache_implementation": "static"}}
# The prompt in chunks: only then is a static cache allocated by the configuration's heads, before the first keys.
CHUNKED = {"chunked": {"cache_implementation": "static", "prefill_chunk_size": 5}}
SAMPLED = {"sampled": {"do_sample": True, "temperature": 2.0}}

# On 4 ranks; a tiny model has 4 heads in 2 groups, so every head of keys and values is on 2 ranks.
FEW_HEADS = [
    Case("llama", "llama", generations={**GREEDY, **STATIC, **CHUNKED, **SAMPLED}),
    Case("qwen2", "qwen2", generations={**GREEDY, **STATIC}),
    *(
        Case(name, name)
        for name in ("cohere", "gemma2", "gemma4_text", "glm4", "mixtral", "olmo2", "phi3", "qwen3", "qwen3_next")
    ),
    # Groups of 4 heads, of which a rank has 2; and one group for all ranks.
    *(Case(f"{name}-8-to-2", name, values={"num_attention_heads": 8}) for name in ("llama", "phi3")),
    *(Case(f"{name}-4-to-1", name, values={"num_key_value_heads": 1}) for name in ("llama", "phi3")),
    # A vocabulary that does not divide: 25 rows on three ranks, 24 on the last.
    Case("llama-99", "llama", values={"vocab_size": 99, "tie_word_embeddings": True}),
    Case("granite-99", "granite", values={"vocab_size": 99, "tie_word_embeddings": False}),
    # Experts over 2 ranks, each over 2.
    *(Case(f"{name}-ep2", name, experts=2) for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return work_through(2, [*SHARDS, *TYPES, *EXPERTS, *OTHER_PLANS, SILENTLY_WRONG], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return work_through(4, FEW_HEADS, tmp_path_factory.mktemp("four"))


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", TYPES, ids=name_of)
def test_output_and_tokens_are_those_of_one_process(two_ranks: Outcomes, case: Case):
    check_run(two_ranks[case.name])


def test_what_is_silently_wrong_is_found(two_ranks: Outcomes):
    refuse_errors(two_ranks[SILENTLY_WRONG.name])
    found = record(two_ranks[SILENTLY_WRONG.name])
    assert not found.right
    assert found.error.startswith("output differs by")


@pytest.mark.parametrize("case", OTHER_PLANS, ids=name_of)
def test_output_and_tokens_with_the_plan_of_transformers(two_ranks: Outcomes, case: Case):
    check_run(two_ranks[case.name])


@pytest.mark.parametrize("case", EXPERTS, ids=name_of)
def test_experts_divided(two_ranks: Outcomes, case: Case):
    check_run(two_ranks[case.name])


@pytest.mark.parametrize("case", FEW_HEADS, ids=name_of)
def test_more_ranks_than_key_and_value_heads(four_ranks: Outcomes, case: Case):
    check_run(four_ranks[case.name])


@pytest.mark.parametrize("case", TYPES, ids=name_of)
def test_no_more_collectives_than_transformers(two_ranks: Outcomes, case: Case):
    """Its own are counted in the sweep, on the same models, where it is right; what it leaves whole needs none."""
    peer = Record(**json.loads(PEER_FILE.read_text())["records"][f"{case.name}@tp2-peer"])
    ours = record(two_ranks[case.name])
    assert not needs_more(ours, peer), (ours, peer)


@pytest.mark.parametrize("case", SHARDS, ids=name_of)
def test_shards_are_those_of_transformers(two_ranks: Outcomes, case: Case):
    refuse_errors(two_ranks[case.name])
    for outcome in two_ranks[case.name]:
        assert outcome["names"] == outcome["peer_names"]
        assert outcome["different"] == []
        assert outcome["cut"]


def check_run(outcomes: list[dict[str, Any]]) -> None:
    refuse_errors(outcomes)
    found = record(outcomes)
    assert found.right, found
    assert {outcome["no_tokens"] for outcome in outcomes} == {""}


def refuse_errors(outcomes: list[dict[str, Any]]) -> None:
    errors = [f"rank {rank}: {outcome['traceback']}" for rank, outcome in enumerate(outcomes) if outcome["error"]]
    assert not errors, "\n".join(errors)
