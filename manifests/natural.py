"""Numbers in names: by their value, so that layer 2 comes before layer 10, or left open."""

import re
from collections.abc import Collection, Iterable
from itertools import count, islice
from operator import lt

_NUMBER = re.compile(r"(\d+)")
_NUMBERED = re.compile(r"\d(?<![^.\n].)\d*(?![^.\n])")
"""A part of a name that is a number, in a text of one name a line. It looks behind its first digit, which is found
sooner than a place that a digit follows."""
_AFTER_TEXT = re.compile(r"\n(?<!\d\n)")
_MOST_DIGITS = 10
"""Of a number in names that are compared as texts."""
_AT_ONCE = 4096
"""Names of which texts are made at once."""


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which numbers in a name count by value; equal keys mean equal names.

    >>> sorted(["layers.10.w", "layers.2.w", "layers.w"], key=natural_key)
    ['layers.2.w', 'layers.10.w', 'layers.w']
    """
    pieces = [piece for piece in _NUMBER.split(name) if piece]
    by_value = [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]
    return (*by_value, (2, 0, name))


def natural_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of `natural_key`.

    >>> natural_order(["layers.10.w", "layers.w", "layers.2.w", "layers.02.w"])
    ['layers.02.w', 'layers.2.w', 'layers.10.w', 'layers.w']
    """
    names = list(names)
    keys: list[str] = []
    for begin in range(0, len(names), _AT_ONCE):
        some = names[begin : begin + _AT_ONCE]
        text = "\n".join(some)
        plain = text.isascii() and text.count("\n") == len(some) - 1 and text.replace("\n", "").isprintable()
        pieces = _NUMBER.split(f"{text}\n") if plain and "" not in some else []
        if not pieces or max(map(len, pieces[1::2]), default=0) > _MOST_DIGITS:
            return sorted(names, key=natural_key)
        # Numbers of one width compare as texts. A text ends before all that it begins; then comes a number or, after
        # that, the end of the name, which comes after texts as well.
        pieces[1::2] = [f"\1\0{number.zfill(_MOST_DIGITS)}" for number in pieces[1::2]]
        keys += _AFTER_TEXT.sub("\1\n", "".join(pieces)).replace("\n", "\x7f\n").split("\n")[:-1]
    if all(map(lt, keys, islice(keys, 1, None))):
        return names
    return [name for _, name in sorted(zip(keys, names, strict=True))]


def kind_of(name: str) -> str:
    """Return a name with its numbers left open: what a tensor is, whichever layer it is in.

    >>> kind_of("model.layers.11.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def alike(names: Iterable[str], kept: Collection[str] = ()) -> list[str]:
    """Return, for each name, one that stands for all that differ from it only in numbers.

    Every part that is a number becomes one and the same, which no pattern tells from the others; names that are told
    apart by patterns are, if the numbers that these mention are kept.

    Args:
        names: The names.
        kept: The numbers that are kept, as texts.

    >>> alike(["layers.7.w1", "layers.12.w1", "layers.3.w1"], {"3"})
    ['layers.0.w1', 'layers.0.w1', 'layers.3.w1']
    """
    names = list(names)
    numbers = {number for number in kept if number.isdecimal()}
    other = next(text for number in count() if (text := str(number)) not in numbers)
    text = "\n".join(names)
    if text.count("\n") != max(len(names) - 1, 0):
        return names  # one has a line feed: all are told apart
    made = _NUMBERED.sub((lambda found: found[0] if found[0] in numbers else other) if numbers else other, text)
    return made.split("\n") if names else []
