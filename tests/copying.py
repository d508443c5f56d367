"""Runs, carried out on arrays one entry at a time: what the library's integers mean."""

import numpy as np
from numpy.typing import NDArray

from manifests.runs import Runs


def positions(runs: Runs) -> list[tuple[int, int]]:
    """Return every copied entry as (src, dst)."""
    return [
        (run.src + block * run.src_step + i, run.dst + block * run.dst_step + i)
        for run in runs
        for block in range(run.repeat)
        for i in range(run.length)
    ]


def apply(runs: Runs, source: NDArray, dim: int = 0) -> NDArray:
    """Copy along one dimension; the destination must be filled front to back, each entry once."""
    by_destination = sorted(positions(runs), key=lambda pair: pair[1])
    assert [dst for _, dst in by_destination] == list(range(len(by_destination)))
    return np.take(source, np.array([src for src, _ in by_destination], int), axis=dim)
