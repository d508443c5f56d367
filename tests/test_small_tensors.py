"""Many small tensors, which are read and cut many at a time: each byte and each hash against torch and xxhash."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from manifests.header import read_header
from manifests.manifest import read_manifest
from reshard import merge, split, verify
from reshard.engine import batches
from tests.checkpoints import files_of, of_rank, raw, save, save_indexed, stored

RULES = {"m.*.q": "colwise", "m.*.o": "rowwise"}
TP = 3


def tensors_of(position: int) -> dict[str, Tensor]:
    """Return tensors of several kinds, divided in pieces, by rows, by columns and not at all; some are left out."""
    torch.manual_seed(position)
    tensors = {
        f"m.{position}.q.weight": torch.randn(6, 4),
        f"m.{position}.q.bias": torch.randn(6).to(torch.bfloat16),
        f"m.{position}.o.weight": torch.randn(4, 9).to(torch.bfloat16),
        f"m.{position}.norm": torch.randn(5),
        f"m.{position}.empty": torch.zeros(0, 3),
        f"m.{position}.mask": torch.rand(7) < 0.5,
        f"m.{position}.large.weight": torch.randn(70, 250),
    }
    return {
        name: x
        for at, (name, x) in enumerate(tensors.items())
        if (position + at) % 11 and (at < 6 or position % 60 == 1)
    }


WHOLE = {name: x for position in range(300) for name, x in tensors_of(position).items()}


def of_one(whole: Mapping[str, Tensor], name: str, rank: int) -> Tensor:
    x = whole[name]
    return x.chunk(TP, 0 if ".q." in name else 1)[rank] if ".q." in name or ".o." in name else x


@pytest.fixture(scope="module", params=["one file", "two files, tensors in another order"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library writes tensors by their dtypes and names, so that they lie in another order than that of numbers."""
    folder = tmp_path_factory.mktemp("source") / "source"
    if request.param == "one file":
        return save(folder, WHOLE)
    names = list(WHOLE)
    return save_indexed(folder, {name: WHOLE[name] for name in names[1::2]}, {name: WHOLE[name] for name in names[::2]})


@pytest.mark.parametrize("memory", [8 << 20, 256 << 20])
def test_small_tensors_are_those_of_torch(source: Path, tmp_path: Path, memory: int) -> None:
    out = tmp_path / "out"
    split(source, out, tp=TP, plan=RULES, memory=memory)
    for rank in range(TP):
        held = of_rank(out, rank, TP)
        assert held.keys() == WHOLE.keys()
        for name, (_, shape, data) in held.items():
            mine = of_one(WHOLE, name, rank)
            assert (shape, data) == (tuple(mine.shape), raw(mine)), name
    verify(out)


def test_their_hashes_are_those_of_their_bytes(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", tp=TP, plan=RULES)
    manifest = read_manifest(tmp_path / "out")
    for folder, files in ((tmp_path / "out", manifest.files), (source, manifest.source.files)):
        for file in files:
            there = stored(folder / file.name)
            assert list(file.tensors) == list(read_header(folder / file.name).tensors)
            for name, row in file.tensors.items():
                data = there[name][2]
                assert row.tiles == ((xxhash.xxh3_128_hexdigest(data),) if data else ()), name


def test_they_are_merged_to_what_they_were(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", tp=TP, plan=RULES)
    merged = merge(tmp_path / "out", tmp_path / "back")
    assert not merged.rewritten
    whole, back = files_of(source), files_of(tmp_path / "back")
    assert {name: back[name] for name in whole if name.endswith(".safetensors")} == {
        name: content for name, content in whole.items() if name.endswith(".safetensors")
    }


def test_it_does_not_matter_how_many_are_read_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(source, tmp_path / "many", tp=TP, plan=RULES)
    monkeypatch.setattr(batches, "SMALL_NBYTES", 0)
    split(source, tmp_path / "one", tp=TP, plan=RULES)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
