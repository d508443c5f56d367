"""A CUDA device without a GPU: what streams are given is done as late as events and other streams allow.

So a pinned buffer that is filled again too early, or memory that is used before what wrote to it, gives wrong bytes.
Which device is current, every thread has by itself, from 0. Follows "CUDA semantics" of torch's documentation.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

GARBAGE = 0xAA
_lock = threading.RLock()


class Stream:
    """A queue of work, which is done when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.index = current.device() if device.index is None else device.index
        self._work: deque[Callable[[], object]] = deque()

    def give(self, work: Callable[[], object]) -> None:
        with _lock:
            self._work.append(work)

    def run(self, until: "Event | None" = None) -> None:
        """Do the work that was given so far, or as much of it as an event needs."""
        with _lock:
            for _ in range(len(self._work)):
                if until is not None and until.done:
                    return
                self._work.popleft()()

    @property
    def pending(self) -> int:
        return len(self._work)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.give(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.give(other.record_event().synchronize)


class Event:
    """A mark in a stream; one that was never recorded is no reason to wait."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.done = True
        self._stream: Stream | None = None
        self._mark: object = None

    def record(self, stream: Stream) -> None:
        mark = object()
        self._stream, self._mark, self.done = stream, mark, False
        stream.give(lambda: self._reach(mark))

    def _reach(self, mark: object) -> None:
        self.done = self.done or mark is self._mark

    def synchronize(self) -> None:
        if self._stream is not None and not self.done:
            self._stream.run(until=self)


class _Current:
    """What every thread has by itself: its device, and a stream of each."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._default: dict[int, Stream] = {}

    def device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, index: int) -> None:
        self._local.device = index

    def stream(self, device: torch.device) -> Stream:
        index = self.device() if device.index is None else device.index
        with _lock:
            default = self._default.setdefault(index, Stream(torch.device("cuda", index)))
        return getattr(self._local, "streams", {}).get(index, default)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._local, "streams", {})
        self._local.streams = before | {stream.index: stream}
        try:
            yield
        finally:
            self._local.streams = before


current = _Current()


class OnDevice(torch.Tensor):
    """A tensor on the device: it is written to by the current stream of the thread that asks for it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", getattr(self, "number", 0))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "OnDevice":  # type: ignore[override]
        assert non_blocking, "the worker would wait for every copy"
        assert source.data_ptr() in PINNED, "what is not pinned is not copied beside other work"
        target = self.as_subclass(torch.Tensor)
        current.stream(self.device).give(lambda: torch.Tensor.copy_(target, source))
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, OnDevice) and isinstance(args[0], OnDevice):
            found.number = getattr(args[0], "number", 0)
        return found


PINNED: dict[int, int] = {}
"""Where pinned buffers start, and their bytes; the fake never frees one."""

_kept: list[torch.Tensor] = []


def install(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Put the fake device in place of torch's; return the streams that are made from then on."""
    made: list[Stream] = []
    empty = torch.empty

    def make_stream(device: torch.device) -> Stream:
        made.append(Stream(device))
        return made[-1]

    def make_tensor(*shape: Any, device: Any = "cpu", pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            PINNED[tensor.data_ptr()] = tensor.nbytes
            _kept.append(tensor)
        if torch.device(device).type != "cuda":
            return tensor
        on_device = tensor.as_subclass(OnDevice)
        index = torch.device(device).index
        on_device.number = current.device() if index is None else index  # type: ignore[attr-defined]
        # Memory that is used again: what wrote to it before may still be queued.
        current.stream(on_device.device).give(lambda: tensor.fill_(GARBAGE))
        return on_device

    PINNED.clear()
    monkeypatch.setattr(torch, "empty", make_tensor)
    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current.use)
    monkeypatch.setattr(torch.cuda, "current_stream", current.stream)
    monkeypatch.setattr(torch.cuda, "current_device", current.device)
    monkeypatch.setattr(torch.cuda, "set_device", current.set_device)
    return made
