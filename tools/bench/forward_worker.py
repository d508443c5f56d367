"""A rank that decodes with three forms of one model in turns: python -m tools.bench.forward_worker RANK WORLD_SIZE."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.ranks import Job, serve, start_group

MODULES = ("torch", "loader", "transformers.distributed", "transformers.models.llama.modeling_llama")
CONTENDERS = ("reshard", "by hand", "transformers")
PROMPT_TOKENS = 8
CLOCKS = {"fake": time.process_time, "gloo": time.perf_counter}
"""With a fake group there is nothing to wait for: the processor's time is all of it, and others disturb it less."""


def measure(job: Job, rank: int, world_size: int) -> dict[str, Any]:
    """Load the model in every form; return milliseconds a token, in rounds, and the collectives of one token."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job["backend"] == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job["world_size"])
    else:
        start_group(job, rank, world_size)
    if job["what"] == "hook":
        return {"microseconds": hook_cost(job["rounds"])}
    forms = {"reshard": by_hooks(job), "by hand": by_hand(job), "transformers": by_peer(job)}
    found: dict[str, Any] = {"milliseconds": {name: [] for name in forms}, "collectives": {}}
    with torch.inference_mode():
        for name, model in forms.items():
            found["collectives"][name] = collectives_of(model)
        for turn in range(job["rounds"]):
            names = list(forms)
            # Each is first, second and last equally often.
            for name in names[turn % 3 :] + names[: turn % 3]:
                dist.barrier()
                seconds = seconds_a_token(forms[name], job["tokens"], CLOCKS[job["backend"]])
                found["milliseconds"][name].append(1000 * seconds)
    return found


def by_hooks(job: Job) -> Any:
    """Return the model with the loader's hooks. Without `load_model`: a fake group has no store to agree through."""
    from loader import install_hooks

    model, shard = with_local_parameters(job)
    install_hooks(model, shard.manifest)
    return model


def with_local_parameters(job: Job) -> tuple[Any, Any]:
    """Return the model with the rank's parameters in memory, and its shard."""
    import torch.distributed as dist

    from loader import attach, open_shard
    from loader.meta import parameters_on_meta

    shard = open_shard(job["split"], dist.get_rank(), read="read")
    with parameters_on_meta():
        model = _class_of(job)(_config_of(job)).eval()
    attach(model, shard)
    return model, shard


def by_hand(job: Job) -> Any:
    """Return the same model with the collectives written into the forwards of its modules' classes."""
    model, shard = with_local_parameters(job)
    for name, entry in shard.manifest.modules.items():
        module = model.get_submodule(name)
        module.__class__ = written_class(type(module), module, entry.before, entry.after)
    return model


def written_class(kind: Any, module: Any, before: str, after: str) -> Any:
    """Return a module's class as one would write it for a divided model: nothing looked up, nothing checked.

    Raises:
        ValueError: Nothing is written for such a module.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    world_size = dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    class Summed(kind):
        def forward(self, states: Any) -> Any:
            output = functional.linear(states, self.weight, self.bias)
            dist.all_reduce(output)
            return output

    class Gathered(kind):
        def forward(self, states: Any) -> Any:
            part = functional.linear(states, self.weight, self.bias)
            whole = part.new_empty((world_size, *part.shape))
            gather(whole.view(-1), part.view(-1))
            return whole.movedim(0, -2).reshape(*part.shape[:-1], -1)

    class Embedded(kind):
        def forward(self, ids: Any) -> Any:
            local = ids - self.first
            foreign = (local < 0) | (local >= self.weight.shape[0])
            output = functional.embedding(local.masked_fill(foreign, 0), self.weight)
            output.masked_fill_(foreign.unsqueeze(-1), 0)
            dist.all_reduce(output)
            return output

    if before == "mask_ids":
        module.first = dist.get_rank() * module.weight.shape[0]
        return Embedded
    written = {("", "all_reduce"): Summed, ("", "all_gather"): Gathered}.get((before, after))
    if written is None or not issubclass(kind, torch.nn.Linear):
        raise ValueError(f"{kind.__name__}: {before}, {after}: nothing is written for it")
    return written


def by_peer(job: Job) -> Any:
    """Return the model as transformers' own tensor parallelism loads it."""
    import torch.distributed as dist
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    config = DistributedConfig(tp_size=dist.get_world_size())
    return _class_of(job).from_pretrained(job["folder"], dtype="float32", distributed_config=config).eval()


def _class_of(job: Job) -> Any:
    import transformers

    return getattr(transformers, job["architecture"])


def _config_of(job: Job) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(Path(job["folder"]))
    config._attn_implementation = "sdpa"
    return config


def seconds_a_token(model: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Return the seconds of decoding one token, after a prompt."""
    import torch

    given = model(torch.arange(1, PROMPT_TOKENS + 1).view(1, -1), use_cache=True)
    token = torch.tensor([[5]])
    started = clock()
    for _ in range(tokens):
        given = model(token, past_key_values=given.past_key_values, use_cache=True)
    return (clock() - started) / tokens


def collectives_of(model: Any) -> dict[str, int]:
    """Return how many collectives of each kind one token takes."""
    import torch

    from tools.sweep.counting import count

    given = model(torch.arange(1, PROMPT_TOKENS + 1).view(1, -1), use_cache=True)
    _, counts = count(model, input_ids=torch.tensor([[5]]), past_key_values=given.past_key_values, use_cache=True)
    return counts


def hook_cost(rounds: int) -> list[float]:
    """Return the microseconds that a hook with an all-reduce adds to a module that calls it itself, in rounds."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from loader.steps import Sequence, Site, make_step
    from manifests.manifest import Module

    class Plain(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states

    class Written(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(states)
            return states

    hooked, written, states = Plain(), Written(), torch.zeros(1, 1, 64)
    after = make_step("all_reduce", Site(hooked, Module("rowwise", after="all_reduce"), None, Sequence())).after
    hooked.register_forward_hook(after)  # type: ignore[arg-type]
    found = []
    calls = 3000
    with torch.inference_mode():
        for _ in range(rounds):
            times = []
            for module in (hooked, written):
                started = time.process_time()
                for _ in range(calls):
                    module(states)
                times.append(time.process_time() - started)
            found.append(1e6 * (times[0] - times[1]) / calls)
    return found


if __name__ == "__main__":
    serve(measure, MODULES)
