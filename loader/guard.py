"""What would be silently wrong on a sharded model is refused; what must be alike on all ranks is made alike."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from manifests.errors import LoadError

_REFUSED = {
    "save_pretrained": "this process holds one rank's shards; {remedy}",
    "push_to_hub": "this process holds one rank's shards; {remedy}",
    "load_state_dict": "the parameters are one rank's shards; change the checkpoint and split it again",
    "load_adapter": "an adapter is made for whole weights; merge it into the checkpoint and split that",
    "add_adapter": "an adapter is made for whole weights; merge it into the checkpoint and split that",
    "load_lora_adapter": "an adapter is made for whole weights; merge it into the checkpoint and split that",
    "_load_ip_adapter_weights": "its attention counts all heads, of which this process holds some",
    "enable_parallelism": "the model is divided already; split it for another number of ranks",
    "enable_group_offload": "the parameters are one rank's shards, mapped from its files; split for more ranks",
    "resize_token_embeddings": "the embedding is one rank's shard; resize it in the checkpoint and split that",
}


def refuse_unsafe(model: Any, folder: Path | None) -> None:  # noqa: ANN401
    """Make the methods that expect whole weights raise, with what to do instead.

    Args:
        model: The model.
        folder: The split that it was loaded from; None if it was cut in memory.
    """
    remedy = f"`reshard merge {folder} DEST` gives the checkpoint back" if folder else "save it before it is cut"
    refuse(model, {name: advice.format(remedy=remedy) for name, advice in _REFUSED.items()}, "model")


def refuse(thing: Any, advice: Mapping[str, str], kind: str) -> None:  # noqa: ANN401 - a model or a pipeline
    """Make methods of a thing raise, each with its advice."""
    for name, text in advice.items():
        if hasattr(thing, name):
            object.__setattr__(thing, name, _refusal(f"{name}: refused on a sharded {kind}: {text}"))


def _refusal(message: str) -> Any:  # noqa: ANN401
    def refused(*_: object, **__: object) -> NoReturn:
        raise LoadError(message)

    return refused


def align_sampling(model: Any, group: dist.ProcessGroup | None) -> None:  # noqa: ANN401
    """Make ``generate`` draw the same numbers on all ranks, and let a static cache take the rank's number of heads.

    Before each call the ranks take rank 0's generator state; otherwise their texts would part at the first sample.
    """
    if not hasattr(model, "generate"):
        return
    generate = model.generate

    @functools.wraps(generate)
    def aligned(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        share_generator_state(group, model.device)
        return generate(*args, **kwargs)

    object.__setattr__(model, "generate", aligned)
    if hasattr(model, "_get_static_cache_init_shape"):
        # The whole model's heads would be allocated; without a shape the cache takes it from the first keys.
        object.__setattr__(model, "_get_static_cache_init_shape", lambda: None)


def share_generator_state(
    group: dist.ProcessGroup | None, device: torch.device, generator: torch.Generator | None = None
) -> None:
    """Give a generator of every rank the state of rank 0's.

    Args:
        group: The ranks; the default group if None.
        device: Of the tensors that the group's collectives take; also whose default generator is meant.
        generator: The generator; the device's default one if None.
    """
    source = 0 if group is None else dist.get_global_rank(group, 0)
    carrier = _state(device, generator).to(device)
    dist.broadcast(carrier, source, group=group)
    if generator is not None:
        generator.set_state(carrier.cpu())
    elif device.type == "cpu":
        torch.set_rng_state(carrier)
    else:
        torch.cuda.set_rng_state(carrier.cpu(), device)


def _state(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
