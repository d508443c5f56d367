"""The journal: what of a run is finished, so that a killed one can be gone on with.

A file of lines, each a checksum and JSON: first what the run is, then what was finished, in the order in which it was.
A line is written when all of its bytes were, and is never waited for: after a crash of the machine it may tell of bytes
that are not on the disk, so whoever reads it compares them with their hashes (`reshard.engine.resuming`). Whatever
follows a line that is not whole is not read.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec
import xxhash

RECORD_NBYTES = 4 << 20
"""How many bytes of a chain, or of small tensors, are written between two lines, at least."""
_FORMAT = 2


class Head(msgspec.Struct, frozen=True):
    """What a run is.

    Attributes:
        key: What decides the bytes that it writes.
        program: The names of what it moves, hashed; the key and the files' headers fix the rest.
        limits: Which boxes it takes; an unfinished tensor can only be gone on with in the same ones.
        format: Of the journal.
    """

    key: str
    program: str
    limits: tuple[int, ...]
    format: int = _FORMAT


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Where a chain is gone on with: a flow and the number of a box in it; ``DONE`` if it is finished."""

    flow: int
    box: int


START, DONE = Mark(0, 0), Mark(-1, 0)


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """How far a stored tensor was read or written.

    Attributes:
        of: File, offset and bytes of an input; positions of the move and of the scatter of a part.
        nbytes: From its start.
        hashes: Of the tiles that were finished since the line before.
        begun: The hash of what is there of the next tile; empty if nothing is.
        late: Whether it is hashed at the end of the run, from the file.
    """

    of: tuple[int, ...]
    nbytes: int
    hashes: tuple[str, ...]
    begun: str = ""
    late: bool = False


class Small(msgspec.Struct, frozen=True, array_like=True):
    """Small tensors that follow each other, each a chain of its own, that are finished.

    Attributes:
        first: Position of the first one's move.
        count: How many there are.
        read: The hashes of their inputs, in one.
        written: Those of all their parts; of a part without bytes too.
        nbytes: Of all of them.
    """

    first: int
    count: int
    read: str
    written: str
    nbytes: int


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was finished: of one chain, or small tensors.

    Attributes:
        chain: Position of the chain's first move in the program.
        mark: How far it is.
        read: Its inputs.
        written: Its parts.
        small: Small tensors in place of a chain.
    """

    chain: int = -1
    mark: Mark = START
    read: tuple[Passed, ...] = ()
    written: tuple[Passed, ...] = ()
    small: Small | None = None


class Journal:
    """The journal of a run that goes on. A failure to write it ends the journal, not the run."""

    def __init__(self, path: Path, head: Head, lines: Sequence[Line] = ()) -> None:
        """Begin a journal, in place of an older one, with what is known to be finished."""
        self._lock = Lock()
        self._descriptor = -1
        self._waiting: list[bytes] = []
        self._waiting_nbytes = 0
        beside = path.with_name(f"{path.name}.new")
        with suppress(OSError):
            # An owner that is taken for dead, and lives, goes on with the file that it opened.
            beside.write_bytes(b"".join([_encode(head), *map(_encode, lines)]))
            beside.replace(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, line: Line) -> None:
        """Add what was finished."""
        text = _encode(line)
        with self._lock:
            self._waiting.append(text)
            self._write()

    def append_small(self, line: Line, nbytes: int) -> None:
        """Add what was finished of so few bytes that the line may wait for others."""
        text = _encode(line)
        with self._lock:
            self._waiting.append(text)
            self._waiting_nbytes += nbytes
            if self._waiting_nbytes >= RECORD_NBYTES:
                self._write()

    def close(self) -> None:
        """Write what waits and close the file."""
        with self._lock:
            self._write()
            self._close()

    def _write(self) -> None:
        text, self._waiting, self._waiting_nbytes = b"".join(self._waiting), [], 0
        if self._descriptor >= 0:
            with suppress(OSError):
                if os.write(self._descriptor, text) == len(text):
                    return
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _encode(line: Head | Line) -> bytes:
    text = msgspec.json.encode(line)
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield the text of whole lines."""
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            checksum, _, text = line.removesuffix(b"\n").partition(b" ")
            if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(text).encode() != checksum:
                return
            yield text


def _decode_head(text: bytes) -> Head | None:
    try:
        head = msgspec.json.decode(text, type=Head)
    except msgspec.DecodeError:
        return None
    return head if head.format == _FORMAT else None


def read_key(path: Path) -> str:
    """Return the key of the run whose journal a file is; empty if it is none."""
    head, _ = read_journal(path)
    return head.key if head else ""


def read_journal(path: Path) -> tuple[Head | None, Iterator[Line]]:
    """Return what run's journal a file is, and its lines; None and none if it is none."""
    texts = _read_lines(path)
    head = _decode_head(next(texts, b""))
    return head, map(msgspec.json.Decoder(Line).decode, texts if head else ())


def written_nbytes(path: Path) -> int:
    """Return the bytes that a journal says are written and hashed."""
    passed: dict[tuple[int, ...], int] = {}
    small = 0
    for line in read_journal(path)[1]:
        passed |= {part.of: part.nbytes for part in line.written}
        small += line.small.nbytes if line.small else 0
    return small + sum(passed.values())
