"""Random runs against arrays of indices."""

import random
from itertools import pairwise

import numpy as np
import pytest

from manifests.runs import Run, clip, compose, covers, divide_unit, expand, fold, invert, numel, whole, without
from tests.copying import positions

SEEDS = range(300)


def random_spans(rng: random.Random, size: int, *, grid: int = 1) -> list[tuple[int, int, int]]:
    """Return disjoint blocks of ``size`` source entries, in any order, gaps in the destination allowed."""
    cuts = sorted({0, size, *(rng.randrange(0, size + 1, grid) for _ in range(rng.randrange(8)))})
    blocks = [(lo, hi) for lo, hi in pairwise(cuts) if rng.random() < 0.8]
    if rng.random() < 0.5:
        rng.shuffle(blocks)
    spans = []
    dst = 0
    for lo, hi in blocks:
        dst += rng.choice((0, 0, 0, grid))
        spans.append((lo, dst, hi - lo))
        dst += hi - lo
    return spans


def regular_spans(rng: random.Random) -> list[tuple[int, int, int]]:
    """Return equally spaced blocks, as a packed or an interleaved axis has them."""
    length, repeat, gap = rng.randint(1, 4), rng.randint(1, 5), rng.randint(0, 3)
    return [(3 + i * (length + gap), i * length, length) for i in range(repeat)]


def spans_of(seed: int) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    return regular_spans(rng) if seed % 3 == 0 else random_spans(rng, rng.randint(0, 24))


def table(pairs: list[tuple[int, int]], size: int = 64) -> list[int]:
    """Return, for every destination, its source, or -1."""
    sources = [-1] * size
    for src, dst in pairs:
        assert sources[dst] == -1
        sources[dst] = src
    return sources


def pairs_of(spans: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, length in spans for i in range(length)]


def test_fold_and_expand_keep_every_entry() -> None:
    for seed in SEEDS:
        spans = spans_of(seed)
        runs = fold(spans)
        assert table(positions(runs)) == table(pairs_of(spans)), seed
        assert table(pairs_of(expand(runs))) == table(pairs_of(spans)), seed
        assert numel(runs) == sum(length for _, _, length in spans), seed
        assert [dst for _, dst, _ in expand(runs)] == sorted(dst for _, dst, _ in expand(runs)), seed
        assert fold(expand(runs)) == runs, seed


@pytest.mark.parametrize("size", [0, 1, 7])
def test_whole_is_every_entry_and_what_fold_makes_of_it(size: int) -> None:
    assert positions(whole(size)) == [(i, i) for i in range(size)]
    assert fold((i, i, 1) for i in range(size)) == whole(size)


def test_fold_gathers_equal_blocks_into_one_run() -> None:
    assert fold((i * 10, i * 2, 2) for i in range(1000)) == (Run(0, 0, 2, 1000, 10, 2),)


def test_invert_swaps_source_and_destination() -> None:
    for seed in SEEDS:
        runs = fold(spans_of(seed))
        assert table(positions(invert(runs))) == table([(dst, src) for src, dst in positions(runs)]), seed
        assert table(positions(invert(invert(runs)))) == table(positions(runs)), seed


def test_compose_goes_through_the_dimension_between() -> None:
    for seed in SEEDS:
        first, second = fold(spans_of(seed)), fold(spans_of(seed + 1000))
        through = table(positions(first))
        expected = [through[between] if between >= 0 else -1 for between in table(positions(second))]
        assert table(positions(compose(first, second))) == expected, seed


def test_clip_keeps_destinations_counted_from_the_lower_end() -> None:
    for seed in SEEDS:
        rng = random.Random(-seed)
        runs = fold(spans_of(seed))
        lo = rng.randint(0, 20)
        hi = rng.randint(lo, 30)
        kept = table(positions(runs))[lo:hi]
        assert table(positions(clip(runs, lo, hi))) == kept + [-1] * (64 - len(kept)), seed


def test_without_leaves_out_destinations() -> None:
    for seed in SEEDS:
        runs, other = fold(spans_of(seed)), fold(spans_of(seed + 1000))
        gone = {dst for _, dst in positions(other)}
        kept = [(src, dst) for src, dst in positions(runs) if dst not in gone]
        assert table(positions(without(runs, other))) == table(kept), seed


def test_covers_means_every_destination_once() -> None:
    for seed in SEEDS:
        runs = fold(spans_of(seed))
        for size in (0, numel(runs), numel(runs) + 1):
            assert covers(runs, size) == (sorted(dst for _, dst in positions(runs)) == list(range(size))), seed


@pytest.mark.parametrize(
    ("runs", "size"),
    [((Run(0, 0, 3), Run(5, 2, 2)), 4), ((Run(0, 0, 3), Run(5, 2, 2)), 5), ((Run(0, 0, 2), Run(0, 0, 2)), 4)],
)
def test_overlapping_destinations_do_not_cover(runs: tuple[Run, ...], size: int) -> None:
    assert not covers(runs, size)


def in_units(runs: tuple[Run, ...], unit: int, size: int) -> list[int] | None:
    """Return the sources in units for every destination in units, or None where one is cut; by index arrays."""
    units = []
    for block in np.array(table(positions(runs), 48 * unit)).reshape(48, unit):
        filled = block[block >= 0]
        if not len(filled):
            units.append(-1)
            continue
        starts = filled[0] % unit == 0 and (block[: len(filled)] == filled[0] + np.arange(len(filled))).all()
        if not starts or (len(filled) < unit and filled[-1] + 1 != size):
            return None
        units.append(int(filled[0]) // unit)
    return units


@pytest.mark.parametrize("unit", [2, 3, 8, 128])
def test_divide_unit_is_exact_or_refuses(unit: int) -> None:
    outcomes = set()
    for seed in SEEDS:
        rng = random.Random(seed * unit)
        size = unit * rng.randint(1, 8) - rng.choice((0, 0, rng.randrange(unit)))
        # Half the cases have every boundary on the grid of units, the last one perhaps inside its unit.
        runs = fold(random_spans(rng, size, grid=unit if rng.random() < 0.5 else 1))
        divided, expected = divide_unit(runs, unit, size), in_units(runs, unit, size)
        assert (None if divided is None else table(positions(divided), 48)) == expected, seed
        outcomes.add(divided is None)
    assert outcomes == {True, False}


def test_divide_unit_of_one_changes_nothing() -> None:
    assert divide_unit((Run(3, 0, 5),), 1, 9) == (Run(3, 0, 5),)
