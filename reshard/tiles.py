"""Tile hashes: xxh3-128 of every 4 MiB of a tensor in a file, taken while the bytes pass by."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import xxhash

from manifests.manifest import TILE_NBYTES as TILE_NBYTES


class TileHasher:
    """Hashes a tensor's bytes that arrive in order, cut into tiles.

    >>> hasher = TileHasher()
    >>> hasher.update(b"abc")
    >>> hasher.finish() == (xxhash.xxh3_128_hexdigest(b"abc"),)
    True
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._done: list[str] = []
        self._tile = xxhash.xxh3_128()

    def update(self, piece: "bytes | memoryview") -> None:
        """Add the next bytes."""
        view = memoryview(piece)
        while view:
            room = TILE_NBYTES - self.nbytes % TILE_NBYTES
            head, view = view[:room], view[room:]
            self._tile.update(head)
            self.nbytes += len(head)
            if self.nbytes % TILE_NBYTES == 0:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """Return the tiles' hashes; an empty tensor has none."""
        if self.nbytes % TILE_NBYTES:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._tile.hexdigest())
        self._tile.reset()


class Damage(NamedTuple):
    """Tiles that follow each other and differ; ``begin`` and ``end`` are bytes counted from the start of the tensor."""

    first: int
    last: int
    begin: int
    end: int

    def __str__(self) -> str:
        tiles = f"tile {self.first}" if self.first == self.last else f"tiles {self.first} to {self.last}"
        return f"{tiles}: bytes {self.begin} to {self.end}"


def differing_tiles(expected: Sequence[str], actual: Sequence[str], nbytes: int) -> list[Damage]:
    """Return where tiles differ, those that follow each other as one.

    >>> [str(damage) for damage in differing_tiles(["a", "b"], ["a", "c"], TILE_NBYTES + 10)]
    ['tile 1: bytes 4194304 to 4194314']
    """
    found: list[Damage] = []
    for tile, (one, other) in enumerate(zip_longest(expected, actual)):
        if one == other:
            continue
        end = min((tile + 1) * TILE_NBYTES, nbytes)
        if found and found[-1].last == tile - 1:
            found[-1] = found[-1]._replace(last=tile, end=end)
        else:
            found.append(Damage(tile, tile, tile * TILE_NBYTES, end))
    return found
