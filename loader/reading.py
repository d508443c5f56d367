"""Reading a stretch of a rank file: large reads in file order, each block hashed while it is in the cache."""

import os
from collections.abc import Sequence

import xxhash

from loader.tiles import BLOCK_NBYTES, Tile, compare
from manifests.errors import LoadError


class RankFile:
    """A rank file, open for reading.

    Attributes:
        label: How messages name it.
        data_offset: Where its data starts, in bytes from the start of the file.
        nbytes: Bytes that the whole file should have.
    """

    def __init__(self, label: str, data_offset: int, nbytes: int, handle: int) -> None:
        self.label = label
        self.data_offset = data_offset
        self.nbytes = nbytes
        self._handle = handle

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def read(self, tiles: Sequence[Tile], target: memoryview) -> None:
        """Read tiles that follow each other.

        Args:
            tiles: The tiles.
            target: Where their bytes go, as many as they are.

        Raises:
            LoadError: The file ends before them, or cannot be read.
        """
        begin, end = tiles[0].begin, tiles[-1].end
        self._fill(target, begin, end, tiles)

    def read_hashed(self, tiles: Sequence[Tile], target: memoryview) -> None:
        """Read tiles that follow each other, and compare their hashes on the way.

        Args:
            tiles: The tiles.
            target: Where their bytes go, as many as they are.

        Raises:
            LoadError: The file ends before them, cannot be read, or has other bytes.
        """
        start, stop = tiles[0].begin, tiles[-1].end
        filled = start
        hasher = xxhash.xxh3_128()
        for tile in tiles:
            at = tile.begin
            while at < tile.end:
                if at == filled:
                    filled = min(at + BLOCK_NBYTES, stop)
                    self._fill(target[at - start : filled - start], at, filled, tiles)
                piece = min(tile.end, filled)
                hasher.update(target[at - start : piece - start])
                at = piece
            compare(self.label, tile, hasher.hexdigest())
            hasher.reset()

    def _fill(self, target: memoryview, begin: int, end: int, tiles: Sequence[Tile]) -> None:
        """Read bytes of the data, counted from its start."""
        at = begin
        while at < end:
            try:
                got = os.preadv(self._handle, [target[at - begin :]], self.data_offset + at)
            except OSError as error:
                raise LoadError(f"{self.label}: {_place(tiles, at)}: cannot be read: {error.strerror}") from error
            if not got:
                raise LoadError(
                    f"{self.label}: {_place(tiles, at)}: the file ends at byte {at} of its data, and has "
                    f"{os.fstat(self._handle).st_size} bytes now; {self.nbytes} expected; copy it again"
                )
            at += got


def _place(tiles: Sequence[Tile], at: int) -> str:
    tile = next((tile for tile in tiles if tile.end > at), tiles[-1])
    return f"{tile.tensor}: tile {tile.number}"
