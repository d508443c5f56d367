"""The main job on a real model: fetch it, split it, verify it, and let the ranks say what one process says.

    python tools/demo.py --models build/models

Every line that starts with $ is a command that can be repeated by hand.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fetch_models import fetch

RANKS = 3
TOKENS = 40
PROMPT = "Explain in three sentences why the sky is blue."


def main() -> None:
    """Run the demonstration; exit 1 if a token differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("build/models"))
    folder: Path = parser.parse_args().models
    model = fetch("smollm2", folder)
    out = folder / f"smollm2-tp{RANKS}"
    shutil.rmtree(out, ignore_errors=True)
    _run("-m", "reshard", str(model), "--tp", str(RANKS), "-o", str(out))
    _run("-m", "reshard", "verify", str(out))
    alone, together = folder / "demo-1.json", folder / f"demo-{RANKS}.json"
    generate = os.path.relpath(Path(__file__).with_name("generate.py"))
    _run(generate, str(model), "--save", str(alone), *_generation())
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    _run(*launcher, generate, str(out), "--save", str(together), *_generation())
    one, many = (json.loads(path.read_text()) for path in (alone, together))
    equal = sum(a == b for a, b in zip(one["tokens"], many["tokens"], strict=True))
    print(f"\n{many['text']}\n")
    print(f"{RANKS} processes against one: {equal} of {TOKENS} tokens equal")
    if equal != TOKENS:
        sys.exit(1)


def _generation() -> tuple[str, ...]:
    return ("--prompt", PROMPT, "--tokens", str(TOKENS))


def _run(*arguments: str) -> None:
    shown = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
    print(f"\n$ python {shown}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *arguments], check=True, env=environment)


if __name__ == "__main__":
    main()
