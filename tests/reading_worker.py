"""A rank of `test_reading`: loads a model whose file on rank 1 is damaged, and writes down what was raised."""

import datetime
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn

from loader import load_model, models


def main(folder: Path) -> None:
    rank, timeout = int(os.environ["RANK"]), datetime.timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    models.build_model = lambda *_: nn.ModuleDict({"a": nn.Linear(512, 8, bias=False, device="meta")})
    found = ("", "")
    try:
        load_model(folder / "out", read="read")
    except Exception as error:  # noqa: BLE001 - told by the test
        found = type(error).__name__, str(error)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
