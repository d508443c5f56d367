import json
import os
import pty
import resource
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from click import Group
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from manifests.errors import DamageError, DegreeError
from reshard import lines
from reshard.catalogue import PLAN_SOURCES, model_types
from reshard.catalogue.diffusers import class_names
from reshard.catalogue.tables import FOLDER
from reshard.cli import main
from reshard.options import LAYOUTS

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}
TENSORS = 3 + 2 * len(SHAPES)
NBYTES_CUT = 4 * (2 * 128 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64))
NBYTES_WHOLE = 4 * 64 * 5
RESHARD = [sys.executable, "-m", "reshard"]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def tensors():
    shapes = {
        "model.embed_tokens.weight": (128, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
        **{f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in SHAPES.items()},
    }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def model(tmp_path, tensors):
    return write_model(tmp_path / "tiny", tensors)


@pytest.fixture
def out(model):
    assert reshard(str(model), "--tp", "2", "-o", "out", "-q").exit_code == 0
    return Path("out")


def write_model(folder: Path, tensors, config=CONFIG):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reshard(*args) -> Result:
    result = CliRunner().invoke(main, [*map(str, args)], prog_name="reshard")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def parsed(result: Result):
    """Return the one JSON object that stdout is."""
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    return json.loads(result.stdout)


def names_here():
    return sorted(path.name for path in Path.cwd().iterdir())


def damage(path: Path, at: int):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_split_prints_the_path_and_a_summary(model):
    result = reshard(model, "--tp", 2, "-o", "out")
    assert result.exit_code == 0
    assert result.stdout == "out\n"
    assert f"ranks 0 to 1: each {NBYTES_CUT // 2 + NBYTES_WHOLE} bytes" in result.stderr
    assert f"whole on every rank: 5 tensors, {NBYTES_WHOLE} bytes (1.3 kB)" in result.stderr
    assert "model.layers.*.input_layernorm.weight (2 tensors): no rule names it" in result.stderr
    assert "in 3 files in " in result.stderr
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "common.safetensors",
        "config.json",
        "manifest.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


def test_the_rank_files_hold_the_rows_of_each_rank(model, tensors):
    reshard(model, "--tp", 2, "-o", "out")
    name = "model.layers.1.mlp.up_proj.weight"
    for rank in range(2):
        held = load_file(f"out/rank-0000{rank}-of-00002.safetensors")[name]
        assert np.array_equal(held, tensors[name][64 * rank : 64 * (rank + 1)])


@pytest.mark.parametrize(
    "args",
    [
        ("tiny", "--tp", "2", "-o", "out"),
        ("--tp", "2", "tiny", "-o", "out"),
        ("--tp", "2", "-o", "out", "tiny"),
        ("--tp=2", "-oout", "tiny"),
        ("-qo", "out", "tiny", "--tp", "2"),
        ("-q", "--tp", "2", "--max-file-size", "1MB", "-o", "out", "./tiny"),
        ("--tp", "2", "-o", "out", "--", "tiny"),
        ("split", "tiny", "--tp", "2", "-o", "out"),
        ("--tp", "2", "split", "-o", "out", "tiny"),
    ],
)
def test_options_stand_anywhere(model, args):
    result = reshard(*args)
    assert (result.exit_code, result.stdout) == (0, "out\n")
    assert Path("out/manifest.json").exists()


def test_options_before_a_command_belong_to_it(out):
    assert parsed(reshard("--json", "verify", out))["tensors"] == TENSORS
    assert parsed(reshard("--tp", 2, "--json", "plan", "tiny"))["world_size"] == 2


@pytest.mark.parametrize("value", ["plan", "verify"])
def test_an_option_value_is_no_command(model, value):
    assert reshard("-o", value, "--tp", 2, "tiny").stdout == f"{value}\n"


def test_the_default_out_is_beside_the_model(model):
    assert reshard("tiny", "--tp", 2).stdout == "tiny-tp2\n"
    assert (model.parent / "tiny-tp2" / "manifest.json").exists()


def test_quiet_leaves_only_the_result(model):
    result = reshard("tiny", "--tp", 2, "-o", "out", "-q")
    assert (result.stdout, result.stderr) == ("out\n", "")


def test_split_json(model):
    facts = parsed(reshard("tiny", "--tp", 2, "-o", "out", "--json"))
    assert facts["out"] == "out"
    assert facts["nbytes_model"] == NBYTES_CUT + NBYTES_WHOLE
    assert facts["nbytes_read"] == NBYTES_CUT + NBYTES_WHOLE
    assert facts["nbytes_written"] == sum(path.stat().st_size for path in Path("out").glob("*.safetensors"))
    assert facts["ranks"] == [
        {"rank": rank, "nbytes": NBYTES_CUT // 2 + NBYTES_WHOLE, "share": 0.502} for rank in range(2)
    ]
    assert facts["model"] == {"library": "transformers", "type": "llama", "architecture": "LlamaForCausalLM"}
    assert facts["seconds"] >= 0


def test_dry_run_writes_nothing(model):
    save_file({"stray": np.zeros(3, np.float32)}, model / "stray.safetensors")
    before = [path.stat().st_mtime_ns for path in [Path(), model, *model.iterdir()]]
    result = reshard("tiny", "--tp", 2, "--dry-run", "-q")
    assert before == [path.stat().st_mtime_ns for path in [Path(), model, *model.iterdir()]]
    assert names_here() == ["tiny"]
    assert result.stderr == ""
    assert f"ranks 0 to 1: each {NBYTES_CUT // 2 + NBYTES_WHOLE} bytes" in result.stdout
    assert "0.502 of the model" in result.stdout
    assert "note: ignored 1 weight file beside the checkpoint: stray.safetensors" in result.stdout
    assert "to tiny-tp2" in result.stdout
    facts = parsed(reshard("tiny", "--tp", 2, "--dry-run", "--json"))
    assert facts["ignored"] == ["stray.safetensors"]
    assert "seconds" not in facts


def test_dry_run_says_why_tensors_stay_whole(model):
    Path("plan.toml").write_text('[plan]\n"lm_head" = "colwise_gather_output"\n"model.embed_tokens" = "replicate"\n')
    result = reshard("tiny", "--tp", 2, "--dry-run", "--plan", "plan.toml")
    whole = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert "model.embed_tokens.weight (1 tensor): model.embed_tokens = replicate" in "\n".join(whole)
    assert whole[0] == "  65536 bytes (65.5 kB): model.layers.*.mlp.down_proj.weight (2 tensors): no rule names it"
    assert whole[-1] == "  and 6 smaller kinds"
    kinds = parsed(reshard("tiny", "--tp", 2, "--dry-run", "--plan", "plan.toml", "--json"))["whole"]["kinds"]
    assert len(kinds) == 11


def test_notes_reach_the_reader(tmp_path, tensors):
    config = {key: value for key, value in CONFIG.items() if "heads" not in key and key != "architectures"}
    write_model(tmp_path / "own", tensors, config | {"model_type": "ours"})
    Path("plan.toml").write_text('[plan]\n"layers.*.self_attn.q_proj" = "colwise"\n')
    for args in (("own", "--tp", 2, "-o", "out"), ("plan", "own", "--tp", 2)):
        assert "note: q_proj: cut as plain rows" in reshard(*args, "--plan", "plan.toml").stderr
    assert "note:" not in reshard("plan", "own", "--tp", 2, "--plan", "plan.toml", "-q").stderr
    assert "no built-in plan for the model type 'ours'" in reshard("own", "--tp", 2).stderr


def test_existing_out_needs_force(model, out):
    before = Path("out/manifest.json").stat().st_ino
    refused = reshard("tiny", "--tp", 2, "-o", "out")
    assert (refused.exit_code, refused.stdout) == (5, "")
    assert refused.stderr.startswith("reshard: out: exists already")
    assert Path("out/manifest.json").stat().st_ino == before
    assert reshard("tiny", "--tp", 2, "-o", "out", "--force").exit_code == 0
    assert Path("out/manifest.json").stat().st_ino != before
    assert names_here() == ["out", "tiny"]


def test_options_reach_the_library(tmp_path, tensors):
    write_model(tmp_path / "more", {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    facts = parsed(reshard("more", "--tp", 2, "--dry-run", "--json"))
    assert facts["unused"] == {"tensors": 1, "nbytes": 32}
    facts = parsed(reshard("more", "--tp", 2, "--dry-run", "--json", "--drop-unused", "--self-contained"))
    assert facts["dropped"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert len(facts["files"]) == 2
    few = parsed(reshard("more", "--tp", 2, "--dry-run", "--json", "--max-file-size", "64KiB"))
    assert len(few["files"]) > 4
    layout = parsed(reshard("more", "--tp", 2, "--dry-run", "--json", "--layout", "checkpoint"))
    assert layout["layout"] == "checkpoint"
    theirs = parsed(reshard("more", "--tp", 2, "--dry-run", "--json", "--plan-source", "transformers"))
    assert theirs["plan"] == "the transformers plan of llama"


def test_the_choices_are_those_of_the_library():
    choices = {param.name: param.type for param in main.commands["split"].params}
    assert tuple(choices["layout"].choices) == LAYOUTS
    assert tuple(choices["plan_source"].choices) == PLAN_SOURCES


def test_plan_prints_every_tensor(model):
    result = reshard("plan", "tiny", "--tp", 4)
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert len(rows) == TENSORS
    query = rows["model.layers.0.self_attn.q_proj.weight"].split("  ")
    assert [cell.strip() for cell in query if cell] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.*.self_attn.q_proj = colwise",
        "dim 0 as (2@kv, 2@rep, 16) over kv 2, rep 2",
        "F32 [16, 64]",
    ]
    assert "no rule" in rows["model.norm.weight"]
    assert "replicated" in rows["model.norm.weight"]


def test_plan_tells_what_only_rank_0_holds(tmp_path, tensors):
    bias = {"model.layers.0.mlp.down_proj.bias": np.ones(64, np.float32)}
    write_model(tmp_path / "biased", {**tensors, **bias})
    result = reshard("plan", "biased", "--tp", 2)
    assert "rank 0 only" in next(line for line in result.stdout.splitlines() if "down_proj.bias" in line)
    assert "on rank 0 only: 1 tensor, 256 bytes" in reshard("biased", "--tp", 2, "--dry-run").stdout


def test_plan_json(model):
    facts = parsed(reshard("plan", "tiny", "--tp", 2, "--json"))
    assert [tensor["name"] for tensor in facts["tensors"]][:2] == ["lm_head.weight", "model.embed_tokens.weight"]
    down = next(tensor for tensor in facts["tensors"] if tensor["name"] == "model.layers.1.mlp.down_proj.weight")
    assert down == {
        "name": "model.layers.1.mlp.down_proj.weight",
        "rule": "model.layers.*.mlp.down_proj = rowwise",
        "dtype": "F32",
        "shape": [64, 128],
        "placement": "cut",
        "cuts": [{"dim": 1, "axis": "(128*)", "unit": 1}],
        "mesh": {"tp": 2},
        "local_shape": [64, 64],
    }


def test_the_program_moves_the_right_bytes(model, out):
    """Carry out by hand what is printed; the files that the split wrote are the oracle."""
    facts = parsed(reshard("plan", "tiny", "--tp", 2, "--program", "--json"))
    files = {path.name: path.read_bytes() for path in [*model.glob("*.safetensors"), *out.glob("*.safetensors")]}
    done = 0
    for copy in facts["copies"]:
        starts = [(copy["source_offset"], copy["output_offset"])]
        for loop in copy["loops"]:
            starts = [
                (source + i * loop["source_step"], output + i * loop["output_step"])
                for source, output in starts
                for i in range(loop["times"])
            ]
        for source, output in starts:
            taken = files[copy["source"]][source : source + copy["nbytes"]]
            assert files[copy["output"]][output : output + copy["nbytes"]] == taken
            done += copy["nbytes"]
    assert done == NBYTES_CUT + NBYTES_WHOLE
    text = reshard("plan", "tiny", "--tp", 2, "--program").stdout
    assert len(text.splitlines()) == len(facts["copies"])
    down = next(line for line in text.splitlines() if line.startswith("model.layers.0.mlp.down_proj.weight"))
    assert down.endswith(": 256 bytes, 64 times at +512 -> +256")
    assert "model.safetensors+" in down
    assert " -> rank-00000-of-00002.safetensors+" in down


def test_plans(tmp_path, model, tensors):
    assert reshard("plans").stdout.split() == [*model_types(), *class_names()]
    assert parsed(reshard("plans", "--json")) == {"model_types": [*model_types()], "diffusers": [*class_names()]}
    assert reshard("plans", "tiny").stdout == "llama: LlamaForCausalLM: the built-in plan of llama\n"
    assert parsed(reshard("plans", "tiny", "--json"))["architecture"] == "LlamaForCausalLM"
    write_model(tmp_path / "own", tensors, CONFIG | {"model_type": "ours"})
    refused = reshard("plans", "own")
    assert (refused.exit_code, refused.stdout) == (4, "")
    assert "no built-in plan for the model type 'ours'" in refused.stderr


def test_show(out):
    result = reshard("show", out)
    assert result.exit_code == 0
    assert "out: LlamaForCausalLM (llama), 21 tensors, world size 2, layout runtime, format version 2" in result.stdout
    assert "common.safetensors               all ranks  5 tensors" in result.stdout
    assert f"ranks 0 to 1: each {NBYTES_CUT // 2 + NBYTES_WHOLE} bytes" in result.stdout
    assert "hooks: rowwise: 4 modules, all_reduce after" in result.stdout
    assert "hooks: embedding_rowwise: 1 module, mask_ids before and all_reduce after" in result.stdout
    assert "carried over: config.json" in result.stdout
    assert "q_proj" not in result.stdout
    assert "model.layers.1.self_attn.q_proj.weight" in reshard("show", out, "--tensors").stdout


def test_show_attributes(model):
    reshard("tiny", "--tp", 4, "-o", "four")
    attributes = "attributes: model.layers.*.self_attn (2 modules): num_key_value_groups = 1"
    assert attributes in reshard("show", "four").stdout


def test_show_ties(tmp_path, tensors):
    del tensors["lm_head.weight"]
    write_model(tmp_path / "tied", tensors, CONFIG | {"tie_word_embeddings": True})
    reshard("tied", "--tp", 2, "-o", "out")
    assert "tie: lm_head.weight is model.embed_tokens.weight" in reshard("show", "out").stdout


def test_show_json(out):
    facts = parsed(reshard("show", out, "--json", "--tensors"))
    assert facts["hooks"]["rowwise"] == {"modules": 4, "before": "", "after": "all_reduce"}
    assert facts["files"][2]["owners"] == [0, 1]
    assert len(facts["listing"]) == facts["tensors"] == TENSORS
    assert "listing" not in parsed(reshard("show", out, "--json"))


def test_show_no_split(model):
    for name in ("tiny", "nowhere"):
        result = reshard("show", name)
        assert (result.exit_code, result.stdout) == (6, "")


def test_verify(out):
    result = reshard("verify", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "out: whole: 3 files, 21 tensors" in result.stderr
    assert reshard("verify", out, "-q").output == ""
    assert parsed(reshard("verify", out, "--json"))["nbytes"] == NBYTES_CUT + NBYTES_WHOLE


def test_verify_names_the_damage(out):
    damage(out / "rank-00001-of-00002.safetensors", -1)
    damage(out / "common.safetensors", -1)
    result = reshard("verify", out, "-q")
    assert (result.exit_code, result.stdout) == (DamageError.exit_code, "")
    assert result.stderr.startswith("reshard: out: damaged:\n")
    error = json.loads(reshard("verify", out, "--json").stderr)["error"]
    assert (error["kind"], error["exit_code"]) == ("DamageError", 7)
    assert len(error["findings"]) == 2
    for finding, file in zip(sorted(error["findings"]), ("common", "rank-00001-of-00002"), strict=True):
        assert finding.startswith(f"{file}.safetensors: ")
        assert f"  {finding}\n" in result.stderr


def test_merge(model, out):
    result = reshard("merge", out, "again")
    assert (result.exit_code, result.stdout) == (0, "again\n")
    assert "21 tensors with the bytes that the split read" in result.stderr
    assert "identical to the source's: 1 file: model.safetensors" in result.stderr
    assert Path("again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert reshard("merge", out, "again").exit_code == 5
    assert reshard("merge", out, "quiet", "-q").stderr == ""


def test_merge_says_what_was_dropped(tmp_path, tensors):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_model(tmp_path / "more", {**tensors, name: np.ones(8, np.float32)})
    reshard("more", "--tp", 2, "--drop-unused", "-o", "out")
    facts = parsed(reshard("merge", "out", "again", "--json"))
    assert (facts["identical"], facts["rewritten"], facts["dropped"]) == ([], ["model.safetensors"], [name])
    text = reshard("merge", "out", "anew").stderr
    assert f"not here, since the split left them out: 1 tensor: {name}" in text
    assert "with another header than the source's: 1 file: model.safetensors" in text


@pytest.mark.parametrize(("typed", "meant"), [("verfy", "verify"), ("mrege", "merge"), ("shwo", "show")])
def test_a_mistyped_command(typed, meant):
    result = reshard(typed, "out")
    assert result.exit_code == 2
    assert f"{typed!r} is no command and no folder; did you mean {meant!r}?" in result.stderr


def test_a_folder_with_the_name_of_a_command(tmp_path, tensors):
    write_model(tmp_path / "plan", tensors)
    write_model(tmp_path / "verfy", tensors)
    assert reshard("./plan", "--tp", 2, "-o", "one").exit_code == 0
    assert reshard("verfy", "--tp", 2, "-o", "two").exit_code == 0
    assert reshard("plan", "plan", "--tp", 2).exit_code == 0


@pytest.mark.parametrize("tp", ["0", "-1", "1.5", "abc", "", "1e3", "٤"])
def test_a_number_of_ranks_that_is_none(model, tp):
    result = reshard("tiny", f"--tp={tp}", "-o", "out")
    assert result.exit_code == 2
    assert "is not a whole number from 1" in result.stderr
    assert names_here() == ["tiny"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1", 1), ("4GB", 4 * 10**9), ("500MiB", 500 * 2**20), ("1.5k", 1500), ("2 tib", 2**41)]
)
def test_sizes(text, nbytes):
    split = main.commands["split"]
    context = split.make_context("split", ["x", "--tp", "1", "--max-file-size", text])
    assert context.params["max_file_nbytes"] == nbytes


@pytest.mark.parametrize("text", ["4 bananas", "-1", "GB", "0.1", "1e9", ""])
def test_sizes_that_are_none(model, text):
    result = reshard("tiny", "--tp", 2, f"--max-file-size={text}")
    assert result.exit_code == 2
    assert "is not a size" in result.stderr


@pytest.mark.parametrize("tp", [3, 1_000_000])
def test_a_number_of_ranks_that_does_not_divide(model, tp):
    result = reshard("tiny", "--tp", tp)
    assert result.exit_code == DegreeError.exit_code == 4
    assert result.stderr.startswith(f"reshard: the built-in plan of llama: tp {tp} does not divide this model")
    assert result.stdout == ""


def test_errors_in_json(model):
    degree = reshard("tiny", "--tp", 3, "--json")
    assert degree.stdout == ""
    error = json.loads(degree.stderr)["error"]
    assert (error["kind"], error["exit_code"], degree.exit_code) == ("DegreeError", 4, 4)
    assert error["allowed"] == [1, 2, 4]
    assert len(error["misfits"]) == 7
    for args in (("tiny",), ("tiny", "--tp", "x"), ("verfy",), ("show",), ("--tp", "2")):
        usage = reshard(*args, "--json")
        error = json.loads(usage.stderr)["error"]
        assert (error["exit_code"], usage.exit_code) == (2, 2)


def test_other_exit_codes(model, tmp_path):
    assert reshard("no/such/folder", "--tp", 2).exit_code == 3
    assert reshard("tiny", "--tp", 2, "--plan", "missing.toml").exit_code == 4
    (model / "model.safetensors").write_bytes(b"")
    assert reshard("tiny", "--tp", 2).exit_code == 3
    assert reshard("tiny").exit_code == 2
    assert reshard("tiny", "--tp", 2, "--bogus").exit_code == 2
    assert reshard("tiny", "other", "--tp", 2).exit_code == 2


def test_an_interrupt(monkeypatch, model):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("reshard.splitting.carry_out", interrupted)
    result = reshard("tiny", "--tp", 2)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "reshard: interrupted\n")


def test_a_bug_shows_its_traceback(monkeypatch, model):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("reshard.splitting.plan", broken)
    assert isinstance(CliRunner().invoke(main, ["tiny", "--tp", "2"]).exception, ZeroDivisionError)


def test_help():
    result = reshard("--help")
    assert result.exit_code == 0
    text = result.stdout.splitlines()
    assert len(text) <= 60
    assert text[0] == "Usage: reshard MODEL --tp N [-o OUT] [OPTIONS] | COMMAND ..."
    for option in main.commands["split"].params[1:]:
        assert max(option.opts, key=len) in result.stdout
    for word in ("merge", "plan", "plans", "show", "verify", "Examples:", "Exit codes:"):
        assert any(line.strip().startswith(word) for line in text)
    assert "4  the plan is right, but this number of ranks does not divide the model" in result.stdout
    assert reshard("--tp", 2, "--help").stdout == result.stdout
    assert reshard("-h").stdout == result.stdout
    assert "--program" in reshard("plan", "--help").stdout
    assert reshard().exit_code == 2


def test_every_command_takes_quiet_and_json():
    groups = [command for command in main.commands.values() if isinstance(command, Group)]
    single = [command for command in main.commands.values() if not isinstance(command, Group)]
    for command in [*single, *(command for group in groups for command in group.commands.values())]:
        assert {"quiet", "as_json"} <= {param.name for param in command.params}


def test_version():
    assert reshard("--version").stdout == "reshard, version 0.1.0\n"


def test_help_is_quick():
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*RESHARD, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.2


def test_a_fresh_interpreter_imports_little():
    code = """
import sys
from click import Group
from click.testing import CliRunner
import reshard.cli
CliRunner().invoke(reshard.cli.main, ["--help"])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {"reshard", "manifests", "click"} <= loaded
    assert not loaded & {
        "numpy",
        "torch",
        "huggingface_hub",
        "tqdm",
        "msgspec",
        "xxhash",
        "safetensors",
        "transformers",
    }


def test_a_plan_is_made_without_what_moves_bytes_and_from_the_tables_of_its_type(model):
    code = """
import sys, tomllib
load, loaded = tomllib.loads, []
tomllib.loads = lambda text: loaded.append(len(text)) or load(text)
from reshard.cli import main
main(["tiny", "--tp", "2", "--dry-run"], standalone_mode=False)
print(sum(loaded), *sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    nbytes, *modules = done.stdout.splitlines()[-1].split()
    assert not {*modules} & {"numpy", "torch", "huggingface_hub", "tqdm", "concurrent", "shutil", "hashlib"}
    stored = sum(path.stat().st_size for path in (FOLDER / "ours").iterdir())
    assert 0 < int(nbytes) < stored / 10


def test_the_module_and_the_script(model):
    script = Path(sys.executable).with_name("reshard")
    for number, command in enumerate((RESHARD, [str(script)])):
        args = ["tiny", "--tp", "2", "-o", f"out{number}"]
        done = subprocess.run([*command, *args], capture_output=True, text=True, check=True)
        assert done.stdout == f"out{number}\n"
        assert "\r" not in done.stderr
    refused = subprocess.run([*RESHARD, "tiny", "--tp", "3"], capture_output=True, text=True)
    assert refused.returncode == 4
    assert "Traceback" not in refused.stderr


def test_a_reader_that_closes_its_pipe(model):
    command = [*RESHARD, "plan", "tiny", "--tp", "4", "--program"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def on_terminal(*args) -> bytes:
    """Return what a command writes to a terminal that is its stderr."""
    control, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (30, 100))
    subprocess.run([*RESHARD, *args], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(control, 65536):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(control)
    return shown


def test_a_bar_on_a_terminal(model):
    assert b"\rsplit: " in on_terminal("tiny", "--tp", "2", "-o", "one")
    assert on_terminal("tiny", "--tp", "2", "-o", "two", "-q") == b""
    assert b"\rverify: " in on_terminal("verify", "one")
    assert b"\rmerge: " in on_terminal("merge", "one", "again")


def test_human_bytes():
    assert [lines.human_bytes(n) for n in (0, 999, 1000, 89_669_632, 10**12, 3 * 10**15)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "89.7 MB",
        "1.0 TB",
        "3.0 PB",
    ]
