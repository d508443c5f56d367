"""The open files of a run: whole reads and whole writes at a position, and whose fault a failure is."""

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from manifests.errors import OutputError, ReshardError
from reshard.disks import is_on_disk, start_writing_back

_WRITE_BACK_NBYTES = 8 << 20
_WRITE_NBYTES = 1 << 19
"""In one call: for more, Linux takes larger pages, and finding such, or touching them, costs up to three times."""
_MOST_BUFFERS = 1024
"""In one call of the system."""


class Files:
    """Open files by position."""

    def __init__(self, paths: Sequence[Path], flags: int, error_type: type[ReshardError]) -> None:
        self.paths = paths
        self._error_type = error_type
        self._waiting = [0] * len(paths)
        """Bytes written to every file on a disk of which the disk was not told."""
        self._on_disk = [flags != os.O_RDONLY and path.exists() and is_on_disk(path) for path in paths]
        self.descriptors: list[int] = []
        self._opened_nbytes: list[int] = []
        for path in paths:
            try:
                self.descriptors.append(os.open(path, flags | os.O_CLOEXEC))
                self._opened_nbytes.append(os.fstat(self.descriptors[-1]).st_size)
            except OSError as error:
                self.__exit__()
                raise error_type(f"{path}: cannot be opened: {error.strerror}") from error

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a position.

        Raises:
            ReshardError: The file cannot be read, or ends before; of the type that its files' errors have.
        """
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self.descriptors[file], [buffer[done:] if done else buffer], offset + done)
            except OSError as error:
                raise self._error_type(
                    f"{self.paths[file]}: cannot be read at byte {offset + done}: {error.strerror}"
                ) from error
            if got == 0:
                raise self._error_type(
                    f"{self.paths[file]}: became shorter while it was read: ends at byte {self._nbytes(file)}, "
                    f"{max(self._opened_nbytes[file], offset + len(buffer))} expected"
                )
            done += got

    def hash_into(self, hasher: xxhash.xxh3_128, file: int, offset: int, nbytes: int, block: memoryview) -> None:
        """Read some bytes, a block at a time, and hash them.

        Raises:
            ReshardError: The file cannot be read, or ends before.
        """
        for at in range(0, nbytes, len(block)):
            piece = block[: nbytes - at]
            self.read_into(file, offset + at, piece)
            hasher.update(piece)

    def _nbytes(self, file: int) -> int:
        return os.fstat(self.descriptors[file]).st_size

    def write(self, file: int, offset: int, buffer: memoryview) -> None:
        """Write a whole buffer to a position.

        Raises:
            OutputError: The file cannot be written.
        """
        done = 0
        while done < len(buffer):
            piece = buffer[done : done + _WRITE_NBYTES]
            try:
                done += os.pwrite(self.descriptors[file], piece, offset + done)
            except OSError as error:
                raise OutputError(f"{self.paths[file]}: cannot be written: {error.strerror}") from error
        self._write_back(file, len(buffer))

    def _write_back(self, file: int, nbytes: int) -> None:
        """Let a disk start to write what it was given, some MiB at a time."""
        if self._on_disk[file]:
            self._waiting[file] += nbytes
            if self._waiting[file] >= _WRITE_BACK_NBYTES:
                self._waiting[file] = 0
                start_writing_back(self.descriptors[file])

    def write_all(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write buffers one after another from a position.

        Raises:
            OutputError: The file cannot be written.
        """
        for begin in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[begin : begin + _MOST_BUFFERS]
            nbytes = sum(map(len, some))
            try:
                done = os.pwritev(self.descriptors[file], some, offset)
            except OSError as error:
                raise OutputError(f"{self.paths[file]}: cannot be written: {error.strerror}") from error
            self._write_back(file, done)
            if done < nbytes:
                self.write(file, offset + done, memoryview(b"".join(some))[done:])
            offset += nbytes
