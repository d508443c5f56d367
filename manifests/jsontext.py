"""JSON objects of files, read as strictly as what they decide asks for: UTF-8, no key twice, no half of a character."""

import json
import re
from typing import Any

from manifests.shown import shown

_HALF = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


class DuplicateKeyError(ValueError):
    """An object has a key twice."""


def load_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes hold.

    Raises:
        ValueError: They hold something else; the message goes on where the file was named.
    """
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


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"has the key {shown(key)} twice; a duplicate key has no one meaning")
            seen.add(key)
    return entries
