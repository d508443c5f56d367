"""The sweep itself: what it calls right, what it counts, and that nothing is left out."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.catalogue import model_types
from tools.shares import Shown
from tools.sweep.cases import Case, Subject, cases_of, planned_types, subjects
from tools.sweep.pool import LaunchError, work_through
from tools.sweep.records import Record, Store, record
from tools.sweep.report import write_report
from tools.sweep.types import COMPOSITES, STANDS

FOUND = {
    "error": "",
    "seconds": 1.0,
    "shape": [2, 3],
    "expected_shape": [2, 3],
    "difference": 1e-5,
    "largest": 4.0,
    "share": 0.5,
    "collectives": {"all_reduce": 3},
    "tokens": {"greedy": [[1, 2]]},
    "expected_tokens": {"greedy": [[1, 2]]},
}


def ranks(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**FOUND, **change} for change in changes]


def test_right_on_every_rank():
    found = record(ranks({}, {"difference": 4e-5, "share": 0.6}))
    assert found == Record(True, "", "", 1e-5, 0.6, {"all_reduce": 3}, "equal", 1.0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"difference": 6e-4}, "output differs by 1.5e-04"),
        ({"difference": math.nan}, "output differs by nan"),
        ({"shape": [2, 4], "difference": None}, "shape [2, 3], not [2, 3]"),
        ({"tokens": {"greedy": [[1, 3]]}}, "other tokens"),
        ({"tokens": {}}, "other tokens"),
    ],
)
def test_not_right_if_one_rank_is_not(change: dict[str, Any], error: str):
    found = record(ranks({}, change))
    assert not found.right
    assert found.error == error


def test_the_first_error_is_told():
    late = {"error": "ValueError: late", "stage": "forward", "seconds": 20.0}
    early = {"error": "KeyError: early", "stage": "load", "seconds": 0.5}
    found = record([late, early])
    assert (found.right, found.error, found.stage) == (False, "KeyError: early", "load")


def test_a_difference_is_relative_to_values_over_one():
    assert record(ranks({"difference": 9e-5, "largest": 0.1})).difference == 9e-5
    assert record(ranks({"difference": 9e-5, "largest": 0.1})).right
    assert not record(ranks({"difference": 2e-4, "largest": 0.1})).right


def test_records_are_kept_with_what_decides_them(tmp_path: Path):
    store = Store(tmp_path)
    store.put("case", "then", Record(True, difference=1e-6))
    assert store.get("case", "then") == store.get("case") == Record(True, difference=1e-6)
    assert store.get("case", "now") is None
    assert store.get("other") is None


def test_cases_of_a_type_with_experts():
    subject = Subject("mixtral", "mixtral", {}, True)
    assert [(case.name, case.experts) for case in cases_of(subject, 4, peer=False)] == [
        ("mixtral@tp4", 1),
        ("mixtral@tp4-ep2", 2),
        ("mixtral@tp4-ep4", 4),
    ]
    assert [(case.name, case.experts) for case in cases_of(subject, 4, peer=True)] == [
        ("mixtral@tp4-peer", 1),
        ("mixtral@tp4-ep4-peer", 4),
    ]


def test_every_type_that_transformers_has_a_plan_for_is_in_the_sweep_and_in_the_catalogue(tmp_path: Path):
    planned = planned_types(tmp_path)
    assert len(planned) >= 166
    assert planned.keys() <= {row.name for row in subjects(tmp_path)}
    # A type without a public class is only a part of another.
    assert {*planned, *COMPOSITES} - STANDS.keys() <= set(model_types())


def test_a_model_that_cannot_be_built_stops_no_other(tmp_path: Path):
    told: list[str] = []
    cases = [Case("broken", "llama", values={"hidden_act": "none"}), Case("whole", "llama")]
    outcomes = work_through(1, cases, tmp_path, told.append)
    assert told == ["broken", "whole"]
    assert "none" in record(outcomes["broken"]).error
    assert record(outcomes["whole"]).right


def test_processes_that_die_are_replaced(tmp_path: Path):
    cases = [Case("deadly", "llama", kind="of_none"), Case("whole", "llama")]
    outcomes = work_through(1, cases, tmp_path)
    assert record(outcomes["deadly"]).error == "ranks ended with [1]"
    assert record(outcomes["whole"]).right


def test_processes_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LaunchError, match=r"ranks ended with \[1\]"):
        work_through(1, [Case("llama", "llama")], tmp_path)


def test_the_table(tmp_path: Path):
    rows = [Subject("llama", "llama", {}, False), Subject("mixtral", "mixtral", {}, True)]
    store = Store(tmp_path / "records")
    right = Record(True, difference=2e-6, share=0.5, collectives={"all_reduce": 3, "all_gather": 1}, tokens="equal")
    for name in ("llama@tp2", "llama@tp4", "mixtral@tp2", "mixtral@tp4-ep2"):
        store.put(name, "", right)
    store.put("mixtral@tp2-ep2", "", Record(False, "ValueError: a | b", "forward"))
    peer = {
        "llama@tp2-peer": right._replace(collectives={"all_reduce": 2}),
        "mixtral@tp2-ep2-peer": right._replace(tokens="none"),
    }
    shares = {"llama": Shown(("0.50", "0.25"), ("0.50", "0.29"), "heads")}
    write_report(tmp_path / "sweep.md", rows, store, (peer, True), shares)
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert "| tp 2 | 2 of 2 | 1 of 1 | 0 | 1 |" in lines
    assert "| tp 2 ep 2 | 0 of 1 | 1 of 1 | 1 | 0 |" in lines
    llama = "| llama | text | right | right | - | - | - | 2e-06 | 0.50, 0.29 | heads | 0.50 0.50 | 3r 1g"
    assert f"{llama} | right | - | - | - | 2r |" in lines
    mixtral = "| mixtral | text | right | - | **no** | right | - | 2e-06 |  |  | 0.50 | 3r 1g"
    assert f"{mixtral} | - | - | right | - | 3r 1g |" in lines
    assert "* `forward: ValueError: a / b`: `mixtral` (tp 2 ep 2)." in lines
