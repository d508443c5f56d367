"""Many builders of one split of a cache, with locks that work, lie and fail; killed, stopped and taken for dead."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from manifests.manifest import MANIFEST_NAME
from reshard import plan, verify
from tests.cache_worker import LOCKS, PLAN

FULL = bool(os.environ.get("FULL"))
ROUNDS = 20 if FULL else 2
BUILDERS = 8
ROOT = Path(__file__).parent.parent

Line = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {
        f"layers.{layer}.{name}.weight": random.random((32, 16), np.float32)
        for layer in range(4)
        for name in ("up", "down", "norm")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@contextmanager
def builders(
    model: Path, cache: Path, chosen: list[Line], locks: str = "working", **environment: float
) -> Iterator[Callable[[str], Line]]:
    """Start builders; give what waits for the next line of theirs that has a word, and in the end sees them finish."""
    command = [sys.executable, "-m", "tests.cache_worker", str(model), str(cache), locks, json.dumps(chosen)]
    variables = {name: str(value) for name, value in environment.items()}
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as worker:
        lines: Queue[Line] = Queue()

        def read() -> None:
            assert worker.stdout
            for line in worker.stdout:
                lines.put(json.loads(line))
            lines.put({"ended": worker.wait()})

        threading.Thread(target=read, daemon=True).start()
        passed: list[Line] = []

        def until(word: str, timeout_s: float = 30) -> Line:
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                try:
                    line = lines.get(timeout=0.5)
                except Empty:
                    continue
                if word in line:
                    return line
                passed.append(line)
                if "ended" in line:
                    break
            pytest.fail(f"no {word!r} within {timeout_s} s: " + "\n".join(map(str, passed)))

        try:
            yield until
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def check_cache(model: Path, cache: Path) -> Path:
    """Compare the one split of a cache with its source, and see that nothing else was left; return its path."""
    names = sorted(path.name for path in cache.iterdir())
    assert len(names) == 2
    assert names[0] == ".uses"
    assert [path.name for path in (cache / ".uses").iterdir()] == [names[1]]
    out = cache / names[1]
    assert sorted(path.name for path in out.iterdir()) == [
        "common.safetensors", "config.json", MANIFEST_NAME,
        "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors",
    ]  # fmt: skip
    source = load_file(model / "model.safetensors")
    first, second = (load_file(out / f"rank-0000{rank}-of-00002.safetensors") for rank in range(2))
    common = load_file(out / "common.safetensors")
    assert first.keys() | common.keys() == source.keys()
    for name, whole in source.items():
        if "norm" in name:
            assert np.array_equal(common[name], whole)
        else:
            assert np.array_equal(np.concatenate([first[name], second[name]], 0 if "up" in name else 1), whole)
    verify(out)
    return out


def results(until: Callable[[str], Line], number: int) -> list[Line]:
    """Return what builders got, once all have ended well."""
    got = [until("found") for _ in range(number)]
    assert until("codes")["codes"] == [0] * number
    return got


def hosts(number: int, *, elsewhere: bool, **more: Any) -> list[Line]:
    return [more | ({"host": f"host-{at}"} if elsewhere else {}) for at in range(number)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one host", "a host each"])
@pytest.mark.parametrize("locks", LOCKS)
def test_one_of_many_builds_and_all_get_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], locks: str, elsewhere: bool
) -> None:
    for number in range(ROUNDS):
        cache = tmp_path / f"cache-{number}"
        with builders(model, cache, hosts(BUILDERS, elsewhere=elsewhere), locks) as until:
            got = results(until, BUILDERS)
        out = check_cache(model, cache)
        assert {line["path"] for line in got} == {str(out)}
        assert sum(not line["found"] for line in got) == 1
        shutil.rmtree(cache)
    if FULL:
        hosts_named = "a host each" if elsewhere else "one host"
        with capsys.disabled():
            sys.stdout.write(
                f"\n{BUILDERS} builders at once, locks {locks}, {hosts_named}: {ROUNDS} times one built it, all got "
                "it, the right bytes, nothing else left\n"
            )


def test_builders_that_do_not_see_each_other_leave_one_split(model: Path, tmp_path: Path) -> None:
    for number in range(ROUNDS):
        cache = tmp_path / f"cache-{number}"
        with builders(model, cache, hosts(BUILDERS, elsewhere=True, blind=True, slow_s=0.05)) as until:
            got = results(until, BUILDERS)
        out = check_cache(model, cache)
        assert {line["path"] for line in got} == {str(out)}
        assert sum(not line["found"] for line in got) == 1


def test_whatever_it_is_called_a_key_is_built_once(model: Path, tmp_path: Path) -> None:
    names = [f"model-{at}-tp2-{'0' * 16}" for at in range(4)]
    key = entry_key(model)
    chosen = [{"name": name.replace("0" * 16, key)} for name in names]
    with builders(model, tmp_path / "cache", chosen) as until:
        got = results(until, len(chosen))
    assert {line["path"] for line in got} == {str(check_cache(model, tmp_path / "cache"))}


def entry_key(model: Path) -> str:
    return plan(model, tp=2, plan=PLAN).key[:16]


@pytest.mark.parametrize(
    ("locks", "elsewhere"), [("working", False), ("lying", False), ("failing", False), ("failing", True)]
)
def test_the_others_go_on_where_a_builder_was_killed(model: Path, tmp_path: Path, locks: str, elsewhere: bool) -> None:
    cache, limits = tmp_path / "cache", {"BEAT_S": 0.2, "SILENT_S": 3.0}
    victims = [{"host": "first", "slow_s": 60} if elsewhere else {"slow_s": 60}]
    with builders(model, cache, victims, locks, **limits) as first:
        victim = first("done")["pid"]
        with builders(model, cache, hosts(BUILDERS, elsewhere=elsewhere), locks, **limits) as until:
            assert f"process {victim} on" in until("notice")["notice"]
            os.kill(victim, signal.SIGKILL)
            got = results(until, BUILDERS)
        assert first("codes")["codes"] == [-signal.SIGKILL]
    assert {line["path"] for line in got} == {str(check_cache(model, cache))}
    assert sum(not line["found"] for line in got) == 1


@pytest.mark.parametrize("meanwhile", ["finished", "unfinished"])
def test_a_slow_builder_that_is_taken_for_dead_does_no_harm(model: Path, tmp_path: Path, meanwhile: str) -> None:
    cache, limits = tmp_path / "cache", {"BEAT_S": 0.2, "SILENT_S": 3.0}
    with builders(model, cache, [{"host": "slow", "slow_s": 0.2}], **limits) as first:
        slow = first("done")["pid"]
        os.kill(slow, signal.SIGSTOP)
        try:
            others = hosts(BUILDERS, elsewhere=True, slow_s=0 if meanwhile == "finished" else 1)
            with builders(model, cache, others, **limits) as until:
                if meanwhile == "unfinished":
                    until("done")
                    os.kill(slow, signal.SIGCONT)
                got = results(until, BUILDERS)
        finally:
            with suppress(ProcessLookupError):
                os.kill(slow, signal.SIGCONT)
        got += results(first, 1)
    assert {line["path"] for line in got} == {str(check_cache(model, cache))}
    assert sum(not line["found"] for line in got) == 1
