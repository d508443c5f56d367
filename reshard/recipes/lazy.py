"""Lazy tensors: made of stored ones, of which nothing is read.

A tensor is the product of its parts' links, so that an operation along one dimension changes the runs of one link, and
a transpose renumbers links. Every operation here only moves bytes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from manifests.dtypes import atom
from manifests.errors import CheckpointError
from manifests.manifest import Link, Part
from manifests.runs import Run, Runs, compose, expand, fold, numel
from reshard.program import identity_links


class Lazy(NamedTuple):
    """A tensor made of stored ones, none of them read.

    Attributes:
        dtype: As in the safetensors header.
        shape: In atoms.
        parts: Where it comes from.
        stored: Whether it is one stored tensor as it is, perhaps seen under another shape.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    stored: bool = False


def stack(tensors: Iterable[Lazy], dim: int, target: str) -> Lazy:
    """Return the tensors as entries of a new dimension.

    Raises:
        CheckpointError: Their dtypes or shapes differ.
    """
    tensors = list(tensors)
    first = tensors[0]
    dim %= len(first.shape) + 1
    _check_alike([(lazy.dtype, lazy.shape) for lazy in tensors], target)
    parts: list[Part] = []
    for position, lazy in enumerate(tensors):
        for part in lazy.parts:
            links = [
                Link(link.src, link.dst + 1 if link.dst is not None and link.dst >= dim else link.dst, link.runs)
                for link in part.links
            ]
            parts.append(_relinked(part, (*links, Link(None, dim, (Run(0, position, 1),)))))
    return Lazy(first.dtype, (*first.shape[:dim], len(tensors), *first.shape[dim:]), tuple(parts))


def concatenate(tensors: Iterable[Lazy], dim: int, target: str) -> Lazy:
    """Return the tensors joined along a dimension.

    Raises:
        CheckpointError: Their dtypes differ, or their shapes in another dimension.
    """
    tensors = list(tensors)
    first = tensors[0]
    dim = _dimension(first, dim, target)
    _check_alike([(lazy.dtype, (*lazy.shape[:dim], *lazy.shape[dim + 1 :])) for lazy in tensors], target)
    parts: list[Part] = []
    start = 0
    for lazy in tensors:
        for part in lazy.parts:
            links = [
                Link(link.src, link.dst, _shift(link.runs, start)) if link.dst == dim else link for link in part.links
            ]
            parts.append(_relinked(part, tuple(links)))
        start += lazy.shape[dim]
    return Lazy(first.dtype, (*first.shape[:dim], start, *first.shape[dim + 1 :]), tuple(parts))


def select(lazy: Lazy, dim: int, runs: Runs) -> Lazy:
    """Return the entries of a dimension that the runs take, in the runs' order."""
    parts: list[Part] = []
    for part in lazy.parts:
        links = [Link(link.src, link.dst, compose(link.runs, runs)) if link.dst == dim else link for link in part.links]
        if all(link.runs for link in links if link.dst == dim) or not numel(runs):
            parts.append(_relinked(part, tuple(links)))
    return Lazy(lazy.dtype, (*lazy.shape[:dim], numel(runs), *lazy.shape[dim + 1 :]), tuple(parts))


def split(lazy: Lazy, dim: int, sizes: Sequence[int], target: str) -> list[Lazy]:
    """Return consecutive pieces of these sizes, in elements.

    Raises:
        CheckpointError: The sizes do not add up to the dimension.
    """
    dim = _dimension(lazy, dim, target)
    per_atom = atom(lazy.dtype)[0] if dim == len(lazy.shape) - 1 else 1
    total = lazy.shape[dim] * per_atom
    if sum(sizes) != total or any(size % per_atom or size < 0 for size in sizes):
        listed = " + ".join(map(str, sizes))
        raise CheckpointError(
            f"{target}: {listed} entries are taken from dim {dim} of a stored tensor, which has {total}"
        )
    starts = accumulate((size // per_atom for size in sizes), initial=0)
    return [
        select(lazy, dim, (Run(start, 0, size // per_atom),) if size else ())
        for start, size in zip(starts, sizes, strict=False)
    ]


def chunk(lazy: Lazy, dim: int, count: int, target: str) -> list[Lazy]:
    """Return equal pieces.

    Raises:
        CheckpointError: The number of pieces does not divide the dimension.
    """
    dim = _dimension(lazy, dim, target)
    per_atom = atom(lazy.dtype)[0] if dim == len(lazy.shape) - 1 else 1
    size = lazy.shape[dim] * per_atom
    if size % count:
        raise CheckpointError(f"{target}: dim {dim} of a stored tensor has {size} entries, not {count} equal pieces")
    return split(lazy, dim, [size // count] * count, target)


def unstack(lazy: Lazy, dim: int, target: str) -> list[Lazy]:
    """Return the entries of a dimension as tensors without it."""
    dim = _dimension(lazy, dim, target)
    _check_addressable(lazy, (dim,), target)
    pieces: list[Lazy] = []
    for position in range(lazy.shape[dim]):
        parts: list[Part] = []
        for part in select(lazy, dim, (Run(position, 0, 1),)).parts:
            links: list[Link] = []
            for link in part.links:
                if link.dst == dim:
                    links += [Link(link.src, None, link.runs)] if link.src is not None else []
                else:
                    links.append(
                        Link(link.src, link.dst - 1 if link.dst is not None and link.dst > dim else link.dst, link.runs)
                    )
            parts.append(_relinked(part, tuple(links)))
        pieces.append(Lazy(lazy.dtype, (*lazy.shape[:dim], *lazy.shape[dim + 1 :]), tuple(parts)))
    return pieces


def transpose(lazy: Lazy, one: int, other: int, target: str) -> Lazy:
    """Return the tensor with two dimensions exchanged.

    Raises:
        CheckpointError: Its elements share bytes along one of them.
    """
    one, other = _dimension(lazy, one, target), _dimension(lazy, other, target)
    _check_addressable(lazy, (one, other), target)
    place = {one: other, other: one}
    order = [place.get(dim, dim) for dim in range(len(lazy.shape))]
    parts = [
        _relinked(
            part,
            tuple(Link(link.src, None if link.dst is None else order[link.dst], link.runs) for link in part.links),
        )
        for part in lazy.parts
    ]
    return Lazy(lazy.dtype, tuple(lazy.shape[dim] for dim in order), tuple(parts))


def interleave(lazy: Lazy, dim: int, target: str, *, inverse: bool = False) -> Lazy:
    """Return the even entries of a dimension before the odd ones, or the other way round.

    Raises:
        CheckpointError: The dimension is odd.
    """
    dim = _dimension(lazy, dim, target)
    _check_addressable(lazy, (dim,), target)
    size = lazy.shape[dim]
    if size % 2:
        raise CheckpointError(f"{target}: dim {dim} of a stored tensor has {size} entries, which are no pairs")
    return select(lazy, dim, _paired(1, size, inverse=inverse))


def permute_for_rope(lazy: Lazy, heads: int, target: str, *, inverse: bool = False) -> Lazy:
    """Return the rows of every head with the even ones before the odd ones; other than 1-d and 2-d stay as they are.

    Raises:
        CheckpointError: The rows are not those of so many heads of even size.
    """
    if len(lazy.shape) not in (1, 2):
        return lazy
    _check_addressable(lazy, (0,), target)
    rows = lazy.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError(f"{target}: {rows} rows are not {heads} heads of an even size")
    return select(lazy, 0, _paired(heads, rows // heads, inverse=inverse))


@lru_cache(maxsize=256)
def _paired(blocks: int, size: int, *, inverse: bool) -> Runs:
    """Return the runs that put the even entries of every block before the odd ones, or back.

    >>> expand(_paired(1, 6, inverse=False))
    [(0, 0, 1), (2, 1, 1), (4, 2, 1), (1, 3, 1), (3, 4, 1), (5, 5, 1)]
    """
    half = size // 2
    runs: list[Run] = []
    for start in range(0, blocks * size, size):
        for odd in range(2):
            apart, together = start + odd, start + odd * half
            if inverse:
                runs.append(Run(together, apart, 1, half, 1, 2))
            else:
                runs.append(Run(apart, together, 1, half, 2, 1))
    return tuple(run for run in runs if run.repeat)


def reshape(lazy: Lazy, shape: tuple[int, ...], target: str) -> Lazy:
    """Return a stored tensor seen under another shape.

    Raises:
        CheckpointError: It has another number of elements, or is no longer one stored tensor as it is.
    """
    if shape == lazy.shape:
        return lazy
    if prod(shape) != prod(lazy.shape):
        raise CheckpointError(f"{target}: a stored tensor of {list(lazy.shape)} does not have the shape {list(shape)}")
    if not lazy.stored or atom(lazy.dtype)[0] != 1:
        raise CheckpointError(f"{target}: only a stored tensor as it is, of whole bytes, takes another shape")
    return Lazy(lazy.dtype, shape, (Part(lazy.parts[0].source, identity_links(shape), shape),), stored=True)


def _relinked(part: Part, links: tuple[Link, ...]) -> Part:
    return Part(part.source, links, part.shape)


@lru_cache(maxsize=4096)
def _shift(runs: Runs, by: int) -> Runs:
    return fold((src, dst + by, length) for src, dst, length in expand(runs))


def _dimension(lazy: Lazy, dim: int, target: str) -> int:
    ndim = len(lazy.shape)
    if not -ndim <= dim < ndim:
        raise CheckpointError(f"{target}: a stored tensor of {ndim} dimensions has no dim {dim}")
    return dim % ndim


def _check_alike(kinds: list[tuple[str, tuple[int, ...]]], target: str) -> None:
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(set(kinds)))
        raise CheckpointError(f"{target}: its stored tensors do not fit together: {listed}")


def _check_addressable(lazy: Lazy, dims: Iterable[int], target: str) -> None:
    if atom(lazy.dtype)[0] != 1 and len(lazy.shape) - 1 in dims:
        raise CheckpointError(f"{target}: elements of {lazy.dtype} share bytes along the last dim; it is not reordered")
