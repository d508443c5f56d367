"""The guide's example as printed: its files are taken from docs/plans.md, its commands run, their outputs compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_real_models import model_folder

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "plans.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)


def block(language: str, *words: str) -> str:
    """Return the one block of a language that has all the words."""
    (found,) = [text for kind, text in BLOCKS if kind == language and all(word in text for word in words)]
    return found


PRINTED = [
    text.removeprefix("$ ").split("\n", 1)
    for kind, text in [*BLOCKS, *re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)]
    if kind == "console"
]
COMMANDS = [(command, output) for command, output in PRINTED if re.match(r"reshard (plan |show )?pebble", command)]
OF_A_REAL_MODEL = [
    (command, output)
    for command, output in PRINTED
    if re.match(r"reshard (build/models/)?smollm2 ", command) and "..." not in output
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's model, checkpoint and plan."""
    made = tmp_path_factory.mktemp("guide")
    (made / "pebble.py").write_text(block("python", "class Pebble"))
    (made / "pebble.toml").write_text(block("toml", '"blocks.*.attn.out" =', "[attributes]", "[plan]"))
    (made / "run.py").write_text(block("python", "install_hooks(model, shard.manifest)", "import Pebble"))
    subprocess.run(
        [sys.executable, "-c", block("python", "torch.manual_seed(0)", "pebble/config.json")], cwd=made, check=True
    )
    return made


def without_times(text: str) -> str:
    """Leave out what differs from run to run: seconds, and the key, in which the time of the file is."""
    return re.sub(r"(?m) in [\d.]+ s$|^key: \w+$", "", text).strip()


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 6
    assert len(OF_A_REAL_MODEL) >= 3


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_guide_says(command: str, output: str, folder: Path) -> None:
    assert without_times(run(command, folder)) == without_times(output)


@pytest.mark.parametrize(("command", "output"), OF_A_REAL_MODEL, ids=[command for command, _ in OF_A_REAL_MODEL])
def test_a_command_on_a_real_model_prints_what_the_page_says(command: str, output: str, folder: Path) -> None:
    model = model_folder("smollm2")
    for link in (folder / "smollm2", folder / "build" / "models" / "smollm2"):
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(model)
    rules = json.loads(block("json", '"lm_head": "colwise_gather_output"'))
    (folder / "hf.json").write_text(json.dumps(rules))
    del rules["embed_tokens"]
    (folder / "hf-without-embedding.json").write_text(json.dumps(rules))
    assert without_times(run(command, folder)) == without_times(output)


def test_the_ranks_compute_what_the_whole_model_does(folder: Path) -> None:
    if not (folder / "pebble-tp4").exists():
        run("reshard pebble --tp 4 --plan pebble.toml", folder)
    command = f"OMP_NUM_THREADS=1 {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 4 run.py"
    heads, kv_heads, difference = run(command, folder).split()[-3:]
    assert (heads, kv_heads) == ("1", "1")
    assert float(difference) < 1e-5
