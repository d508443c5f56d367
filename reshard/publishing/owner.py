"""Owners: who is making something in a hidden folder, and whether it still does.

A folder's owner is in a small file inside of it, and the file's name follows from the folder's. So whoever claims the
folder of a dead owner puts its own file there first, under the name that the folder is about to have, and then renames
it: of several only one rename succeeds, and from that instant on the folder has a living owner. No lock is needed.

On the owner's machine its process tells whether it lives, by its number and the time at which it started. From anywhere
else (another host, another container) its heartbeat tells: the owner touches its file, and the file system's own clock,
not this machine's, says how long ago that was.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import xxhash

from manifests.process import Process, runs_here, this_process

BEAT_S = 10.0
"""How often an owner touches its file."""
SILENT_S = 60.0
"""How long it may not have done so before it is taken for dead, where its process cannot be seen."""
PREFIX = ".owner-"


def write_owner(folder: Path, new_name: str = "") -> None:
    """Make this process the owner of a folder.

    Args:
        folder: The folder.
        new_name: What it is about to be called, if it is about to be renamed.

    Raises:
        OSError: The folder is gone, or cannot be written.
    """
    path = _path(folder, new_name or folder.name)
    beside = path.with_name(f"{path.name}.{os.urandom(6).hex()}")
    try:
        beside.write_bytes(msgspec.json.encode(this_process()))
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _path(folder: Path, name: str) -> Path:
    return folder / f"{PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(name))}"


def has_owner(folder: Path) -> bool:
    """Tell whether a folder has, or had, an owner under its name."""
    return _path(folder, folder.name).exists()


def release(folder: Path) -> None:
    """Leave a folder to whoever wants to go on with it. Needs no room on the disk."""
    with suppress(OSError):
        os.truncate(_path(folder, folder.name), 0)


def read_owner(folder: Path) -> Process | None:
    """Return the owner of a folder, or None if it has none that can be read."""
    try:
        return msgspec.json.decode(_path(folder, folder.name).read_bytes(), type=Process)
    except (OSError, msgspec.DecodeError):
        return None


def is_alive(folder: Path) -> bool:
    """Tell whether somebody is making something in a folder.

    A folder that nobody has owned yet is so while it is young, since its maker is about to write its name.
    """
    path = _path(folder, folder.name)
    owner = read_owner(folder)
    if owner is not None and (runs := runs_here(owner)) is not None:
        return runs
    try:
        status = path.stat()
    except FileNotFoundError:
        return _is_young(folder, folder)
    except OSError:
        return False
    return status.st_size > 0 and _is_young(folder, path)


def _is_young(folder: Path, path: Path) -> bool:
    """Tell whether a file was changed a short time ago, by the clock of its file system where one may be asked."""
    probe = folder.with_name(f".clock-{os.urandom(6).hex()}")
    try:
        changed = path.stat().st_mtime
        probe.touch()
        now = probe.stat().st_mtime
    except FileNotFoundError:
        return False
    except OSError:
        # Who may not write here can claim nothing, so it does no harm to be unsure: what is doubtful is alive.
        return True
    finally:
        with suppress(OSError):
            probe.unlink()
    return now - changed < SILENT_S


def claim(folder: Path, new_name: str) -> bool:
    """Take over the folder of an owner that is dead; of several that try, one succeeds.

    Args:
        folder: The folder; it is not there afterwards.
        new_name: What it is called then, beside its old place; a name that nobody else takes.

    Returns:
        Whether it is this process's now.

    Raises:
        OSError: It cannot be written or renamed.
    """
    try:
        if is_alive(folder):
            return False
        write_owner(folder, new_name)
        folder.rename(folder.with_name(new_name))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """Show, while the body runs, that the owner of a folder lives."""
    path, done = _path(folder, folder.name), threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="reshard-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
