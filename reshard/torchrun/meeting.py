"""Meeting: how the processes of one split talk, by small files in the hidden folder that all of them see.

Process 0 makes the folder, the others wait for it. Nothing but a shared file system is needed, so several machines meet
as those of one do. A message is written beside its name and renamed, so it is read whole. What an older run of the same
name left behind is never taken for an answer: everyone says a word of its own, and goes on when it hears it again.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from manifests.errors import CheckpointError, OutputError, ReshardError
from reshard.publishing.staging import take_away
from reshard.torchrun.processes import Processes, first_line

START_LIMIT_S = 300.0
"""How long a process waits for the others to start; a plan is made from headers, so they are not far apart."""
LEAD_GRACE_S = 3.0
"""How long process 0 leaves a failure to be read before it removes the folder."""
FOLLOW_GRACE_S = 10.0
"""How long another process waits for the folder to be removed before it does so itself."""
LONGEST_NAP_S = 0.25
PREFIX = ".process-"

_Message = TypeVar("_Message")


class Hello(msgspec.Struct, frozen=True):
    """A process has planned the split of this key."""

    word: str
    key: str


class Start(msgspec.Struct, frozen=True):
    """All are there: the word of each, and the key of process 0."""

    words: dict[int, str]
    key: str


class Failure(msgspec.Struct, frozen=True):
    """A process stops: because it failed, or because ``rank`` did."""

    rank: int
    reason: str
    exit_code: int


class Meeting:
    """The folder of a split, as one of the processes sees it."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder = folder
        self._rank, self._size, _ = processes
        self._looked = time.monotonic()

    def post(self, kind: str, message: object) -> None:
        """Leave a message of this process for the others.

        Raises:
            OutputError: It cannot be written.
        """
        path = self._path(self._rank, kind)
        beside = path.with_name(f"{path.name}.partial")
        try:
            beside.write_bytes(msgspec.msgpack.encode(message))
            beside.replace(path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    def read(self, rank: int, kind: str, form: type[_Message]) -> _Message | None:
        """Return a message of a process, or None if there is none.

        Raises:
            OutputError: It cannot be read.
        """
        path = self._path(rank, kind)
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=form)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise OutputError(f"{path}: cannot be read: {error}") from error

    def gather(self, key: str) -> None:
        """Wait, as process 0, until all have planned the same split, and tell them so.

        Raises:
            ReshardError: A process does not come, or fails.
        """
        hellos: dict[int, Hello] = {}
        for _ in _naps(START_LIMIT_S):
            self.check()
            for rank in range(1, self._size):
                if rank not in hellos and (hello := self.read(rank, "hello", Hello)):
                    hellos[rank] = hello
            if len(hellos) == self._size - 1:
                self.post("start", Start({rank: hello.word for rank, hello in hellos.items()}, key))
                return
        missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in hellos)
        raise ReshardError(
            f"process {missing} of {self._size} did not come within {START_LIMIT_S:.0f} s to {self.folder}; "
            "all need the same destination on one file system; unset RANK and WORLD_SIZE to split alone"
        )

    def join(self, key: str) -> None:
        """Wait, as another process, until process 0 has heard this one.

        Raises:
            CheckpointError: Process 0 has planned another split.
            ReshardError: It does not come.
        """
        hello = Hello(os.urandom(8).hex(), key)
        for _ in _naps(START_LIMIT_S):
            start = self.read(0, "start", Start)
            if start is not None and start.words.get(self._rank) == hello.word:
                break
            with suppress(OutputError):  # there is no folder yet, or a left one is being removed
                if self.read(self._rank, "hello", Hello) != hello:
                    self.post("hello", hello)
        else:
            raise ReshardError(
                f"process 0 did not come within {START_LIMIT_S:.0f} s to {self.folder}; all need the same destination "
                "on one file system"
            )
        if start.key != key:
            raise CheckpointError(
                "another split is planned here than by process 0; the options, the files and their modification "
                "times must be the same for all"
            )

    def results(self, form: type[_Message]) -> list[_Message]:
        """Wait for the results of all processes, and return them in the order of the processes.

        Raises:
            ReshardError: A process failed.
        """
        found: dict[int, _Message] = {}
        for _ in _naps():
            self.check()
            for rank in range(self._size):
                if rank not in found and (result := self.read(rank, "result", form)) is not None:
                    found[rank] = result
            if len(found) == self._size:
                break
        return [found[rank] for rank in range(self._size)]

    def wait_until_removed(self) -> None:
        """Wait until process 0 has published the folder or given it up.

        Raises:
            ReshardError: A process failed.
        """
        for _ in _naps():
            self.check()
            if not self.folder.exists():
                return

    def check(self) -> None:
        """Stop if another process failed.

        Raises:
            ReshardError: It did; with its exit code.
        """
        if failure := self._failure():
            raise _follow(failure)

    def look(self) -> None:
        """Do as `check`, once a second: for whoever calls often."""
        if time.monotonic() - self._looked > 1:
            self.check()
            self._looked = time.monotonic()

    @contextmanager
    def reporting(self, on_failure: Callable[[], object]) -> Iterator[None]:
        """Tell the others if the body fails; afterwards the folder is gone, or process 0 may remove it.

        Args:
            on_failure: Called first, so that a signal does not keep the rest from being done.

        Raises:
            ReshardError: This process was interrupted because another one had failed.
        """
        try:
            yield
        except BaseException as error:
            on_failure()
            failure = None
            with suppress(OutputError):
                failure = self._failure()
            with suppress(OutputError):
                self.post("error", failure or _describe(self._rank, error))
            self._part()
            if failure is not None and failure.exit_code != 130 and isinstance(error, KeyboardInterrupt):
                raise _follow(failure) from error
            raise

    def _part(self) -> None:
        for _ in _naps(FOLLOW_GRACE_S if self._rank else LEAD_GRACE_S):
            names = self._names()
            if not names or (self._rank == 0 and len([n for n in names if n.endswith(".error")]) == self._size):
                return
        if self._rank:
            take_away(self.folder)

    def _failure(self) -> Failure | None:
        """Return why another process stopped; an interruption only if there is nothing else."""
        failures: list[Failure] = []
        for name in self._names():
            rank = name.removeprefix(PREFIX).removesuffix(".error")
            if name.endswith(".error") and rank.isdecimal() and int(rank) != self._rank:
                failure = self.read(int(rank), "error", Failure)
                if failure is not None and failure.rank != self._rank:
                    failures.append(failure)
        return min(failures, key=lambda failure: (failure.exit_code == 130, failure.rank), default=None)

    def _names(self) -> list[str]:
        # A listing is fresh where a network file system answers for a single name from what it remembers.
        try:
            return [path.name for path in self.folder.iterdir()]
        except OSError:
            return []

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"{PREFIX}{rank}.{kind}"


def _describe(rank: int, error: BaseException) -> Failure:
    exit_code = error.exit_code if isinstance(error, ReshardError) else 1
    return Failure(rank, first_line(error), 130 if isinstance(error, KeyboardInterrupt) else exit_code)


def _follow(failure: Failure) -> ReshardError:
    error = ReshardError(f"process {failure.rank} failed: {failure.reason}")
    error.exit_code = failure.exit_code
    return error


def _naps(limit_s: float = float("inf")) -> Iterator[None]:
    """Yield again and again, after naps that grow, until the limit is reached."""
    deadline = time.monotonic() + limit_s
    nap = 0.005
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(nap)
        nap = min(nap * 1.5, LONGEST_NAP_S)
