"""One rank of the tests of `loader.parallelize`, of compiled models and of the collectives of a forward.

Started in as many processes as there are ranks. Every rank makes the whole model, the same on all of them, keeps what
it gives in one process, cuts it, and tells what it found.
"""

import copy
import datetime
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from loader import parallelize
from tests.steps_worker import PAIR, GatedMlp, numbers, whole_module
from tools.sweep.counting import count
from tools.sweep.tiny import tiny_model

TIMEOUT = datetime.timedelta(seconds=60)
NEW_TOKENS = 5
Outcome = dict[str, Any]


class Model(NamedTuple):
    """A tiny model of transformers, and what is done with it.

    Attributes:
        name: Its name.
        model_type: Its type.
        config: Values of the configuration beside the tiny ones.
        ep: Over how many ranks its experts are divided.
        plan: A plan in place of the built-in one.
    """

    name: str
    model_type: str
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed
    ep: int = 1
    plan: dict[str, Any] | None = None


EXPERTS = {
    "plan": {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "experts": {
        "layers.*.mlp.experts": "ep_dispatch_experts",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    },
}
SEQUENCE = {
    "layers.0": "sequence_scatter",
    "layers.*.input_layernorm": "sequence_parallel",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise_reduce_scatter",
    "layers.*.post_attention_layernorm": "sequence_parallel",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise_reduce_scatter",
    "norm": "sequence_parallel",
}
MODELS = (
    Model("llama", "llama"),
    Model("llama, tied", "llama", {"tie_word_embeddings": True}),
    Model("llama, sequence", "llama", plan=SEQUENCE),
    Model("qwen2", "qwen2"),
    Model("phi3", "phi3"),
    Model("mixtral", "mixtral"),
    Model("mixtral, ep", "mixtral", ep=2),
    Model("olmo2", "olmo2"),
    Model("deepseek_v2, dense", "deepseek_v2", {"first_k_dense_replace": 8}),
    Model("deepseek_v2", "deepseek_v2", {"first_k_dense_replace": 1}),
)
ONE_LAYER = {"num_hidden_layers": 1}
COMPILED = {
    # The one traces through autograd's functions, which rewrites what is done in place; the others are quicker.
    "aot_eager": (Model("llama", "llama", ONE_LAYER),),
    "eager": (
        Model("llama, sequence", "llama", ONE_LAYER, plan=SEQUENCE),
        Model("qwen2", "qwen2", {**ONE_LAYER, "layer_types": ["full_attention"]}),
        Model("mixtral", "mixtral", ONE_LAYER),
        Model("mixtral, ep", "mixtral", ONE_LAYER, ep=2, plan=EXPERTS),
    ),
}


def prompt() -> torch.Tensor:
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def decode(model: Any, step: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and tokens: the prompt through a model, then one token after the other through `step`."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=32)
    ids, logits, tokens = prompt(), [], []
    caller = model
    for _ in range(NEW_TOKENS):
        found = caller(input_ids=ids, cache=cache, use_cache=True).logits[:, -1]
        ids = found.argmax(-1, keepdim=True)
        logits.append(found)
        tokens.append(ids)
        caller = step
    return torch.stack(logits), torch.cat(tokens, 1)


def both(case: Model) -> tuple[Any, Any]:
    """Return a model, and the rank's part of one that is the same."""
    whole = tiny_model(case.model_type, case.config)
    cut = copy.deepcopy(whole)
    parallelize(cut, case.plan, tp=dist.get_world_size(), ep=case.ep)
    return whole, cut


@torch.inference_mode()
def run_model(case: Model) -> Outcome:
    whole, cut = both(case)
    given, collectives = count(cut, input_ids=prompt())
    logits = given.logits
    expected = whole(input_ids=prompt()).logits
    return {
        "difference": float((logits - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "tokens": cut.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[:, 12:].tolist(),
        "expected_tokens": whole.generate(prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[:, 12:].tolist(),
        "share": numel(cut) / numel(whole),
        "tied": cut.get_output_embeddings().weight is cut.get_input_embeddings().weight,
        "collectives": collectives,
        "layers": whole.config.num_hidden_layers,
    }


@torch.inference_mode()
def run_compiled(case: Model, backend: str) -> Outcome:
    """Decode with a compiled model, of one graph. Its experts do not loop over those that were chosen: no graph can."""
    whole, cut = both(case)
    for model in (whole, cut):
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("batched_mm")
    expected, expected_tokens = decode(whole, whole)
    logits, tokens = decode(cut, torch.compile(cut, backend=backend, fullgraph=True))
    return {
        "difference": float((logits - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "tokens": tokens.tolist(),
        "expected_tokens": expected_tokens.tolist(),
    }


@torch.inference_mode()
def compile_prompt() -> Outcome:
    """Compile a model that divides the sequence, for prompts whose length the ranks divide and do not divide."""
    whole, cut = both(Model("llama, sequence", "llama", ONE_LAYER, plan=SEQUENCE))
    compiled = torch.compile(cut, backend="eager", fullgraph=True, dynamic=False)
    prompts = [prompt(), prompt()[:, :7]]
    pairs = [(compiled(input_ids=ids).logits, whole(input_ids=ids).logits) for ids in prompts]
    return {"differences": [float((mine - expected).abs().max()) for mine, expected in pairs]}


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class TiedPair(nn.Module):
    """An embedding and a head with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) * self.scale


@torch.inference_mode()
def compare(build: Callable[[], nn.Module], plan: Any, *args: Any, uneven: str = "") -> Outcome:
    whole = filled(build())
    cut = filled(build())
    parallelize(cut, plan, uneven=uneven)
    return {
        "output": cut(*args),
        "expected": whole(*args),
        "shapes": {n: list(p.shape) for n, p in cut.named_parameters()},
    }


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed))
    return module


def shared_block() -> nn.Module:
    """Return a module that has one block under two names."""
    block = GatedMlp()
    block.down = nn.Linear(8, 6)
    return nn.Sequential(block, block)


def refused(change: Callable[[nn.Module], None], **options: Any) -> Outcome:
    """Cut a module that cannot be, and tell why, and whether it is as it was."""
    module = whole_module(PAIR)
    change(module)
    parameters = dict(module.named_parameters())
    error = ""
    try:
        parallelize(module, **{"plan": PAIR.plan, **options})
    except Exception as raised:  # noqa: BLE001 - told by the test
        error = f"{type(raised).__name__}: {raised}"
    return {"refused": error, "unchanged": all(p is parameters[n] for n, p in module.named_parameters())}


def quantize(module: nn.Module) -> None:
    module.config = type("Config", (), {"quantization_config": {"quant_method": "fp8"}})()


def widen_on_one_rank(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        module.up, module.down = nn.Linear(6, 16), nn.Linear(16, 5)


def cut_before(module: nn.Module) -> None:
    parallelize(module, PAIR.plan)


def nothing(_: nn.Module) -> None:
    pass


def save_refused() -> Outcome:
    model = tiny_model("llama", {})
    parallelize(model)
    try:
        model.save_pretrained("never-written")
    except Exception as raised:  # noqa: BLE001 - told by the test
        return {"refused": f"{type(raised).__name__}: {raised}", "unchanged": not Path("never-written").exists()}
    return {"refused": "", "unchanged": True}


GATED = {"gate_up": "packed_colwise", "down": "rowwise"}
ONE_UNIT = {
    "gate_up": {"style": "colwise", "layout": "(2, 1*, 8)"},
    "down": {"style": "rowwise", "layout": "(1*, 8)"},
}
TIED = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
CHECKS: dict[str, Callable[[], Outcome]] = {
    "plain": lambda: compare(GatedMlp, GATED, numbers(2, 3, 6)),
    "nothing on a rank": lambda: compare(GatedMlp, ONE_UNIT, numbers(2, 3, 6), uneven="pad"),
    "tied": lambda: compare(TiedPair, TIED, torch.tensor([[0, 5, 9]])),
    "one block twice": lambda: compare(shared_block, {f"*.{k}": v for k, v in GATED.items()}, numbers(2, 3, 6)),
    "second call": lambda: refused(cut_before),
    "compiled": lambda: refused(lambda module: module.compile()),
    "quantized": lambda: refused(quantize),
    "other tp": lambda: refused(nothing, tp=4),
    "other ep": lambda: refused(nothing, ep=3),
    "no plan": lambda: refused(nothing, plan=None),
    "dead rule": lambda: refused(nothing, plan={**PAIR.plan, "top": "colwise"}),
    "odd": lambda: refused(nothing, plan={"down": {"style": "colwise"}}),
    "other model": lambda: refused(widen_on_one_rank),
    "save": save_refused,
}


def attempt(action: Callable[..., Outcome], *args: Any) -> Outcome:
    try:
        return {"error": "", **action(*args)}
    except Exception:  # noqa: BLE001 - told by the test
        return {"error": traceback.format_exc()}


def main(folder: Path, work: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    torch.set_num_threads(1)
    if work == "compile":
        found = {case.name: attempt(run_compiled, case, name) for name, cases in COMPILED.items() for case in cases}
        found["prompts"] = attempt(compile_prompt)
    else:
        found = {case.name: attempt(run_model, case) for case in MODELS}
        found |= {name: attempt(check) for name, check in CHECKS.items()}
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
