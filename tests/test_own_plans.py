"""Plans of our own where transformers has none: tiny random models in 2 and 4 processes, against transformers in one.

With FULL=1 every type and variant of the sweep, else those that differ in kind.
"""

import os
from pathlib import Path

import pytest

from manifests.errors import DegreeError, PlanError
from reshard import split
from reshard.catalogue import exported, model_types, ours, own_plans
from tools.sweep.cases import Subject, cases_of, subjects
from tools.sweep.own import OWN_COMPOSITES, OWN_PARTS, OWN_TYPES, OWN_VARIANTS, own_types
from tools.sweep.own_inputs import OWN_INPUTS
from tools.sweep.pool import Outcomes, work_through
from tools.sweep.records import record
from tools.sweep.tiny import tiny_model

KINDS = (
    *("albert", "bart", "bert", "bloom", "clip", "deberta-v2", "falcon", "falcon+multi_query", "falcon+slopes", "gpt2"),
    *("gpt_bigcode", "gpt_bigcode+heads", "mamba", "modernbert", "mpnet", "mpt", "opt", "roberta", "stablelm"),
    *("stablelm+norms", "t5", "vit", "wav2vec2", "whisper"),
    *("blip-2", "deberta+talking_head", "funnel", "jetmoe", "longformer", "mamba2+one_group", "mllama", "nllb-moe"),
    *("recurrent_gemma", "wav2vec2-bert"),
    *("canine", "csm", "florence2", "mobilebert", "parakeet_ctc", "vitpose+experts"),
)
"""Conv1D, grouped and interleaved heads, slopes, distances, encoders, decoders, both, images, sounds, state spaces,
whole heads, experts, parts of parts, convolutions, outputs of several weights.
"""

LARGEST = 1e-5


def chosen(work: Path) -> list[Subject]:
    rows = [row for row in subjects(work) if not row.has_peer]
    return rows if os.environ.get("FULL") else [row for row in rows if row.name in KINDS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcomes]:
    work = tmp_path_factory.mktemp("own")
    rows = chosen(work)
    cases = {ranks: [case for row in rows for case in cases_of(row, ranks, peer=False)] for ranks in (2, 4)}
    return {ranks: work_through(ranks, cases[ranks], work) for ranks in cases}


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_tokens_are_those_of_one_process(ranks: int, outcomes: dict[int, Outcomes]) -> None:
    found = {name: record(outcome) for name, outcome in outcomes[ranks].items()}
    assert len(found) >= len(KINDS)
    assert {name: entry.error for name, entry in found.items() if not entry.right} == {}
    far = {name: entry.difference for name, entry in found.items() if entry.difference and entry.difference > LARGEST}
    assert far == {}


def test_models_that_generate_are_compared_by_their_tokens(outcomes: dict[int, Outcomes]) -> None:
    found = {name: record(outcome).tokens for name, outcome in outcomes[2].items()}
    for name in ("gpt2@tp2", "falcon+slopes@tp2", "bloom@tp2", "mamba@tp2", "t5@tp2", "bart@tp2", "whisper@tp2"):
        assert found[name] == "equal", name
    assert found["bert@tp2"] == "none"


def test_every_type_of_ours_is_in_the_sweep(tmp_path: Path) -> None:
    names = {row.name for row in subjects(tmp_path)}
    theirs = {name for name, entry in exported()["types"].items() if {"plan", "ep_plan"} & entry.keys()}
    assert own_plans().keys() - theirs == {*own_types(), *OWN_PARTS}
    assert {*own_types(), *OWN_PARTS.values()} <= names
    assert {*own_types(), *OWN_COMPOSITES} <= set(model_types())
    assert {*OWN_TYPES, *OWN_INPUTS} <= {*own_types(), *OWN_COMPOSITES, *OWN_PARTS}
    assert {model_type for model_type, _ in OWN_VARIANTS.values()} <= {*own_types(), *OWN_COMPOSITES}


def test_no_type_is_in_two_files() -> None:
    """The files are joined, and the later would take the place of the earlier."""
    import tomllib
    from importlib.resources import files

    found = [
        name
        for file in files("reshard.catalogue").joinpath("ours").iterdir()
        for name in tomllib.loads(file.read_text("utf-8")).get("types", {})
    ]
    assert sorted(found) == sorted(ours()["types"])


@pytest.mark.parametrize(
    ("model_type", "values", "ranks", "named"),
    [
        ("bert", {}, 3, "attention.self.query.weight"),
        ("gpt2", {"n_head": 2}, 4, "attn.c_attn.weight"),
        ("bart", {"encoder_attention_heads": 2}, 4, "encoder.layers.*.self_attn.q_proj.weight"),
        ("bloom", {"n_head": 2}, 4, "self_attention.query_key_value.weight"),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused(
    model_type: str, values: dict[str, int], ranks: int, named: str, tmp_path: Path
) -> None:
    tiny_model(model_type, values).save_pretrained(tmp_path / "model")
    with pytest.raises(DegreeError, match=f"tp {ranks} does not divide this model") as caught:
        split(tmp_path / "model", tmp_path / "out", tp=ranks)
    assert any(named in line for line in caught.value.misfits), caught.value.misfits
    assert not (tmp_path / "out").exists()


def test_stacks_in_place_of_dense_layers_are_refused(tmp_path: Path) -> None:
    """ConvBERT's of `num_groups` have three dimensions, of which these rules would cut the wrong one."""
    tiny_model("convbert", {"num_groups": 2}).save_pretrained(tmp_path / "model")
    with pytest.raises(PlanError, match=r"intermediate\.dense\.weight: the layout \(intermediate_size\*\) has 96"):
        split(tmp_path / "model", tmp_path / "out", tp=2)


def test_transformers_has_no_plan_for_them(tmp_path: Path) -> None:
    tiny_model("bert", {}).save_pretrained(tmp_path / "model")
    with pytest.raises(PlanError, match="BertForMaskedLM: transformers has no plan for bert"):
        split(tmp_path / "model", tmp_path / "out", tp=2, plan_source="transformers")
