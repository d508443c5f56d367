"""Conversion of floating point between dtypes, as torch does it.

numpy has no bfloat16: it is the upper half of a float32, rounded to the nearest, of two equally near to the even one.
Every other conversion goes by float32 too, as in torch.
"""

from typing import Any

import numpy as np

from reshard.engine.copying import Bytes

_BLOCK = 1 << 16
"""Numbers at a time, so that what is made on the way stays in the cache."""
_NAN = 0x7FC0
_KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def convert(source: Bytes, source_dtype: str, target: Bytes, target_dtype: str) -> None:
    """Fill a buffer with the numbers of another, converted.

    Args:
        source: The numbers' bytes.
        source_dtype: As in a safetensors header.
        target: As many numbers.
        target_dtype: As in a safetensors header.
    """
    numbers, made = source.view(_KINDS[source_dtype]), target.view(_KINDS[target_dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(numbers), _BLOCK):
            block = _to_float32(numbers[begin : begin + _BLOCK], source_dtype)
            made[begin : begin + _BLOCK] = _to_bfloat16(block) if target_dtype == "BF16" else block


def _to_float32(numbers: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32, copy=False)


def _to_bfloat16(numbers: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    halfway = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    rounded = ((bits + halfway) >> 16).astype(np.uint16)
    # Rounding would carry a NaN over into an infinity or zero.
    return np.where(np.isnan(numbers), np.uint16(_NAN), rounded)
