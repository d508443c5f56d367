"""Natural order, and names that are alike: the quick forms against what they stand for."""

import random
import re

import pytest

from manifests.natural import alike, natural_key, natural_order

PIECES = ("a", "b", ".", "1", "2", "10", "02", "-", "A", "0", "_", "a1", " ", "/", "é", "٣", "\n", "9" * 21)


@pytest.mark.parametrize("kinds", [12, len(PIECES)], ids=["ordinary", "unusual"])
def test_many_names_are_ordered_as_their_keys(kinds: int) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        names = ["".join(rng.choice(PIECES[:kinds]) for _ in range(rng.randint(0, 6))) for _ in range(12)]
        assert natural_order(names) == sorted(names, key=natural_key)


def test_numbers_of_one_value_are_told_apart_by_their_texts() -> None:
    assert natural_order(["a.1", "a.01", "a.001.b"]) == ["a.001.b", "a.01", "a.1"]


def test_many_names_are_in_one_order() -> None:
    names = [f"layers.{at}.{part}" for at in range(3000) for part in ("a", "b")]
    assert natural_order(sorted(names)) == natural_order(names) == names


def test_the_order_by_hand() -> None:
    names = ["3", "a", "a.2", "a.2.b", "a.02", "a.10", "a.b", "a2", "ab", "a-1"]
    assert natural_order(names) == ["3", "a2", "a", "a-1", "a.2.b", "a.02", "a.2", "a.10", "a.b", "ab"]


def test_names_that_differ_in_numbers_alone_are_alike() -> None:
    for kept in ((), ("0", "2")):
        for seed in range(200):
            rng = random.Random(seed)
            names = [".".join(rng.choice(("a", "w1", "0", "2", "11", "02")) for _ in range(3)) for _ in range(20)]
            opened = [
                tuple("*" if re.fullmatch("[0-9]+", part) and part not in kept else part for part in name.split("."))
                for name in names
            ]
            numbers = {kind: number for number, kind in enumerate(dict.fromkeys(alike(names, kept)))}
            expected = {kind: number for number, kind in enumerate(dict.fromkeys(opened))}
            assert [numbers[kind] for kind in alike(names, kept)] == [expected[kind] for kind in opened]


def test_a_name_that_stands_for_others_is_taken_by_the_same_patterns() -> None:
    (stands,) = set(alike(["a.7.b", "a.8.b"], {"0", "1"}))
    assert stands == "a.2.b"
