"""The steps on 2 ranks, eager and compiled, compared with the whole module in one process; and what is refused.

All of it is run by `steps_worker.py` in one launch of one process a rank.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from loader.steps import Sequence, Site, make_step
from manifests.errors import LoadError
from manifests.manifest import Module
from manifests.styles import STYLES
from reshard import split
from tests.checkpoints import save
from tests.launching import gathered, run_ranks
from tests.steps_worker import CASES, CHECKS, EMBEDDING, PAIR, Case, Outcome, outputs, whole_module

WORLD_SIZE = 2
TIMEOUT_S = 500
PROMPT_S = 8
"""Less than a rank waits for another that never comes."""

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What every rank found, by the name of a case or check."""
    folder = tmp_path_factory.mktemp("steps")
    for case in CASES:
        split(
            save_module(case, folder / "source" / case.name),
            folder / case.name,
            tp=WORLD_SIZE,
            plan=case.plan,
            **case.options,
        )
    split(save_module(PAIR, folder / "source" / "four"), folder / "four", tp=4, plan=PAIR.plan)
    prepare_folders_of_ranks(folder)
    run_ranks("tests.steps_worker", folder, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    return gathered(folder, WORLD_SIZE)


def save_module(case: Case, folder: Path) -> Path:
    return save(folder, whole_module(case).state_dict())


def prepare_folders_of_ranks(folder: Path) -> None:
    """Give each rank a folder of its own; that of rank 1 is not what it should be."""
    for name in ("good", "damaged", "other split", "unfinished"):
        for rank in range(WORLD_SIZE):
            shutil.copytree(folder / PAIR.name, folder / f"{name} {rank}")
    damaged = folder / "damaged 1" / "rank-00001-of-00002.safetensors"
    os.truncate(damaged, damaged.stat().st_size // 2)
    (folder / "unfinished 1" / "manifest.json").unlink()
    shutil.rmtree(folder / "other split 1")
    other = {name: tensor + 1 for name, tensor in whole_module(PAIR).state_dict().items()}
    split(save(folder / "source" / "other", other), folder / "other split 1", tp=WORLD_SIZE, plan=PAIR.plan)


def test_every_step_of_the_table_has_a_case():
    plans = [case.plan for case in CASES]
    tables = [
        table for plan in plans for table in ((plan["plan"], plan.get("experts", {})) if "plan" in plan else (plan,))
    ]
    used = {rule if isinstance(rule, str) else rule["style"] for table in tables for rule in table.values()}
    table = {
        style.name for style in STYLES.values() if style.cuts or style.before or style.after or style.bias != "whole"
    }
    assert {name for name in used if name in STYLES} == table


def test_another_layer_norm_than_torchs():
    site = Site(nn.GroupNorm(2, 8), Module("layer_norm", "layer_norm"), None, Sequence())
    with pytest.raises(LoadError, match="GroupNorm: is not torch's LayerNorm"):
        make_step("layer_norm", site)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_those_of_the_whole_module(outcomes: Outcomes, case: Case):
    check_outputs(outcomes[case.name], case)


@pytest.mark.parametrize("case", [case for case in CASES if case.compiles], ids=lambda case: case.name)
def test_installed_then_compiled(outcomes: Outcomes, case: Case):
    check_outputs(outcomes[f"{case.name}, compiled"], case)


def test_compiled_then_installed(outcomes: Outcomes):
    check_outputs(outcomes["call compiled before"], PAIR)
    # Without the hooks a rank has its own part of the sum.
    one, other = (found["before"] for found in outcomes["call compiled before"])
    for mine, theirs, expected in zip(one, other, expected_outputs(PAIR), strict=True):
        assert torch.equal(mine + theirs, expected)


def check_outputs(found: list[Outcome], case: Case) -> None:
    expected = expected_outputs(case)
    for rank, outcome in enumerate(found):
        assert not outcome["error"], f"rank {rank}: {outcome['error']}: {outcome['message']}"
        for mine, theirs in zip(outcome["outputs"], expected, strict=True):
            if theirs is None:
                assert mine is None
            else:
                assert mine.shape == theirs.shape
                if case.exact:
                    assert torch.equal(mine, theirs)
                else:
                    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def expected_outputs(case: Case) -> list[torch.Tensor | None]:
    return outputs(whole_module(case), case)


def test_ranks_have_a_part_of_the_sequence_where_their_number_divides_it(outcomes: Outcomes):
    for outcome in outcomes["parts"]:
        # Lengths 4, 3, 6 and 1 on 2 ranks.
        assert outcome["lengths"] == [[2, 2], [3, 3], [3, 3], [1, 1]]


REFUSED = {
    "unknown strategy": ("LoadError", "a style that this process does not have", "tests.strategies has no Gone"),
    "fewer inputs": ("LoadError", "Experts", "takes 2 inputs", "chosen experts"),
    "install twice": ("LoadError", "has its hooks already"),
    "id too high": ("IndexError", "from 2 to 10", "vocabulary of 10"),
    "id too low": ("IndexError", "from -1 to 2", "vocabulary of 10"),
    "fewer features": ("LoadError", "Linear", "gets 4 features", "expects all 8"),
    "no inputs": ("LoadError", "Embedding", "without inputs"),
    "backward": ("LoadError", "no gradients", "torch.inference_mode()"),
    "backward to inputs": ("LoadError", "no gradients", "torch.inference_mode()"),
    "split for four": ("LoadError", "for 4 ranks", "has 2", "--tp 2"),
    "hooks of four": ("LoadError", "for 4 ranks", "has 2", "--tp 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(outcomes: Outcomes, name: str):
    error, *words = REFUSED[name]
    for outcome in outcomes[name]:
        check_error(outcome, error, *words)


@pytest.mark.parametrize("ids", [[2, 10], [-1, 2]])
def test_ids_are_refused_as_torch_refuses_them(ids: list[int]):
    with pytest.raises(IndexError):
        whole_module(EMBEDDING)(torch.tensor(ids))


def test_one_generator_state(outcomes: Outcomes):
    one, other = outcomes["generator"]
    assert not torch.equal(one["apart"], other["apart"])
    assert torch.equal(one["outputs"][0], other["outputs"][0])
    torch.manual_seed(0)
    torch.rand(4)
    assert torch.equal(one["outputs"][0], torch.rand(4))


def test_ranks_agree_and_load(outcomes: Outcomes):
    check_outputs(outcomes["good"], PAIR)


def test_damage_on_one_rank_is_told_to_the_other(outcomes: Outcomes):
    one, other = outcomes["damaged"]
    sizes = ("rank-00001-of-00002.safetensors", "bytes", "expected")
    check_error(other, "LoadError", *sizes)
    check_error(one, "LoadError", "rank 1 cannot go on", *sizes)
    assert other["message"] in one["message"]


def test_a_rank_without_a_manifest_is_told_to_the_other(outcomes: Outcomes):
    one, other = outcomes["unfinished"]
    check_error(other, "ManifestError", "no manifest.json")
    check_error(one, "LoadError", "rank 1", "no manifest.json")


def test_ranks_with_different_splits_are_refused(outcomes: Outcomes):
    for outcome in outcomes["other split"]:
        check_error(outcome, "LoadError", "another split")


@pytest.mark.parametrize("name", CHECKS)
def test_no_collective_was_begun_in_vain(outcomes: Outcomes, name: str):
    assert [outcome["total"] for outcome in outcomes[name]] == [3, 3]


def check_error(outcome: Outcome, error: str, *words: str) -> None:
    assert outcome["error"] == error, f"{outcome['error']}: {outcome['message']}"
    for word in words:
        assert word in outcome["message"]
    assert outcome["seconds"] < PROMPT_S
