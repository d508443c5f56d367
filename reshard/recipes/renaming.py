"""Renaming: from a stored name to the running model's, and to the converter that takes the tensor.

Every renaming is applied once, in order, each to the result of the one before; then the first converter that fits takes
the tensor. A pattern is a regular expression that is searched anywhere in the name; ``*.`` is any text up to a dot, and
a pattern that ends with a letter or digit ends at the end of a word. The first occurrence of the matched text is
replaced.

Source: ``WeightTransform``, its subclasses and ``rename_source_key`` in ``transformers/core_model_loading.py`` of
transformers 5.24.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from manifests.errors import PlanError
from reshard.catalogue.architecture import Converter, Rename

_LAYER_PAIR = re.compile(r"layers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")
_HALVES = ("self_attn", "mlp")
_SCALES = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}


class Renamed(NamedTuple):
    """What becomes of a stored name.

    Attributes:
        name: The model's name; for a converter with several targets that of the first.
        converter: The converter that takes the tensor, or None.
        source: Which of its sources has matched.
    """

    name: str
    converter: Converter | None = None
    source: str = ""


class Renamer:
    """Renames the names of one checkpoint, which come in natural order: some renamings hold once another has."""

    def __init__(self, renames: Iterable[Rename], converters: Iterable[Converter]) -> None:
        self._renames = tuple(renames)
        self._converters = tuple(converters)
        # Of several converters with one source pattern the first finds the name and the last converts.
        self._by_source = {source: converter for converter in self._converters for source in converter.sources}
        self._active: set[Rename] = set()

    def rename(self, name: str) -> Renamed:
        """Return what becomes of a stored name.

        Raises:
            PlanError: A renaming is of a kind that is not known.
        """
        for rename in self._renames:
            name = self._apply(name, rename)
        for converter in self._converters:
            if found := _search(name, converter):
                source = converter.sources[found.source]
                return Renamed(found.replaced(_fill(converter.targets[0], found)), self._by_source[source], source)
        return Renamed(name)

    def _apply(self, name: str, rename: Rename) -> str:
        if rename.kind == "layer_pairs":
            return _collapse_layer_pair(name)
        found = _search(name, rename)
        if found is None:
            return name
        if rename.kind == "plain":
            return found.replaced(_fill(rename.targets[0], found))
        if rename.kind == "group":
            if found.source == 0:
                self._active.add(rename)
            elif rename not in self._active:
                return name
            return found.replaced(
                re.sub(r"\\(\d+)", lambda m: found.groups[int(m[1]) - 1], rename.targets[found.source])
            )
        if rename.kind == "offset":
            number = int(found.groups[0]) + rename.offset
            return found.replaced(rename.targets[0].replace(r"\1", str(number)))
        raise PlanError(f"the catalogue has a renaming of the kind {rename.kind!r}, which is not known")


class _Found(NamedTuple):
    """A match: the name is ``prefix + rest``, ``text`` is in the rest, ``groups`` are those of the source's pattern."""

    prefix: str
    rest: str
    text: str
    source: int
    groups: tuple[str, ...]

    def replaced(self, text: str) -> str:
        return self.prefix + self.rest.replace(self.text, text, 1)


def _search(name: str, transform: Rename | Converter) -> _Found | None:
    prefix = ""
    if transform.scope is not None:
        scope = f"{transform.scope}." if transform.scope else ""
        base = f"{transform.base}." if transform.base else ""
        if name.startswith(base + scope):
            prefix = base + scope
        elif name.startswith(scope):
            prefix = scope
        else:
            return None
    rest = name[len(prefix) :]
    pattern, order = _compile(transform.sources)
    match = pattern.search(rest)
    if match is None:
        return None
    source = next(position for position in order if match[f"g{position}"] is not None)
    first = pattern.groupindex[f"g{source}"]
    after = min((i for i in pattern.groupindex.values() if i > first), default=pattern.groups + 1)
    groups = tuple(match[i] or "" for i in range(first + 1, after))
    return _Found(prefix, rest, match[0], source, groups)


def _fill(target: str, found: _Found) -> str:
    return target.replace(r"\1", found.groups[0]) if r"\1" in target else target


@lru_cache(maxsize=4096)
def _compile(sources: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[int, ...]]:
    """Return the sources as one expression with a named group for each, and the order of the groups: longest first."""
    order = sorted(range(len(sources)), key=lambda position: -len(sources[position]))
    branches = []
    for position in order:
        pattern = sources[position].replace("*.", r".*\.")
        ending = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else ""
        branches.append(f"(?P<g{position}>{pattern}{ending})")
    return re.compile("|".join(branches)), tuple(order)


def _collapse_layer_pair(name: str) -> str:
    """Rename layers of a checkpoint that counts a layer's attention and its mlp as two.

    >>> _collapse_layer_pair("layers.3.mixer.up_proj.weight"), _collapse_layer_pair("layers.2.attn_alpha")
    ('layers.1.mlp.up_proj.weight', 'layers.1.lambda_1')
    """
    match = _LAYER_PAIR.search(name)
    if match is None:
        return name
    number, part = int(match[1]), match[2]
    part = _SCALES.get(part, _HALVES[number % 2])
    return f"{name[: match.start()]}layers.{number // 2}.{part}{name[match.end() :]}"


def stored_order(name: str) -> list[tuple[int | str, ...]]:
    """Return the sort key of the order in which tensors are joined: by dotted parts, numbers by their value and first.

    A part that ends in digits is ordered by its text, then by the number.

    Source: ``dot_natural_key``.

    >>> sorted(["e.10.w", "e.2.w", "e.w", "e.w11", "e.w2"], key=stored_order)
    ['e.2.w', 'e.10.w', 'e.w', 'e.w2', 'e.w11']
    """
    return [_part_order(part) for part in name.split(".")]


@lru_cache(maxsize=65536)
def _part_order(part: str) -> tuple[int | str, ...]:
    if part.isdecimal():
        return 0, int(part)
    text = part.rstrip("0123456789")
    digits = part[len(text) :]
    return (1, text, int(digits)) if digits else (1, text)
