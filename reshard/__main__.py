"""``python -m reshard``, and the script: the command line in a process that does nothing else."""

import gc
import os
import sys

_FEW_SEARCHES = 100_000
"""Objects that are made between two searches for cycles; Python's own 700 make dozens while modules are imported."""


def run() -> None:
    """Run the command line and end the process, which takes its memory with it.

    Python would take everything down piece by piece, for as long as it took to import it, or to plan.
    """
    gc.set_threshold(_FEW_SEARCHES)
    # Nothing here multiplies matrices; numpy would start a thread for every processor, and they wait by spinning.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from reshard.cli import main

    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) and _written_out():
            os._exit(end.code)
        raise


def _written_out() -> bool:
    """Tell whether what was printed has reached its reader."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    run()
