"""Strided copies between two byte arrays, with transposes by blocks.

A copy whose innermost dimensions differ on the two sides is a transpose. Done element by element it runs at a tenth of
the memory's speed, so it goes by panels that stay in the cache: as many rows as make 16 bytes are interleaved, and the
elements of 16 bytes are transposed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.program import Copy, Loop

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, np.dtype[Any]]

_LANE_NBYTES = 16
_PANEL_NBYTES = 256 << 10
"""Most bytes of a panel, so that it stays in a core's second cache."""
_LINE_NBYTES = 256
"""Least of a panel in the direction that becomes dense: a few lines of the cache, so that each is written once."""
_FIRST_CACHE_NBYTES = 8 << 10
"""What is so small is transposed in a core's first cache, element by element."""


def copy_strided(src: Bytes, dst: Bytes, copy: Copy, item_nbytes: int) -> None:
    """Copy atoms between two byte arrays.

    Args:
        src: The source's bytes.
        dst: The destination's bytes.
        copy: Offsets and steps, in atoms of ``item_nbytes`` bytes.
        item_nbytes: Bytes of an atom.
    """
    source, target = _view(src, copy, item_nbytes, source=True), _view(dst, copy, item_nbytes, source=False)
    inner = _innermost(copy.loops, source=True), _innermost(copy.loops, source=False)
    if inner[0] == inner[1] or _is_small([copy.loops[at].size * item_nbytes for at in inner], item_nbytes):
        target[...] = source
        return
    # The last two dimensions: the one that is dense in the target, then the one that is dense in the source.
    last = [inner[1], inner[0]]
    order = [at for at in range(len(copy.loops)) if at not in last] + last
    _transpose(source.transpose(order), target.transpose(order))


def _view(array: Bytes, copy: Copy, item_nbytes: int, *, source: bool) -> Array:
    """Return a side of a copy as an array with a dimension for each loop, of items of 1, 2, 4 or 8 bytes or of raw."""
    offset = (copy.src if source else copy.dst) * item_nbytes
    steps = [(loop.src_step if source else loop.dst_step) * item_nbytes for loop in copy.loops]
    item = np.dtype(f"u{item_nbytes}") if item_nbytes in (1, 2, 4, 8) else np.dtype(f"V{item_nbytes}")
    return np.ndarray([loop.size for loop in copy.loops], item, array.data, offset, steps)


def _innermost(loops: tuple[Loop, ...], *, source: bool) -> int:
    """Return the position of the loop with the least step on a side; -1 without loops."""
    steps = [loop.src_step if source else loop.dst_step for loop in loops]
    return min(range(len(steps)), key=lambda at: steps[at], default=-1)


def _is_small(sides: Sequence[int], item_nbytes: int) -> bool:
    """Tell whether a transpose, whose sides have so many bytes, is as quick element by element."""
    return min(sides) <= _LANE_NBYTES or sides[0] * sides[1] <= _FIRST_CACHE_NBYTES * item_nbytes


def _transpose(source: Array, target: Array) -> None:
    """Copy where the dimension before the last is dense in the target, and the last in the source."""
    rows, columns = source.shape[-2:]
    lanes = _LANE_NBYTES // source.itemsize if _LANE_NBYTES % source.itemsize == 0 else 1
    height = max(lanes, max(_LINE_NBYTES, _PANEL_NBYTES // columns) // source.itemsize // lanes * lanes)
    whole_rows = rows - rows % lanes if lanes > 1 and target.strides[-2] == target.itemsize else 0
    for at in np.ndindex(source.shape[:-2]):
        for begin in range(0, whole_rows, height):
            end = min(begin + height, whole_rows)
            _transpose_lanes(source[at][begin:end], target[at][begin:end], lanes)
        if whole_rows < rows:
            _transpose_items(source[at][whole_rows:], target[at][whole_rows:])


def _transpose_lanes(source: Array, target: Array, lanes: int) -> None:
    rows, columns = source.shape
    width = max(1, _PANEL_NBYTES // (rows * source.itemsize))
    panel = np.empty((rows // lanes, min(width, columns), lanes), source.dtype)
    wide = panel.view(f"V{_LANE_NBYTES}")[..., 0]
    wide_target = target.T.view(f"V{_LANE_NBYTES}")
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        for lane in range(lanes):
            panel[:, : end - begin, lane] = source[lane::lanes, begin:end]
        wide_target[begin:end] = wide[:, : end - begin].T


def _transpose_items(source: Array, target: Array) -> None:
    """Copy by panels of 32 columns or more, so that the target's lines stay in the cache until they are full."""
    rows, columns = source.shape
    width = max(32, _PANEL_NBYTES // (rows * source.itemsize))
    for begin in range(0, columns, width):
        target[:, begin : begin + width] = source[:, begin : begin + width]
