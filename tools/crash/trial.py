"""Trials: a model, the command that splits it, and what must be true after a run that was disturbed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
TILE_NBYTES = 4 << 20
RESHARD, ROOMY = "reshard", "tools.crash.roomy"
"""The command line; the same, for which every disk has room, so that it meets a full one while it writes."""
INTERRUPTED, REFUSED = 130, 5


class Ended(NamedTuple):
    """A run that has ended: its exit code, what it said, and the bytes that it wrote."""

    code: int
    said: str
    nbytes: int


class WrongError(Exception):
    """Something that must be true is not."""


class Bench:
    """A model and its split, as an undisturbed run makes it."""

    def __init__(self, work: Path, tiles: int, *, options: Sequence[str] = ()) -> None:
        """Make the model, of at least so many tiles, and its split.

        Args:
            work: A folder that is made.
            tiles: Number of tiles of 4 MiB of random bytes.
            options: Of the command besides.
        """
        self.work = work
        self.options = ["--tp", "2", "--plan", str(work / "plan.json"), *options]
        work.mkdir(parents=True)
        (work / "plan.json").write_text(json.dumps({"plan": {"column.*": "colwise", "row.*": "rowwise"}}))
        (work / "model").mkdir()
        save_file(_tensors(tiles), work / "model" / "model.safetensors")
        (work / "model" / "config.json").write_text(json.dumps({"model_type": "x"}))
        self.out = work / "reference"
        ended = self.finish(self.start())
        require(ended.code == 0, f"the undisturbed run: {ended}")
        self.expected = digests(self.out)
        self.nbytes = sum(path.stat().st_size for path in self.out.iterdir())
        self.out = work / "place" / "out"

    def start(self, *options: str, module: str = RESHARD, wrapper: Sequence[str] = ()) -> "subprocess.Popen[str]":
        """Start a run to ``out``."""
        command = [sys.executable, "-m", module, str(self.work / "model"), *self.options, "-o", str(self.out), *options]
        return subprocess.Popen(
            [*wrapper, *command],
            cwd=self.work,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # What runs in the background ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def finish(self, process: "subprocess.Popen[str]") -> Ended:
        """Wait for a run; what it wrote is counted by the system, calls that write to a terminal included."""
        said = process.stderr.read() if process.stderr else ""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        counters = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
        process.communicate()
        return Ended(process.returncode, said, int(counters["wchar"]))

    def begin(self, older: Mapping[str, bytes] | None = None) -> None:
        """Clear the place of ``out``; put an older split there."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir(parents=True)
        if older is not None:
            self.out.mkdir()
            for name, content in older.items():
                (self.out / name).write_bytes(content)

    def check_nothing_half(self, older: Mapping[str, bytes] | None = None) -> bool:
        """Check that ``out`` is the older split or nothing, or else the new one, and return whether it is that."""
        if not os.path.lexists(self.out):
            require(older is None, "the older split is gone")
            return False
        found = digests(self.out)
        if older is not None and found == {name: xxhash.xxh3_128_hexdigest(text) for name, text in older.items()}:
            return False
        require(found == self.expected, f"{self.out} holds something else: {sorted(found)}")
        return True

    def check_rerun(self, *options: str) -> Ended:
        """Run again, undisturbed, and check that it completes with the same bytes and leaves nothing else."""
        ended = self.finish(self.start(*options))
        require(ended.code == 0, f"the rerun: {ended}")
        require(digests(self.out) == self.expected, "the rerun made other bytes")
        names = [path.name for path in self.out.parent.iterdir()]
        require(names == [self.out.name], f"left behind: {names}")
        return ended


def _tensors(tiles: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(nbytes: int) -> np.ndarray:
        return np.frombuffer(rng.bytes(nbytes), np.float32)

    large = {f"{'column' if at % 2 else 'row'}.{at}": 3 for at in range(tiles // 3)}
    large |= {f"whole.{at}": 1 for at in range(tiles - 3 * len(large))}
    tensors = {name: random(count * TILE_NBYTES).reshape(1024, -1) for name, count in large.items()}
    return (
        tensors
        | {f"small.{at}": random(2048) for at in range(40)}
        | {"column.odd": random(4 * 250 * 1002).reshape(250, -1)}
    )


def digests(folder: Path) -> dict[str, str]:
    """Return the hash of every file of a folder."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        hasher = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
        found[path.name] = hasher.hexdigest()
    return found


def require(fact: object, otherwise: str) -> None:
    """Stop if something is not so."""
    if not fact:
        raise WrongError(otherwise)
