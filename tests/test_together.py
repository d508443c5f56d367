"""Several processes make one split: the same bytes as one process, and nothing that looks finished if one dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import pytest
import torch

from manifests.errors import CheckpointError, ReshardError
from manifests.manifest import Link
from manifests.runs import Run, invert, numel, whole
from reshard import plan, verify
from reshard.program import Gather, Input, Move, Program, Scatter, identity_links
from reshard.publishing.renaming import publish
from reshard.publishing.staging import take_away
from reshard.torchrun import together
from reshard.torchrun.meeting import Meeting
from reshard.torchrun.processes import Processes, read_environment
from reshard.torchrun.sharing import deal, restrict
from tests.checkpoints import LLAMA, count, files_of, mentions, save_indexed
from tests.hub_server import HubServer
from tests.launching import ROOT
from tests.test_split_merge import LAYERS, PLAN

Process = subprocess.Popen[str]
RESHARD, FAULTY = "reshard", "tests.together_worker"
MODEL = ["m", "--tp", "4", "--plan", "plan.json"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a folder with two models of several files: any tensors, and a Mixtral whose experts are stacked."""
    save_indexed(tmp_path / "m", *LAYERS, config={"model_type": "x"})
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps({"plan": PLAN}))
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_key_value_heads": 2, "num_experts_per_tok": 1}
    layer = "model.layers.0."
    tensors = {f"{layer}self_attn.{name}_proj.weight": count(n, 8) for name, n in (("q", 8), ("k", 4), ("v", 4))}
    tensors |= {f"{layer}self_attn.o_proj.weight": count(8, 8), f"{layer}block_sparse_moe.gate.weight": count(2, 8)}
    tensors |= {"model.embed_tokens.weight": count(8, 8), "lm_head.weight": count(8, 8, start=5)}
    tensors |= {name: torch.ones(8) for name in (f"{layer}input_layernorm.weight", "model.norm.weight")}
    tensors |= {f"{layer}post_attention_layernorm.weight": torch.ones(8)}
    experts = {
        f"{layer}block_sparse_moe.experts.{e}.w{w}.weight": count(8, 8, start=64 * (3 * e + w))
        for e in range(2)
        for w in (1, 2, 3)
    }
    halves = [dict(list(experts.items())[at::2]) for at in range(2)]
    save_indexed(tmp_path / "moe", tensors, *halves, config=LLAMA | config | sizes)
    return tmp_path


def start(
    work: Path, arguments: Sequence[str], rank: int, world_size: int, module: str = RESHARD, **environment: str
) -> Process:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=work,
        env={**os.environ, **place, "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_all(
    work: Path, arguments: Sequence[str], world_size: int, module: str = RESHARD, **environment: str
) -> list[Process]:
    return [start(work, arguments, rank, world_size, module, **environment) for rank in range(world_size)]


def finish(processes: Sequence[Process], timeout_s: float = 30) -> list[tuple[int, str, str]]:
    """Return the exit codes and what was said, of processes that end by themselves."""
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
    return ended


def alone(work: Path, arguments: Sequence[str]) -> dict[str, bytes]:
    """Return the files that one process makes."""
    place = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "reshard", *arguments, "-o", "alone"]
    subprocess.run(command, cwd=work, env={**place, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return files_of(work / "alone")


def wait_for(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hidden(work: Path) -> list[str]:
    return [path.name for path in work.iterdir() if path.name.startswith(".")]


CASES: dict[str, tuple[int, list[str]]] = {
    "two": (2, MODEL),
    "three, files of 300 bytes": (3, [*MODEL, "--max-file-size", "300"]),
    "more than files": (4, [*MODEL, "--tp", "2", "--layout", "checkpoint"]),
    "stacked experts": (2, ["moe", "--tp", "4"]),
    "stacked experts, three": (3, ["moe", "--tp", "4", "--self-contained"]),
    "divided experts": (2, ["moe", "--tp", "2", "--ep", "2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(work: Path, case: str) -> None:
    world_size, arguments = CASES[case]
    expected = alone(work, arguments)
    ended = finish(start_all(work, [*arguments, "-o", "out"], world_size))
    assert [code for code, _, _ in ended] == [0] * world_size
    # Process 0 alone speaks.
    assert [out for _, out, _ in ended] == ["out\n", *[""] * (world_size - 1)]
    assert "wrote" in ended[0][2]
    assert [err for _, _, err in ended[1:]] == [""] * (world_size - 1)
    assert files_of(work / "out") == expected
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json", "alone", "out"}


@pytest.mark.parametrize("fault_rank", ["0", "1"])
def test_a_killed_process_leaves_nothing(work: Path, fault_rank: str) -> None:
    """The launcher ends the others, as torchrun does."""
    processes = start_all(work, [*MODEL, "-o", "out"], 3, FAULTY, FAULT="kill", FAULT_RANK=fault_rank)
    processes[int(fault_rank)].wait(30)
    assert len(hidden(work)) == 1
    others = [process for rank, process in enumerate(processes) if rank != int(fault_rank)]
    assert [process.poll() for process in others] == [None, None]  # there is nobody who could tell them
    for process in others:
        process.terminate()
    codes = [code for code, _, _ in finish(processes)]
    assert codes.pop(int(fault_rank)) == -signal.SIGKILL
    assert codes == [130, 130]
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json"}


@pytest.mark.parametrize(
    ("fault_rank", "fault", "code", "reason"),
    [
        (0, "error", 5, "the disk: is full"),
        (1, "error", 5, "the disk: is full"),
        (1, "os", 5, "{out}: cannot be written: No space left on device (the file)"),
        (2, "bug", 1, "ZeroDivisionError: by 0"),
    ],
)
def test_an_error_in_one_process_ends_all(work: Path, fault: str, fault_rank: int, code: int, reason: str) -> None:
    ended = finish(
        start_all(work, [*MODEL, "-o", "out"], 3, FAULTY, FAULT=fault, FAULT_RANK=str(fault_rank)),
    )
    assert [code for code, _, _ in ended] == [code] * 3
    reason = reason.format(out=work / "out")
    for rank, (_, out, err) in enumerate(ended):
        assert out == ""
        who = f"process {rank}: " if rank else ""
        if rank != fault_rank:
            assert err == f"reshard: {who}process {fault_rank} failed: {reason}\n"
        elif fault == "bug":
            assert "Traceback" in err
            assert reason in err
        else:
            assert err.startswith(f"reshard: {who}{reason}\n")
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json"}


def test_an_interruption_that_comes_twice(work: Path) -> None:
    """The terminal interrupts all processes, and torchrun passes it on."""
    processes = start_all(work, [*MODEL, "-o", "out"], 2, FAULTY, FAULT="hang", FAULT_RANK="1")
    wait_for(lambda: [*work.glob(".out.partial-*/.process-0.result")])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        for process in processes:
            process.send_signal(number)
        time.sleep(0.02)
    ended = finish(processes)
    assert [(code, err) for code, _, err in ended] == [(130, "reshard: interrupted\n"), (130, "")]
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json"}


def test_what_a_killed_run_left_is_no_answer(work: Path) -> None:
    """The same name, with everything in it that a process waits for."""
    killed = start_all(work, [*MODEL, "-o", "out"], 2, FAULTY, FAULT="hang", FAULT_RANK="1")
    wait_for(lambda: [*work.glob(".out.partial-*/.process-0.result")])
    for process in killed:
        process.kill()
    finish(killed)
    (left,) = work.glob(".out.partial-*")
    Meeting(left, Processes(0, 2)).post("error", {"rank": 0, "reason": "old", "exit_code": 3})
    late = start(work, [*MODEL, "-o", "out"], 1, 2)
    wait_for(lambda: (left / ".process-1.hello").stat().st_mtime_ns > (left / ".process-0.error").stat().st_mtime_ns)
    ended = finish([start(work, [*MODEL, "-o", "out"], 0, 2), late])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert files_of(work / "out") == alone(work, MODEL)
    assert hidden(work) == []


def test_two_runs_at_once_to_two_destinations(work: Path) -> None:
    runs = [start_all(work, [*MODEL, "-o", out], 2) for out in ("one", "other")]
    for processes in runs:
        assert [code for code, _, _ in finish(processes)] == [0, 0]
    assert files_of(work / "one") == files_of(work / "other") == alone(work, MODEL)


def test_a_hub_id_is_downloaded_once(work: Path) -> None:
    """The processes of one machine share its cache."""
    server = HubServer()
    server.add("org/m", work / "m")
    place = {"HF_ENDPOINT": server.url, "HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "0"}
    try:
        ended = finish(start_all(work, ["org/m", *MODEL[1:], "-o", "out", "-q"], 2, **place))
    finally:
        server.close()
    assert [(code, err) for code, _, err in ended] == [(0, ""), (0, "")]
    downloaded = [sent.path for sent in server.weight_requests() if not sent.range]
    assert len(downloaded) == len({*downloaded}) == 2
    assert verify(work / "out").tensors == len(LAYERS[0] | LAYERS[1])


def test_an_existing_destination(work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / "manifest.json").write_text("no split")
    for force in ([], ["--force"]):
        ended = finish(start_all(work, [*MODEL, "-o", "out", *force], 2))
        assert [code for code, _, _ in ended] == [5, 5]
        assert ended[0][2].startswith("reshard: out: ")
        assert ended[1][2].startswith("reshard: process 1: out: ")
    assert files_of(work / "out") == {"manifest.json": b"no split"}
    (work / "out" / "manifest.json").unlink()
    assert [code for code, _, _ in finish(start_all(work, [*MODEL, "-o", "out", "--force"], 2))] == [0, 0]
    # An older split, of another number of ranks, is replaced.
    ended = finish(start_all(work, [*MODEL, "--tp", "2", "-o", "out", "--force"], 2))
    assert [code for code, _, _ in ended] == [0, 0]
    assert len([*(work / "out").glob("rank-*")]) == 2
    assert hidden(work) == []


def test_a_refusal_is_told_in_full_once(work: Path) -> None:
    ended = finish(start_all(work, ["moe", "--tp", "3", "-o", "out"], 2))
    assert [code for code, _, _ in ended] == [4, 4]
    assert len(ended[0][2].splitlines()) > 1
    assert ended[1][2] == f"reshard: process 1: {ended[0][2].splitlines()[0].removeprefix('reshard: ')}\n"
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json"}


def test_processes_that_plan_different_splits(work: Path) -> None:
    other = [*MODEL, "-o", "out", "--self-contained"]
    ended = finish([start(work, [*MODEL, "-o", "out"], 0, 2), start(work, other, 1, 2)])
    assert [code for code, _, _ in ended] == [3, 3]
    assert "process 1 failed: another split is planned" in ended[0][2]
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_does_not_come(work: Path, rank: int) -> None:
    ((code, _, err),) = finish([start(work, [*MODEL, "-o", "out"], rank, 2, FAULTY, START_LIMIT_S="0.5")])
    assert code == 1
    assert f"process {1 - rank}" in err
    assert "did not come" in err
    assert hidden(work) == []


def test_other_commands_are_left_to_process_0(work: Path) -> None:
    alone(work, MODEL)
    ended = finish(start_all(work, ["merge", "alone", "back"], 2))
    assert [code for code, _, _ in ended] == [0, 0]
    assert ended[1][1:] == ("", "reshard: process 1: leaves merge to process 0\n")
    assert files_of(work / "back").keys() == files_of(work / "m").keys()
    ended = finish(start_all(work, [*MODEL, "--dry-run"], 2))
    assert "rank 0: " in ended[0][1]
    assert ended[1] == (0, "", "")


def torchrun(work: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments]
    place = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [*command[:3], "--master-port", "29647", *command[3:]],
        cwd=work,
        env=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_under_torchrun(work: Path) -> None:
    done = torchrun(work, "-m", "reshard", *MODEL, "-o", "out")
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert files_of(work / "out") == alone(work, MODEL)
    failed = torchrun(work, "-m", FAULTY, *MODEL, "-o", "other", FAULT="kill", FAULT_RANK="1")
    assert failed.returncode != 0
    assert {path.name for path in work.iterdir()} == {"m", "moe", "plan.json", "alone", "out"}


def rows(first: int, last: int) -> tuple[Run, ...]:
    """Rows of a source that become a tensor's rows from the first on."""
    return (Run(first, 0, last - first),)


SOURCE = Input("fused", 0, 64, (6, 4), 4)
OTHER = Input("apart", 1, 64, (4, 4), 4)
HALVES = [(invert((Run(0, at, 2),)), whole(4)) for at in (0, 2)]
FUSED = Program(
    ("a", "b"),
    ("rank 0", "rank 1", "common"),
    (
        Move(
            "cut",
            (4, 4),
            4,
            (Gather(SOURCE, (Link(0, 0, rows(0, 4)), Link(1, 1, whole(4)))),),
            (Scatter(0, 64, HALVES[0]), Scatter(1, 64, HALVES[1])),
        ),
        Move(
            "whole",
            (2, 4),
            4,
            (Gather(SOURCE, (Link(0, 0, rows(4, 6)), Link(1, 1, whole(4)))),),
            (Scatter(2, 64, (whole(2), whole(4))),),
        ),
        Move(
            "apart",
            (4, 4),
            4,
            (Gather(OTHER, identity_links((4, 4))),),
            (Scatter(0, 96, HALVES[0]), Scatter(1, 96, HALVES[1])),
        ),
    ),
)
"""Two tensors that are parts of one source, one cut and one whole; a third of its own."""


def test_a_share_reads_a_source_once_and_whole() -> None:
    """Who writes only the whole tensor still reads all of the source, and nothing of the other one."""
    shares = [restrict(FUSED, files) for files in ([0], [1], [2], [0, 2], [0, 1, 2])]
    for share in shares:
        read: dict[tuple[str, tuple[int, ...]], int] = {}
        for move in share.moves:
            for gather in move.gathers:
                source = gather.source
                assert share.input_files[source.file] == ("b" if source.name == "apart" else "a")
                taken = prod(numel(link.runs) for link in gather.links)
                read[source.name, source.shape] = read.get((source.name, source.shape), 0) + taken
        assert all(taken == prod(shape) for (_, shape), taken in read.items())
        assert ("fused", (6, 4)) in read
    assert [share.input_files for share in shares] == [("a", "b"), ("a", "b"), ("a",), ("a", "b"), ("a", "b")]
    assert [[len(move.scatters) for move in share.moves] for share in shares] == [
        [1, 0, 1], [1, 0, 1], [0, 1], [1, 1, 1], [2, 1, 2],
    ]  # fmt: skip
    assert shares[-1] == FUSED
    assert shares[2].output_files == ("common",)
    assert [scatter.file for move in shares[3].moves for scatter in move.scatters] == [0, 1, 0]


def test_every_file_has_one_process() -> None:
    for sizes in ([], [3], [5, 5, 5, 5], [100, 1, 1, 1, 1], [7, 9, 0, 4, 4, 8, 2]):
        for size in (1, 2, 3, 7):
            dealt = deal(sizes, size)
            assert sorted(position for files in dealt for position in files) == [*range(len(sizes))]
            loads = [sum(sizes[position] for position in files) for files in dealt]
            # None is so full that it could give its smallest file to the emptiest.
            assert all(
                load - min(sizes[position] for position in files) <= min(loads)
                for load, files in zip(loads, dealt, strict=True)
                if files
            )


def test_processes_that_read_other_bytes(work: Path) -> None:
    """Two machines may see different contents of one file; the hashes tell."""
    planned = plan(work / "m", tp=2, plan=PLAN)
    one, other = ({"scale": (word,)} for word in "ab")
    results = [together.Result(planned.key, read, {}) for read in (one, other)]
    with pytest.raises(CheckpointError) as caught:
        together.join(planned, results)
    assert mentions(caught.value, work / "m", "scale", "process 1")
    with pytest.raises(CheckpointError) as caught:
        together.join(planned, [together.Result(planned.key, one, {}), together.Result("another", one, {})])
    assert mentions(caught.value, work / "m", "process 1")


def test_a_folder_is_published_or_taken_away(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    publish(tmp_path / "one", tmp_path / "out", force=False)
    take_away(tmp_path / "one")
    assert files_of(tmp_path / "out") == {"file": b"one"}
    take_away(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "other", tmp_path / "again", force=False)


RUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}


def test_what_torchrun_tells() -> None:
    one, other = (read_environment({**RUN, "RANK": rank}) for rank in "01")
    assert (one.rank, one.size, one.follows, other.rank, other.follows) == (0, 2, False, 1, True)
    assert one.token == other.token
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert read_environment({**RUN, "RANK": "0", name: "7"}).token != one.token
    # Runs of one machine each, under names that torchrun gives if none is given, differ by the machine.
    assert read_environment({**RUN, "RANK": "0", "LOCAL_WORLD_SIZE": "2"}).token != one.token
    assert read_environment({"WORLD_SIZE": "1", "RANK": "0"}).size == 1


@pytest.mark.parametrize("place", [{}, {"RANK": "2"}, {"RANK": "-1"}, {"RANK": "x"}, {"RANK": "0", "WORLD_SIZE": "0"}])
def test_variables_that_torchrun_does_not_set(place: dict[str, str]) -> None:
    with pytest.raises(ReshardError) as caught:
        read_environment({**RUN, **place})
    assert mentions(caught.value, "RANK", "WORLD_SIZE")
