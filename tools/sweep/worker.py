"""One rank of a comparison: takes a list of cases, compares with one process, and leaves what it found.

Started by `tools.sweep.pool` in as many processes as there are ranks, which import transformers once. The ranks make
the models, the expected results and the splits in turns, then go through the cases together. A case that fails on a
rank, or that leaves one waiting for another, is told as failed, and the ranks go on in a new process group.
"""

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from manifests.placement import counts
from tools.sweep.cases import Case
from tools.sweep.counting import count
from tools.sweep.inputs import tiny_inputs
from tools.sweep.ranks import Outcome, Ranks

NEW_TOKENS = 6

progress = {"stage": ""}
"""What this rank is doing."""


def main(cases_file: str, folder: str) -> None:
    """Work through the cases of a file; ``outcomes/NAME.json`` appears in the folder when a case is done."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    # Llama4ForConditionalGeneration asks its language model's output for it; its forward fails otherwise.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    ranks, work = Ranks(), Path(folder)
    cases = [Case(**fields) for fields in json.loads(Path(cases_file).read_text())]
    models = list({case.model_name: case for case in cases}.values())
    in_turns("model", models, ranks, lambda case: prepare_model(case, work))
    made = {case.model_name: ranks.hear(f"model/{position}") for position, case in enumerate(models)}
    in_turns("split", cases, ranks, lambda case: prepare_split(case, work, ranks.world_size, made[case.model_name]))
    prepared = [ranks.hear(f"split/{position}") for position in range(len(cases))]
    # Not before: in a group transformers saves on rank 0 alone.
    ranks.join()
    for position, case in enumerate(cases):
        outcomes = [prepared[position]]
        if not outcomes[0]["error"]:
            ranks.tell(f"started/{position}", {"time": time.time()})
            ranks.tell(f"done/{position}/{ranks.rank}", attempt(KINDS[case.kind], case, work, ranks))
            outcomes = [ranks.hear(f"done/{position}/{rank}") for rank in range(ranks.world_size)]
            if any(outcome["error"] for outcome in outcomes):
                ranks.renew()
        if ranks.rank == 0:
            leave(work / "outcomes" / f"{case.name}.json", outcomes)
            shutil.rmtree(work / "splits" / case.name, ignore_errors=True)
    dist.destroy_process_group()


def in_turns(topic: str, cases: list[Case], ranks: Ranks, action: Callable[[Case], Outcome]) -> None:
    """Do this rank's part of a job for all cases, and tell the others."""
    for position, case in enumerate(cases):
        if position % ranks.world_size == ranks.rank:
            ranks.tell(f"{topic}/{position}", attempt(action, case))


def leave(file: Path, outcomes: list[Outcome]) -> None:
    """Write the outcomes of a case; the file appears whole."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(outcomes))
    part.rename(file)


def attempt(action: Callable[..., Outcome], *args: Any) -> Outcome:
    """Return an action's outcome, or its error as text."""
    started = time.perf_counter()
    try:
        outcome = {"error": "", **action(*args)}
    except Exception as error:  # noqa: BLE001 - told to all ranks, and reported
        text = " ".join(str(error).split())
        outcome = {
            "error": f"{type(error).__name__}: {text[:400]}",
            "stage": progress["stage"],
            "traceback": traceback.format_exc(),
        }
    return {"seconds": round(time.perf_counter() - started, 3), **outcome}


def prepare_model(case: Case, work: Path) -> Outcome:
    """Write a tiny model and what one process makes of it, unless they are there."""
    from tools.sweep.tiny import tiny_model

    folder = work / "models" / case.model_name
    progress["stage"] = "build"
    if not (folder / "config.json").exists():
        tiny_model(case.model_type, case.values).save_pretrained(folder)
    expected = expected_file(case, work)
    progress["stage"] = "one process"
    if not expected.exists():
        model = open_model(folder)
        found, failure = results(model, case)
        facts = {"numel": sum(parameter.numel() for parameter in model.parameters()), "no_tokens": failure}
        expected.with_suffix(".json").write_text(json.dumps(facts))
        save_file(found, expected)
    return {}


def expected_file(case: Case, work: Path) -> Path:
    """Return where the output and the tokens of one process are; facts about the model are beside it, in JSON."""
    return work / "models" / case.model_name / f"expected-{'-'.join(case.generations)}.safetensors"


def prepare_split(case: Case, work: Path, world_size: int, model: Outcome) -> Outcome:
    """Split a model for the ranks."""
    from reshard import split

    if model["error"]:
        return model
    if case.kind not in ("peer", "given"):
        progress["stage"] = "split"
        options = {"experts": case.experts, "uneven": case.uneven}
        source, target = work / "models" / case.model_name, work / "splits" / case.name
        shutil.rmtree(target, ignore_errors=True)
        split(source, target, tp=world_size, plan_source=case.plan_source, **options)
    return {}


def open_model(folder: Path, **options: Any) -> Any:
    """Return a saved model, as transformers opens it."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, name)
    model = model_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options)
    return model.eval()


def results(model: Any, case: Case) -> tuple[dict[str, torch.Tensor], str]:
    """Return the output of one process, the tokens it generates by run, and why there are none."""
    failure = ""
    with torch.no_grad():
        found = {"output": output_of(model(**tiny_inputs(case.model_type)))}
    try:
        found |= tokens_of(model, case, seed=0)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        failure = f"{type(error).__name__}: {error}"
    return found, failure


def tokens_of(model: Any, case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Return the tokens generated after the prompt, by run; none from a class that generates nothing."""
    if not model.can_generate():
        return {}
    inputs = tiny_inputs(case.model_type)
    made = {}
    for name, options in case.generations.items():
        torch.manual_seed(seed)
        made[name] = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **{"do_sample": False, **options})
    return {name: whole.contiguous() for name, whole in made.items()}


def output_of(given: Any) -> torch.Tensor:
    """Return what is compared: logits, or the last hidden state of a class without a head."""
    from torch.distributed.tensor import DTensor

    named = (getattr(given, name, None) for name in ("logits", "last_hidden_state"))
    output = next((value for value in named if value is not None), None)
    output = given[0] if output is None else output
    return (output.full_tensor() if isinstance(output, DTensor) else output).float().contiguous()


def run(case: Case, work: Path, ranks: Ranks) -> Outcome:
    """Compare our model in several processes with one; every rank starts with another seed."""
    from loader import load_model

    progress["stage"] = "load"
    model = load_model(work / "splits" / case.name, attn_implementation="eager")
    with torch.inference_mode():
        return compare(model, case, work, ranks)


def run_peer(case: Case, work: Path, ranks: Ranks) -> Outcome:
    """Compare transformers' own tensor parallelism with one process."""
    from transformers.distributed import DistributedConfig

    progress["stage"] = "load"
    degrees = {"tp_size": ranks.world_size} | ({"ep_size": case.experts} if case.experts > 1 else {})
    model = open_model(work / "models" / case.model_name, distributed_config=DistributedConfig(**degrees))
    # Some of its models change tensors in a way that inference mode forbids.
    with torch.no_grad():
        return compare(model, case, work, ranks)


def compare(model: Any, case: Case, work: Path, ranks: Ranks) -> Outcome:
    """Compare output and tokens with those of one process."""
    expected_at = expected_file(case, work)
    expected, facts = load_file(expected_at), json.loads(expected_at.with_suffix(".json").read_text())
    progress["stage"] = "forward"
    given, collectives = count(model, **tiny_inputs(case.model_type))
    output, expected_output = output_of(given), expected.pop("output")
    alike = output.shape == expected_output.shape
    outcome = {
        "shape": list(output.shape),
        "expected_shape": list(expected_output.shape),
        "difference": float((output - expected_output).abs().max()) if alike else None,
        "largest": float(expected_output.abs().max()),
        "share": sum(local(parameter).numel() for parameter in model.parameters()) / facts["numel"],
        "collectives": collectives,
        "no_tokens": facts["no_tokens"],
        "expected_tokens": {name: row.tolist() for name, row in expected.items()},
    }
    if expected:
        progress["stage"] = "generate"
        outcome["tokens"] = {name: row.tolist() for name, row in tokens_of(model, case, seed=ranks.rank).items()}
    else:
        outcome["tokens"] = {}
    return outcome


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare_shards(case: Case, work: Path, ranks: Ranks) -> Outcome:
    """Compare a rank's tensors with those that transformers' own tensor parallelism holds, bit for bit."""
    from transformers.distributed import DistributedConfig

    from loader import open_shard

    progress["stage"] = "peer"
    degrees = {"tp_size": ranks.world_size} | ({"ep_size": case.experts} if case.experts > 1 else {})
    held = open_model(work / "models" / case.model_name, distributed_config=DistributedConfig(**degrees)).state_dict()
    peer = {name: local(tensor) for name, tensor in held.items()}
    progress["stage"] = "shards"
    shard = open_shard(work / "splits" / case.name, ranks.rank)
    names = {name: shard.manifest.ties.get(name, name) for name in (*shard, *shard.manifest.ties)}
    alike = [name for name in names if name in peer and fits(shard, names[name], peer[name])]
    return {
        "names": sorted(names),
        "peer_names": sorted(peer),
        "different": sorted(names.keys() & peer.keys() - set(alike)),
        "cut": sorted(name for name in names if shard.manifest.tensors[names[name]].placement.cuts),
    }


def fits(shard: Any, name: str, peer: torch.Tensor) -> bool:
    """Tell whether a tensor of the shard is the peer's; a partial one is there on one rank, and zero on the others."""
    mine = shard[name]
    if not counts(shard.manifest.tensors[name].placement, shard.rank):
        peer = torch.zeros_like(peer)
    return mine.dtype == peer.dtype and torch.equal(mine, peer)


KINDS = {"run": run, "given": run, "peer": run_peer, "shards": compare_shards}


if __name__ == "__main__":
    main(*sys.argv[1:])
