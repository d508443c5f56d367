"""Where a rank file's bytes go when they are read: one allocation for each file, in memory or on a device.

On a device the bytes pass through pinned buffers, two for each worker, which are used again and again: one is filled
while the other one is copied. Every worker has a stream of its own. A device's memory may be used again while earlier
work on it is still queued, so the copies wait for the stream on which it was allocated, and this one waits for them
before the memory can be read, or given back. (torch.cuda, "CUDA semantics": streams, memory management, pinned memory.)
"""

import ctypes
import mmap
import sys
import threading
from typing import Protocol

import torch

_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python's mmap does not name it


# Python's own madvise stops all other threads. A kernel that does not know this advice makes the pages later.
_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory(Protocol):
    """The memory of one file's data; ranges are bytes counted from its start."""

    block: torch.Tensor

    def begin(self, start: int, stop: int) -> memoryview:
        """Return where the bytes of a range are to be written."""

    def end(self, start: int, stop: int) -> None:
        """Take over what was written, by the same thread."""

    def finish(self) -> None:
        """Let what comes after, by the thread that made it, have all of it, or all that was begun."""


class HostMemory:
    """Memory of this process: bytes are read to their place.

    Attributes:
        block: The file's data.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(pages)
        self.block = torch.frombuffer(pages, dtype=torch.uint8)

    def begin(self, start: int, stop: int) -> memoryview:
        """Return the place itself, its pages made: all in one call, a quarter cheaper than one at a time by reading."""
        first = start - start % mmap.PAGESIZE
        if _madvise is not None:
            _madvise(self.block.data_ptr() + first, stop - first, _MADV_POPULATE_WRITE)
        return self._view[start:stop]

    def end(self, start: int, stop: int) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        """Nothing is left to do."""


class DeviceMemory:
    """Memory of a CUDA device.

    Attributes:
        block: The file's data.
    """

    def __init__(self, nbytes: int, pool: "PinnedPool") -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        self._pool = pool
        self._stream = torch.cuda.current_stream(pool.device)
        self._allocated = self._stream.record_event()

    def begin(self, start: int, stop: int) -> memoryview:
        """Return a part of the pinned buffer that this thread fills next."""
        return memoryview(self._pool.lane().next_buffer(stop - start).numpy())  # type: ignore[arg-type]

    def end(self, start: int, stop: int) -> None:
        """Copy the pinned buffer to the device, beside what else it does."""
        self._pool.lane().copy(self.block[start:stop], self._allocated)

    def finish(self) -> None:
        """Let the stream on which the memory was allocated wait for the copies."""
        self._pool.join(self._stream)


class PinnedPool:
    """The pinned buffers of all workers, for all files that go to one device: at most two for each worker.

    Attributes:
        device: The device, with its number: which one is current, every thread has by itself.
    """

    def __init__(self, device: torch.device, buffer_nbytes: int) -> None:
        number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, number)
        self._buffer_nbytes = buffer_nbytes
        self._local = threading.local()
        self._lanes: list[_Lane] = []

    def lane(self) -> "_Lane":
        """Return this thread's buffers and stream."""
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(self.device, self._buffer_nbytes)
            self._lanes.append(self._local.lane)
        lane: _Lane = self._local.lane
        return lane

    def join(self, stream: "torch.cuda.Stream") -> None:
        """Make a stream wait for all copies."""
        for lane in self._lanes:
            stream.wait_stream(lane.stream)


class _Lane:
    """One worker's two buffers and its stream."""

    def __init__(self, device: torch.device, buffer_nbytes: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(buffer_nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # A worker that waits sleeps, for the sake of those that hash.
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._nbytes = 0

    def next_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of that many bytes, after its last copy has ended."""
        self._turn ^= 1
        self._nbytes = nbytes
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:nbytes]

    def copy(self, target: torch.Tensor, allocated: "torch.cuda.Event") -> None:
        """Start the copy of the buffer that was given out last, once its target is free to be written to."""
        self.stream.wait_event(allocated)
        with torch.cuda.stream(self.stream):
            target.copy_(self._buffers[self._turn][: self._nbytes], non_blocking=True)
            self._copied[self._turn].record(self.stream)
