"""Python's search for cycles is off for a while, and afterwards as it was."""

import gc
from collections.abc import Iterator

import pytest

from reshard.collecting import without_collector


@pytest.fixture(params=[True, False], ids=["on", "off"])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield bool(request.param)
    (gc.enable if was else gc.disable)()


def test_it_is_as_it_was_afterwards(before: bool) -> None:
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled() == before


def test_it_is_as_it_was_after_a_failure(before: bool) -> None:
    with pytest.raises(KeyError), without_collector():
        raise KeyError
    assert gc.isenabled() == before
