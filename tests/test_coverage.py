"""The page on coverage: what it says is not planned is what transformers has and the catalogue has not."""

from reshard.catalogue import model_types
from tools.coverage import listed_types, unplanned_types


def test_the_types_that_are_not_planned_are_listed() -> None:
    assert listed_types() == unplanned_types()


def test_what_is_planned_is_not_listed() -> None:
    assert not set(listed_types()) & set(model_types())
