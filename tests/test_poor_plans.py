"""Plans of our own where those of transformers are poor: what a rank holds, and that every kind of them is right.

The shares are the planner's, on models without values of published proportions; a share above the bound needs a reason
of docs/shares.md. The comparisons with one process are made by `tools.sweep.worker`; with FULL=1 for every such type.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from reshard import merge, split, verify
from reshard.catalogue import ours
from tools.shares import MOST, PAGE, build, compared_types, line, measure, place, reasons
from tools.sweep.cases import Case, cases_of, subjects
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


def rows_of_the_page() -> dict[str, list[str]]:
    """Return the cells of the table of docs/shares.md after the first, by it."""
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in text.strip("|").split("|")] for text in lines if text.startswith("| ")]
    return {row[0]: row[1:] for row in rows if len(row) == 7 and row[0] != "type"}


ROWS = rows_of_the_page()
REASONS = reasons(PAGE.read_text("utf-8"))


def above(cells: list[str]) -> bool:
    """Tell whether a row has a share of ours above the bounds, or none."""
    shares = zip(cells[3:5], (2, 4), strict=True)
    return any(not text.startswith("0.") or float(text) > MOST[tp] for text, tp in shares)


def test_the_page_has_every_type_once():
    assert sorted(ROWS) == sorted(compared_types(WORK))


@pytest.mark.parametrize("name", ROWS)
def test_a_share_above_the_bound_has_a_reason(name: str):
    assert above(ROWS[name]) == (name in REASONS), ROWS[name]
    assert ROWS[name][5] == REASONS.get(name, "")


@pytest.mark.parametrize("name", ROWS if FULL else QUICK)
def test_the_page_says_what_the_planner_gives(name: str):
    found = measure(name, build(compared_types(WORK)[name]))
    assert line(found, REASONS) in PAGE.read_text("utf-8").splitlines()
    assert found.above == above(ROWS[name])


@pytest.mark.parametrize("name", QUICK)
def test_ours_divides_more_than_transformers_or_joins_less(name: str):
    cells = ROWS[name]
    assert float(cells[3]) <= float(cells[1])
    assert float(cells[4]) <= float(cells[2])


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
