"""Every case of `tests.cases`, end to end: split, loaded, verified and merged, or refused with nothing left behind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from loader import open_shard
from manifests.errors import ManifestError
from manifests.header import read_header
from reshard import cli, merge, verify
from tests.cases import CASES, Case
from tests.cases.case import as_stored, of
from tests.checkpoints import of_rank, stored


def run(case: Case, folder: Path, *more: str) -> Result:
    case.write(folder / "in")
    (folder / "plan.json").write_text(json.dumps({"plan": case.rules}))
    options = ("--tp", str(case.tp), "--plan", str(folder / "plan.json"), "--layout", "checkpoint", *case.options)
    return CliRunner().invoke(cli.main, [str(folder / "in"), *options, "-o", str(folder / "out"), *more])


def names(*, refused: bool) -> list[str]:
    return [name for name, case in CASES.items() if (case.refusal is not None) == refused]


@pytest.mark.parametrize("name", names(refused=True))
def test_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    result = run(case, tmp_path)
    assert isinstance(result.exception, SystemExit), result.exception
    assert case.refusal is not None
    assert result.exit_code == case.refusal.exit_code
    missing = [word for word in case.words if word not in result.output]
    assert not missing, f"{missing} not in {result.output}"
    assert "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "plan.json"]


@pytest.mark.parametrize("name", names(refused=False))
@pytest.mark.parametrize("shared", [False, True], ids=["self-contained", "shared"])
def test_right(tmp_path: Path, name: str, *, shared: bool) -> None:
    case = CASES[name]
    result = run(case, tmp_path, *([] if shared else ["--self-contained"]))
    assert result.exit_code == 0, result.output
    assert not [word for word in case.said if word not in result.output]
    out = tmp_path / "out"
    for rank, expected in enumerate(map(as_stored, case.ranks)):
        found = of_rank(out, rank, case.tp)
        # What rank 0 alone counts is on its own files only, unless every rank has its own.
        assert expected.items() >= found.items()
        assert found == expected or (shared and rank)
        shard = open_shard(out, rank)
        assert set(shard) == set(expected)
        for tensor, whole in case.ranks[rank].items():
            assert shard[tensor].dtype == whole.dtype
            assert shard[tensor].shape == whole.shape
    for path in out.glob("*.safetensors"):
        assert (read_header(path).metadata or {})["format"] == "pt"
    verify(out)
    merge(out, tmp_path / "again")
    assert tensors_of(tmp_path / "again") == sources(case, tmp_path / "in")


def test_a03_a_bias_is_added_once(tmp_path: Path) -> None:
    """By hand: every rank multiplies its half of the input, and the sum has the bias as often as ranks use it."""
    case = CASES["a03 the bias of a rowwise module is whole"]
    assert run(case, tmp_path).exit_code == 0
    weight, bias = (f"model.layers.0.mlp.down_proj.{name}" for name in ("weight", "bias"))
    x = torch.arange(8.0)
    shards = [open_shard(tmp_path / "out", rank) for rank in range(2)]
    summed = sum(shard[weight] @ x[4 * rank : 4 * rank + 4] + shard[bias] for rank, shard in enumerate(shards))
    whole = load_file(tmp_path / "in" / "model.safetensors")
    assert torch.equal(summed, whole[weight] @ x + whole[bias])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_i01_an_asked_dtype_leaves_what_must_stay(tmp_path: Path, dtype: str) -> None:
    """238 values of float32 are 9 of bfloat16. Its type keeps them, with and without a class in the configuration."""
    case = CASES["i01 a router's bias in float32"]
    bias = next(name for name in case.ranks[0] if name.endswith("e_score_correction_bias"))
    whole = case.ranks[0][bias]
    assert (len(whole.unique()), len(whole.to(torch.bfloat16).unique())) == (238, 9)
    result = run(case, tmp_path, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert torch.equal(open_shard(tmp_path / "out", 0)[bias], whole)


def test_i01_an_asked_dtype_for_a_type_that_is_not_known(tmp_path: Path) -> None:
    """Nothing tells whether they must stay; that they were converted is told."""
    case = CASES["i01 a router's bias in float32"]
    result = run(case._replace(write=of(case.ranks[0], model_type="unheard_of")), tmp_path, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "converted from F32 to BF16: 1 tensor" in result.output
    with pytest.raises(ManifestError, match="--converted"):
        merge(tmp_path / "out", tmp_path / "again")


def tensors_of(folder: Path) -> dict[str, object]:
    return {name: entry for path in sorted(folder.glob("*.safetensors")) for name, entry in stored(path).items()}


def sources(case: Case, folder: Path) -> dict[str, object]:
    """Return the tensors of the files that belong to the checkpoint: those that the ranks have."""
    wanted = case.ranks[0]
    found: dict[str, object] = {}
    for path in files_that_count(folder, case.options):
        found |= stored(path)
    assert set(found) == set(wanted)
    return found


def files_that_count(folder: Path, options: tuple[str, ...]) -> Iterator[Path]:
    folder = folder / "transformer" if "transformer" in options else folder
    if "fp16" in options:
        yield from folder.glob("*.fp16-*.safetensors")
    elif parts := sorted(folder.glob("model-*-of-*.safetensors")):
        yield from parts
    else:
        yield from (folder / name for name in ("model.safetensors", "diffusion_pytorch_model.safetensors")
                    if (folder / name).exists())  # fmt: skip
