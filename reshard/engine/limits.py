"""Limits: how large the buffers of a run may be, from one budget."""

from typing import NamedTuple

BUDGET_NBYTES = 256 << 20
LEAST_BUDGET_NBYTES = 32 << 20
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
    """Return the limits under which all buffers of all workers stay within a budget.

    Each worker has up to three units (what it read, the box, the parts); what is left is held.

    >>> limits_of(256 << 20, 2)
    Limits(band=1048576, unit=4194304, held=243269632)
    """
    unit = max(1 << 16, min(_UNIT_NBYTES, budget // (12 * jobs)))
    return Limits(min(_BAND_NBYTES, unit), unit, budget - 3 * unit * jobs)
