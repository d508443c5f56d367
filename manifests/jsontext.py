"""JSON objects of files, read as strictly as what they decide asks for: UTF-8, no key twice, no half of a character."""

import json
import re
from typing import Any

import msgspec

from manifests.shown import shown

_HALF = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


_LARGE_NBYTES = 1 << 20
"""Of a text that is worth reading twice if the quick way does not take it."""


class DuplicateKeyError(ValueError):
    """An object has a key twice."""


def load_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes hold.

    Raises:
        ValueError: They hold something else; the message goes on where the file was named.
    """
    if len(text) >= _LARGE_NBYTES and (plain := _load_plain(text)) is not None:
        return plain
    try:
        decoded = text.decode("utf-8")
        value = json.loads(decoded, object_pairs_hook=_unique_pairs)
        if _HALF.search(decoded):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except DuplicateKeyError:
        raise
    except ValueError as error:
        reason = "a number of over 4300 digits" if "set_int_max_str_digits" in str(error) else error
        raise ValueError(f"not JSON in UTF-8: {reason}") from error
    except RecursionError as error:
        raise ValueError("not JSON in UTF-8 that is read: nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _load_plain(text: bytes) -> dict[str, Any] | None:
    """Return the object if it is one as writers write it; None is for others to explain.

    A colon follows each key at once. So where a quote and a colon are as often as keys are kept, none was there twice.
    """
    if any(space + b":" in text for space in (b" ", b"\t", b"\n", b"\r")):
        return None
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and text.count(b'":') == _count_keys(value) else None


def _count_keys(value: object) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 0
    own = len(inner) if isinstance(value, dict) else 0
    nested = {dict, list}.intersection(map(type, inner))
    return own + (sum(map(_count_keys, inner)) if nested else 0)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"has the key {shown(key)} twice; a duplicate key has no one meaning")
            seen.add(key)
    return entries
