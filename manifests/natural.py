"""Numbers in names: by their value, so that layer 2 comes before layer 10, or left open."""

import re

_NUMBER = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which numbers in a name count by value; equal keys mean equal names.

    >>> sorted(["layers.10.w", "layers.2.w", "layers.w"], key=natural_key)
    ['layers.2.w', 'layers.10.w', 'layers.w']
    """
    pieces = [piece for piece in _NUMBER.split(name) if piece]
    by_value = [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]
    return (*by_value, (2, 0, name))


def kind_of(name: str) -> str:
    """Return a name with its numbers left open: what a tensor is, whichever layer it is in.

    >>> kind_of("model.layers.11.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
