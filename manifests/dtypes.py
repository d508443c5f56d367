"""The dtypes that a safetensors header may name, by their width.

Bytes are moved and never converted, so a dtype is only its number of bits. A tensor is addressed in atoms: the fewest
elements that fill whole bytes (1 for most dtypes, 2 elements in 1 byte for F4, 4 elements in 3 bytes for the F6 kinds).

Source: the ``Dtype`` enumeration of safetensors 0.8.0.
"""

from collections.abc import Sequence
from math import lcm, prod

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
MAX_DIMS = 32
"""Of a tensor: as many as every numpy takes."""


def atom(dtype: str) -> tuple[int, int]:
    """Return the elements and the bytes of the smallest piece that can be moved.

    >>> atom("BF16"), atom("F4"), atom("F6_E2M3")
    ((1, 2), (2, 1), (4, 3))
    """
    bits = BITS[dtype]
    whole_bits = lcm(bits, 8)
    return whole_bits // bits, whole_bits // 8


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor, rounded up to a whole byte.

    >>> nbytes("F4", [4, 8]), nbytes("F32", []), nbytes("I64", [0, 3])
    (16, 4, 0)
    """
    return -(-prod(shape) * BITS[dtype] // 8)


def atoms(dtype: str, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape in atoms, or None where a row does not fill whole bytes.

    >>> atoms("F4", [4, 8]), atoms("F32", [3]), atoms("F4", [4, 7])
    ((4, 4), (3,), None)
    """
    per_atom, _ = atom(dtype)
    if per_atom == 1:
        return tuple(shape)
    if not shape or shape[-1] % per_atom:
        return None
    return (*shape[:-1], shape[-1] // per_atom)
