"""Streams: the bytes of one stored tensor as they pass by, hashed in tiles."""

import xxhash

from reshard import tiles
from reshard.engine.files import Files


class Stream:
    """A stored tensor, read or written in pieces; hashed in the same pass as long as they come in order."""

    __slots__ = ("_tile", "file", "files", "hashes", "late", "nbytes", "offset", "passed")

    def __init__(self, files: Files, file: int, offset: int, nbytes: int) -> None:
        self.files = files
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.passed = 0
        self.late = False
        """Whether it is hashed afterwards: pieces do not come in order."""
        self.hashes: list[str] = []
        self._tile: xxhash.xxh3_128 | None = None

    def update(self, at: int, piece: memoryview) -> None:
        """Hash a piece that begins ``at`` bytes after the start."""
        if self.late or at != self.passed:
            self.late = True
            return
        size = tiles.TILE_NBYTES
        while piece:
            room = min(size - self.passed % size, self.nbytes - self.passed)
            head, piece = piece[:room], piece[room:]
            self._add(head, room)

    def _add(self, head: memoryview, room: int) -> None:
        """Add bytes of one tile, which takes ``room`` more."""
        self.passed += len(head)
        if self._tile is None and len(head) == room:
            self.hashes.append(xxhash.xxh3_128_hexdigest(head))
            return
        if self._tile is None:
            self._tile = xxhash.xxh3_128()
        self._tile.update(head)
        if len(head) == room:
            self.hashes.append(self._tile.hexdigest())
            self._tile = None

    @property
    def whole(self) -> bool:
        """Whether all of it was hashed."""
        return not self.late and self.passed == self.nbytes

    def begun(self) -> str:
        """Return the hash of what has passed of the next tile; empty if nothing has."""
        return self._tile.hexdigest() if self._tile else ""

    def take_up(self, block: memoryview) -> str:
        """Hash what has passed of the next tile, from the file, and return its hash; more of it may follow.

        Args:
            block: Memory to read into.
        """
        self._tile = xxhash.xxh3_128()
        at = self.offset + len(self.hashes) * tiles.TILE_NBYTES
        self.files.hash_into(self._tile, self.file, at, self.offset + self.passed - at, block)
        return self._tile.hexdigest()

    def begin_again(self) -> int:
        """Forget what was hashed; return how many tiles there are to be hashed from the file."""
        self._tile = None
        self.hashes = [""] * -(-self.nbytes // tiles.TILE_NBYTES)
        return len(self.hashes)

    def hash_tile(self, tile: int, block: memoryview) -> None:
        """Read a tile and hash it; a stream's tiles may be hashed in any order."""
        begin = tile * tiles.TILE_NBYTES
        end = min(begin + tiles.TILE_NBYTES, self.nbytes)
        hasher = xxhash.xxh3_128()
        self.files.hash_into(hasher, self.file, self.offset + begin, end - begin, block)
        self.hashes[tile] = hasher.hexdigest()
