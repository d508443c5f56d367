"""The tiles of a rank file, in the order of its bytes, and the comparison of their hashes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from manifests.errors import LoadError
from manifests.manifest import TILE_NBYTES, Extent

STRETCH_NBYTES = TILE_NBYTES
"""Least bytes of a stretch, but for the last: what one worker does at a time."""

BLOCK_NBYTES = 256 << 10
"""Bytes that are read and hashed at once: few enough to be in the cache of a core when they are hashed."""


class Tile(NamedTuple):
    """At most 4 MiB of one tensor; ``begin`` and ``end`` count from the start of the file's data."""

    begin: int
    end: int
    tensor: str
    number: int
    digest: str


def tiles_of(extents: Mapping[str, Extent]) -> Iterator[Tile]:
    """Yield the tiles of a file, in the order of its bytes."""
    for name, extent in sorted(extents.items(), key=lambda item: item[1].offset):
        end = extent.offset + extent.nbytes
        for number, digest in enumerate(extent.tiles):
            begin = extent.offset + number * TILE_NBYTES
            yield Tile(begin, min(begin + TILE_NBYTES, end), name, number, digest)


def stretches_of(extents: Mapping[str, Extent]) -> Iterator[list[Tile]]:
    """Yield the tiles of a file in stretches without gaps, each of at least `STRETCH_NBYTES` but for the last.

    >>> tiles = {"a": Extent(0, 9, ("x",)), "b": Extent(9, 5 << 20, ("y", "z")), "c": Extent((5 << 20) + 9, 8, ("w",))}
    >>> [[(tile.tensor, tile.number) for tile in stretch] for stretch in stretches_of(tiles)]
    [[('a', 0), ('b', 0)], [('b', 1), ('c', 0)]]
    """
    stretch: list[Tile] = []
    for tile in tiles_of(extents):
        stretch.append(tile)
        if tile.end - stretch[0].begin >= STRETCH_NBYTES:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def compare(label: str, tile: Tile, found: str) -> None:
    """Compare a tile's hash with the manifest's.

    Raises:
        LoadError: They differ.
    """
    if found != tile.digest:
        raise LoadError(
            f"{label}: {tile.tensor}: tile {tile.number}, bytes {tile.begin} to {tile.end} of the file's data, "
            "is not what was written; copy the file again, or split again"
        )


def check_in_memory(label: str, tiles: Sequence[Tile], memory: memoryview) -> None:
    """Compare the hashes of tiles that are in memory.

    Args:
        label: The file, for messages.
        tiles: The tiles.
        memory: The file's data.

    Raises:
        LoadError: One differs.
    """
    for tile in tiles:
        compare(label, tile, xxhash.xxh3_128_hexdigest(memory[tile.begin : tile.end]))
