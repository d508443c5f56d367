"""Staging: the hidden folders in which outputs are made, and what becomes of those that dead owners left."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from manifests.errors import CheckpointError, OutputError
from reshard.engine.journal import read_key, written_nbytes
from reshard.publishing.files import make_folders, sync_folder
from reshard.publishing.owner import PREFIX, beating, claim, has_owner, is_alive, release, write_owner
from reshard.publishing.renaming import ASIDE_NAME, publish

Keep = Callable[["Staging", BaseException], str]
"""Returns how to go on after a failure, for the message; empty if what was made is of no use."""


class Staging(NamedTuple):
    """A hidden folder."""

    folder: Path

    @property
    def content(self) -> Path:
        """Where the files of the output are made."""
        return self.folder / "content"

    @property
    def journal(self) -> Path:
        """Where it is noted what is finished of them."""
        return self.folder / "journal"

    @property
    def aside(self) -> Path:
        """Where an older output is for an instant, if the file system cannot exchange two folders."""
        return self.folder / ASIDE_NAME


def _give_up(_staging: Staging, _error: BaseException) -> str:
    return ""


def kept(staging: Staging, error: BaseException, total: int) -> str:
    """Keep what was made where a rerun can go on with it: after an interruption, or a fault of a disk.

    Args:
        staging: Where it was made, with a journal.
        error: What ended the run.
        total: Bytes of the whole output.

    Returns:
        How to go on, for the message; empty if it is of no use.
    """
    nbytes = written_nbytes(staging.journal) if staging.content.is_dir() else 0
    if not nbytes or not isinstance(error, KeyboardInterrupt | OutputError | CheckpointError):
        return ""
    return f"{nbytes} of {total} bytes are kept: the same command goes on from there (--no-resume starts over)"


@contextmanager
def staged(
    destination: Path, *, force: bool, key: str = "", resume: bool = True, keep: Keep = _give_up
) -> Iterator[Staging]:
    """Give a hidden folder beside the destination, and publish its content at the end.

    Args:
        destination: The folder to be made.
        force: Whether an older folder of that name is replaced.
        key: What decides the bytes of the output; of an equal key, what a dead owner left is given.
        resume: Whether it is.
        keep: Called if the body raises; what was made is removed unless it says how to go on with it.

    Raises:
        OutputError: The folder cannot be made, synced or renamed.
    """
    destination = destination.absolute()
    with writing(destination):
        staging = _take_up(destination, key if resume else "") or _make(destination)
    try:
        with writing(destination), beating(staging.folder):
            yield staging
            publish(staging.content, destination, force=force)
    except BaseException as error:
        how = keep(staging, error)
        if how:
            error.args = (f"{str(error) or 'interrupted'}; {how}",)
            release(staging.folder)
        else:
            _remove(staging.folder)
        raise
    _remove(staging.folder)


def staging_path(destination: Path, token: str) -> Path:
    """Return the hidden folder in which a destination is made; the token tells runs apart."""
    destination = destination.absolute()
    return destination.with_name(f"{_prefix(destination)}{token}")


def _prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"


def _fresh(destination: Path) -> Path:
    return staging_path(destination, os.urandom(6).hex())


@contextmanager
def made(folder: Path, destination: Path) -> Iterator[Staging]:
    """Make a hidden folder of a given name, whose content the body publishes; remove what is left of it at the end.

    Raises:
        OutputError: The folder cannot be made, or what the body does in it fails.
    """
    staging = _make(destination, folder)
    try:
        with writing(destination), beating(folder):
            yield staging
    finally:
        _remove(folder)


def _make(destination: Path, folder: Path | None = None) -> Staging:
    """Make a hidden folder, of this process."""
    folder = folder or _fresh(destination)
    try:
        make_folders(folder.parent)
        while True:
            folder.mkdir(exist_ok=True)
            # One without an owner may be taken for left, and removed.
            with suppress(FileNotFoundError):
                write_owner(folder)
                break
        staging = Staging(folder)
        staging.content.mkdir()
    except OSError as error:
        _remove(folder)
        raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    return staging


def left(destination: Path) -> list[Staging]:
    """Return the hidden folders of a destination whose owners are dead."""
    destination = destination.absolute()
    try:
        names = sorted(path.name for path in destination.parent.iterdir())
    except OSError:
        return []
    folders = [destination.with_name(name) for name in names if name.startswith(_prefix(destination))]
    return [Staging(folder) for folder in folders if _is_left(folder)]


def _is_left(folder: Path) -> bool:
    try:
        return folder.is_dir() and (not is_alive(folder) or _is_bare(folder))
    except OSError:  # another user's, or just being removed
        return False


def _is_bare(folder: Path) -> bool:
    """Tell whether a folder has not even an owner."""
    try:
        return not has_owner(folder) and all(path.name.startswith(PREFIX) for path in folder.iterdir())
    except FileNotFoundError:
        return False  # another process has it now, or has removed it


def _remove(folder: Path) -> None:
    """Remove a hidden folder, its owner last, so that one that is removed in part is still known to be left."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name.startswith(PREFIX)):
            if path.is_dir():
                _remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


def _remove_tree(folder: Path) -> None:
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)


def _remove_bare(folder: Path) -> None:
    """Remove a folder that has no owner; if somebody is just becoming it, either this fails or that is done again."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix:  # what an owner's file is before it has its name
                path.unlink()
        folder.rmdir()


def held_nbytes(destination: Path) -> int:
    """Return the bytes on the disk that dead owners' folders take, which are gone on with or removed."""
    return sum(_disk_nbytes(staging.folder) for staging in left(destination))


def _disk_nbytes(folder: Path) -> int:
    nbytes = 0
    with suppress(OSError):  # another process removes it
        for path in folder.rglob("*"):
            if path.is_file():
                nbytes += path.stat().st_blocks * 512
    return nbytes


def mend(destination: Path) -> None:
    """Give an older output its name back, which a run that replaced it in two steps and died had taken from it.

    Raises:
        OutputError: It cannot be renamed.
    """
    destination = destination.absolute()
    with writing(destination):
        for staging in left(destination):
            if staging.aside.is_dir() and not os.path.lexists(destination):
                taken = _claimed(staging, destination)
                if taken is not None:
                    taken.aside.rename(destination)
                    sync_folder(destination.parent)
                    release(taken.folder)


def _take_up(destination: Path, key: str) -> Staging | None:
    """Claim what dead owners left: return what has the key, and remove the rest."""
    found: Staging | None = None
    for staging in left(destination):
        if _is_bare(staging.folder):
            _remove_bare(staging.folder)
            continue
        fits = bool(key) and found is None and staging.content.is_dir() and read_key(staging.journal) == key
        taken = None
        with suppress(OSError):  # of another user, who may go on with it
            taken = _claimed(staging, destination)
        if taken is None:
            continue
        if fits:
            found = taken
        else:
            _remove(taken.folder)
    return found


def clear_left(destination: Path) -> None:
    """Remove what dead owners left."""
    _take_up(destination.absolute(), "")


def _claimed(staging: Staging, destination: Path) -> Staging | None:
    mine = _fresh(destination)
    return Staging(mine) if claim(staging.folder, mine.name) else None


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
    removed = staging.with_name(f"{staging.name}-{os.urandom(6).hex()}")
    with suppress(OSError):
        staging.rename(removed)
        _remove_tree(removed)
