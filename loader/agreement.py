"""How the ranks agree that all of them can go on: through a store, before any collective.

Every rank says that it is there, then that it is ready; the last one says that all are. The first that cannot go on
says why, and all end with its reason. Meanwhile a thread of every rank looks after the others: of a process of this
machine it is known at once that it has ended, of one of another machine by the signs that it stops to give. A rank that
lives is waited for, however slow its file system is, until this one has been ready for `WAIT_S` seconds.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from loader.group import Place, start_group
from manifests.errors import LoadError
from manifests.process import Process, decode_process, encode_process, runs_here, this_process

WAIT_S = 1800.0
"""Seconds that a rank which is ready waits for one that is not."""

SILENCE_S = 30.0
"""Seconds without a sign after which a rank of another machine is given up. A thread gives the signs, so nothing but a
call that keeps Python from running for so long looks like an end."""

LINGER_S = 6.0
"""Seconds that the process which holds the store waits, after a refusal, for those that have not read it."""

_SIGN_S = 0.5
_LONGEST_POLL_S = 0.1
_REASON_LENGTH = 20_000
_GO = "go"

Facts = Mapping[str, str]
"""What must be the same on all ranks, by what it is called."""


class Agreement:
    """The agreement of one load.

    Attributes:
        on_refusal: Called, by another thread, with the error if another rank cannot go on.
    """

    def __init__(self, place: Place, wait_s: float = WAIT_S) -> None:
        self._place = place
        self._wait_s = wait_s
        self._me = this_process()
        self._opened: Any = None
        self._store: Any = None
        self._facts: Facts = {}
        self._compared = place.rank == 0
        self._others: dict[int, Process] = {}
        self._signs = (0, 0.0)
        self._verdict = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._word = ""
        self.on_refusal: Callable[[LoadError], None] = lambda _: None

    def open(self) -> None:
        """Open the store, if that is for this rank to do: the others wait for it, and for nothing else that it does.

        Raises:
            LoadError: It cannot be opened.
        """
        if self._place.opens_store:
            self._opened = self._place.open_store(self._wait_s)

    def arrive(self, facts: Facts) -> None:
        """Tell the others that this rank is there, and look after them from now on.

        Args:
            facts: What must be the same on all ranks.

        Raises:
            LoadError: The store cannot be reached, or another process has this rank.
        """
        if self._place.size == 1:
            return
        self._facts = facts
        self._enter(self._wait_s)
        with self._reached():
            if self._place.rank == 0:
                self._store.set("facts", json.dumps(facts))
        self._thread = threading.Thread(target=self._look_after, name="reshard-agree", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Go on, unless another rank is known to have refused.

        Raises:
            LoadError: It has, for the reason in the message.
        """
        if self._verdict and self._verdict != _GO:
            raise LoadError(self._verdict)

    def tell(self, word: str) -> None:
        """Give the others a word, as the one rank that does, before it concludes."""
        self._word = word
        if self._store is not None:
            with self._reached():
                self._store.set("word", word)

    def told(self) -> str:
        """Return the word that a rank has given; all have it once they have concluded."""
        if self._store is not None and not self._word:
            with self._reached():
                self._word = self._store.get("word").decode()
        return self._word

    def conclude(self, worker: int | None = None) -> None:
        """Tell the others that this rank is ready, and wait until all are.

        Args:
            worker: A rank that works for all: once it is there it is waited for, however long it takes.

        Raises:
            LoadError: Another rank cannot go on, or is not ready in time.
        """
        if self._store is None:
            return
        place, began, pause = self._place, time.monotonic(), 0.001
        told = False
        with self._reached():
            while not self._read_verdict():
                if not told and self._compare():
                    self._store.set(f"ready/{place.rank}", "")
                    told = True
                    if self._store.add("ready", 1) == place.size:
                        self._decide(_GO)
                        continue
                if worker in self._others and not self._store.check([f"ready/{worker}"]):
                    began = time.monotonic()
                if time.monotonic() - began > self._wait_s:
                    self._refuse_late()
                    continue
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_POLL_S)
        self._stop()
        self.check()

    def group(self, device: torch.device) -> dist.ProcessGroup | None:
        """Return the group to compute in, started now if there is none; None in a process of its own."""
        if self._place.group is None and self._store is not None:
            return start_group(self._place, PrefixStore("group", self._store), device)
        return self._place.group

    def refuse(self, error: BaseException) -> None:
        """Tell the others why this rank cannot go on, unless one was first; return when they know it, or soon after."""
        if self._place.size == 1 or self._place.problem:
            return
        with suppress(LoadError, RuntimeError):
            if self._store is None:
                self._enter(LINGER_S)
            self._decide(_reason(self._place.rank, f"{type(error).__name__}: {error}"))
        self._stop()
        with suppress(RuntimeError):
            self._linger()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within it, whatever ends this rank's load ends that of the others, with its reason."""
        try:
            yield
        except BaseException as error:
            self.refuse(error)
            raise

    def _enter(self, wait_s: float) -> None:
        """Open the store and take this rank in it; a process that has it already is told as well."""
        place, me = self._place, encode_process(self._me)
        store: Any = self._opened if self._opened is not None else place.open_store(wait_s)
        with self._reached():
            holder = decode_process(store.compare_set(f"reshard/process/{place.rank}", "", me))
            mine = holder == self._me
            number = store.add(f"reshard/loads/{place.rank}", int(mine))
            self._store = PrefixStore(f"reshard/load/{max(number, 1)}", store)
            if mine:
                self._store.set(f"here/{place.rank}", me)
                self._store.add("here", 1)
                return
        raise LoadError(
            f"{self._me} and {holder} both have rank {place.rank} of {place.size}; "
            "every process needs a RANK of its own"
        )

    def _look_after(self) -> None:
        """Look after the other ranks until there is a verdict."""
        try:
            while not self._ended.wait(_SIGN_S) and not self._read_verdict():
                self._compare()
                self._store.add(f"signs/{self._place.rank}", 1)
                self._find_others()
                self._look_for_ended()
        except RuntimeError as error:
            self._settle(self._of_lost_store(error))

    def _find_others(self) -> None:
        """Learn which processes the ranks are that are there."""
        if self._store.add("here", 0) - 1 == len(self._others):
            return
        for rank in self._missing():
            if self._store.check([f"here/{rank}"]):
                self._others[rank] = decode_process(self._store.get(f"here/{rank}"))

    def _missing(self) -> Iterator[int]:
        return (rank for rank in range(self._place.size) if rank != self._place.rank and rank not in self._others)

    def _look_for_ended(self) -> None:
        for rank, process in list(self._others.items()):
            if self._has_ended(rank):
                self._give_up(rank, _ended_words(process))
                return
        # Each looks after one of another machine, the next rank: so all are looked after, however many they are.
        rank = (self._place.rank + 1) % self._place.size
        other = self._others.get(rank)
        if other is None or runs_here(other) is not None:
            return
        count, now = self._store.add(f"signs/{rank}", 0), time.monotonic()
        if count != self._signs[0] or not self._signs[1]:
            self._signs = (count, now)
        elif now - self._signs[1] > SILENCE_S:
            self._give_up(rank, f"no sign of {other} for {now - self._signs[1]:.0f} s; it has ended, or stands")

    def _give_up(self, rank: int, words: str) -> None:
        """Refuse in the name of a rank that cannot do so; nobody needs to wait until it has read that."""
        self._store.set(f"seen/{rank}", "")
        self._decide(_reason(rank, words))

    def _compare(self) -> bool:
        """Compare the facts with those of rank 0, once they are there; tell whether they were compared."""
        if self._compared or not self._store.check(["facts"]):
            return self._compared
        theirs, mine = json.loads(self._store.get("facts")), self._facts
        for name in dict.fromkeys((*theirs, *mine)):
            one, other = mine.get(name, "none"), theirs.get(name, "none")
            if one != other:
                self._decide(_reason(self._place.rank, f"another {name} than rank 0: {one}, rank 0 has {other}"))
                return False
        self._compared = True
        return True

    def _refuse_late(self) -> None:
        """Refuse, since a rank is not ready in time."""
        late = [rank for rank in range(self._place.size) if not self._store.check([f"ready/{rank}"])]
        if not late:
            return
        never = [rank for rank in late if not self._store.check([f"here/{rank}"])]
        rank, *more = never or late
        what = "has not come to load the split" if never else "is not ready"
        also = f", nor have ranks {', '.join(map(str, more))}" if more else ""
        since = f"{self._wait_s:.0f} s after rank {self._place.rank} was ready{also}"
        self._decide(_reason(rank, f"{what}, {since}; see why, or give a larger wait_s"))

    def _decide(self, verdict: str) -> None:
        """Give the verdict, unless there is one; either way it is what this rank goes by."""
        self._settle(self._store.compare_set("verdict", "", verdict[:_REASON_LENGTH]).decode())

    def _read_verdict(self) -> str:
        if not self._verdict and self._store.check(["verdict"]):
            self._settle(self._store.get("verdict").decode())
        return self._verdict

    def _settle(self, verdict: str) -> None:
        with self._lock:
            first, self._verdict = not self._verdict, self._verdict or verdict
        if first and verdict != _GO:
            self.on_refusal(LoadError(verdict))
            with suppress(RuntimeError):
                self._store.set(f"seen/{self._place.rank}", "")

    def _stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_SIGN_S)

    def _linger(self) -> None:
        """Keep the store, if it is this process's, until all ranks that live have read the verdict."""
        if not self._place.holds_store or self._store is None:
            return
        end = time.monotonic() + LINGER_S
        unaware = set(range(self._place.size)) - {self._place.rank}
        while unaware and time.monotonic() < end:
            self._find_others()
            unaware = {
                rank for rank in unaware if not self._store.check([f"seen/{rank}"]) and not self._has_ended(rank)
            }
            time.sleep(0.05)

    def _has_ended(self, rank: int) -> bool:
        return rank in self._others and runs_here(self._others[rank]) is False

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Within it, a store that is lost is a refusal."""
        try:
            yield
        except RuntimeError as error:
            raise LoadError(self._of_lost_store(error)) from error

    def _of_lost_store(self, error: Exception) -> str:
        """Return the verdict where the store is lost: the process that had it ended, and with it what it said."""
        for rank, process in list(self._others.items()):
            if self._has_ended(rank):
                return _reason(rank, _ended_words(process))
        first = str(error).partition("\n")[0]
        return _reason(
            0, f"the ranks' store was lost ({first}); it ends with the process that holds it, mostly rank 0's"
        )


def versions(*packages: str) -> str:
    """Return what computes: the versions of torch, of this package and of others that are installed."""
    found = {"torch": torch.__version__.partition("+")[0]}
    for package in ("reshard", *filter(None, packages)):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _reason(rank: int, words: str) -> str:
    return f"rank {rank} cannot go on: {words}"


def _ended_words(process: Process) -> str:
    return f"{process} ended while it loaded; its own output may tell why"
