"""The files of a rank: checked, then mapped or read, each one block of bytes of which tensors are views."""

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
from manifests.errors import CheckpointError, LoadError
from manifests.header import read_header
from manifests.manifest import TILE_NBYTES, Extent
from manifests.opening import open_file
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

    def open(self, file: RuntimeFile) -> ShardFile:
        """Check a file's size and header, and map it or begin to read it.

        Raises:
            LoadError: It is not the file that was written.
        """
        path = self._folder / file.name
        check_rank_file(path, file, self._manifest.key)
        extents, nbytes = self._manifest.extents(file), file.nbytes - file.data_offset
        if nbytes == 0:
            return ShardFile(extents, torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._way == "read":
            return ShardFile(extents, self._begin(RankFile(str(path), file.data_offset), extents, nbytes))
        pages = map_file(path, file.nbytes)
        if self._hashed:
            memory = memoryview(pages)[file.data_offset :]
            self._submit(partial(check_in_memory, str(path), memory=memory), extents)
        block = torch.frombuffer(pages, dtype=torch.uint8, offset=file.data_offset, count=nbytes)
        return ShardFile(extents, block if self._device.type == "cpu" else block.to(self._device))

    def finish(self) -> None:
        """Wait until everything is in memory and every hash that is to be compared was.

        Raises:
            LoadError: A file ends early, or has other bytes than were written.
        """
        try:
            for work in self._work:
                work.result()
            for _, memory in self._reading:
                memory.finish()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the work that was not begun, and wait for what was."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
        for source, _ in self._reading:
            source.close()
        self._workers, self._work, self._reading = None, [], []

    def _begin(self, source: RankFile, extents: Mapping[str, Extent], nbytes: int) -> torch.Tensor:
        memory = self._allocate(nbytes)
        self._reading.append((source, memory))
        self._submit(partial(_read_stretch, source, memory, self._hashed), extents)
        return memory.block

    def _allocate(self, nbytes: int) -> Memory:
        if self._device.type == "cpu":
            return HostMemory(nbytes)
        self._pinned = self._pinned or PinnedPool(self._device, STRETCH_NBYTES + TILE_NBYTES)
        return DeviceMemory(nbytes, self._device, self._pinned)

    def _submit(self, work: "partial[None]", extents: Mapping[str, Extent]) -> None:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(THREADS, "reshard-read")
        self._work += [self._workers.submit(work, stretch) for stretch in stretches_of(extents)]


def _read_stretch(source: RankFile, memory: Memory, hashed: bool, stretch: Sequence[Tile]) -> None:
    begin, end = stretch[0].begin, stretch[-1].end
    target = memory.begin(begin, end)
    (source.read_hashed if hashed else source.read)(stretch, target)
    memory.end(begin, end)


def check_rank_file(path: Path, file: RuntimeFile, key: str) -> None:
    """Compare a file's size and header with the manifest, before its data is touched.

    The header's hash says all; only where it differs is the header parsed, to tell why.

    Raises:
        LoadError: It is missing, short, long, of another split, or not the file that was written.
    """
    try:
        with open_file(path) as stream:
            actual = stream.seek(0, 2)
            if actual != file.nbytes:
                raise LoadError(f"{path}: {actual} bytes, {file.nbytes} expected; split again or copy the file again")
            stream.seek(0)
            start = stream.read(file.data_offset)
        length = int.from_bytes(start[:8], "little")
        if length == len(start) - 8 and xxhash.xxh3_128_hexdigest(start[8:]) == file.header:
            return
        header = read_header(path)
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; copy it, or split again") from error
    except (OSError, CheckpointError) as error:
        raise LoadError(f"{path}: cannot be used: {error}") from error
    found = (header.metadata or {}).get("reshard.key", "none")
    if found != key:
        raise LoadError(f"{path}: belongs to another split: its key is {found}, the manifest's {key}")
    raise LoadError(f"{path}: its header is not the one that was written")
