"""Decoding with compiled models on 2 ranks, compared with one process that compiles nothing; one graph each.

All of it is run by `parallel_worker.py` in one launch of one process a rank. The steps of every style are compiled in
`test_steps.py`.
"""

import pytest

from tests.launching import gathered, run_ranks
from tests.parallel_worker import COMPILED, Model, Outcome

WORLD_SIZE = 2
TIMEOUT_S = 500
TOLERANCE = 1e-4

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What every rank found, by the name of a model."""
    folder = tmp_path_factory.mktemp("compile")
    run_ranks("tests.parallel_worker", folder, "compile", world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    return gathered(folder, WORLD_SIZE)


@pytest.mark.parametrize("case", [case for cases in COMPILED.values() for case in cases], ids=lambda case: case.name)
def test_compiled_decoding_is_that_of_one_process(outcomes: Outcomes, case: Model):
    for outcome in outcomes[case.name]:
        assert not outcome["error"], outcome["error"]
        assert outcome["difference"] <= TOLERANCE * max(1.0, outcome["largest"])
        assert outcome["tokens"] == outcome["expected_tokens"]


def test_compiled_prompts_of_lengths_that_the_ranks_divide_and_do_not_divide(outcomes: Outcomes):
    for outcome in outcomes["prompts"]:
        assert not outcome["error"], outcome["error"]
        assert max(outcome["differences"]) <= TOLERANCE
