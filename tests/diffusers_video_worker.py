"""One rank of the tests of diffusers' models for videos and sounds: runs every split, and tells what it found.

Started by `test_diffusers_video.py`, which made the models, the expected outputs and the splits, in four processes.
What was split for two ranks is run by the last two, in a group of their own.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.diffusers_video import CASES, FLEX, FUSED, VideoCase, fuse, outputs
from tests.diffusers_worker import Collectives, Outcome, Ranks, attempt, run_rank


def work_through(folder: Path) -> dict[str, Outcome]:
    """Return what this rank found, by the name of a case and the number of ranks."""
    pair = dist.new_group([2, 3])
    found: dict[str, Outcome] = {}
    for ranks in (Ranks(4, dist.group.WORLD, None), Ranks(2, pair, None)):
        if ranks.degree == 2 and dist.get_rank() < 2:
            break
        cases = [*CASES, FUSED] if ranks.degree == 2 else CASES
        found |= {f"{case.name} {ranks.degree}": attempt(run, case, folder, ranks) for case in cases}
    return found


def run(case: VideoCase, folder: Path, ranks: Ranks) -> Outcome:
    """Compare a case's outputs with those of one process, and count collectives."""
    from loader import load_model

    expected = load_file(folder / f"{case.name}-expected.safetensors")
    model = load_model(folder / f"{case.name}-tp{ranks.degree}", group=ranks.group)
    collectives = Collectives()
    # Flex attention does not run while operations are counted.
    with nullcontext() if case.architecture in FLEX else collectives:
        found = outputs(model, case)
    difference = largest_difference(found, expected)
    if case is FUSED:
        # What the checkpoint had fused is not used; fused again, each rank has its own rows.
        fuse(model)
        difference = max(difference, largest_difference(outputs(model, case), expected))
    return {
        "difference": difference,
        "finite": all(bool(tensor.isfinite().all()) for tensor in found.values()),
        "collectives": dict(collectives.counts),
        "class": type(model).__name__,
    }


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of the same output."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


if __name__ == "__main__":
    run_rank(sys.argv[1], work_through)
