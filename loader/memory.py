"""Where a rank file's bytes go when they are read: one allocation for each file, in memory or on a device.

On a device the bytes pass through pinned buffers, two for each worker, which are used again and again: one is filled
while the other one is copied.
"""

import ctypes
import mmap
import threading
from typing import Protocol

import torch

_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python's mmap does not name it


# Python's own madvise keeps other threads from running meanwhile. A kernel that lacks this advice makes the pages later.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory(Protocol):
    """The memory of one file's data; ranges are bytes counted from its start."""

    block: torch.Tensor

    def begin(self, start: int, stop: int) -> memoryview:
        """Return where the bytes of a range are to be written."""

    def end(self, start: int, stop: int) -> None:
        """Take over what was written, by the same thread."""

    def finish(self) -> None:
        """Wait until all of it is there."""


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

    def __init__(self, nbytes: int, device: torch.device, pool: "PinnedPool") -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._pool = pool
        pool.follow(torch.cuda.current_stream(device))

    def begin(self, start: int, stop: int) -> memoryview:
        """Return a part of the pinned buffer that this thread fills next."""
        return memoryview(self._pool.lane().next_buffer(stop - start).numpy())  # type: ignore[arg-type]

    def end(self, start: int, stop: int) -> None:
        """Copy the pinned buffer to the device, beside what else it does."""
        self._pool.lane().copy(self.block[start:stop])

    def finish(self) -> None:
        """Let the device's current stream wait for the copies."""
        self._pool.join(torch.cuda.current_stream(self.block.device))


class PinnedPool:
    """The pinned buffers of all workers, for all files that go to one device: at most two for each worker."""

    def __init__(self, device: torch.device, buffer_nbytes: int) -> None:
        self._device = device
        self._buffer_nbytes = buffer_nbytes
        self._local = threading.local()
        self._lanes: list[_Lane] = []
        self._before: torch.cuda.Event | None = None

    def lane(self) -> "_Lane":
        """Return this thread's buffers and stream."""
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(self._device, self._buffer_nbytes)
            self._lanes.append(self._local.lane)
        lane: _Lane = self._local.lane
        if self._before is not None:
            lane.stream.wait_event(self._before)
        return lane

    def follow(self, stream: "torch.cuda.Stream") -> None:
        """Make later copies wait for what a stream was given: memory that is reused may be in use until then."""
        self._before = stream.record_event()

    def join(self, stream: "torch.cuda.Stream") -> None:
        """Make a stream wait for all copies."""
        for lane in self._lanes:
            stream.wait_stream(lane.stream)


class _Lane:
    """One worker's two buffers and its stream."""

    def __init__(self, device: torch.device, buffer_nbytes: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(buffer_nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._nbytes = 0

    def next_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of that many bytes, after its last copy has ended."""
        self._turn ^= 1
        self._nbytes = nbytes
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:nbytes]

    def copy(self, target: torch.Tensor) -> None:
        """Start the copy of the buffer that was given out last."""
        with torch.cuda.stream(self.stream):
            target.copy_(self._buffers[self._turn][: self._nbytes], non_blocking=True)
            self._copied[self._turn].record(self.stream)
