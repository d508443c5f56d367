"""Builders for the tests of the cache: many processes that ask for one split at once.

One interpreter imports everything, then makes a child for each builder, which all start at one signal. Arguments: the
model, the cache, how locks behave, and a JSON list with an object for each builder: ``host``, a name under which it
goes, so that others judge it by its heartbeat only; ``slow_s``, how long it sleeps whenever bytes are done; ``name``,
by which it calls the split; ``blind``, whether it takes no turn. Each prints what happens as lines of JSON, its ``pid``
in all of them.
"""

import errno
import fcntl
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from manifests import process
from manifests.errors import ReshardError
from reshard.cache import building
from reshard.cache.entries import entry_name
from reshard.publishing import owner
from reshard.splitting import plan

LOCKS = ("working", "lying", "failing")
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def set_locks(behaviour: str) -> None:
    """Make every lock of this process succeed without locking, or fail as where a file system has none."""

    def lying(*_: Any) -> None:
        pass

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if behaviour != "working":
        fcntl.flock = fcntl.lockf = fcntl.fcntl = lying if behaviour == "lying" else failing


def say(**words: Any) -> None:
    os.write(1, json.dumps(words | {"pid": os.getpid()}).encode() + b"\n")


def build(model: Path, cache: Path, chosen: dict[str, Any]) -> None:
    if host := chosen.get("host"):
        process.this_machine = lambda: (host, "boot", "namespace")
    if chosen.get("blind"):
        building.turn = lambda *_: nullcontext()

    def progress(done: int, total: int) -> None:
        say(done=done, of=total)
        time.sleep(chosen.get("slow_s", 0))

    planned = plan(model, tp=2, plan=PLAN)
    name = chosen.get("name") or entry_name(model, planned)
    try:
        path, found = building.provide(planned, cache, name, notice=lambda line: say(notice=line), progress=progress)
        say(path=str(path), found=found)
    except ReshardError as error:
        say(error=f"{type(error).__name__}: {error}")


def main(model: str, cache: str, locks: str, builders: str) -> None:
    set_locks(locks)
    owner.BEAT_S, owner.SILENT_S = (
        float(os.environ.get(name, default))
        for name, default in (("BEAT_S", owner.BEAT_S), ("SILENT_S", owner.SILENT_S))
    )
    building.POLL_S = (0.01, 0.05)
    plan(model, tp=2, plan=PLAN)  # everything that planning needs is imported
    waiting, start = os.pipe()
    children = []
    for chosen in json.loads(builders):
        if child := os.fork():
            children.append(child)
            continue
        os.close(start)
        os.read(waiting, 1)  # until the parent closes its end
        build(Path(model), Path(cache), chosen)
        os._exit(0)
    os.close(start)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    say(codes=codes)


if __name__ == "__main__":
    main(*sys.argv[1:])
