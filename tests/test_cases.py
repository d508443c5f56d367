"""Every case of `tests.cases`, end to end: split, loaded, verified and merged, or refused with nothing left behind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loader import open_shard
from manifests.header import read_header
from reshard import cli, merge, verify
from tests.cases import CASES, Case
from tests.cases.case import as_stored
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
