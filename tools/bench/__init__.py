"""Benchmarks: what is claimed of speed and memory, measured beside the peers in the same run.

    python -m tools.bench [NAME ...]     run those benchmarks (all that there are) and write docs/bench.md
    python -m tools.bench --small load   on models of a few MB: whether it works, not what it takes

Each benchmark is a module of this package with ``run(options) -> dict`` and ``table(result) -> list[str]``. Its result
is kept in ``build/bench/NAME.json``; the page is made from all results that are there.
"""
