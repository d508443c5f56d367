"""Reading onto a CUDA device, on a fake one that does everything as late as it may: buffers, streams, events."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loader import Shard, files, memory, open_shard
from loader.tiles import STRETCH_NBYTES
from manifests.errors import LoadError
from manifests.manifest import TILE_NBYTES
from reshard import split
from tests import fake_cuda
from tests.checkpoints import count, mentions, save

FILE = "rank-00000-of-00002.safetensors"
BUFFER_NBYTES = STRETCH_NBYTES + TILE_NBYTES

# Eight stretches of a rank: with one worker each buffer is filled four times.
TENSORS = {f"big.{layer}.weight": count(4096, 2048, start=layer) for layer in range(2)} | {
    "small.weight": count(6, 5),
    "whole.weight": count(7),
}
PLAN = {"big.*": "colwise", "small": "colwise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("device")
    split(save(root / "source", TENSORS), root / "split", tp=2, plan=PLAN)
    return root / "split"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fake_cuda.Stream]]:
    """The streams of the workers; this thread's device is not the one that others start with."""
    made = fake_cuda.install(monkeypatch)
    torch.cuda.set_device(1)
    yield made
    torch.cuda.set_device(0)


def wrong(folder: Path, shard: Shard) -> list[str]:
    """Return the tensors that this thread would find with other values, doing what its stream has to do before."""
    fake_cuda.current.stream(torch.device("cuda", 1)).run()
    stored = load_file(folder / FILE) | load_file(folder / "common.safetensors")
    return [
        name for name, expected in stored.items() if not torch.equal(shard[name].as_subclass(torch.Tensor), expected)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_every_byte_arrives_through_two_buffers_a_worker(
    folder: Path, streams: list[fake_cuda.Stream], monkeypatch: pytest.MonkeyPatch, device: str, threads: int
):
    monkeypatch.setattr(files, "THREADS", threads)
    shard = open_shard(folder, 0, device)
    assert shard["big.0.weight"].device == torch.device("cuda", 1)
    assert wrong(folder, shard) == []
    assert 1 <= len(streams) <= threads
    assert {stream.index for stream in streams} == {1}
    assert list(fake_cuda.PINNED.values()) == [BUFFER_NBYTES] * 2 * len(streams)
    assert not any(stream.pending for stream in streams)


def test_a_load_that_was_refused_leaves_no_copy_that_could_hit_the_next_tensor(
    folder: Path, streams: list[fake_cuda.Stream], tmp_path: Path
):
    out = tmp_path / "split"
    out.mkdir()
    for path in folder.iterdir():
        content = bytearray(path.read_bytes())
        if path.name == FILE:
            content[-100] ^= 1
        (out / path.name).write_bytes(content)
    with pytest.raises(LoadError) as caught:
        open_shard(out, 0, "cuda")
    assert mentions(caught.value, out / FILE, "copy the file again")
    assert streams
    fake_cuda.current.stream(torch.device("cuda", 1)).run()
    assert not any(stream.pending for stream in streams)


BROKEN = {
    "a buffer is filled before its copy has ended": (fake_cuda.Event, "synchronize"),
    "a copy does not wait until the memory is free": (fake_cuda.Stream, "wait_event"),
    "nobody waits for the copies": (memory.PinnedPool, "join"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_fake_device_shows_what_is_left_out(
    folder: Path, streams: list[fake_cuda.Stream], monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setattr(files, "THREADS", 1)
    with monkeypatch.context() as patched:
        patched.setattr(*BROKEN[fault], lambda *_: None)
        shard = open_shard(folder, 0, "cuda")
    assert wrong(folder, shard)
