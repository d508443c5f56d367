"""A process of its own for `test_reading`: loads a split, and writes down what memory and reads it took.

In the process of the tests, memory of earlier ones is given back at some time, which no measure could tell apart.
"""

import ctypes
import gc
import json
import mmap
import sys
from pathlib import Path

import torch

from loader import load_model


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bytes_read() -> int:
    """Return the bytes that this process got from read calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def resident(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor's whole pages this process has in its page table, from ``pagemap``."""
    first, stop = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    if stop <= first:
        return 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as stream:
        stream.seek(8 * first)
        entries = (ctypes.c_uint64 * (stop - first)).from_buffer_copy(stream.read(8 * (stop - first)))
    return mmap.PAGESIZE * sum(entry >> 63 for entry in entries)


def main(folder: Path, way: str) -> None:
    # The first load imports what later ones have.
    load_model(folder)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("RssAnon"), bytes_read()
    model = load_model(folder, read=way)
    found = {"grown": memory("RssAnon") - before[0], "read": bytes_read() - before[1]}
    found["resident"] = sum(resident(parameter) for parameter in model.parameters())
    with torch.inference_mode():
        model(torch.tensor([[5, 6, 7]]))
    found["used"] = resident(model.model.layers[0].mlp.up_proj.weight)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
