"""Publishing: output is written into a hidden sibling of its destination and appears by one rename.

What has the destination's name is whole: its files are on disk, the manifest last, before the folder is renamed. A run
that fails removes what it wrote and leaves an older output as it was.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manifests.errors import OutputError
from manifests.manifest import is_split
from reshard.disks import is_on_disk, reserve


def check_destination(destination: Path, nbytes: int, *, force: bool) -> None:
    """Refuse a destination that cannot take the output, before anything is written.

    Args:
        destination: The folder to be made.
        nbytes: Bytes that will be written.
        force: Whether an older output may be replaced.

    Raises:
        OutputError: It exists, its file system lacks the space, or it may not be written.
    """
    if os.path.lexists(destination):
        if not force:
            raise OutputError(
                f"{destination}: exists already; remove it or choose another name (--force replaces a split)"
            )
        if not destination.is_dir() or destination.is_symlink():
            raise OutputError(f"{destination}: is no folder; --force replaces a folder only")
        if any(destination.iterdir()) and not is_split(destination):
            raise OutputError(f"{destination}: holds no split, so it is not ours to replace; remove it yourself")
    parent = _existing_parent(destination)
    if not parent.is_dir():
        raise OutputError(f"{destination}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{destination}: no permission to write in {parent}")
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise OutputError(f"{destination}: {nbytes} bytes are needed, {free} are free there")


def check_apart(destination: Path, source: Path) -> None:
    """Refuse a destination that is the source, lies in it, or holds it.

    Raises:
        OutputError: The one is part of the other.
    """
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise OutputError(f"{destination}: overlaps with the source {source}; choose a folder beside it")


def _existing_parent(path: Path) -> Path:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


@contextmanager
def staged(destination: Path, *, force: bool) -> Iterator[Path]:
    """Give a hidden folder beside the destination; publish it at the end, or remove it if the body raises.

    Raises:
        OutputError: The folder cannot be made, synced or renamed.
    """
    staging = staging_path(destination, secrets.token_hex(6))
    destination = destination.absolute()
    with made(staging, destination):
        yield staging
        publish(staging, destination, force=force)


def staging_path(destination: Path, token: str) -> Path:
    """Return the hidden folder in which a destination is made; the token tells runs apart."""
    destination = destination.absolute()
    return destination.with_name(f".{destination.name}.partial-{token}")


@contextmanager
def made(staging: Path, destination: Path) -> Iterator[None]:
    """Make the hidden folder; remove what is left of it at the end.

    Raises:
        OutputError: The folder cannot be made, or what the body does in it fails.
    """
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise OutputError(f"{staging}: cannot be made: {error.strerror}") from error
    try:
        with writing(destination):
            yield
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the destination.

    Raises:
        OutputError: The body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise OutputError(f"{destination}: cannot be written: {error.strerror}{where}") from error


def take_away(staging: Path) -> None:
    """Remove a hidden folder that another process may be about to publish: it is renamed first, so one of both fails.

    Whoever publishes it afterwards finds nothing to rename; if it was published already, nothing is removed.
    """
    removed = staging.with_name(f"{staging.name}-{secrets.token_hex(6)}")
    with suppress(OSError):
        staging.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def publish(staging: Path, destination: Path, *, force: bool) -> None:
    """Give a finished folder the destination's name.

    Raises:
        OutputError: The destination exists, and is not to be replaced.
        OSError: The folder cannot be synced or renamed.
    """
    sync_folder(staging)
    if os.path.lexists(destination):
        if not force:
            raise OutputError(f"{destination}: appeared while its content was made; nothing was replaced")
        replaced = staging.with_name(f".{destination.name}.replaced-{secrets.token_hex(6)}")
        destination.rename(replaced)
        try:
            staging.rename(destination)
        except OSError:
            replaced.rename(destination)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        staging.rename(destination)
    sync_folder(destination.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and make its bytes durable."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def create_sized(path: Path, header: bytes, nbytes: int) -> None:
    """Make a new file of ``nbytes`` bytes that starts with the header."""
    with path.open("xb") as file:
        file.write(header)
        file.truncate(nbytes)
        if is_on_disk(path):
            file.flush()
            reserve(file.fileno(), nbytes)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
