"""Tile hashes: xxh3-128 of every 4 MiB of a tensor in a file, taken while the bytes pass by."""

from collections.abc import Sequence

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


def differing_tiles(expected: Sequence[str], actual: Sequence[str], nbytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges, counted from the start of the tensor, whose tiles differ.

    >>> differing_tiles(["a", "b"], ["a", "c"], TILE_NBYTES + 10)
    [(4194304, 4194314)]
    """
    return [
        (tile * TILE_NBYTES, min((tile + 1) * TILE_NBYTES, nbytes))
        for tile, (one, other) in enumerate(zip(expected, actual, strict=True))
        if one != other
    ]
