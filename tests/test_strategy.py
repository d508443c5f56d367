"""Strategies of a user's own: found by name, placed, refused. What they do at run time is in `test_steps.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import PlanError
from manifests.placement import PARTIAL, REPLICATED, Cut, Placement
from manifests.strategy import Parameter, Strategy, find_strategy, place_parameter, register, writes
from manifests.styles import STYLES, resolve_style
from reshard import plan
from tests import strategies
from tests.checkpoints import save

ROOT = Path(__file__).parent.parent


def folder_of(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    return save(tmp_path / "model", tensors)


def placements(folder: Path, rules: dict[str, Any], tp: int = 2) -> dict[str, Placement]:
    return {name: tensor.placement for name, tensor in plan(folder, tp=tp, plan=rules).resolution.tensors.items()}


def test_attributes_place_a_module_like_a_row_of_the_table(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"down.weight": torch.zeros(5, 8), "down.bias": torch.zeros(5)})
    found = placements(folder, {"down": "tests.strategies:FloatSum"})
    assert found == placements(folder, {"down": "rowwise"})
    assert found["down.bias"] == PARTIAL


def test_its_own_place_says_axis_and_dimension(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"down.weight": torch.zeros(5, 8), "down.bias": torch.zeros(5)})
    found = placements(folder, {"down": "tests.strategies:Halves"})
    assert found == {
        "down.weight": Placement((Cut(1, "(2, 4*)"),), (("tp", 2),)),
        "down.bias": REPLICATED,
    }


def test_a_layout_beside_a_strategy(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"norm.weight": torch.zeros(12)})
    rule = {"style": "tests.strategies:AllHeadsNorm", "layout": "(4*, 3)"}
    assert placements(folder, {"norm": rule})["norm.weight"] == Placement((Cut(0, "(4*, 3)"),), (("tp", 2),))


def test_the_manifest_names_the_strategy_and_its_steps(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"norm.weight": torch.zeros(8), "down.weight": torch.zeros(5, 8)})
    modules = plan(
        folder, tp=2, plan={"norm": "tests.strategies:AllHeadsNorm", "down": "tests.strategies:Halves"}
    ).resolution.modules
    # A method is "own"; a step of the table has its name.
    assert (modules["norm"].style, modules["norm"].before, modules["norm"].after) == (
        "tests.strategies:AllHeadsNorm",
        "own",
        "",
    )
    assert (modules["down"].before, modules["down"].after) == ("", "all_reduce")


def test_offline_no_torch_is_imported(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"norm.weight": torch.zeros(8)})
    code = (
        "import json, sys; from reshard import plan\n"
        f"made = plan({str(folder)!r}, tp=2, plan={{'norm': 'tests.strategies:AllHeadsNorm'}})\n"
        "print(json.dumps(['torch' in sys.modules, made.resolution.modules['norm'].style]))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [False, "tests.strategies:AllHeadsNorm"]


def test_a_parameter_that_does_not_suit_it_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"norm.weight": torch.zeros(8, 2)})
    with pytest.raises(PlanError, match=r"norm\.weight: AllHeadsNorm: a norm's weight has one dimension, not 2"):
        placements(folder, {"norm": "tests.strategies:AllHeadsNorm"})


def test_a_number_of_ranks_that_does_not_divide_its_axis_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"down.weight": torch.zeros(5, 8)})
    with pytest.raises(PlanError, match=r"down\.weight.*\(2, 4\*\)"):
        placements(folder, {"down": "tests.strategies:Halves"}, tp=3)


PARAMETER = Parameter("a.weight", "F32", (4, 6), 2)


@pytest.mark.parametrize("answer", ["(6*)", ("(6*)",), ("(6*)", 2), (6, 1), ("(6*)", "1"), 3])
def test_an_answer_of_another_form_is_refused(answer: object) -> None:
    kind = type("Odd", (Strategy,), {"place": lambda *_: answer})
    with pytest.raises(PlanError, match=r"a\.weight: Odd\.place: .* is no axis"):
        place_parameter(kind, PARAMETER)


def test_answers() -> None:
    kind = type("Last", (Strategy,), {"place": lambda *_: ("(6*)", -1)})
    assert place_parameter(kind, PARAMETER) == ("(6*)", 1)
    assert place_parameter(Strategy, PARAMETER) is NotImplemented
    assert place_parameter(strategies.Halves, PARAMETER._replace(shape=(4,))) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package.part:Name", ("no_such_package.part:Name", "install the package", "PYTHONPATH")),
        ("tests.no_such_module:Name", ("No module named", "tests.no_such_module", "PYTHONPATH")),
        ("tests.needs_more:Name", ("install not_there", "which tests.needs_more imports")),
        ("tests.strategies:Nothing", ("tests.strategies has no Nothing",)),
        ("tests.strategies:Parameter", ("not a subclass",)),
        ("os:system", ("not a subclass",)),
        ("tests.strategies", ("unknown style", "package.module:Name", *STYLES)),
        ("tests.strategies:", ("unknown style",)),
        ("a b:C", ("unknown style",)),
        ("../x:C", ("unknown style",)),
    ],
)
def test_names_that_mean_none(name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # A module that needs another, which is not installed.
    finder = _NeedsMore()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(PlanError) as caught:
        resolve_style(name)
    for word in words:
        assert word in str(caught.value)


class _NeedsMore:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "tests.needs_more":
            raise ModuleNotFoundError("No module named 'not_there'", name="not_there.inner")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ep_router", ("removed", "ep_dispatch_experts", "router whole")),
        ("deepgemm_megamoe", ("one kernel", "ep_dispatch_experts", "grouped_gemm")),
        ("megamoe_experts", ("one kernel", "ep_dispatch_experts", "grouped_gemm")),
        ("local_rowwise", ("older", "rowwise")),
        ("gather", ("older", "moe_tp_experts")),
    ],
)
def test_names_of_the_peer_that_are_not_styles_have_advice(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", {"a.weight": torch.zeros(2, 2)}), tp=1, plan={"a": name})
    for word in (f"'{name}'", "a: ", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("attribute", ["cuts", "bias", "before", "after"])
def test_attributes_that_are_not_of_the_table_are_refused(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Odd", (Strategy,), {attribute: "rows"})
    monkeypatch.setattr(strategies, "Odd", kind, raising=False)
    with pytest.raises(PlanError, match=f"tests.strategies:Odd: {attribute} is 'rows'; known are ''|'cut'"):
        resolve_style("tests.strategies:Odd")


def test_registered_names() -> None:
    assert find_strategy("float_sum") is strategies.FloatSum
    assert resolve_style("float_sum").own is strategies.FloatSum
    register("float_sum", strategies.FloatSum)
    for name in ("float_sum", "colwise", "a:b", ""):
        with pytest.raises(PlanError):
            register(name, strategies.Halves)
    with pytest.raises(PlanError, match="not a subclass"):
        register("parameter", Parameter)  # type: ignore[arg-type]


def test_which_methods_a_strategy_writes() -> None:
    assert [m for m in ("before", "around", "after", "forward") if writes(strategies.AllHeadsNorm, m)] == ["forward"]
    assert [m for m in ("before", "around", "after", "forward") if writes(strategies.Halves, m)] == []
