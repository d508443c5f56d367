"""From what a split is (placed tensors, files) to the program that makes it, or that takes it apart again."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from manifests.dtypes import atom, atoms, nbytes
from manifests.errors import ReshardError
from manifests.manifest import Link, Part, Tensor
from manifests.placement import dim_runs, part_of
from manifests.runs import Runs, compose, invert, numel, whole, without
from reshard.program import Gather, Input, Move, Program, Scatter, identity_links


class Place(NamedTuple):
    """Where a rank's part of a tensor lies.

    Attributes:
        file: Position of the file.
        offset: First byte, counted from the start of the file.
        rank: A rank whose part it is.
    """

    file: int
    offset: int
    rank: int


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


def build_input(name: str, dtype: str, shape: tuple[int, ...], file: int, offset: int) -> Input:
    """Return a stored tensor as the program reads it; ``offset`` counts from the start of the file."""
    return Input(name, file, offset, *storage(dtype, shape))


def part_runs(tensor: Tensor, rank: int) -> tuple[Runs, ...]:
    """Return, for every dimension, the runs from a whole tensor into a rank's part, in atoms."""
    if tensor.placement.cuts and (runs := dim_runs(tensor.placement, tensor.dtype, tensor.shape, rank)) is not None:
        return runs
    return _whole(storage(tensor.dtype, tensor.shape)[0])


def parts_of(name: str, tensor: Tensor) -> tuple[Part, ...]:
    """Return where a tensor came from, spelt out."""
    shape, _ = storage(tensor.dtype, tensor.shape)
    if not tensor.parts:
        return (Part(name, identity_links(shape)),)
    return tuple(part if part.links else Part(part.source, identity_links(shape), part.shape) for part in tensor.parts)


def split_moves(
    tensors: Mapping[str, Tensor], inputs: Mapping[str, Input], places: Mapping[str, Iterable[Place]]
) -> tuple[Move, ...]:
    """Return the moves that make the parts of every tensor, in the order in which their sources lie."""
    moves: list[Move] = []
    for name, tensor in tensors.items():
        shape, item_nbytes = storage(tensor.dtype, tensor.shape)
        gathers = tuple(Gather(_seen(inputs[part.source], part), part.links) for part in parts_of(name, tensor))
        scatters = tuple(Scatter(place.file, place.offset, part_runs(tensor, place.rank)) for place in places[name])
        cast = (tensor.cast, tensor.dtype) if tensor.cast else None
        moves.append(Move(name, shape, item_nbytes, gathers, scatters, cast))
    moves.sort(key=_first_source)
    return tuple(moves)


def _seen(source: Input, part: Part) -> Input:
    """Return a stored tensor in the shape that the part's links take it for.

    Raises:
        ReshardError: It has another number of elements.
    """
    if not part.shape:
        return source
    if prod(part.shape) != prod(source.shape):
        raise ReshardError(f"{source.name}: {list(source.shape)} is not seen under the shape {list(part.shape)}")
    return source._replace(shape=part.shape)


def _first_source(move: Move) -> tuple[int, int]:
    return min((gather.source.file, gather.source.offset) for gather in move.gathers)


def merge_moves(
    tensors: Mapping[str, Tensor],
    places: Mapping[str, Iterable[Place]],
    sources: Mapping[str, tuple[str, tuple[int, ...]]],
    targets: Mapping[str, Place],
) -> tuple[Move, ...]:
    """Return the moves that make the source tensors again from the parts of a split.

    Args:
        tensors: The tensors of the split.
        places: Where their parts lie; of equal copies the first is taken.
        sources: The dtype and the shape of every source tensor.
        targets: Where every source tensor goes.
    """
    gathers: dict[str, list[Gather]] = {name: [] for name in targets}
    views: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        for place, back in _first_copies(tensor, places[name]):
            shape = tuple(map(numel, part_runs(tensor, place.rank)))
            local = Input(name, place.file, place.offset, shape, storage(tensor.dtype, tensor.shape)[1])
            for part in parts_of(name, tensor):
                links = _links_back(part.links, back)
                if part.shape:
                    views[part.source] = part.shape
                if part.source in gathers and links is not None:
                    gathers[part.source].append(Gather(local, links))
    return tuple(
        Move(name, shape, item_nbytes, tuple(gathers[name]), (Scatter(place.file, place.offset, _whole(shape)),))
        for name, place in targets.items()
        for stored, item_nbytes in [storage(*sources[name])]
        for shape in [views.get(name, stored)]
    )


def _first_copies(tensor: Tensor, places: Iterable[Place]) -> Iterator[tuple[Place, tuple[Runs, ...]]]:
    """Yield the parts with their runs back into the whole tensor, every entry once: of copies the first is taken."""
    cut = {cut.dim for cut in tensor.placement.cuts}
    seen: set[tuple[int, ...]] = set()
    taken: dict[int, Runs] = {}
    for place in places:
        back = [invert(runs) for runs in part_runs(tensor, place.rank)]
        if len(cut) == 1:
            # A part may hold copied key and value heads beside query heads of its own: those are left out alone.
            dim = min(cut)
            back[dim] = without(back[dim], taken.get(dim, ()))
            taken[dim] = (*taken.get(dim, ()), *back[dim])
        if (part := part_of(tensor.placement, place.rank)) not in seen and all(back):
            yield place, tuple(back)
        seen.add(part)


def _links_back(links: tuple[Link, ...], back: tuple[Runs, ...]) -> tuple[Link, ...] | None:
    """Return the links from a rank's part to the source, or None if the part holds nothing of it.

    Args:
        links: From the source to the whole tensor.
        back: For every dimension, from the part to the whole tensor.
    """
    returned: list[Link] = []
    for link in links:
        if link.dst is None:
            returned.append(Link(None, link.src, invert(link.runs)))
            continue
        through = compose(back[link.dst], invert(link.runs))
        if not through and link.runs:
            return None
        returned.append(Link(link.dst, link.src, through))
    return tuple(returned)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> tuple[Runs, ...]:
    return tuple(whole(size) for size in shape)


def build_program(input_files: Iterable[str], output_files: Iterable[str], moves: tuple[Move, ...]) -> Program:
    """Return the program of the moves."""
    return Program(tuple(input_files), tuple(output_files), moves)
