"""Together: several processes, on one machine or on several with a shared file system, make one split.

All plan it by themselves, from the same headers; each writes the files that it is dealt and tells the hashes of what it
read and wrote; process 0 writes the manifest and publishes. What they make is what one process makes, byte for byte.
A file is written by one process, since two machines that write one file lose pages on a network file system.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from manifests.errors import CheckpointError, ManifestError, OutputError, ReshardError
from manifests.manifest import read_manifest
from reshard.engine import Hashes
from reshard.options import refuse_unproved
from reshard.planning import SplitPlan, plan_split
from reshard.publishing.destination import check_apart, check_destination
from reshard.publishing.renaming import publish
from reshard.publishing.staging import Staging, clear_left, held_nbytes, made, mend, staging_path, take_away, writing
from reshard.sources.folder import LocalFolder
from reshard.splitting import TotalProgress, write_files, write_manifest
from reshard.torchrun.meeting import Meeting
from reshard.torchrun.processes import Processes
from reshard.torchrun.sharing import deal, restrict

PUBLISHED_LIMIT_S = 10.0
"""How long the folder's new name may take to be seen from another machine."""


class Result(msgspec.Struct, frozen=True):
    """What a process did.

    Attributes:
        key: Of the split of which it wrote its share.
        read: The tile hashes of every source tensor that it read.
        written: The same of every part that it wrote, by file and tensor.
    """

    key: str
    read: dict[str, tuple[str, ...]]
    written: dict[str, dict[str, tuple[str, ...]]]


def carry_out(
    planned: SplitPlan,
    out: Path,
    processes: Processes,
    *,
    force: bool = False,
    progress: TotalProgress | None = None,
    **how: Any,  # noqa: ANN401 - what write_files takes
) -> None:
    """Make a split that was decided, together with the other processes; returns when it is published.

    Args:
        planned: The split, the same in all processes.
        out: The folder to make, the same for all.
        processes: Which of them this one is.
        force: Whether an older split under this name is replaced, once the new one is whole.
        progress: Called with the bytes that this process finished so far and their total.
        how: What `reshard.splitting.write_files` takes besides.

    Raises:
        CheckpointError: The source cannot be read, changed while it was read, or is another one for another process.
        OutputError: The destination exists, lacks space, or cannot be written.
        PlanError: The plan is one that is proposed.
        ReshardError: Another process failed, with its exit code, or does not come.
    """
    folder = planned.checkpoint.folder
    refuse_unproved(planned.options, folder.label)
    if isinstance(folder, LocalFolder):
        check_apart(out, folder.path)
    if not processes.follows:
        mend(out)
    check_destination(out, planned.nbytes_written - held_nbytes(out), force=force)
    out = out.absolute()
    meeting = Meeting(staging_path(out, processes.token), processes)
    stopped = threading.Event()

    def show(done: int, total: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        meeting.look()
        if progress is not None:
            progress(done, total)

    with _interrupted_once(stopped) as ignore_signals:
        if processes.follows:
            with meeting.reporting(ignore_signals), writing(out):
                meeting.join(planned.key)
                _write_share(planned, meeting, processes, progress=show, **how)
                meeting.wait_until_removed()
                _check_published(out, planned.key)
            return
        take_away(meeting.folder)  # left by a run of the same name that was killed
        clear_left(out)
        with made(meeting.folder, out) as staging, meeting.reporting(ignore_signals), writing(out):
            meeting.gather(planned.key)
            planned = _write_share(planned, meeting, processes, progress=show, **how)
            results = meeting.results(Result)
            hashes = join(planned, results)
            _check_files(planned, staging.content)
            write_manifest(planned, hashes, staging.content)
            publish(staging.content, out, force=force)


def _write_share(
    planned: SplitPlan,
    meeting: Meeting,
    processes: Processes,
    **how: Any,  # noqa: ANN401
) -> SplitPlan:
    """Write the files of this process and tell their hashes; return the plan with its source on this machine."""
    folder = planned.checkpoint.folder
    if not isinstance(folder, LocalFolder):
        planned = plan_split(folder.download(planned.checkpoint.needed), planned.world_size, planned.options)
    files = deal([file.nbytes for file in planned.files], processes.size)[processes.rank]
    program = restrict(planned.program, files)
    hashes = write_files(planned, program, Staging(meeting.folder).content, **how)
    written: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in program.output_files}
    for move, parts in zip(program.moves, hashes.written, strict=True):
        for scatter, tiles in zip(move.scatters, parts, strict=True):
            written[program.output_files[scatter.file]][move.name] = tiles
    read = {source.name: tiles for source, tiles in hashes.read.items()}
    meeting.post("result", Result(planned.key, read, written))
    return planned


def join(planned: SplitPlan, results: list[Result]) -> Hashes:
    """Return the hashes of the whole program from those of its shares.

    Raises:
        CheckpointError: Two processes planned another split, or read other bytes of one tensor.
    """
    read: dict[str, tuple[str, ...]] = {}
    written: dict[str, dict[str, tuple[str, ...]]] = {}
    label = planned.checkpoint.folder.label
    for rank, result in enumerate(results):
        if result.key != planned.key:
            raise CheckpointError(f"{label}: process {rank} read another checkpoint than process 0; split again")
        for name, tiles in result.read.items():
            if read.setdefault(name, tiles) != tiles:
                raise CheckpointError(f"{label}: {name}: process {rank} read other bytes than another; split again")
        written |= result.written
    program = planned.program
    return Hashes(
        {gather.source: read[gather.source.name] for move in program.moves for gather in move.gathers},
        tuple(
            tuple(written[program.output_files[scatter.file]][move.name] for scatter in move.scatters)
            for move in program.moves
        ),
    )


def _check_files(planned: SplitPlan, folder: Path) -> None:
    for file in planned.files:
        try:
            nbytes = (folder / file.name).stat().st_size
        except OSError as error:
            raise OutputError(f"{folder / file.name}: another process's, not seen here: {error.strerror}") from error
        if nbytes != file.nbytes:
            raise OutputError(f"{folder / file.name}: {nbytes} of {file.nbytes} bytes are seen here; split again")


def _check_published(out: Path, key: str) -> None:
    deadline = time.monotonic() + PUBLISHED_LIMIT_S
    while True:
        _ = [*out.parent.iterdir()]  # makes a network file system forget what it remembered of the names
        try:
            if read_manifest(out).key == key:
                return
        except (ManifestError, OSError):
            pass
        if time.monotonic() > deadline:
            raise ReshardError("process 0 failed: it removed what was made")
        time.sleep(0.1)


@contextmanager
def _interrupted_once(stopped: threading.Event) -> Iterator[Callable[[], object]]:
    """Let the first signal alone interrupt the body, and set the event; give what keeps even that from doing so.

    torchrun passes on Ctrl-C, which the terminal has sent already: the second one must not end the cleaning up. After
    an interruption signals stay ignored, as the process is about to end.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def ignore() -> None:
        stopped.set()
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)

    def interrupt(*_: object) -> None:
        ignore()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield ignore
        return
    before = [signal.signal(number, interrupt) for number in numbers]

    def restore() -> None:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    try:
        yield ignore
    except Exception:
        restore()
        raise
    restore()
