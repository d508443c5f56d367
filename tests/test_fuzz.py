"""Fuzzing: whatever is in a file, it is read or refused with an error of our own, soon, and in little memory.

A sample by default; ``FULL=1`` runs for as long as the promises in the documents say.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bounds import attempt, check
from tests.fuzz_targets import Target, build_targets
from tests.launching import ROOT
from tests.mutations import damage, encode, mutate

FULL = bool(os.environ.get("FULL"))
EXAMPLES = 5000 if FULL else 100
SECONDS = 120 if FULL else 6
NAMES = ("header", "index", "config", "json plan", "toml plan", "manifest")
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def targets(work: Path) -> dict[str, Target]:
    return build_targets(work)


@pytest.mark.parametrize("name", NAMES)
def test_the_good_input_is_read(targets: dict[str, Target], name: str) -> None:
    """Or the others would be refused for a reason that is not theirs."""
    target = targets[name]
    assert attempt(lambda: target.read(target.seed)).refusal is None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "toml plan"])
def test_changed_documents(work: Path, targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    before = sorted(path.name for path in work.parent.iterdir())
    outcomes: set[bool] = set()

    @SETTINGS
    @given(st.randoms(use_true_random=False), st.integers(1, 4))
    def run(rng: random.Random, times: int) -> None:
        text = encode(mutate(target.document, rng, times), rng)
        content = target.wrap(text) if target.wrap else text
        cost = check(lambda: target.read(content), len(content))
        outcomes.add(cost.refusal is None)
        if cost.refusal is not None:
            # A line that a terminal shows, and not the whole input.
            assert len(str(cost.refusal)) < 20_000
            str(cost.refusal).encode("utf-8")

    run()
    assert False in outcomes
    assert sorted(path.name for path in work.parent.iterdir()) == before


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes(targets: dict[str, Target], name: str) -> None:
    target = targets[name]

    @SETTINGS
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        content = damage(target.seed, rng)
        check(lambda: target.read(content), len(content))

    run()


@pytest.mark.parametrize("names", [(name,) for name in NAMES] if FULL else [NAMES], ids=" ".join)
def test_coverage_guided(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Atheris looks for inputs that reach other lines; what it finds is an input that ends its process."""
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86_64 only")
    command = [sys.executable, "-m", "tests.fuzz_worker", str(tmp_path), str(SECONDS), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 120, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "runs in" in done.stderr
