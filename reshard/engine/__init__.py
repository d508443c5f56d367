"""The engine: runs a program in constant memory.

Every input byte is read once, in file order, and every output byte written once. Workers are alike: each takes the next
box of a tensor, reads it, cuts it, hashes what it read and what it writes, and writes (`running`). What a box is,
`flows` decides; small tensors are taken many at a time (`batches`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manifests.errors import CheckpointError, OutputError
from reshard.engine.limits import BUDGET_NBYTES, limits_of
from reshard.program import Input, Program

Progress = Callable[[int], None]
"""Called with the number of bytes just finished."""


class Hashes(NamedTuple):
    """The tile hashes of everything that was read and written, in the order of the program.

    Attributes:
        read: By input tensor.
        written: By position of the move, one for each of its scatters.
    """

    read: Mapping[Input, tuple[str, ...]]
    written: Sequence[tuple[tuple[str, ...], ...]]


def hashes_in_files(program: Program, hashes: Hashes) -> tuple[list[str], list[str]]:
    """Return the hashes of all that was read of every input file and written of every output file.

    Those of one file are one text, in the order of the file's bytes.
    """
    from reshard.engine.finishing import read_in_files, written_in_files

    return read_in_files(program, hashes.read), written_in_files(program, hashes.written)


def run_program(
    program: Program,
    input_paths: Sequence[Path],
    output_paths: Sequence[Path],
    *,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: Progress | None = None,
    journal: Path | None = None,
    key: str = "",
) -> Hashes:
    """Run every move.

    Args:
        program: What to move.
        input_paths: The files that it reads, in its order.
        output_paths: The files that it writes, in its order; they exist and have their headers.
        jobs: Number of worker threads.
        memory: Bytes that all buffers together may take.
        progress: Called from the workers as bytes are finished.
        journal: Where it is noted what is finished; of an earlier run of equal key, what still is is not done again.
        key: What decides the bytes that the program writes.

    Raises:
        CheckpointError: A source file cannot be read, or became shorter.
        OutputError: A file cannot be written.
    """
    from reshard.engine.batches import program_units
    from reshard.engine.files import Files
    from reshard.engine.finishing import Read, Written, late_units
    from reshard.engine.machine import Machine
    from reshard.engine.pool import Pool
    from reshard.engine.resuming import resume

    limits = limits_of(memory, jobs)
    with (
        Files(input_paths, os.O_RDONLY, CheckpointError) as inputs,
        Files(output_paths, os.O_RDWR, OutputError) as outputs,
    ):
        machine = Machine(Pool(jobs, 3 * limits.unit), inputs, outputs, limits, progress)
        if journal is not None:
            resume(machine, program, journal, key)
        try:
            machine.pool.run(program_units(machine, program))
            machine.pool.run(late_units(machine))
        finally:
            if machine.journal is not None:
                machine.journal.close()
    return Hashes(Read(program, machine), Written(program, machine))
