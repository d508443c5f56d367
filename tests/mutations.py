"""Mutations of JSON documents: what a fuzzer puts where a file had something else."""

import copy
import json
import random
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 63), 0.5, 1e300)
NOT_NUMBERS = (float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "x",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "\0",
    "\n",
    "\ud800",
    "é漢😀",
    "*",
    "[",
    "a[b].c",
    "a." * 60 + "w",
    "a." * 3000 + "w",
    "9" * 5000,
    "w" * 5000,
    "(8*)",
    "(4*)",
    "(0*)",
    "(99999999999, 2*)",
    "(2, 4*) + (1@ep)",
    "9*9*9*9" * 500,
    "(" * 2000,
    "(2, [" * 500,
    "tp",
    "F32",
    "F4",
    "U8",
    "rank-00000-of-00002.safetensors",
    "model.safetensors",
    "manifest.json",
    "config.json",
    "common.safetensors",
    "colwise",
    "rowwise",
    "packed_colwise",
    "embedding_rowwise",
    "os:path",
    "all_reduce",
    "mask_ids",
    "a",
    "b",
)
"""Texts that some reader could trip over, beside ordinary ones in the wrong place."""


WRITTEN = {
    "@deep": b"[" * 5000 + b"]" * 5000,
    "@digits": b"9" * 5000,
    "@large": b"1e400",
    "@objects": b'{"a":' * 3000 + b"1" + b"}" * 3000,
}
"""What Python would not write, by the text that stands for it."""


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, more often one that looks right."""
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice((None, True, False, *NOT_NUMBERS))
    if kind < 7:
        return rng.choice(TEXTS)
    if kind == 7:
        return rng.choice(tuple(WRITTEN))
    if kind == 8:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(TEXTS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutate(document: Any, rng: random.Random, times: int) -> Any:
    """Return a copy of a document in which as many places are changed, dropped, doubled or moved."""
    document = copy.deepcopy(document)
    for _ in range(times):
        places = list(_places(document))
        if not places:
            return junk(rng)
        holder, key = rng.choice(places)
        change = rng.randrange(6)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = holder[key]
        elif change == 1:
            holder.insert(key, holder[key])
        elif change == 2:
            other, at = rng.choice(places)
            if at in other if isinstance(other, dict) else at < len(other):
                holder[key] = copy.deepcopy(other[at])
        elif change == 3 and type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 7, 64, 4096, 1 << 32))
        else:
            holder[key] = junk(rng)
    return document


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def encode(document: Any, rng: random.Random) -> bytes:
    """Return a document as JSON; one time in eight with a key of its first object twice."""
    text = json.dumps(document, separators=(",", ":"))
    if isinstance(document, dict) and document and rng.randrange(8) == 0:
        key = rng.choice(list(document))
        text = f"{{{json.dumps(key)}:{rng.choice(('1', '{}', 'null'))},{text[1:]}"
    content = text.encode()
    for stands, written in WRITTEN.items():
        content = content.replace(json.dumps(stands).encode(), written)
    return content


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some flipped, left out, repeated, or put in."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 1, 2, 8, 100))
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 50))
        else:
            changed[at:at] = rng.choice(
                (b"\0", b"[", b"{", b'"', b"9", b"-", b"\xff", b"\\ud800", rng.randbytes(length))
            )
    return bytes(changed)
