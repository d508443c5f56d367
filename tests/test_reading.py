"""The ways of reading a rank's files: what they give, what they cost, and what they notice."""

import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loader import files, load_model, open_shard, ways
from loader.memory import HostMemory
from manifests.errors import LoadError
from manifests.manifest import TILE_NBYTES, read_manifest
from reshard import split
from tests.checkpoints import count, mentions, save
from tests.launching import ROOT, run_ranks
from tools.sweep.tiny import tiny_model

MIB = 1 << 20
FILE = "rank-00000-of-00002.safetensors"

# More than two tiles, a tile and a byte, less than a tile, and what fills no tile at all; no two bytes alike for long.
TENSORS = {
    "big.weight": count(2200, 2048),
    "even.weight": count(2, TILE_NBYTES, dtype=torch.uint8),
    "odd.weight": count(2, TILE_NBYTES + 1, dtype=torch.uint8, start=5),
    "scalar": torch.tensor(0.25),
    "empty.weight": torch.zeros(0, 4),
    **{f"small.{position}.weight": count(6, 5, start=position) for position in range(40)},
}
PLAN = {"big": "colwise", "even": "colwise", "odd": "colwise", "small.*": "colwise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reading")
    split(save(root / "source", TENSORS), root / "split", tp=2, plan=PLAN)
    return root / "split"


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "split"))


@pytest.mark.parametrize("verify", ["headers", "auto", "full"])
@pytest.mark.parametrize("read", ["mmap", "read"])
@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_are_those_that_safetensors_reads(folder: Path, rank: int, read: Any, verify: Any):
    shard = open_shard(folder, rank, read=read, verify=verify)
    stored = load_file(folder / f"rank-{rank:05d}-of-00002.safetensors") | load_file(folder / "common.safetensors")
    assert set(shard) == set(stored) == set(TENSORS)
    for name, expected in stored.items():
        assert torch.equal(shard[name], expected)


@pytest.mark.parametrize("read", ["mmap", "read"])
def test_what_is_written_to_a_tensor_stays_in_the_process(folder: Path, read: Any):
    before = (folder / FILE).read_bytes()
    open_shard(folder, 0, read=read)["big.weight"].fill_(-1)
    assert (folder / FILE).read_bytes() == before


def test_a_file_is_one_allocation(folder: Path):
    shard = open_shard(folder, 0, read="read")
    storages = {shard[name].untyped_storage().data_ptr() for name in ("big.weight", "even.weight", "small.3.weight")}
    assert len(storages) == 1
    assert shard["big.weight"].data_ptr() % 64 == 0


def faults_of(place: HostMemory, start: int, stop: int) -> int:
    """Return the page faults of writing to memory."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    place.block[start:stop].fill_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_the_pages_of_a_stretch_are_made_before_it_is_read():
    """Needs Linux 5.14; on an older one they are made while it is read."""
    place = HostMemory(16 * MIB)
    # Neither end is that of a page.
    place.begin(4 * MIB + 5, 12 * MIB + 5)
    pages = 8 * MIB // mmap.PAGESIZE
    assert faults_of(place, 4 * MIB + 5, 12 * MIB + 5) < pages // 10


def flip(path: Path, data_offset: int, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(data_offset + at)
        byte = stream.read(1)[0]
        stream.seek(data_offset + at)
        stream.write(bytes([byte ^ 4]))


PLACES: dict[str, tuple[str, int, int]] = {
    "first byte": ("big.weight", 0, 0),
    "last byte of a tile": ("big.weight", TILE_NBYTES - 1, 0),
    "first byte of the next": ("big.weight", TILE_NBYTES, 1),
    "a tile of one byte": ("odd.weight", TILE_NBYTES, 1),
    "a tensor of a few bytes": ("small.39.weight", 7, 0),
    "an even tile": ("even.weight", TILE_NBYTES - 1, 0),
}


@pytest.mark.parametrize(("read", "verify"), [("read", "auto"), ("read", "full"), ("mmap", "full")])
@pytest.mark.parametrize("place", PLACES)
def test_a_changed_byte_is_found(copied: Path, place: str, read: Any, verify: Any):
    tensor, at, tile = PLACES[place]
    file = read_manifest(copied).files[0]
    assert file.name == FILE
    flip(copied / FILE, file.data_offset, file.tensors[tensor].offset + at)
    with pytest.raises(LoadError) as caught:
        open_shard(copied, 0, read=read, verify=verify)
    assert mentions(caught.value, copied / FILE, tensor, f"tile {tile},", "copy the file again")
    assert open_shard(copied, 1, read=read, verify=verify).rank == 1
    # What was asked for is what is checked.
    for lazy in ("mmap", "read"):
        open_shard(copied, 0, read=lazy, verify="headers")
    open_shard(copied, 0, read="mmap")


def shortened(monkeypatch: pytest.MonkeyPatch, path: Path, nbytes: int) -> None:
    """Cut a file short as soon as it was checked."""
    check = files.open_checked

    def check_and_cut(checked: Path, *rest: Any) -> int:
        handle = check(checked, *rest)
        if checked == path:
            os.truncate(path, nbytes)
        return handle

    monkeypatch.setattr(files, "open_checked", check_and_cut)


@pytest.mark.parametrize("verify", ["headers", "auto"])
def test_a_file_that_gets_short_while_it_is_read(copied: Path, monkeypatch: pytest.MonkeyPatch, verify: Any):
    file = read_manifest(copied).files[0]
    at = file.tensors["big.weight"].offset + TILE_NBYTES + 10
    shortened(monkeypatch, copied / FILE, file.data_offset + at)
    with pytest.raises(LoadError) as caught:
        open_shard(copied, 0, read="read", verify=verify)
    sizes = (f"has {file.data_offset + at} bytes now", f"{file.nbytes} expected")
    assert mentions(caught.value, copied / FILE, "big.weight: tile 1", f"ends at byte {at} of its data", *sizes)


def test_a_file_that_gets_short_before_it_is_mapped(copied: Path, monkeypatch: pytest.MonkeyPatch):
    file = read_manifest(copied).files[0]
    shortened(monkeypatch, copied / FILE, file.nbytes - 1)
    with pytest.raises(LoadError) as caught:
        open_shard(copied, 0, read="mmap")
    assert mentions(caught.value, copied / FILE, f"{file.nbytes} bytes cannot be mapped", "length is greater")


@pytest.mark.parametrize("read", ["mmap", "read"])
def test_what_was_checked_is_what_is_used(copied: Path, monkeypatch: pytest.MonkeyPatch, read: Any):
    """Another file gets the name after the check."""
    check = files.open_checked

    def check_and_replace(path: Path, *rest: Any) -> int:
        handle = check(path, *rest)
        other = path.with_suffix(".other")
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)
        return handle

    expected = load_file(copied / FILE)
    monkeypatch.setattr(files, "open_checked", check_and_replace)
    shard = open_shard(copied, 0, read=read, verify="headers")
    assert torch.equal(shard["big.weight"], expected["big.weight"])


@pytest.mark.parametrize("how", ["truncate", "remove"])
def test_a_file_that_is_not_whole_is_refused_before_it_is_read(copied: Path, how: str):
    path = copied / FILE
    os.truncate(path, path.stat().st_size - 1) if how == "truncate" else path.unlink()
    with pytest.raises(LoadError) as caught:
        open_shard(copied, 0, read="read")
    assert mentions(caught.value, path, "expected" if how == "truncate" else "missing")


def test_unknown_ways_and_checks(folder: Path):
    with pytest.raises(LoadError) as caught:
        open_shard(folder, 0, read="map")  # type: ignore[arg-type]
    assert mentions(caught.value, "'map'", "auto, mmap, read")
    with pytest.raises(LoadError) as caught:
        open_shard(folder, 0, verify="all")  # type: ignore[arg-type]
    assert mentions(caught.value, "'all'", "auto, headers, full")


def test_other_devices_get_a_copy_of_the_mapping(tmp_path: Path):
    assert ways.choose_way("auto", tmp_path, torch.device("mps")) == "mmap"
    with pytest.raises(LoadError) as caught:
        ways.choose_way("read", tmp_path, torch.device("mps"))
    assert mentions(caught.value, "not for mps", "'mmap'")


MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:20 / /proc rw - proc proc rw
30 22 0:45 / {mount} rw,relatime shared:7 master:2 - {kind} server:/export rw
"""


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("nfs4", "read"),
        ("fuse.sshfs", "read"),
        ("fuse", "read"),
        ("lustre", "read"),
        ("ext4", "mmap"),
        ("tmpfs", "mmap"),
    ],
)
def test_auto_reads_what_comes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    out = tmp_path / "with space" / "out"
    out.mkdir(parents=True)
    (tmp_path / "link").symlink_to(out)
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(mount=str(out.parent.resolve()).replace(" ", "\\040"), kind=kind))
    monkeypatch.setattr(ways, "_MOUNTS", mounts)
    assert ways.choose_way("auto", out, torch.device("cpu")) == way
    assert ways.choose_way("auto", tmp_path / "link", torch.device("cpu")) == way
    assert ways.choose_way("auto", tmp_path, torch.device("cpu")) == "mmap"
    assert ways.choose_way("auto", tmp_path, torch.device("cuda")) == "read"
    assert ways.choose_way("mmap", out, torch.device("cpu")) == "mmap"
    assert ways.choose_way("read", tmp_path, torch.device("cpu")) == "read"


def test_the_kernel_names_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways.file_system(Path("/proc/self")) == "proc"
    assert ways.file_system(tmp_path) not in ("", "proc")
    monkeypatch.setattr(ways, "_MOUNTS", tmp_path / "absent")
    assert ways.choose_way("auto", tmp_path, torch.device("cpu")) == "mmap"


@pytest.mark.parametrize(
    ("read", "verify", "hashed"),
    [("mmap", "auto", False), ("mmap", "full", True), ("read", "auto", True), ("read", "headers", False)],
)
def test_what_is_hashed(read: str, verify: str, hashed: bool) -> None:
    assert ways.choose_check(verify, read) is hashed


def measured(folder: Path, way: str) -> dict[str, int]:
    """Return what a process of its own, which has loaded the split before, needs to load it again."""
    command = [sys.executable, "-m", "tests.memory_worker", str(folder), way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 50 MB, and its split for one rank."""
    root = tmp_path_factory.mktemp("llama")
    model = tiny_model("llama", {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, "head_dim": 64})
    model.save_pretrained(root / "f32")
    split(root / "f32", root / "tp1", tp=1)
    return root / "tp1"


def test_nothing_of_a_mapped_model_is_read_copied_or_initialised(llama: Path):
    weights = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    assert weights > 40 * MIB
    found = measured(llama, "mmap")
    # The measure is of pages: some are the interpreter's own.
    assert found["grown"] <= weights // 100
    # Headers, the manifest and configurations.
    assert found["read"] < MIB
    assert found["resident"] == 0
    # The measure sees pages that are used.
    assert found["used"] > 3 * MIB


def test_a_model_that_was_read_is_held_once(llama: Path):
    weights = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    found = measured(llama, "read")
    assert 0.9 * weights < found["grown"] < 1.05 * weights
    assert weights - MIB < found["read"] < 1.01 * weights + MIB
    with torch.inference_mode():
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(load_model(llama, read="read")(ids).logits, load_model(llama)(ids).logits)


def test_a_model_with_a_changed_byte(llama: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(llama, out)
    file = read_manifest(out).files[0]
    name = "model.layers.1.mlp.up_proj.weight"
    flip(out / file.name, file.data_offset, file.tensors[name].offset + 100)
    load_model(out)
    for options in ({"read": "read"}, {"verify": "full"}):
        with pytest.raises(LoadError) as caught:
            load_model(out, **options)  # type: ignore[arg-type]
        assert mentions(caught.value, out / file.name, name, "tile 0")


def test_the_log_tells_where_the_time_went(llama: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", "loader.models"):
        load_model(llama)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "loader.models")
    for part in ("after the process started", "before", "manifest", "imports", "class", "parameters", "hooks"):
        assert part in line


def test_all_ranks_raise_where_one_has_a_changed_byte(tmp_path: Path):
    source = save(tmp_path / "source", {"a.weight": count(8, 512)})
    split(source, tmp_path / "out", tp=2, plan={"a": "colwise"})
    file = read_manifest(tmp_path / "out").files[1]
    flip(tmp_path / "out" / file.name, file.data_offset, 5)
    run_ranks("tests.reading_worker", tmp_path, world_size=2, timeout_s=120)
    errors = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [kind for kind, _ in errors] == ["LoadError", "LoadError"]
    assert "rank 1 cannot go on: LoadError" in errors[0][1]
    for _, message in errors:
        assert file.name in message
        assert "a.weight: tile 0" in message


def test_files_without_data(tmp_path: Path):
    split(save(tmp_path / "source", {"a.weight": torch.zeros(4, 0)}), tmp_path / "out", tp=2, plan={"a": "colwise"})
    for read in ("mmap", "read"):
        assert open_shard(tmp_path / "out", 1, read=read)["a.weight"].shape == (2, 0)
