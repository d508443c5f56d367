"""Plans of our own where those of transformers are poor: what a rank holds, and that every kind of them is right.

The shares are the planner's, on models without values of real proportions; a share above the bound needs a reason of
docs/shares.md, and the sweep's table shows both. The comparisons with one process are made by `tools.sweep.worker`;
with FULL=1 for every such type.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from reshard import merge, split, verify
from reshard.catalogue import exported, ours
from tools import decoders
from tools.proportions import PROPORTIONS
from tools.shares import PAGE, build, compared_types, line, measure, place, reasons, shown_rows
from tools.sweep.__main__ import TABLE
from tools.sweep.cases import Case, cases_of, subjects
from tools.sweep.own import OWN_PARTS
from tools.sweep.pool import Outcomes, work_through
from tools.sweep.records import record
from tools.sweep.tiny import tiny_model

FULL = os.environ.get("FULL") == "1"

# One type of every cause, and those of most use.
QUICK = (
    "bamba",
    "deepseek_v3",
    "diffllama",
    "dory",
    "emu3_text_model",
    "falcon_h1",
    "gemma4_text",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "minimax",
    "nemotron_h",
    "olmo2",
    "qwen3_next",
    "qwen3_vl_text",
)

# What the parity tests do not run. A rank of 4 shares its key and value heads, or its group of B and C, with another.
TWO = [
    Case(name, name)
    for name in ("bamba", "diffllama", "dory", "olmo_hybrid", "bailing_hybrid", "dots3_note_vision_encoder")
]
FOUR = [
    *(Case(name, name) for name in ("bamba", "diffllama", "falcon_h1", "nemotron_h", "kimi_linear", "minimax")),
    Case("nemotron_h-2-groups", "nemotron_h", values={"n_groups": 2, "mamba_num_heads": 8}),
    Case("gpt_oss-ep2", "gpt_oss", experts=2),
]


def changed_types() -> list[str]:
    """Return the types whose plan is not transformers' own."""
    return [name for name, table in ours()["types"].items() if table.keys() & {"plan", "changes", "heads"}]


def more_cases(work: Path, tp: int) -> list[Case]:
    """Return every case of a number of ranks, if all are asked for."""
    rows = [row for row in subjects(work) if row.has_peer and row.name in changed_types()] if FULL else []
    return [case for row in rows for case in cases_of(row, tp, peer=False)]


WORK = Path(__file__).parents[1] / "build" / "sweep"
ALL = [*more_cases(WORK, 2), *more_cases(WORK, 4)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What the ranks found, by the name of a case and their number."""
    found: Outcomes = {}
    for tp, cases in ((2, TWO), (4, FOUR)):
        more = [case for case in ALL if f"@tp{tp}" in case.name]
        made = work_through(tp, [*cases, *more], tmp_path_factory.mktemp(str(tp)))
        found |= {name if "@" in name else f"{name}@tp{tp}": outcome for name, outcome in made.items()}
    return found


@pytest.mark.parametrize(
    "name", [*(f"{case.name}@tp2" for case in TWO), *(f"{case.name}@tp4" for case in FOUR), *(c.name for c in ALL)]
)
def test_output_and_tokens_are_those_of_one_process(outcomes: Outcomes, name: str):
    errors = [outcome["traceback"] for outcome in outcomes[name] if outcome["error"]]
    assert not errors, "\n".join(errors)
    found = record(outcomes[name])
    assert found.right, found


ROWS = shown_rows(PAGE.read_text("utf-8"))
REASONS = reasons(PAGE.read_text("utf-8"))


def test_the_page_has_every_type_once():
    assert sorted(ROWS) == sorted(compared_types(WORK))


@pytest.mark.parametrize("name", ROWS)
def test_a_share_above_the_bound_has_a_reason(name: str):
    assert ROWS[name].above == (name in REASONS), ROWS[name]
    assert ROWS[name].reason == REASONS.get(name, "")


# Of the types that generate text. Another one here is a decision: a plan that divides more comes first.
DECODERS_ABOVE = {
    **dict.fromkeys(
        ("falcon", "jais2", "mt5", "olmo_hybrid", "recurrent_gemma", "rembert", "umt5", "whisper"), "heads"
    ),
    **dict.fromkeys(("moonshine", "speech_to_text"), "convolutions"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "codec"),
    "xlnet": "attention",
    "xmod": "adapters",
}


def test_decoders_above_the_bound_are_these():
    above = {name: row.reason for name, row in ROWS.items() if row.above and name in decoders.decoders()}
    assert above == DECODERS_ABOVE


def test_a_row_needs_a_reason_if_it_is_above_the_bound_at_one_number_of_ranks():
    page = "## By type\n\n| type | |\n|---|\n| a | 1 B | - | - | 0.52 | 0.28 |  |\n"
    page += "| b | 1 B | - | - | 0.52 | 0.29 |  |\n"
    page += "| c | 1 B | - | - | 0.50 | 0.25 uneven | heads |\n| d | 1 B | - | - | 0.50 | tp 1, 2 | heads |\n"
    assert [name for name, row in shown_rows(page).items() if row.above] == ["b", "c", "d"]


def test_the_table_of_the_sweep_shows_the_shares_and_reasons():
    cells = [[cell.strip() for cell in text.split("|")] for text in TABLE.read_text("utf-8").splitlines()]
    head = next(row for row in cells if row[1:2] == ["type"])
    table = [dict(zip(head, row, strict=True)) for row in cells if len(row) == len(head) and row is not head]
    shown = {row["type"].split(" (")[0]: (row["share"], row["reason"]) for row in table if row["share"].strip("-")}
    assert shown == {name: (", ".join(row.ours), row.reason) for name, row in ROWS.items()}


@pytest.mark.parametrize("name", ROWS if FULL else (*QUICK, "csm", "mobilebert", "xclip"))
def test_the_page_says_what_the_planner_gives(name: str):
    subject = compared_types(WORK)[name]
    found = measure(subject, build(subject.model_type))
    assert line(found, REASONS) in PAGE.read_text("utf-8").splitlines()
    assert found.above == ROWS[name].above


def test_what_is_given_beside_the_defaults_has_a_source():
    assert PROPORTIONS.keys() <= {row.model_type for row in compared_types(WORK).values()}
    kinds = ("defaults", "layers", "like ", "of ", "smallest")
    for name, given in PROPORTIONS.items():
        assert all(part.startswith(kinds) for part in given.source.split(", ")), name


NEEDED = ("chameleon", "deepseek_ocr2_text", "detr", "nemotron", "qwen4_exp_text", "wav2vec2-bert")


@pytest.mark.parametrize("name", PROPORTIONS if FULL else NEEDED)
def test_what_is_given_is_needed(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without it there is no model, or no number of ranks divides it."""
    subject = next(row for row in compared_types(WORK).values() if row.model_type == name)
    monkeypatch.delitem(PROPORTIONS, name)
    try:
        model = build(name)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return
    assert measure(subject, model).above


def test_decoders_without_a_plan_are_listed():
    """The lists are those of now; a type that is in the sweep or has a plan is in neither."""
    assert "\n".join(decoders.section(WORK)) in PAGE.read_text("utf-8")
    lacking = set(decoders.without_plan())
    assert {"xlstm", "zamba2"} <= lacking
    assert not lacking & {*exported()["types"], *compared_types(WORK)}
    apart = decoders.not_run(WORK)
    assert {"qwen2_audio", "paligemma"} <= set(apart)
    classes = [cls for name in apart for cls in exported()["types"][name]["classes"].values()]
    assert {scope[1] for cls in classes for scope in cls["scopes"]} <= {*compared_types(WORK), *OWN_PARTS}


@pytest.mark.parametrize("name", QUICK)
def test_ours_divides_more_than_transformers_or_joins_less(name: str):
    row = ROWS[name]
    for their_share, our_share in zip(row.peer, row.ours, strict=True):
        assert float(our_share) <= float(their_share)


def test_a_bias_of_divided_experts_counts_once(tmp_path: Path):
    """Experts over 2 of 4 ranks, each over 2: the bias that is added to a sum is with the first of the two."""
    model = tiny_model("gpt_oss", {})
    model.save_pretrained(tmp_path / "model")
    split(tmp_path / "model", tmp_path / "split", tp=4, experts=2)
    verify(tmp_path / "split")
    files = [load_file(tmp_path / "split" / f"rank-0000{rank}-of-00004.safetensors") for rank in range(4)]
    name = "model.layers.0.mlp.experts.down_proj_bias"
    bias = model.state_dict()[name]
    assert [name in file for file in files] == [True, False, True, False]
    assert files[0][name].equal(bias[:2])
    assert files[2][name].equal(bias[2:])
    merge(tmp_path / "split", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    source = load_file(tmp_path / "model" / "model.safetensors")
    assert merged.keys() == source.keys()
    assert all(merged[key].equal(tensor) for key, tensor in source.items())


def runs(tensor: Any) -> list[str]:
    return [cut.axis for cut in tensor.placement.cuts]


def test_state_space_heads_stay_with_their_group():
    """Of 8 groups of 16 heads, B and C are cut by groups, the channels by the heads in them, by hand for Nemotron-H."""
    placed = place(build("nemotron_h"), 4)
    assert runs(placed["model.layers.0.mixer.in_proj.weight"]) == [
        "z:(8@kv, 16@rep, 64) + x:(8@kv, 16@rep, 64) + B:(8@kv, 128) + C:(8@kv, 128) + dt:(8@kv, 16@rep)"
    ]
    assert placed["model.layers.0.mixer.in_proj.weight"].placement.mesh == (("kv", 4), ("rep", 1))
    assert runs(placed["model.layers.0.mixer.conv1d.weight"]) == [
        "x:(8@kv, 16@rep, 64) + B:(8@kv, 128) + C:(8@kv, 128)"
    ]
