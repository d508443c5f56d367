"""The catalogue's tables: ``transformers.json``, those in ``ours``, and what is looked up in them by type.

A split needs the entries of one type or a few. So files are only taken apart, and an entry is decoded when it is asked
for: a command does not wait for plans that it does not use.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent
_HEADER = re.compile(r"^(?=\[)", re.MULTILINE)
_BY_NAME = ("types", "classes", "parts")
"""Tables of entries; their headers have the entry's name behind the table's."""


class Entries(Mapping[str, Any]):
    """The entries of a table by name, each decoded when it is first asked for."""

    def __init__(self, names: Iterable[str], decode: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._decode = cache(decode)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - whatever the table holds
        if name not in self._names:
            raise KeyError(name)
        return self._decode(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Exported(msgspec.Struct):
    source: str
    types: dict[str, msgspec.Raw]


@cache
def exported() -> dict[str, Any]:
    """Return the content of ``transformers.json``."""
    content = msgspec.json.decode((FOLDER / "transformers.json").read_bytes(), type=_Exported)
    types = Entries(content.types, lambda name: msgspec.json.decode(content.types[name]))
    return {"source": content.source, "types": types}


@cache
def ours() -> dict[str, Any]:
    """Return the tables of all files in ``ours``.

    A type, or a class of diffusers, that is ``like`` another has that one's tables where it has none. What it is like
    of ``parts``, rules that several have, is joined with its own lines; its own count.
    """
    texts = _texts()
    types, classes, parts = (_stored_entries(kind, texts.pop(kind)) for kind in _BY_NAME)
    content: dict[str, Any] = {kind: _joined_table(kind, pieces.values()) for kind, pieces in texts.items()}
    content |= {"types": _completed(types, parts), "classes": _completed(classes, parts)}
    return content


def _texts() -> dict[str, dict[str, str]]:
    """Return the text of every table: by its name, then by the entry's, or by the file's where there are no entries."""
    texts: dict[str, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    for path in sorted((FOLDER / "ours").iterdir()):
        for text in _HEADER.split(path.read_text("utf-8"))[1:]:
            kind, *names = text[1 : text.index("]")].split(".")
            texts[kind][names[0] if kind in _BY_NAME else path.name] += text
    return texts


def _stored_entries(kind: str, texts: Mapping[str, str]) -> Entries:
    """Return the entries of a table as the files have them."""
    return Entries(texts, lambda name: tomllib.loads(texts[name])[kind][name])


def _joined_table(kind: str, texts: Iterable[str]) -> dict[str, Any]:
    """Return a table that several files may have a piece of."""
    return {name: value for text in texts for name, value in tomllib.loads(text)[kind].items()}


def _completed(tables: Entries, parts: Entries) -> Entries:
    """Return entries that have what those have that they are like."""
    return Entries(tables, lambda name: _with_others(tables[name], tables, parts))


def _with_others(table: Mapping[str, Any], tables: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a type's or a class's tables, completed by those that it is like."""
    named = table.get("like", [])
    likes = [named] if isinstance(named, str) else named
    others: dict[str, Any] = {}
    for name in likes:
        others |= {} if name in parts else _with_others(tables[name], tables, parts)
    own: dict[str, Any] = {}
    for source in (*(parts[name] for name in likes if name in parts), table):
        for key, lines in source.items():
            if key != "like":
                own[key] = {**own.get(key, {}), **lines}
    return {**others, **own}


def own_plans() -> dict[str, dict[str, Any]]:
    """Return the plans of our own by type: those in place of one of transformers, and those where it has none."""
    return {name: table["plan"] for name, table in ours()["types"].items() if "plan" in table}


def model_types() -> tuple[str, ...]:
    """Return the model types of which a class has a plan."""
    return tuple(sorted(name for name, entry in exported()["types"].items() if entry.get("classes")))


def type_values(model_type: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the defaults and the aliases of a type's configuration."""
    entry = exported()["types"].get(model_type, {})
    return entry.get("defaults", {}), entry.get("aliases", {})


def part_of_config(config: Mapping[str, Any], model_type: str, path: str) -> Mapping[str, Any]:
    """Return the part of a configuration at a path, empty if it is missing.

    Files of old hold the values of some composites' parts themselves.
    """
    part: Any = config
    flat = exported()["types"].get(model_type, {}).get("flat", ())
    for name in filter(None, path.split(".")):
        if part is config and name in flat and not isinstance(config.get(name), Mapping):
            continue
        part = part.get(name) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}
