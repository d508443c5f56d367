"""Collecting: Python's search for cycles is left out where much is made and no cycles are."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Do without the search: it takes as long as there are objects, and is as often as some are made."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()
