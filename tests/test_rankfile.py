"""Rank files: plain safetensors that the library opens, with every tensor where a mapping wants it."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from manifests.dtypes import BITS
from manifests.dtypes import nbytes as tensor_nbytes
from manifests.header import read_header
from manifests.manifest import Tensor
from manifests.natural import natural_key
from manifests.placement import PARTIAL, REPLICATED, Cut, Placement
from reshard import split
from reshard.rankfile import FileOptions, PlannedFile, Shard, build_file, plan_files
from tests.checkpoints import count, of_rank, raw, save, stored

TP2 = (("tp", 2),)
KEY = "0123456789abcdef0123456789abcdef"
ITEM_NBYTES = {dtype: bits // 8 if bits >= 8 else 1 for dtype, bits in BITS.items()}
"""Where an item must lie: dtypes below a byte are moved in bytes."""

TENSORS = {
    "layers.10.w": count(8, 6, dtype=torch.bfloat16),
    "layers.2.w": count(8, 6, dtype=torch.bfloat16, start=50),
    "layers.2.bias": count(8, start=3),
    "norm": count(5, dtype=torch.float16),
    "scale": torch.tensor(0.5),
    "step": torch.tensor(7, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "bytes": count(3, dtype=torch.int8),
    "empty": torch.zeros(0, 4),
}
PLAN = {"layers.*": "colwise"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rankfile")
    split(save(folder / "m", TENSORS), folder / "out", tp=2, plan=PLAN)
    return folder / "out"


def data_of(path: Path) -> dict[str, tuple[int, int]]:
    """Return every tensor's first byte, from the start of the file, and its bytes."""
    header = read_header(path)
    return {name: (header.data_offset + tensor.begin, tensor.nbytes) for name, tensor in header.tensors.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_library_opens_them_and_finds_torch_slices(out: Path, rank: int) -> None:
    with safe_open(out / f"rank-0000{rank}-of-00002.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name in TENSORS if name.startswith("layers")}
        for name in file.keys():  # noqa: SIM118 - the library's object is no mapping
            assert file.get_tensor(name).equal(TENSORS[name].chunk(2)[rank])
    with safe_open(out / "common.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name in TENSORS if not name.startswith("layers")}
        for name in file.keys():  # noqa: SIM118
            assert file.get_tensor(name).equal(TENSORS[name])
            assert file.get_tensor(name).dtype == TENSORS[name].dtype


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("rank-00000-of-00002", "0"), ("rank-00001-of-00002", "1"), ("common", "all")],
)
def test_their_metadata_says_what_they_are(out: Path, name: str, ranks: str) -> None:
    with safe_open(out / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
    key = metadata.pop("reshard.key")
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert key in (out / "manifest.json").read_text()
    assert metadata == {"format": "pt", "reshard.world_size": "2", "reshard.ranks": ranks}


def check_alignment(places: dict[str, tuple[int, int]], dtypes: dict[str, str]) -> None:
    for name, (offset, nbytes) in places.items():
        aligned = nbytes >= 64 and nbytes % 64 == 0
        assert offset % (64 if aligned else ITEM_NBYTES[dtypes[name]]) == 0, (name, dtypes[name], offset, nbytes)
    for (begin, nbytes), (following, _) in pairwise(sorted(places.values())):
        assert begin + nbytes == following


def test_data_starts_on_a_page_and_tensors_where_they_are_read(out: Path) -> None:
    for path in out.glob("*.safetensors"):
        assert read_header(path).data_offset % 4096 == 0
        check_alignment(data_of(path), {name: dtype for name, (dtype, _, _) in stored(path).items()})


def planned(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> PlannedFile:
    names = sorted(tensors, key=natural_key)
    shards = [Shard(*tensors[name], tensor_nbytes(*tensors[name])) for name in names]
    return build_file("x", (0,), names, shards, {})


def test_alignment_of_random_files() -> None:
    dtypes = [dtype for dtype in BITS if not dtype.startswith("F6")]
    for seed in range(200):
        rng = random.Random(seed)
        tensors = {}
        for i in range(rng.randint(1, 30)):
            dtype = rng.choice(dtypes)
            numel = rng.choice((0, 1, 3, 8, 32, 64, 100, 256)) * (2 if dtype == "F4" else 1)
            tensors[f"t.{i}"] = (dtype, (numel,))
        file = planned(tensors)
        assert file.data_offset % 4096 == 0
        places = {name: (file.data_offset + t.begin, t.end - t.begin) for name, t in file.tensors.items()}
        check_alignment(places, {name: dtype for name, (dtype, _) in tensors.items()})
        assert places.keys() == tensors.keys()
        assert file.nbytes == max(offset + nbytes for offset, nbytes in places.values())


# F6 is moved in atoms of 3 bytes, after which no wider item may follow.
def test_alignment_beside_f6() -> None:
    file = planned({"a": ("F6_E2M3", (4,)), "b": ("F16", (3,)), "c": ("U8", (1,))})
    places = {name: (t.begin, t.end - t.begin) for name, t in file.tensors.items()}
    check_alignment(places, {"a": "F6_E2M3", "b": "F16", "c": "U8"})


def test_large_tensors_lie_in_natural_order_and_small_ones_by_width() -> None:
    file = planned(
        {
            "layers.10.w": ("F32", (16,)), "layers.2.w": ("I8", (128,)), "layers.9.w": ("BF16", (32,)),
            "empty": ("F32", (0,)), "a": ("I8", (1,)), "b": ("F64", (1,)), "c": ("F16", (1,)), "d": ("F32", (3,)),
            "e.10": ("F16", (1,)), "e.9": ("F16", (1,)),
        }
    )  # fmt: skip
    assert list(file.tensors) == ["empty", "layers.2.w", "layers.9.w", "layers.10.w", "b", "d", "c", "e.9", "e.10", "a"]


def rows(size: int) -> Placement:
    return Placement((Cut(0, f"({size}*)"),), TP2)


ALL_KINDS = {
    "cut": Tensor("F32", (8, 4), rows(8)),
    "partial": Tensor("F32", (4,), PARTIAL),
    "whole": Tensor("F32", (4,), REPLICATED),
    "extra": Tensor("F32", (4,), unused=True),
}


@pytest.mark.parametrize(
    ("tensors", "options", "expected"),
    [
        (
            ALL_KINDS,
            FileOptions(),
            {
                "rank-00000-of-00002": ((0,), {"cut", "partial"}),
                "rank-00001-of-00002": ((1,), {"cut"}),
                "common": ((0, 1), {"whole"}),
                "unused": ((), {"extra"}),
            },
        ),
        (
            ALL_KINDS,
            FileOptions(self_contained=True),
            {
                "rank-00000-of-00002": ((0,), {"cut", "partial", "whole"}),
                "rank-00001-of-00002": ((1,), {"cut", "partial", "whole"}),
                "unused": ((), {"extra"}),
            },
        ),
        # A rank without tensors of its own still has its file: its absence would be a finding.
        (
            {"whole": ALL_KINDS["whole"]},
            FileOptions(),
            {"rank-00000-of-00002": ((0,), set()), "rank-00001-of-00002": ((1,), set()), "common": ((0, 1), {"whole"})},
        ),
        # At most 40 bytes in a file; a single larger tensor has its own.
        (
            {f"w.{i}": Tensor("F32", (8 * size,), rows(8 * size)) for i, size in enumerate((1, 1, 5, 1))},
            FileOptions(max_file_nbytes=40),
            {
                f"rank-0000{rank}-of-00002-part-0000{part + 1}-of-00003": ((rank,), names)
                for rank in range(2)
                for part, names in enumerate(({"w.0", "w.1"}, {"w.2"}, {"w.3"}))
            },
        ),
    ],
    ids=["default", "self-contained", "empty ranks", "limited"],
)
def test_which_file_holds_what(
    tensors: dict[str, Tensor], options: FileOptions, expected: dict[str, tuple[tuple[int, ...], set[str]]]
) -> None:
    files = plan_files(tensors, 2, KEY, options)
    assert {f.name.removesuffix(".safetensors"): (f.owners, set(f.tensors)) for f in files} == expected


def test_one_rank_has_one_file_beside_the_common_one(tmp_path: Path) -> None:
    split(save(tmp_path / "m", TENSORS), tmp_path / "out", tp=1, plan=PLAN)
    assert {name: data for name, (_, _, data) in of_rank(tmp_path / "out", 0, 1).items()} == {
        name: raw(tensor) for name, tensor in TENSORS.items()
    }


def test_golden_bytes(tmp_path: Path) -> None:
    tensors = {"b.weight": count(2, 64, dtype=torch.int8), "a.weight": count(2, 3), "a.bias": count(2)}
    split(save(tmp_path / "m", tensors), tmp_path / "out", tp=2, plan={"a": "colwise", "b": "colwise"})
    content = (tmp_path / "out" / "rank-00001-of-00002.safetensors").read_bytes()
    text = content[8:4096].rstrip(b" ").decode()
    # The key depends on the source's modification time.
    assert re.sub("[0-9a-f]{32}", KEY, text) == (
        '{"__metadata__":{"format":"pt","reshard.key":"' + KEY + '","reshard.world_size":"2","reshard.ranks":"1"},'
        '"b.weight":{"dtype":"I8","shape":[1,64],"data_offsets":[0,64]},'
        '"a.bias":{"dtype":"F32","shape":[1],"data_offsets":[64,68]},'
        '"a.weight":{"dtype":"F32","shape":[1,3],"data_offsets":[68,80]}}'
    )
    assert content[:8] == (4088).to_bytes(8, "little")
    data = raw(tensors["b.weight"][1:]) + raw(tensors["a.bias"][1:]) + raw(tensors["a.weight"][1:])
    assert content[4096:] == data
