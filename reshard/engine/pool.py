"""Workers that take units from one sequence, and the orders that some units keep among each other."""

from collections.abc import Callable, Iterator
from threading import Condition, Lock, Thread

import numpy as np

from reshard.engine.copying import Bytes

_ALIGNMENT = 64


class StoppedError(Exception):
    """Another worker failed, so that what this one waits for never comes."""


class Scratch:
    """One worker's buffers: pieces of one allocation, taken for a unit and given back all at once."""

    def __init__(self, nbytes: int) -> None:
        self._memory: Bytes = np.empty(nbytes, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Give everything back."""
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """Return a buffer, whose content is anything; one of its own where it does not fit."""
        begin = self._used
        if begin + nbytes > len(self._memory):
            return np.empty(nbytes, np.uint8)
        self._used = begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._memory[begin : begin + nbytes]


Unit = Callable[[Scratch], None]
"""A piece of work. It may wait for units before it in the sequence, never for later ones."""


class Pool:
    """Runs units by several workers that take them in order."""

    def __init__(self, jobs: int, scratch_nbytes: int) -> None:
        self._jobs = jobs
        self._scratch_nbytes = scratch_nbytes
        self._changed = Condition()
        self._waiting = 0
        self._failure: BaseException | None = None

    def run(self, units: Iterator[Unit]) -> None:
        """Run all units; the first failure ends the run and is raised once every worker has stopped."""
        lock = Lock()

        def work() -> None:
            scratch = Scratch(self._scratch_nbytes)
            try:
                while self._failure is None:
                    with lock:
                        unit = next(units, None)
                    if unit is None:
                        return
                    scratch.clear()
                    unit(scratch)
            except StoppedError:
                return
            except BaseException as error:  # noqa: BLE001 - raised in the thread that called
                self.fail(error)

        threads = [Thread(target=work, name=f"reshard-{position}") for position in range(self._jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Make all workers stop."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, which is announced by `announce`.

        Raises:
            StoppedError: A worker failed.
        """
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._failure is not None or happened())
            finally:
                self._waiting -= 1
            if not happened():
                raise StoppedError

    def announce(self, change: Callable[[], None]) -> None:
        """Change what others may wait for."""
        with self._changed:
            change()
            if self._waiting:
                self._changed.notify_all()


class Turn:
    """Units of a chain hash in their order."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next = 0

    def is_due(self, position: int) -> bool:
        """Tell whether all units before this one have hashed."""
        return self._next == position

    def wait(self, position: int) -> None:
        """Wait until all units before this one have hashed."""
        self._pool.wait(lambda: self._next == position)

    def pass_on(self) -> None:
        """Let the next unit hash."""
        self._pool.announce(self._advance)

    def _advance(self) -> None:
        self._next += 1


class Phases:
    """Units of a phase start when all units of the phases before it are done."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._open: dict[int, int] = {}
        self._last = -1

    def begin(self) -> int:
        """Return a new phase. Called where units are made, which is in order."""
        self._pool.announce(self._open_next)
        return self._last

    def add(self, phase: int) -> None:
        """Count a unit of a phase; all are counted before the first of the next phase."""
        self._pool.announce(lambda: self._count(phase, 1))

    def enter(self, phase: int) -> None:
        """Wait until the phase has come."""
        self._pool.wait(lambda: not any(count for other, count in self._open.items() if other < phase))

    def leave(self, phase: int) -> None:
        """Finish a unit of a phase."""
        self._pool.announce(lambda: self._count(phase, -1))

    def _open_next(self) -> None:
        self._last += 1
        self._open[self._last] = 0

    def _count(self, phase: int, by: int) -> None:
        self._open[phase] += by
        for done in [other for other, units in self._open.items() if not units and other < self._last]:
            del self._open[done]
