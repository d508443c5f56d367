"""torch's names for the dtypes of a safetensors header."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import torch

from manifests.dtypes import atom
from manifests.errors import LoadError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype.

    Raises:
        LoadError: torch has none.
    """
    if dtype not in TORCH_DTYPES:
        raise LoadError(f"torch has no dtype for {dtype}; read the rank file with another library")
    return TORCH_DTYPES[dtype]


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that torch gives a tensor: it counts two F4 elements as one.

    >>> torch_shape("F4", (4, 8)), torch_shape("F32", (4, 8))
    ((4, 4), (4, 8))
    """
    per_atom, _ = atom(dtype)
    return (*shape[:-1], shape[-1] // per_atom) if shape and per_atom > 1 else shape


class Typed(Protocol):
    """What has a dtype, as in a safetensors header, and a shape: a tensor of a manifest or of a header."""

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, in elements."""
        ...


def main_dtype(tensors: Iterable[Typed]) -> torch.dtype:
    """Return the floating-point dtype that most elements have; float32 if none has one."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in ("F64", "F32", "F16", "BF16"):
            counts[tensor.dtype] += torch.Size(tensor.shape).numel()
    return TORCH_DTYPES[counts.most_common(1)[0][0]] if counts else torch.float32
