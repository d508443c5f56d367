"""The ranks of `test_refusals`: forked, for each case, from one process that has imported everything.

Every line of standard input is a case: a list of what each rank does. Every line of standard output is what became of
it: of every rank the error that it raised, or the sum of its logits, and the seconds after which its process had ended.
"""

import ctypes
import datetime
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from loader import agreement, files, load_model, models, reading
from loader.tiles import tiles_of
from manifests.process import this_process

Rank = dict[str, Any]
"""``folder``, ``options`` of `load_model`, ``environment``, ``before``: the name of what is done first."""


def wait_for_all() -> None:
    while len(list(Path(os.environ["ARRIVED"]).iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    # Each thread has looked who is there.
    time.sleep(0.6)


def tell_when_there() -> None:
    """Leave a file when this rank has come to the others."""
    arrive = agreement.Agreement.arrive

    def arriving(self: Any, facts: Any) -> None:
        arrive(self, facts)
        (Path(os.environ["ARRIVED"]) / os.environ["RANK"]).touch()

    agreement.Agreement.arrive = arriving  # type: ignore[method-assign]


def while_it_is_built(action: Callable[[], object]) -> Callable[[], None]:
    def change() -> None:
        build = models.build_model

        def acting(*arguments: Any) -> Any:
            wait_for_all()
            action()
            return build(*arguments)

        models.build_model = acting

    return change


def read_slowly() -> None:
    """Be on a file system that needs a second for each tensor; four are read at once."""
    fill = reading.RankFile._fill

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(1)
        fill(self, *arguments)

    reading.RankFile._fill = slow  # type: ignore[method-assign]
    files.stretches_of = lambda extents: ([tile] for tile in tiles_of(extents))


def be_elsewhere() -> None:
    """Be a process of another machine than all others."""
    mine = msgspec.structs.replace(this_process(), boot=f"machine {os.environ['RANK']}")
    agreement.this_process = lambda: mine
    agreement.SILENCE_S = 2.0


def lose_the_machine() -> None:
    be_elsewhere()
    while_it_is_built(lambda: os.kill(os.getpid(), signal.SIGKILL))()


def start_group() -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0"
    )
    timeout = datetime.timedelta(seconds=60)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=timeout)


def die_in_a_group() -> None:
    start_group()
    while_it_is_built(lambda: os.kill(os.getpid(), signal.SIGKILL))()


def do_nothing() -> None:
    pass


BEFORE: dict[str, Callable[[], None]] = {
    "": do_nothing,
    "kill": while_it_is_built(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "exit": while_it_is_built(lambda: os._exit(0)),
    "segfault": while_it_is_built(lambda: ctypes.string_at(8)),
    "interrupt": while_it_is_built(lambda: signal.raise_signal(signal.SIGINT)),
    "sleep": while_it_is_built(lambda: time.sleep(4)),
    "late": lambda: time.sleep(3),
    "never": lambda: os._exit(0),
    "slow": read_slowly,
    "elsewhere": be_elsewhere,
    "lost machine": lose_the_machine,
    "group": start_group,
    "killed in group": die_in_a_group,
}


def be_a_rank(rank: Rank, report: Path) -> None:
    """Load, in a process of its own, and tell what happened."""
    os.environ.update(rank["environment"], ARRIVED=str(report.parent / "arrived"))
    tell_when_there()
    found: dict[str, Any] = {"kind": "", "message": ""}
    try:
        BEFORE[rank["before"]]()
        model = load_model(rank["folder"], **rank["options"])
        with torch.inference_mode():
            found["logits"] = float(model(torch.tensor([[5, 6, 7]])).logits.double().sum())
    except BaseException as error:  # noqa: BLE001 - told by the test
        found = {"kind": type(error).__name__, "message": str(error)}
    report.write_text(json.dumps(found))


def run_case(ranks: list[Rank], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    shutil.rmtree(folder / "arrived", ignore_errors=True)
    (folder / "arrived").mkdir()
    began, seconds = time.monotonic(), dict[int, float]()
    reports = [folder / f"rank-{position}.json" for position in range(len(ranks))]
    children: dict[int, int] = {}
    for position, rank in enumerate(ranks):
        reports[position].unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            log = os.open(folder / f"rank-{position}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            be_a_rank(rank, reports[position])
            os._exit(0)
        children[pid] = position
    while children and time.monotonic() - began < limit_s:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            seconds[children.pop(pid)] = time.monotonic() - began
        else:
            time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    none = {"kind": "none", "message": ""}
    return [
        {**(json.loads(report.read_text()) if report.exists() else none), "seconds": seconds.get(position, limit_s)}
        for position, report in enumerate(reports)
    ]


def main(folder: Path) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    assert transformers.LlamaForCausalLM
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = json.loads(line)
        sys.stdout.write(json.dumps(run_case(case["ranks"], folder, case["limit_s"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
