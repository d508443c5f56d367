"""A folder that holds a checkpoint: its files' names, small files' bytes, and safetensors headers."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from manifests.errors import CheckpointError
from manifests.header import LFS_POINTER, Header, read_header
from manifests.opening import open_file, read_file
from manifests.shown import shown_name


class WeightFile(NamedTuple):
    """A safetensors file whose header was read.

    Attributes:
        name: Relative to its folder.
        nbytes: Bytes of the whole file.
        identity: What changes when its bytes do: a content hash, or size and modification time.
        header: The parsed header.
        path: Where its bytes are, or None while they are not on this machine.
    """

    name: str
    nbytes: int
    identity: str
    header: Header
    path: Path | None


class Folder(Protocol):
    """Where a checkpoint lies: a directory, or a repository of the hub."""

    label: str
    """How messages name it."""
    repo: str
    """The hub id, or empty."""
    revision: str
    """The hub commit, or empty."""

    def names(self) -> list[str]:
        """Return the names of its files, those of sub-folders left out."""
        ...

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a small file, of at most that many."""
        ...

    def check(self, name: str) -> None:
        """Refuse a file that cannot be read, before anything is made of the others."""
        ...

    def weights(self, name: str) -> WeightFile:
        """Read the header of a safetensors file."""
        ...

    def download(self, names: Iterable[str]) -> "LocalFolder":
        """Return a directory with these files; fetches those that are not on this machine."""
        ...


class LocalFolder:
    """A directory on this machine."""

    def __init__(self, path: Path, *, label: str = "", repo: str = "", revision: str = "") -> None:
        self.path = path
        self.label = label or str(path)
        self.repo = repo
        self.revision = revision

    def names(self) -> list[str]:
        """Return the names of its files, sorted."""
        try:
            return sorted(entry.name for entry in self.path.iterdir() if not entry.is_dir())
        except OSError as error:
            raise CheckpointError(f"{self.label}: cannot be listed: {error.strerror}") from error

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a file."""
        self._refuse_outside(name)
        try:
            return read_file(self.path / name, most)
        except OSError as error:
            raise self._unreadable(name, error) from error

    def check(self, name: str) -> None:
        """Refuse a file that cannot be read."""
        self._refuse_outside(name)
        try:
            with open_file(self.path / name) as file:
                begin = file.read(len(LFS_POINTER))
        except OSError as error:
            raise self._unreadable(name, error) from error
        if begin == LFS_POINTER:
            raise CheckpointError(
                f"{self.label}/{shown_name(name)}: a Git LFS pointer, not the file; "
                "run `git lfs pull` there or download it again"
            )

    def weights(self, name: str) -> WeightFile:
        """Read the header of a safetensors file."""
        self._refuse_outside(name)
        path = self.path / name
        header = read_header(path, f"{self.label}/{name}")
        return WeightFile(name, path.stat().st_size, self.identity(name), header, path)

    def identity(self, name: str) -> str:
        """Return what changes when the bytes of a file do: its size and modification time.

        Raises:
            CheckpointError: There is no such file any more.
        """
        try:
            status = (self.path / name).stat()
        except OSError as error:
            raise self._unreadable(name, error) from error
        return f"{status.st_size}-{status.st_mtime_ns}"

    def _unreadable(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.label}/{shown_name(name)}: cannot be read: {error.strerror}")

    def _refuse_outside(self, name: str) -> None:
        """Refuse a link that leads out of the folder, but for those of a hub cache to the blobs of their repository."""
        path = self.path / name
        try:
            target = path.parent.resolve() / path.readlink()
        except OSError:  # no link, or one that reading will report
            return
        home, target = self.path.resolve(), Path(os.path.normpath(target))
        if home in target.parents and home in Path(os.path.realpath(target)).parents:
            return
        blobs = next((parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"), None)
        if target.parent != blobs:
            raise CheckpointError(
                f"{self.label}/{shown_name(name)}: a link to {target}, out of the folder; "
                "put the file itself there, or name the folder that holds it"
            )

    def download(self, names: Iterable[str]) -> "LocalFolder":
        """Return this directory."""
        return self
