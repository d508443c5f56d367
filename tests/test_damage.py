"""Every byte of a small split, flipped in turn: `verify` finds it, and no rank loads another value."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from loader import open_shard
from loader.models import check_carried
from manifests.errors import DamageError, LoadError, ManifestError, ReshardError
from manifests.manifest import TILE_NBYTES, encode_manifest, read_manifest
from manifests.runtime import read_runtime
from reshard import lines, merge, report, split, verify
from tests.checkpoints import count, mentions, save

FULL = bool(os.environ.get("FULL"))
MASKS = (0x01, 0x20, 0xFF) if FULL else (0x01,)
STEP = 1 if FULL else 61
"""Every how many bytes of the padding of headers one is flipped; of all else, all are."""

TENSORS = {
    "up.weight": count(4, 6),
    "up.scale": torch.tensor(0.5),
    "down.weight": count(3, 4, start=50),
    "down.bias": count(3, start=9),
    "norm.weight": count(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 2),
}
PLAN = {"up": "colwise", "down": "rowwise"}
RANKS = (0, 1)


@pytest.fixture(params=[False, True], ids=["common file", "self-contained"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = save(tmp_path / "source", TENSORS, {"sizes": [3, 4]}, tokenizer='{"words": ["a", "b"]}')
    split(source, tmp_path / "out", tp=2, plan=PLAN, self_contained=request.param)
    return tmp_path / "out"


@contextmanager
def flipped(path: Path, at: int, mask: int) -> Iterator[None]:
    """Within it, a byte is another one."""
    handle = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte[0] ^ mask]), at)
        yield
        os.pwrite(handle, byte, at)
    finally:
        os.close(handle)


def places(path: Path) -> list[int]:
    """Return which bytes of a file are flipped."""
    content = path.read_bytes()
    padding = range(0)
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        padding = range(len(content[:end].rstrip(b" ")) + 1, end - 1)
    return [at for at in range(len(content)) if at not in padding or at % STEP == 0]


def values(out: Path, rank: int, **options: Any) -> dict[str, tuple[torch.dtype, bytes]]:
    shard = open_shard(out, rank, **options)
    return {name: (x.dtype, x.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, x in shard.items()}


def test_every_byte(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {rank: values(out, rank) for rank in RANKS}
    verify(out)
    found: Counter[str] = Counter()
    for path in sorted(out.iterdir()):
        for at in places(path):
            for mask in MASKS:
                with flipped(path, at, mask):
                    try:
                        verify(out)
                    except (DamageError, ManifestError) as error:
                        assert path.name in str(error)
                        found["found by verify"] += 1
                    else:
                        pytest.fail(f"{path.name}: byte {at} ^ {mask}: not found by verify")
                    for rank in RANKS:
                        for read in ("mmap", "read"):
                            try:
                                mine = values(out, rank, read=read, verify="full")
                            except ReshardError as error:
                                assert path.name in str(error)
                                found["refused by a rank"] += 1
                            else:
                                assert mine == expected[rank], f"{path.name}: byte {at} ^ {mask}: rank {rank}"
                                found["loaded by a rank, with the right values"] += 1
                    if path.suffix == ".json" and path.name != "manifest.json":
                        check_configuration(out, path)
    assert found["found by verify"] >= sum(path.stat().st_size for path in out.glob("*.json")) * len(MASKS)
    assert found["refused by a rank"]
    verify(out)
    if FULL:
        with capsys.disabled():
            sys.stdout.write(f"\n{out.parent.name}: {len(MASKS)} flips of every byte: {dict(found)}\n")


def check_configuration(out: Path, path: Path) -> None:
    """`load_model` builds from config.json, and from no tokenizer."""
    if path.name == "config.json":
        with pytest.raises(LoadError, match=r"config\.json: was changed"):
            check_carried(out, read_runtime(out))
    else:
        check_carried(out, read_runtime(out))


def test_without_a_look_at_the_data_a_changed_byte_is_loaded(out: Path) -> None:
    """What `verify="headers"` is: the reason for `verify="full"` and `reshard verify`."""
    file = read_manifest(out).files[0]
    before = values(out, 0)
    with flipped(out / file.name, file.data_offset + file.tensors["up.weight"].offset, 1):
        for read in ("mmap", "read"):
            assert values(out, 0, read=read, verify="headers") != before
        assert values(out, 0, read="mmap") != before
        with pytest.raises(LoadError):
            values(out, 0, read="read")


def test_copies_that_differ_are_named_though_all_hashes_are_right(tmp_path: Path) -> None:
    """Rank 1's copy is of other bytes, and the manifest says so, with its digest."""
    out = tmp_path / "out"
    split(save(tmp_path / "source", TENSORS), out, tp=2, plan=PLAN, self_contained=True)
    split(save(tmp_path / "source2", TENSORS | {"norm.weight": count(5, dtype=torch.bfloat16, start=1)}),
          tmp_path / "other", tp=2, plan=PLAN, self_contained=True)  # fmt: skip
    manifest, other = read_manifest(out), read_manifest(tmp_path / "other")
    mine, theirs = manifest.files[1], other.files[1]
    assert (mine.name, mine.data_offset) == (theirs.name, theirs.data_offset)
    content = (out / mine.name).read_bytes()[: mine.data_offset] + (tmp_path / "other" / mine.name).read_bytes()[
        mine.data_offset :
    ]
    (out / mine.name).write_bytes(content)
    changed = msgspec.structs.replace(mine, tensors=theirs.tensors)
    edited = msgspec.structs.replace(manifest, files=(manifest.files[0], changed))
    (out / "manifest.json").write_bytes(encode_manifest(edited))
    for work in (lambda: verify(out), lambda: merge(out, tmp_path / "back")):
        with pytest.raises(DamageError) as caught:
            work()
        assert len(caught.value.findings) == 1
        assert mentions(
            caught.value, mine.name, "norm.weight", "the copy of rank 1 differs from that of rank 0", "tile 0: bytes 0"
        )
    assert not (tmp_path / "back").exists()


def test_much_damage_is_counted_and_shown_in_part(tmp_path: Path) -> None:
    """All findings are there; tiles that follow each other are one, and the text has a hundred lines."""
    tensors = {f"{position}.weight": count(2, 3) for position in range(150)}
    tensors["large"] = torch.ones(5 * TILE_NBYTES // 4)
    split(save(tmp_path / "source", tensors), tmp_path / "out", tp=1, plan={"*": "colwise"})
    (file,) = (file for file in read_manifest(tmp_path / "out").files if "large" in file.tensors)
    path = tmp_path / "out" / file.name
    data = bytearray(path.read_bytes())
    large = file.data_offset + file.tensors["large"].offset
    for at in range(file.data_offset, len(data)):
        if at not in range(large + TILE_NBYTES, large + 2 * TILE_NBYTES):
            data[at] = 0x55
    path.write_bytes(data)
    with pytest.raises(DamageError) as caught:
        verify(tmp_path / "out")
    assert len(caught.value.findings) == len(file.tensors) + 1
    assert len(str(caught.value).splitlines()) == 102
    assert str(caught.value).endswith(f"and {len(caught.value.findings) - 100} more")
    of_large = [line for line in caught.value.findings if ": large: " in line]
    assert [line.split(": ")[2:] for line in of_large] == [
        ["tile 0", f"bytes 0 to {TILE_NBYTES} of the tensor are not those that were written"],
        ["tiles 2 to 4", f"bytes {2 * TILE_NBYTES} to {5 * TILE_NBYTES} of the tensor are not those that were written"],
    ]


def test_what_else_is_in_the_folder_is_told_and_does_no_harm(out: Path) -> None:
    (out / "notes.txt").write_text("x")
    (out / "rank-00002-of-00003.safetensors").write_bytes(b"x")
    found = verify(out)
    assert found.unknown == ("notes.txt", "rank-00002-of-00003.safetensors")
    whole, note = lines.format_verified(report.build_verified("out", found))
    assert whole.startswith("out: whole: ")
    assert note.endswith("not looked at: 2 names: notes.txt, rank-00002-of-00003.safetensors")
    assert values(out, 0, verify="full")


def test_a_hidden_folder_is_not_verified(out: Path) -> None:
    hidden = out.with_name(".out.partial-0123456789ab")
    shutil.copytree(out, hidden)
    with pytest.raises(ManifestError) as caught:
        verify(hidden)
    assert mentions(caught.value, hidden, "has not finished", out)


def test_a_file_that_cannot_be_read_is_a_finding(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (file.name for file in read_manifest(out).files[:2])
    (out / first).unlink()
    (out / first).symlink_to(first)
    opened = Path.open

    def failing(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == second and options.get("buffering") == 0:
            raise OSError(5, "Input/output error", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(DamageError) as caught:
        verify(out)
    assert mentions(caught.value, f"{first}: cannot be read", f"{second}: cannot be read: Input/output error")


def test_the_values_are_those_of_the_source(out: Path) -> None:
    shard = open_shard(out, 1, verify="full")
    stored = load_file(out / "rank-00001-of-00002.safetensors")
    assert torch.equal(shard["up.weight"], TENSORS["up.weight"][2:])
    assert torch.equal(stored["up.weight"], shard["up.weight"])
