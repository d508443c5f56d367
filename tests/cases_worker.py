"""One rank of the cases that need processes: loads splits, and holds what they compute against the whole models.

Arguments: a folder with a folder for every job, each with ``split``, ``whole.pt`` and ``job.json``. A job is what is
done, "right", "compiled" or "refused", and the words of the refusal. What went wrong with each goes to ``rank-N.json``.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from loader import load_model
from manifests.errors import ReshardError

SOON_S = 10.0


def right(folder: Path, *, compiled: bool) -> None:
    whole = torch.load(folder / "whole.pt")
    model = load_model(folder / "split").eval()
    assert not [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    # In no file, and never left as memory was found: 1 and 10000 ** -0.5.
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, torch.tensor([1.0, 0.01]))
    run = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad():
        torch.testing.assert_close(run(whole["ids"]).logits, whole["logits"], atol=1e-5, rtol=1e-5)


def refused(folder: Path, *words: str) -> None:
    start = time.monotonic()
    try:
        load_model(folder / "split")
    except ReshardError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
        assert time.monotonic() - start < SOON_S
        return
    raise AssertionError("was not refused")


def run_job(folder: Path) -> str:
    done, *words = json.loads((folder / "job.json").read_text())
    try:
        if done == "refused":
            refused(folder, *words)
        else:
            right(folder, compiled=done == "compiled")
    except Exception:  # noqa: BLE001 - whatever it is goes to the test
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHELASTIC_USE_AGENT_STORE", "True")  # the store is the parent's, as under torchrun
    work = Path(sys.argv[1])
    found = {path.parent.name: run_job(path.parent) for path in sorted(work.glob("*/job.json"))}
    (work / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
