"""The files of an output: made with their size, written whole, and made durable."""

import os
from collections.abc import Iterable
from pathlib import Path

from reshard.disks import is_on_disk, reserve


def create_sized(path: Path, header: Iterable[bytes], nbytes: int) -> None:
    """Make a new file of ``nbytes`` bytes that starts with the header, which comes in pieces."""
    with path.open("xb") as file:
        file.writelines(header)
        file.truncate(nbytes)
        if is_on_disk(path):
            file.flush()
            reserve(file.fileno(), nbytes)


def is_sized(path: Path, header: Iterable[bytes], nbytes: int) -> bool:
    """Tell whether a file is there as `create_sized` makes it, whatever it holds behind the header."""
    try:
        with path.open("rb") as file:
            sized = os.fstat(file.fileno()).st_size == nbytes
            return sized and all(file.read(len(piece)) == piece for piece in header)
    except FileNotFoundError:
        return False


def write_synced(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a new file, whole or piece by piece, and make its bytes durable."""
    with path.open("xb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, and make their names durable."""
    missing = [folder, *folder.parents]
    missing = missing[: next(at for at, path in enumerate(missing) if path.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)
