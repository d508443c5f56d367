"""Sharing: which process writes which files, and the part of the program that makes them."""

from collections.abc import Collection, Iterator, Sequence

from reshard.program import Move, Program


def deal(nbytes: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the files that each process writes: the largest first, to the one with the least so far.

    >>> deal([5, 9, 4, 4], 2)
    ((1, 3), (0, 2))
    >>> deal([7], 3)
    ((0,), (), ())
    """
    files: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, process) for process in range(size)]
    for position in sorted(range(len(nbytes)), key=lambda position: (-nbytes[position], position)):
        load, process = min(loads)
        loads[process] = (load + nbytes[position], process)
        files[process].append(position)
    return tuple(tuple(sorted(positions)) for positions in files)


def restrict(program: Program, files: Collection[int]) -> Program:
    """Return the program that makes these output files alone.

    A tensor of which no part goes there is not read. Of tensors that share a source all are kept as soon as one is
    needed, those that are not needed without parts: a process reads a source whole, so that it can hash it in passing.

    Args:
        program: The whole program.
        files: Positions of the output files, which the program returned counts anew, in the same order.
    """
    outputs = {position: new for new, position in enumerate(sorted(files))}
    kept: list[Move] = []
    for moves in _sharing_a_source(program.moves):
        mine = [
            move._replace(scatters=tuple(s._replace(file=outputs[s.file]) for s in move.scatters if s.file in outputs))
            for move in moves
        ]
        if any(move.scatters for move in mine):
            kept += mine
    read = sorted({gather.source.file for move in kept for gather in move.gathers})
    inputs = {position: new for new, position in enumerate(read)}
    order = {move.name: position for position, move in enumerate(program.moves)}
    return Program(
        tuple(program.input_files[position] for position in read),
        tuple(program.output_files[position] for position in outputs),
        tuple(_count_anew(move, inputs) for move in sorted(kept, key=lambda move: order[move.name])),
    )


def _count_anew(move: Move, inputs: dict[int, int]) -> Move:
    gathers = (g._replace(source=g.source._replace(file=inputs[g.source.file])) for g in move.gathers)
    return move._replace(gathers=tuple(gathers))


def _sharing_a_source(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Yield the moves in groups; two that read the same source are in one."""
    root = list(range(len(moves)))

    def find(position: int) -> int:
        while root[position] != position:
            root[position] = root[root[position]]
            position = root[position]
        return position

    # A source may be seen under several shapes; its place is what it is known by.
    readers: dict[tuple[int, int, str], int] = {}
    for position, move in enumerate(moves):
        for gather in move.gathers:
            source = (gather.source.file, gather.source.offset, gather.source.name)
            root[find(position)] = find(readers.setdefault(source, position))
    groups: dict[int, list[Move]] = {}
    for position, move in enumerate(moves):
        groups.setdefault(find(position), []).append(move)
    yield from groups.values()
