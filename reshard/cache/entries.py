"""Entries: the splits of a cache, by their keys, and whether one is whole."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from manifests.contents import VERSION
from manifests.errors import ManifestError, OutputError
from manifests.manifest import version_of
from manifests.runtime import read_runtime
from reshard.planning import SplitPlan, default_output

KEY_DIGITS = 16
"""How much of a key stands in a name: 64 bits tell the splits of any cache apart; the manifest has the whole key."""

_NAME = re.compile(rf"[^.].*-tp[0-9]+-[0-9a-f]{{{KEY_DIGITS}}}")


def entry_name(model: str | Path, planned: SplitPlan) -> str:
    """Return what a split is called in a cache."""
    name = default_output(model, planned.world_size, planned.options.subfolder).name.lstrip(".")
    return f"{name}-{planned.key[:KEY_DIGITS]}"


def is_entry_name(name: str) -> bool:
    """Tell whether a name is one that a split has in a cache; nothing else in the folder is ours.

    >>> is_entry_name("llama-tp4-0123456789abcdef"), is_entry_name("llama-tp4"), is_entry_name("photos")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def entries_of(cache: Path) -> list[Path]:
    """Return the folders of a cache that are named as splits are, in the order of their names.

    Raises:
        OutputError: The cache cannot be listed.
    """
    return [cache / name for name in names_in(cache) if is_entry_name(name)]


def names_in(cache: Path) -> list[str]:
    """Return the names in a cache, sorted; none if there is no such folder yet.

    Raises:
        OutputError: It cannot be listed.
    """
    try:
        return sorted(os.listdir(cache))  # noqa: PTH208 - names are wanted
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{cache}: cannot be listed: {error.strerror}") from error


def named_by(cache: Path, key: str) -> list[Path]:
    """Return the folders of a cache whose names have a key.

    Raises:
        OutputError: The cache cannot be listed.
    """
    return [path for path in entries_of(cache) if path.name.endswith(f"-{key[:KEY_DIGITS]}")]


def problem_of(entry: Path, key: str = "") -> str:
    """Return in what a folder of a cache is not the whole split that it should be, or an empty text.

    Args:
        entry: The folder.
        key: The split's whole key; if it is not given, what the folder's name has of it is compared.

    Raises:
        ManifestError: It cannot be read, or is of another version, which says nothing about the split.
    """
    try:
        manifest = read_runtime(entry)
    except ManifestError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError):
            raise
        if version_of(entry) not in (None, VERSION):
            raise
        return str(error)
    expected = key or entry.name[-KEY_DIGITS:]
    if not manifest.key.startswith(expected):
        return f"{entry}: holds another split: its key is {manifest.key}, {expected} expected"
    sizes = {file.name: file.nbytes for file in manifest.files} | dict.fromkeys(manifest.carried)
    return next(_wrong_files(entry, sizes), "")


def _wrong_files(entry: Path, sizes: Mapping[str, int | None]) -> Iterator[str]:
    for name, expected in sizes.items():
        try:
            found = (entry / name).stat().st_size
        except FileNotFoundError:
            yield f"{entry / name}: missing"
            continue
        except OSError as error:
            raise ManifestError(f"{entry / name}: cannot be read: {error.strerror}") from error
        if expected not in (None, found):
            yield f"{entry / name}: {found} bytes, {expected} expected"
