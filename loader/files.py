"""The files of a rank: checked, then mapped or read, each one block of bytes of which tensors are views."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import xxhash

from loader.dtypes import torch_dtype, torch_shape
from loader.mapping import map_file
from loader.memory import DeviceMemory, HostMemory, Memory, PinnedPool
from loader.reading import RankFile
from loader.tiles import STRETCH_NBYTES, Tile, check_in_memory, stretches_of
from manifests.belonging import belonging, foreign
from manifests.errors import CheckpointError, LoadError
from manifests.header import read_header
from manifests.manifest import TILE_NBYTES, Extent
from manifests.opening import open_handle
from manifests.runtime import RuntimeFile, RuntimeManifest

THREADS = 4
"""Workers that read or hash: two keep a local disk busy, more hide the delays of a network."""


class ShardFile:
    """A file of the split, as one block of bytes in memory or on a device."""

    def __init__(self, extents: Mapping[str, Extent], block: torch.Tensor) -> None:
        self.extents = extents
        self._block = block

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of the file as a view.

        Raises:
            LoadError: torch has no such dtype.
        """
        extent = self.extents[name]
        view = self._block[extent.offset : extent.offset + extent.nbytes]
        return view.view(torch_dtype(dtype)).view(torch_shape(dtype, shape))


class Opening:
    """Opens the files of a rank; what is read is read by threads, from when it is opened until `finish`."""

    def __init__(
        self, folder: Path, manifest: RuntimeManifest, device: torch.device, way: Literal["mmap", "read"], hashed: bool
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._device = device
        self._way = way
        self._hashed = hashed
        self._workers: ThreadPoolExecutor | None = None
        self._work: list[Future[None]] = []
        self._reading: list[tuple[RankFile, Memory]] = []
        self._pinned: PinnedPool | None = None
        self._given_up: LoadError | None = None

    def open(self, file: RuntimeFile) -> ShardFile:
        """Check a file's size and header, and map it or begin to read it.

        Raises:
            LoadError: It is not the file that was written.
        """
        path = self._folder / file.name
        handle = open_checked(path, file, self._manifest)
        extents, nbytes = self._manifest.extents(file), file.nbytes - file.data_offset
        if self._way == "read" and nbytes:
            return ShardFile(extents, self._begin(RankFile(str(path), file.data_offset, file.nbytes, handle), extents))
        try:
            if nbytes == 0:
                return ShardFile(extents, torch.empty(0, dtype=torch.uint8, device=self._device))
            pages = map_file(str(path), handle, file.nbytes)
        finally:
            os.close(handle)
        if self._hashed:
            memory = memoryview(pages)[file.data_offset :]
            self._submit(partial(check_in_memory, str(path), memory=memory), extents)
        block = torch.frombuffer(pages, dtype=torch.uint8, offset=file.data_offset, count=nbytes)
        return ShardFile(extents, block if self._device.type == "cpu" else block.to(self._device))

    def give_up(self, error: LoadError) -> None:
        """Let what is still to be read raise an error, and so `finish`; for another thread."""
        self._given_up = error

    def finish(self) -> None:
        """Wait until everything is in memory and every hash that is to be compared was.

        Raises:
            LoadError: A file ends early, or has other bytes than were written.
        """
        try:
            for work in self._work:
                work.result()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the work that was not begun, and wait for what was."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
        for source, memory in self._reading:
            memory.finish()
            source.close()
        self._workers, self._work, self._reading = None, [], []

    def _begin(self, source: RankFile, extents: Mapping[str, Extent]) -> torch.Tensor:
        try:
            memory = self._allocate(source.nbytes - source.data_offset)
        except BaseException:
            source.close()
            raise
        self._reading.append((source, memory))
        self._submit(partial(_read_stretch, source, memory, self._hashed), extents)
        return memory.block

    def _allocate(self, nbytes: int) -> Memory:
        if self._device.type == "cpu":
            return HostMemory(nbytes)
        self._pinned = self._pinned or PinnedPool(self._device, STRETCH_NBYTES + TILE_NBYTES)
        return DeviceMemory(nbytes, self._pinned)

    def _submit(self, work: "partial[None]", extents: Mapping[str, Extent]) -> None:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(THREADS, "reshard-read")
        self._work += [self._workers.submit(self._carry_out, work, stretch) for stretch in stretches_of(extents)]

    def _carry_out(self, work: "partial[None]", stretch: Sequence[Tile]) -> None:
        if self._given_up is not None:
            raise self._given_up
        work(stretch)


def _read_stretch(source: RankFile, memory: Memory, hashed: bool, stretch: Sequence[Tile]) -> None:
    begin, end = stretch[0].begin, stretch[-1].end
    target = memory.begin(begin, end)
    (source.read_hashed if hashed else source.read)(stretch, target)
    memory.end(begin, end)


def open_checked(path: Path, file: RuntimeFile, manifest: RuntimeManifest) -> int:
    """Open a file, and compare its size and header with the manifest before its data is touched.

    Returns:
        The open file: what is mapped or read is what was checked, whatever the name means by then.

    Raises:
        LoadError: It is missing, short, long, of another split or rank, or not the file that was written.
    """
    try:
        handle = open_handle(path)
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; copy it, or split again") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        _check(handle, path, file, manifest)
    except OSError as error:
        os.close(handle)
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(handle: int, path: Path, file: RuntimeFile, manifest: RuntimeManifest) -> None:
    """Compare an open file's size and header; the header's hash says all, and only where it differs it is parsed."""
    actual = os.fstat(handle).st_size
    if actual == file.nbytes:
        start = os.pread(handle, file.data_offset, 0)
        length = int.from_bytes(start[:8], "little")
        if length == file.data_offset - 8 == len(start) - 8 and xxhash.xxh3_128_hexdigest(start[8:]) == file.header:
            return
    size = f"{actual} bytes, {file.nbytes} expected; split again or copy the file again"
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise LoadError(f"{path}: {size}" if actual != file.nbytes else f"{path}: cannot be used: {error}") from error
    other = foreign(header.metadata, belonging(manifest.key, manifest.world_size, file.owners))
    if actual != file.nbytes:
        raise LoadError(f"{path}: {other}: {size}" if other else f"{path}: {size}")
    raise LoadError(
        f"{path}: {other or 'its hash differs'}: its header is not the one that was written; "
        "copy the file again, or split again"
    )
