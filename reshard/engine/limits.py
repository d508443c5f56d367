"""Limits: how large the buffers of a run may be, from one budget."""

from typing import NamedTuple

BUDGET_NBYTES = 256 << 20
LEAST_BUDGET_NBYTES = 8 << 20
_PROCESS_NBYTES = 64 << 20
_BAND_NBYTES = 1 << 20
_UNIT_NBYTES = 4 << 20


class Limits(NamedTuple):
    """Sizes in bytes.

    Attributes:
        band: What is read and written at a time.
        unit: The largest box that one worker holds alone.
        held: The largest box that all workers hold together.
    """

    band: int
    unit: int
    held: int


def limits_of(budget: int, jobs: int) -> Limits:
    """Return the limits under which a run stays within a budget; at least 8 MiB are taken.

    A quarter, at most 64 MiB, is left to the interpreter and the plan. Each worker has up to three units: what it read,
    the box, the parts. The rest is held.

    >>> limits_of(256 << 20, 2)
    Limits(band=1048576, unit=4194304, held=176160768)
    """
    budget = max(budget, LEAST_BUDGET_NBYTES)
    rest = budget - min(budget // 4, _PROCESS_NBYTES)
    unit = max(1 << 12, min(_UNIT_NBYTES, rest // (12 * jobs)))
    return Limits(min(_BAND_NBYTES, unit), unit, max(rest - 3 * unit * jobs, unit))
