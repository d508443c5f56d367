"""What reading bad input may cost."""

import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

from manifests.errors import ReshardError

SECONDS = 1.0
"""Of the processor, for one input."""
MEMORY_FACTOR = 40
"""Bytes for a byte of the input: as Python's own objects for ``[[],[],[]]`` or ``1,1,1`` are that much larger."""
MEMORY_NBYTES = 8 << 20
"""Beside: buffers, and tables that are filled on a first use."""


class Cost(NamedTuple):
    """What an attempt cost.

    Attributes:
        refusal: What it was refused with, or None.
        seconds: Of the processor.
        peak_nbytes: The most memory that Python held beside what it held before; 0 if it was not traced.
    """

    refusal: ReshardError | None
    seconds: float
    peak_nbytes: int


def attempt(read: Callable[[], object], *, traced: bool = False) -> Cost:
    """Read something; every error but the project's own goes on."""
    refusal = None
    if traced:
        tracemalloc.start()
    start = time.process_time()
    try:
        read()
    except ReshardError as error:
        refusal = error
    finally:
        seconds = time.process_time() - start
        peak = 0
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return Cost(refusal, seconds, peak)


def check(read: Callable[[], object], input_nbytes: int, *, traced: bool = False) -> Cost:
    """Read something within the bounds of time and, if it is traced, of memory."""
    cost = attempt(read, traced=traced)
    assert cost.seconds < SECONDS * (5 if traced else 1), cost
    assert cost.peak_nbytes <= MEMORY_NBYTES + MEMORY_FACTOR * input_nbytes, cost
    return cost
