"""Processes: which of those that torchrun started this one is. Nothing of torch is needed to know it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from manifests.errors import ReshardError


class Processes(NamedTuple):
    """The processes of one run, as torchrun's variables tell.

    Attributes:
        rank: Position of this process; process 0 leads.
        size: Their number.
        token: The same in all processes of a run and in no other run that is alive, hexadecimal.
    """

    rank: int = 0
    size: int = 1
    token: str = ""

    @property
    def follows(self) -> bool:
        """Whether another process leads."""
        return self.rank > 0


def read_environment(environment: Mapping[str, str] = os.environ) -> Processes:
    """Return this process's place among those of its run; one process alone if torchrun started none.

    >>> read_environment({})
    Processes(rank=0, size=1, token='')
    >>> read_environment({"RANK": "1", "WORLD_SIZE": "4"})[:2]
    (1, 4)

    Raises:
        ReshardError: The variables do not say which of several processes this is.
    """
    size, rank = environment.get("WORLD_SIZE", "1"), environment.get("RANK", "0")
    if size == "1":
        return Processes()
    if not size.isdecimal() or not rank.isdecimal() or "RANK" not in environment or int(rank) >= int(size):
        raise ReshardError(
            f"RANK {environment.get('RANK')!r}, WORLD_SIZE {size!r}: not set as by torchrun; unset both to split alone"
        )
    run = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    named = [environment.get(name, "") for name in run]
    # torchrun's run id and address are the same on every machine unless they are given.
    if environment.get("LOCAL_WORLD_SIZE") == size:
        named.append(os.uname().nodename)
    from hashlib import sha256

    return Processes(int(rank), int(size), sha256("\n".join(named).encode()).hexdigest()[:12])


@contextmanager
def speaking_as(processes: Processes) -> Iterator[None]:
    """Let what is raised tell, in one line, which process raises it, unless it is the one that leads.

    All processes fail alike where the cause is the checkpoint or the plan; the leading one tells it in full.
    An interruption ends all of them, and one line about it is enough.
    """
    try:
        yield
    except ReshardError as error:
        if processes.follows:
            error.args = (f"process {processes.rank}: {first_line(error)}",)
        raise
    except KeyboardInterrupt:
        if processes.follows:
            raise SystemExit(130) from None
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type before it, if it was not raised on purpose.

    >>> first_line(ReshardError("a: b")), first_line(KeyError("x")), first_line(KeyboardInterrupt())
    ('a: b', "KeyError: 'x'", 'interrupted')
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, ReshardError) else f"{type(error).__name__}: {lines[0]}"
