"""One rank of the parity tests: takes a list of cases, compares with transformers, and tells what it found.

Started by `test_parity_transformers.py` in as many processes as there are ranks. The ranks make the models, the
expected results and the splits in turns, then go through the cases together. A case that fails on a rank, or that
leaves one waiting for another, is told as failed, and the ranks go on in a new process group.
"""

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
STORE_TIMEOUT = datetime.timedelta(seconds=120)
NEW_TOKENS = 6

Outcome = dict[str, Any]


class Case(NamedTuple):
    """One comparison.

    Attributes:
        name: Its name, also of its folder.
        model_type: Of the tiny model.
        kind: "run" compares logits and tokens with one process, "shards" the tensors with transformers' own ranks.
        plan_source: Whose plan the split follows.
        config: Values of the configuration beside the tiny ones.
        generations: Arguments of `generate` by the name of a run.
    """

    name: str
    model_type: str
    kind: str = "run"
    plan_source: str = "reshard"
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed
    generations: dict[str, dict[str, Any]] = {"greedy": {}}  # noqa: RUF012


class Ranks:
    """The processes that work through the cases, and this one's place among them."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = self.connect(STORE_TIMEOUT)
        self.group: dist.ProcessGroup | None = None

    def connect(self, timeout: datetime.timedelta) -> dist.Store:
        """Return a connection to the store, in which a question waits so long for its answer."""
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)

    def join(self) -> None:
        """Start the default group."""
        dist.init_process_group(
            "gloo",
            store=self.connect(COLLECTIVE_TIMEOUT),
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def tell(self, topic: str, outcome: Outcome) -> None:
        """Leave something for all ranks to read."""
        self.store.set(topic, json.dumps(outcome))

    def hear(self, topic: str) -> Outcome:
        """Return what a rank left, waiting for it."""
        heard: Outcome = json.loads(self.store.get(topic))
        return heard

    def renew(self) -> None:
        """Leave a group in which a rank may still wait for another."""
        self.group = dist.new_group(timeout=COLLECTIVE_TIMEOUT)


def main(cases_file: str, folder: str, outcomes_file: str) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    ranks = Ranks()
    cases = [Case(**fields) for fields in json.loads(Path(cases_file).read_text())]
    for position, case in enumerate(cases):
        if position % ranks.world_size == ranks.rank:
            ranks.tell(f"prepared/{position}", attempt(prepare, case, Path(folder, case.name), ranks.world_size))
    prepared = [ranks.hear(f"prepared/{position}") for position in range(len(cases))]
    # Not before: in a group transformers saves on rank 0 alone.
    ranks.join()
    outcomes: dict[str, list[Outcome]] = {}
    for position, case in enumerate(cases):
        if prepared[position]["error"]:
            outcomes[case.name] = [prepared[position]]
            continue
        mine = attempt(KINDS[case.kind], case, Path(folder, case.name), ranks)
        ranks.tell(f"done/{position}/{ranks.rank}", mine)
        outcomes[case.name] = [ranks.hear(f"done/{position}/{rank}") for rank in range(ranks.world_size)]
        if any(outcome["error"] for outcome in outcomes[case.name]):
            ranks.renew()
    dist.destroy_process_group()
    if ranks.rank == 0:
        Path(outcomes_file).write_text(json.dumps(outcomes))


def attempt(action: Any, *args: Any) -> Outcome:
    """Return an action's outcome, or its error as text."""
    try:
        return {"error": "", **action(*args)}
    except Exception:  # noqa: BLE001 - told to all ranks, and by the test
        return {"error": traceback.format_exc()}


def prepare(case: Case, folder: Path, world_size: int) -> Outcome:
    """Write a tiny model, what one process makes of it, and its split."""
    from reshard import split
    from tests.tiny_models import tiny_model

    tiny_model(case.model_type, case.config).save_pretrained(folder / "model")
    if case.kind == "run":
        save_file(expect(case, folder / "model"), folder / "expected.safetensors")
    split(folder / "model", folder / "split", tp=world_size, plan_source=case.plan_source)
    return {}


def expect(case: Case, model_folder: Path) -> dict[str, torch.Tensor]:
    """Return what transformers makes of a model in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager", dtype=torch.float32)
    return results(model, case, seed=0)


def results(model: Any, case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Return the logits of a prompt and the tokens generated after it, by run."""
    prompt = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = {"logits": model(input_ids=prompt).logits}
        for name, options in case.generations.items():
            torch.manual_seed(seed)
            whole = model.generate(prompt, max_new_tokens=NEW_TOKENS, **{"do_sample": False, **options})
            found[name] = whole[:, prompt.shape[1] :].contiguous()
    return found


def run(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Compare logits and tokens with those of one process; every rank starts with another seed."""
    from loader import load_model

    expected = load_file(folder / "expected.safetensors")
    model = load_model(folder / "split", group=ranks.group, attn_implementation="eager")
    found = results(model, case, seed=ranks.rank)
    logits, tokens = found.pop("logits"), {name: row.tolist() for name, row in found.items()}
    expected_logits = expected.pop("logits")
    return {
        "shape": list(logits.shape),
        "expected_shape": list(expected_logits.shape),
        "difference": float((logits - expected_logits).abs().max()),
        "largest": float(expected_logits.abs().max()),
        "tokens": tokens,
        "expected_tokens": {name: row.tolist() for name, row in expected.items()},
    }


def compare_shards(case: Case, folder: Path, ranks: Ranks) -> Outcome:
    """Compare a rank's tensors with those that transformers' own tensor parallelism holds, bit for bit."""
    from loader import open_shard

    peer = load_peer(folder / "model", ranks.world_size)
    shard = open_shard(folder / "split", ranks.rank)
    names = {name: shard.manifest.ties.get(name, name) for name in (*shard, *shard.manifest.ties)}
    alike = [name for name in names if name in peer and fits(shard, names[name], peer[name])]
    return {
        "names": sorted(names),
        "peer_names": sorted(peer),
        "different": sorted(names.keys() & peer.keys() - set(alike)),
        "cut": sorted(name for name in names if shard.manifest.tensors[names[name]].placement.cuts),
    }


def load_peer(model_folder: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank, as transformers loads them."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=world_size)
    )
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def fits(shard: Any, name: str, peer: torch.Tensor) -> bool:
    """Tell whether a tensor of the shard is the peer's; a partial one is there on rank 0, and zero on the others."""
    mine = shard[name]
    if shard.manifest.tensors[name].placement.partial and shard.rank:
        peer = torch.zeros_like(peer)
    return mine.dtype == peer.dtype and torch.equal(mine, peer)


KINDS = {"run": run, "shards": compare_shards}


if __name__ == "__main__":
    main(*sys.argv[1:])
