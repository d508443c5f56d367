"""Names that come from files: of tensors, and of files in one folder."""

import re
from collections.abc import Collection

MAX_NAME_LENGTH = 1000
MAX_NAME_PARTS = 100
MAX_FILE_NAME_NBYTES = 255

_LEADS_OUT = re.compile(r"[/\\]|[A-Za-z]:[/\\]|(?:.*[/\\])?\.\.(?:[/\\]|$)")


def tensor_name_problem(name: str, *, renamed: bool = False) -> str:
    """Return what is wrong with the name of a tensor, or nothing.

    Args:
        name: The name.
        renamed: Whether it is the running model's, which may be longer than the stored one.

    >>> [tensor_name_problem(name) for name in ("a.0.w", "encoder/kernel", "../w", "")]
    ['', '', 'a name that looks like a path out of a folder', 'an empty name']
    """
    if not name:
        return "an empty name"
    length, parts = MAX_NAME_LENGTH << renamed, MAX_NAME_PARTS << renamed
    if len(name) > length:
        return f"a name of {len(name)} characters; at most {length} are read"
    if name.count(".") >= parts:
        return f"a name of {name.count('.') + 1} parts; at most {parts} are read"
    if (name[0] in "/\\." or "/" in name or "\\" in name) and _LEADS_OUT.match(name):
        return "a name that looks like a path out of a folder"
    return ""


def find_odd_name(names: Collection[str], *, renamed: bool = False) -> tuple[str, str] | None:
    """Return the first name of tensors with which something is wrong, and what; None if all are right.

    Args:
        names: The names.
        renamed: As of `tensor_name_problem`.

    >>> find_odd_name(["a.0.w", "b"]), find_odd_name(["a.0.w", ""])
    (None, ('', 'an empty name'))
    """
    text = "\n".join(names)
    path = "/" in text or "\\" in text or ".." in text
    if not path and "" not in names and max(map(len, names), default=0) <= MAX_NAME_PARTS:
        return None
    return next(((name, problem) for name in names if (problem := tensor_name_problem(name, renamed=renamed))), None)


def is_file_name(name: object) -> bool:
    r"""Tell whether a value names a file in a folder, and nothing outside it.

    >>> is_file_name("model.safetensors"), is_file_name("../x"), is_file_name("a/x"), is_file_name("x\0")
    (True, False, False, False)
    """
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    if any(character in "/\\\x7f" or character < " " for character in name):
        return False
    try:
        return len(name.encode("utf-8")) <= MAX_FILE_NAME_NBYTES
    except UnicodeEncodeError:
        return False
