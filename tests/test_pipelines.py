"""Pipelines of diffusers: split, verified, loaded by two processes, and given back. The oracle is diffusers in one."""

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from loader import load_model, load_pipeline
from manifests.errors import CheckpointError, DamageError, DegreeError, LoadError, ManifestError, OutputError, PlanError
from manifests.pipeline import read_pipeline
from reshard import pipelines
from reshard.cli import main
from tests.checkpoints import mentions
from tests.launching import run_ranks
from tests.pipeline_worker import REFUSED
from tests.pipelines import PIPELINES, call

TP = 2
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipelines")
    for name, save in PIPELINES.items():
        save(root / name)
        pipelines.split(root / name, root / f"{name}-tp2", tp=TP)
    return root


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    """Return a copy of the split, to be damaged."""
    return Path(shutil.copytree(root / "flux-tp2", tmp_path / "flux-tp2"))


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[str, list[dict[str, Any]]]:
    run_ranks("tests.pipeline_worker", root, *PIPELINES, world_size=TP, timeout_s=TIMEOUT_S)
    ranks = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(TP)]
    assert [found[name]["error"] for found in ranks for name in PIPELINES] == [""] * TP * len(PIPELINES)
    return {name: [found[name] for found in ranks] for name in PIPELINES}


@pytest.mark.parametrize("name", PIPELINES)
def test_two_processes_draw_the_image_of_one(root: Path, outcomes: dict[str, list[dict[str, Any]]], name: str):
    whole = diffusers.DiffusionPipeline.from_pretrained(root / name)
    expected = {"latent": call(whole), "pt": call(whole, "pt")}
    for rank in range(TP):
        found = load_file(root / f"{name}-{rank}.safetensors")
        for kind, wanted in expected.items():
            assert (found[kind] - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert outcomes[name][0]["class"] == type(whole).__name__


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.usefixtures("outcomes")
def test_the_default_generators_draw_alike_and_go_on(root: Path, name: str):
    one, other = (load_file(root / f"{name}-{rank}.safetensors") for rank in range(TP))
    assert torch.equal(one["default"], other["default"])
    assert torch.equal(one["again"], other["again"])
    assert not torch.equal(one["default"], one["again"])


@pytest.mark.parametrize("name", PIPELINES)
def test_what_has_a_plan_is_divided_and_the_rest_is_named(
    root: Path, outcomes: dict[str, list[dict[str, Any]]], name: str
):
    whole = diffusers.DiffusionPipeline.from_pretrained(root / name)
    record = read_pipeline(root / f"{name}-tp2")
    assert "transformer" in record.splits
    assert "vae" in record.whole
    assert record.whole["vae"] == "no built-in plan for the class 'AutoencoderKL' of diffusers"
    assert str(root).encode() not in (root / f"{name}-tp2" / "pipeline.json").read_bytes()
    models = {name for name, part in whole.components.items() if isinstance(part, torch.nn.Module)}
    assert {*record.splits, *record.whole} == models
    for part in record.splits:
        held = outcomes[name][0]["parameters"][part]
        assert held < 0.75 * sum(parameter.numel() for parameter in getattr(whole, part).parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(outcomes: dict[str, list[dict[str, Any]]], name: str):
    for outcome in outcomes["flux"]:
        assert outcome["refused"][name].startswith(f"LoadError: {name}: refused on a sharded pipeline")


def test_a_part_is_a_split_of_its_own(root: Path):
    pipelines.split(root / "flux", root / "flux-tp1", tp=1)
    model = load_model(root / "flux-tp1" / "transformer")
    expected = load_file(root / "flux" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    pipeline = load_pipeline(root / "flux-tp1", vae=diffusers.AutoencoderKL.from_pretrained(root / "flux" / "vae"))
    whole = diffusers.FluxPipeline.from_pretrained(root / "flux")
    assert torch.allclose(call(pipeline), call(whole), atol=1e-5)


def test_merging_gives_every_file_back(root: Path):
    pipelines.merge(root / "flux-tp2", root / "again")
    files = sorted(path.relative_to(root / "flux") for path in (root / "flux").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(root / "again") for path in (root / "again").rglob("*") if path.is_file())
    for file in files:
        assert filecmp.cmp(root / "flux" / file, root / "again" / file, shallow=False), file


def test_a_stored_dtype_is_kept(root: Path, tmp_path: Path):
    diffusers.FluxPipeline.from_pretrained(root / "flux", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    pipelines.split(tmp_path / "half", tmp_path / "out", tp=1)
    pipeline = load_pipeline(tmp_path / "out")
    assert {p.dtype for p in pipeline.vae.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in pipeline.transformer.parameters()} == {torch.bfloat16}
    wide = load_pipeline(tmp_path / "out", dtype="float32")
    assert (
        {p.dtype for p in wide.vae.parameters()} == {p.dtype for p in wide.transformer.parameters()} == {torch.float32}
    )


def test_verify_finds_damage_in_parts_and_in_what_was_carried(damaged: Path):
    report = pipelines.verify(damaged)
    assert "transformer" in report.parts
    for name in ("transformer/common.safetensors", "vae/diffusion_pytorch_model.safetensors"):
        path = damaged / name
        text = bytearray(path.read_bytes())
        text[-1] ^= 1
        path.write_bytes(text)
    (damaged / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(DamageError) as caught:
        pipelines.verify(damaged)
    found = "\n".join(caught.value.findings)
    assert len(caught.value.findings) == 3
    for name in ("transformer/common.safetensors", "vae/diffusion", "scheduler/scheduler_config.json"):
        assert name in found


def test_verify_finds_a_part_of_another_split(root: Path, damaged: Path, tmp_path: Path):
    shutil.rmtree(damaged / "transformer")
    pipelines.split(root / "flux", tmp_path / "other", tp=TP, self_contained=True)
    shutil.copytree(tmp_path / "other" / "transformer", damaged / "transformer")
    with pytest.raises(DamageError, match="of another split"):
        pipelines.verify(damaged)


def test_a_part_of_another_split_is_refused_before_it_is_loaded(root: Path, tmp_path: Path):
    pipelines.split(root / "flux", tmp_path / "out", tp=1)
    pipelines.split(root / "flux", tmp_path / "other", tp=1, self_contained=True)
    shutil.rmtree(tmp_path / "out" / "transformer")
    shutil.copytree(tmp_path / "other" / "transformer", tmp_path / "out" / "transformer")
    with pytest.raises(LoadError, match=r"out/transformer: is of another split"):
        load_pipeline(tmp_path / "out")


def test_a_changed_file_is_not_loaded(root: Path, tmp_path: Path):
    pipelines.split(root / "flux", tmp_path / "out", tp=1)
    (tmp_path / "out" / "vae" / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"vae/config\.json: 2 bytes"):
        load_pipeline(tmp_path / "out")


def test_the_number_of_processes_is_compared(root: Path):
    with pytest.raises(LoadError, match="the split is for 2 ranks, 1 processes were started"):
        load_pipeline(root / "flux-tp2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "not a readable record"),
        (lambda text: text.replace(b'"world_size": 2', b'"world_size": 1'), "does not match its digest"),
        (lambda text: text.replace(b'"version": 1', b'"version": 9'), "version 9"),
    ],
)
def test_a_changed_record_is_refused(damaged: Path, change: Any, words: str):
    path = damaged / "pipeline.json"
    path.write_bytes(change(path.read_bytes()))
    for action in (pipelines.verify, load_pipeline):
        with pytest.raises(ManifestError, match=words):
            action(damaged)


def test_what_cannot_be_divided_is_refused_by_its_part(root: Path, tmp_path: Path):
    with pytest.raises(DegreeError, match="--whole") as caught:
        pipelines.split(root / "flux", tmp_path / "out", tp=3)
    assert mentions(caught.value, "num_attention_heads") or mentions(caught.value, "heads")
    assert not (tmp_path / "out").exists()


def test_whole_keeps_a_part_whole(root: Path, tmp_path: Path):
    record = pipelines.split(root / "flux", tmp_path / "out", tp=2, whole=("text_encoder_2",))
    assert record.whole["text_encoder_2"] == "asked for"
    assert (tmp_path / "out" / "text_encoder_2" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"whole": ("unet",)}, PlanError, "has no part unet"),
        ({"plan": {"*": "colwise"}}, PlanError, "a plan is for one model"),
        (
            {"whole": ("transformer", "text_encoder", "text_encoder_2")},
            PlanError,
            "no part of this pipeline is divided",
        ),
    ],
)
def test_wrong_choices(root: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        pipelines.split(root / "flux", tmp_path / "out", tp=2, **options)


def test_a_broken_pipeline_is_refused_before_any_output(root: Path, tmp_path: Path):
    source = Path(shutil.copytree(root / "flux", tmp_path / "source"))
    shutil.rmtree(source / "tokenizer")
    with pytest.raises(CheckpointError, match="tokenizer"):
        pipelines.split(source, tmp_path / "out", tp=2)
    shutil.copytree(root / "flux" / "tokenizer", source / "tokenizer")
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps({**index, "../flux": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(CheckpointError, match="not the name of a folder"):
        pipelines.split(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="exists already"):
        pipelines.split(root / "flux", root / "flux-tp2", tp=2)


def test_the_command_line(root: Path, tmp_path: Path):
    out = str(tmp_path / "out")
    run = CliRunner().invoke
    planned = run(main, [str(root / "flux"), "--tp", "2", "-o", out, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "transformer" in planned.stdout
    assert not Path(out).exists()
    done = run(main, [str(root / "flux"), "--tp", "2", "-o", out, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["parts"]["transformer"]["world_size"] == 2
    assert "vae" in facts["whole"]
    assert run(main, ["verify", out]).exit_code == 0
    assert run(main, ["show", out]).exit_code == 0
    assert run(main, ["merge", out, str(tmp_path / "again")]).exit_code == 0
    refused = run(main, [str(root / "flux"), "--tp", "3"])
    assert refused.exit_code == 4
