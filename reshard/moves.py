"""From what a split is (placed tensors, files) to the program that makes it, or that takes it apart again."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod

from manifests.errors import ReshardError
from manifests.manifest import Link, Part, Tensor
from manifests.placement import part_of
from manifests.runs import Runs, compose, invert, numel, without
from manifests.stored import StoredTensors
from reshard.addressing import storage
from reshard.movetable import Kind, MoveTable, Places, part_runs, whole_runs
from reshard.movetable import Place as Place
from reshard.program import Gather, Input, Move, Program, Scatter, identity_links


def build_input(name: str, dtype: str, shape: tuple[int, ...], file: int, offset: int) -> Input:
    """Return a stored tensor as the program reads it; ``offset`` counts from the start of the file."""
    return Input(name, file, offset, *storage(dtype, shape))


def parts_of(name: str, tensor: Tensor) -> tuple[Part, ...]:
    """Return where a tensor came from, spelt out."""
    shape, _ = storage(tensor.dtype, tensor.shape)
    if not tensor.parts:
        return (Part(name, identity_links(shape)),)
    return tuple(part if part.links else Part(part.source, identity_links(shape), part.shape) for part in tensor.parts)


class Inputs(Mapping[str, Input]):
    """The tensors of files as a program reads them.

    Args:
        files: The tensors of every file, in its order, and where its data starts, in bytes from its start.
    """

    def __init__(self, files: Iterable[tuple[StoredTensors, int]]) -> None:
        self._files = [*files]

    @cached_property
    def _made(self) -> dict[str, Input]:
        return {
            name: Input(name, number, start + begin, *storage(*kind))
            for number, (tensors, start) in enumerate(self._files)
            for name, kind, begin in zip(tensors.names, tensors.types, tensors.begins, strict=True)
        }

    def __getitem__(self, name: str) -> Input:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(tensors for tensors, _ in self._files)

    def __len__(self) -> int:
        return sum(len(tensors) for tensors, _ in self._files)

    def are(self, names: Sequence[str], kinds: Sequence[Kind]) -> bool:
        """Tell whether tensors are these in this order, as they are."""
        if [*self] != names:
            return False
        types = chain.from_iterable(tensors.types for tensors, _ in self._files)
        pairs = {(id(kind), id(stored)): (kind, stored) for kind, stored in zip(kinds, types, strict=True)}
        return all(kind.source == storage(*stored) for kind, stored in pairs.values())

    def places(self) -> Iterator[tuple["array[int]", "array[int]"]]:
        """Yield the file and the first byte of every tensor, file by file."""
        for number, (tensors, start) in enumerate(self._files):
            yield array("I", [number]) * len(tensors), array("Q", [start + begin for begin in tensors.begins])


def split_moves(
    tensors: Mapping[str, Tensor], inputs: Mapping[str, Input], places: Places | Mapping[str, Iterable[Place]]
) -> MoveTable:
    """Return the moves that make the parts of every tensor, in the order in which their sources lie.

    Args:
        tensors: The tensors; it is quick if those that are alike are one object.
        inputs: The source tensors.
        places: Where the parts of the tensors lie, in their order or by name.
    """
    if not isinstance(places, Places):
        places = Places.listed(places[name] for name in tensors)
    different = {id(tensor): tensor for tensor in tensors.values()}
    alike = {key: Kind(tensor) for key, tensor in different.items()}
    kinds = [*map(alike.__getitem__, map(id, tensors.values()))]
    gathers: dict[int, tuple[Gather, ...]] = {}
    table = MoveTable(list(tensors), kinds, gathers, places)
    parted = any(tensor.parts for tensor in different.values())
    if isinstance(inputs, Inputs) and not parted and inputs.are(table.names, kinds):
        for files, offsets in inputs.places():
            table.files += files
            table.offsets += offsets
        table.sort()
        return table
    for position, (name, tensor) in enumerate(tensors.items()):
        if not tensor.parts:
            first = inputs[name]
            if (first.shape, first.item_nbytes) == kinds[position].source:
                table.files.append(first.file)
                table.offsets.append(first.offset)
                continue
        gathers[position] = tuple(
            Gather(_seen(inputs[part.source], part), part.links) for part in parts_of(name, tensor)
        )
        first = min((gather.source for gather in gathers[position]), key=lambda source: (source.file, source.offset))
        table.files.append(first.file)
        table.offsets.append(first.offset)
    table.sort()
    return table


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
        Move(name, shape, item_nbytes, tuple(gathers[name]), (Scatter(place.file, place.offset, whole_runs(shape)),))
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


def build_program(input_files: Iterable[str], output_files: Iterable[str], moves: Sequence[Move]) -> Program:
    """Return the program of the moves."""
    return Program(tuple(input_files), tuple(output_files), moves)
