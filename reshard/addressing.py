"""Addressing: which shape in atoms a stored tensor has."""

from functools import lru_cache

from manifests.dtypes import atom, atoms, nbytes


@lru_cache(maxsize=4096)
def storage(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return how a tensor is addressed: its shape in atoms and the bytes of one.

    A tensor whose rows do not fill whole bytes is addressed as its bytes; it can only be copied whole.

    >>> storage("F32", (2, 3)), storage("F4", (2, 3))
    (((2, 3), 4), ((3,), 1))
    """
    shape_in_atoms = atoms(dtype, shape)
    if shape_in_atoms is None:
        return (nbytes(dtype, shape),), 1
    return shape_in_atoms, atom(dtype)[1]
