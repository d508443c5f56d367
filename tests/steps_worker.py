"""One rank of the tests of the steps: loads splits of small modules, runs them, and tells what it found.

Started by `test_steps.py`, which made the splits, in as many processes as there are ranks. All values are whole
numbers, so that sums are exact in any order. The checks that may leave a rank waiting for another come last.
"""

import datetime
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from loader import attach, install_hooks, load_model, models, open_shard
from loader.guard import share_generator_state
from tests import strategies  # noqa: F401 - registers one

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)
STORE_TIMEOUT = datetime.timedelta(seconds=10)

Call = tuple[tuple[Any, ...], dict[str, Any]]
Outcome = dict[str, Any]


class GatedMlp(nn.Module):
    """Gate and up in one weight, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(6, 16)
        self.down = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.relu() * up)


class Experts(nn.Module):
    """Stacked experts with bare parameters: gate and up (expert, 2 * inner, hidden), down (expert, hidden, inner)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(3, 8, 6))
        self.down_proj = nn.Parameter(torch.empty(3, 6, 4))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->tei", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("tei,ehi,te->th", gate.relu() * up, self.down_proj, weights)


class Mixture(nn.Module):
    """Experts as a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, weights)


class Part(nn.Module):
    """Two matrices without a module each, and None for an input that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(8, 6))
        self.down = nn.Parameter(torch.empty(5, 8))

    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else nn.functional.linear((x @ self.up.T).relu(), self.down)


class Whole(nn.Module):
    """A part as a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return self.part(x)


class Scaled(nn.Linear):
    """A linear layer with a second input."""

    def forward(self, input: torch.Tensor, factor: float) -> torch.Tensor:  # noqa: A002 - as in torch
        return super().forward(input) * factor


class Routed(nn.Module):
    """Experts that are given the chosen ones of every token, and the id `num_experts` for none."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, 8, 6))
        self.down = nn.Parameter(torch.empty(experts, 6, 8))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routes = nn.functional.one_hot(chosen, self.num_experts + 1)[..., : self.num_experts]
        inner = torch.einsum("th,eih->tei", hidden, self.up).relu()
        return torch.einsum("tei,ehi,tke,tk->th", inner, self.down, routes.float(), weights)


class Routes(nn.Module):
    """Routed experts as a part of a model, called by position or by name."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.experts = Routed()
        self.by_name = by_name

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.by_name:
            return x + self.experts(weights=weights, hidden=x, chosen=chosen)
        return x + self.experts(x, chosen, weights)


class WithIdentity(nn.Module):
    """Experts, one of which gives its input back, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(8, 6))
        self.down = nn.Parameter(torch.empty(6, 8))
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear((x @ self.up.T).relu(), self.down) + 4 * self.identity(x)


class Zero(nn.Module):
    """Experts with an identity as a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = WithIdentity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


class WithShared(Part):
    """A part with a layer beside it that is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear((x @ self.up.T).relu(), self.down) + self.shared(x)


class Biased(Part):
    """A part with a bias of its own, which is added to what the ranks sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.empty(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear((x @ self.up.T).relu(), self.down) + self.offset


class Placed(nn.Module):
    """A layer and a table, of which a part of the features each are added, and no weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.table = nn.Parameter(torch.empty(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.table


class UnitNorm(nn.Module):
    """A norm by the length, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().sum(-1, keepdim=True) + self.eps).rsqrt()


class GatedNorm(nn.Module):
    """An RMS norm over groups of features, after a gate."""

    def __init__(self, size: int, groups: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.group_size = size // groups
        self.variance_epsilon = 0.5

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            hidden_states = hidden_states * nn.functional.silu(gate)
        groups = hidden_states.unflatten(-1, (-1, self.group_size))
        normed = groups * (groups.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * normed.flatten(-2)


class GatedBlock(nn.Module):
    """Two projections, one the other's gate, normed in groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 5)
        self.norm = GatedNorm(16, groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x), self.gate(x)))


class Multiplied(nn.Module):
    """A projection of two blocks, each of which has multipliers that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 5)
        self.multipliers = nn.Buffer(torch.arange(16.0, device="cpu").view(1, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.up(x) * self.multipliers).chunk(2, -1)
        return self.down(gate.relu() * up)


class Scale(nn.Module):
    """A norm as far as the sequence goes: every position by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


class Residual(nn.Module):
    """A block: what it adds depends on the positions before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Scale(), nn.Linear(4, 6), nn.Linear(6, 4)
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length = x.shape[1]
        mixed = self.norm(x).cumsum(1)
        return x + self.down(self.up(mixed).relu().remainder(5))


class Tower(nn.Module):
    """Two blocks and a last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Residual(), Residual()]), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def chain(**children: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(children))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random whole numbers from -3 to 3."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


IDS = torch.tensor([[0, 4, 5, 9], [9, 3, 6, 0]])


class Case(NamedTuple):
    """A module that is split, and what it, or its sub-module `at`, is called with."""

    name: str
    build: Callable[[], nn.Module]
    plan: dict[str, Any]
    calls: tuple[Call, ...]
    compiles: bool = False
    at: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    exact: bool = True


PAIR = Case(
    "colwise and rowwise",
    lambda: chain(up=nn.Linear(6, 8), act=nn.ReLU(), down=nn.Linear(8, 5)),
    {"up": "colwise", "down": "rowwise"},
    (call(numbers(2, 3, 6)), call(numbers(6)), call(input=numbers(0, 6))),
    compiles=True,
)
EMBEDDING = Case(
    "embedding_rowwise",
    lambda: chain(embed=nn.Embedding(10, 4)),
    {"embed": "embedding_rowwise"},
    (call(IDS), call(IDS.int()), call(torch.tensor(5)), call(IDS[:, :0])),
    compiles=True,
)
BLOCKS = [16, 4, 4]
SEQUENCE = Case(
    "sequence",
    Tower,
    {
        "blocks.0": "sequence_scatter",
        "blocks.*.norm": "sequence_parallel",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise_reduce_scatter",
        "norm": "sequence_parallel",
    },
    (call(numbers(2, 4, 4)), call(numbers(2, 3, 4)), call(numbers(1, 6, 4)), call(numbers(2, 1, 4))),
    compiles=True,
)
ROUTED = {
    "plan": {"experts": "moe_tp_experts", "experts.up": "colwise", "experts.down": "rowwise"},
    "experts": {"experts": "ep_dispatch_experts", "experts.up": "grouped_gemm", "experts.down": "grouped_gemm"},
}
DIVIDED = {"experts": 2}


def normed_in_groups(groups: int) -> dict[str, Any]:
    """Return the plan of a block whose heads are two for each of two groups, or four in one."""
    out, into = ({"style": style, "layout": f"({groups}@kv, {4 // groups}@rep, 4)"} for style in ("colwise", "rowwise"))
    norm = {**out, "style": "group_rms_norm"}
    plan = {"block.up": out, "block.gate": out, "block.norm": norm, "block.down": into}
    return {"plan": plan, "attributes": {"block.norm": {"group_size": f"{16 // groups} / rep"}}}


ROUTING = call(numbers(5, 6), torch.tensor([[0, 3], [1, 2], [3, 1], [2, 3], [0, 1]]), numbers(5, 2, seed=1))

CASES = (
    PAIR,
    Case(
        "colwise_gather_output",
        lambda: chain(head=nn.Linear(6, 8)),
        {"head": "colwise_gather_output"},
        (call(numbers(2, 3, 6)), call(numbers(6)), call(numbers(0, 6))),
        compiles=True,
    ),
    Case(
        "rowwise_split_input",
        lambda: chain(whole=nn.Linear(6, 8), act=nn.ReLU(), down=nn.Linear(8, 5)),
        {"down": "rowwise_split_input"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "colwise_gather_input",
        lambda: chain(up=nn.Linear(6, 8), act=nn.ReLU(), across=nn.Linear(8, 4), down=nn.Linear(4, 5)),
        {"up": "colwise", "across": "colwise_gather_input", "down": "rowwise"},
        (call(numbers(2, 3, 6)), call(numbers(6))),
        compiles=True,
    ),
    Case(
        "features of convolutions",
        lambda: chain(up=nn.Conv1d(6, 8, 3), act=nn.ReLU(), down=nn.Conv1d(8, 5, 3)),
        {
            "up": {"style": "colwise_gather_output", "dim": 0},
            "down": {"style": "rowwise_split_input", "dim": 1},
        },
        (call(numbers(2, 6, 7)), call(numbers(6, 7))),
        compiles=True,
    ),
    Case(
        "features of convolutions, joined before one",
        lambda: chain(up=nn.Conv2d(6, 8, 3), across=nn.Conv2d(8, 4, 1), down=nn.Conv2d(4, 5, 1)),
        {
            "up": {"style": "colwise", "dim": 0},
            "across": {"style": "colwise_gather_input", "dim": 0},
            "down": {"style": "rowwise", "dim": 1},
        },
        (call(numbers(2, 6, 4, 5)),),
    ),
    Case(
        "colwise_rep and rowwise_rep",
        lambda: chain(up=nn.Linear(6, 8), act=nn.ReLU(), down=nn.Linear(8, 5)),
        {"up": "colwise_rep", "down": "rowwise_rep"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "rowwise_split_input, keywords in another order",
        lambda: chain(down=Scaled(8, 5)),
        {"down": "rowwise_split_input"},
        (call(factor=2.0, input=numbers(2, 3, 8)),),
        at="down",
    ),
    SEQUENCE,
    Case(
        "experts by position", lambda: Routes(by_name=False), ROUTED, (ROUTING,), compiles=True, options={"experts": 2}
    ),
    Case("experts by name", lambda: Routes(by_name=True), ROUTED, (ROUTING,), compiles=True, options={"experts": 2}),
    Case("experts whole", lambda: Routes(by_name=True), ROUTED, (ROUTING,)),
    Case(
        "moe_identity_expert",
        Zero,
        {
            "experts": "moe_tp_experts",
            "experts.up": "colwise",
            "experts.down": "rowwise",
            "experts.identity": "moe_identity_expert",
        },
        (call(numbers(4, 6)),),
        compiles=True,
    ),
    Case(
        "rms_norm",
        lambda: chain(up=nn.Linear(6, 8), norm=nn.RMSNorm(8, eps=0.5), down=nn.Linear(8, 5)),
        {"up": "colwise", "norm": "rms_norm", "down": "rowwise"},
        (call(numbers(2, 3, 6)), call(numbers(6)), call(numbers(0, 6))),
        compiles=True,
        exact=False,
    ),
    Case(
        "l2_norm",
        lambda: chain(block=chain(up=nn.Linear(6, 8), norm=UnitNorm(), down=nn.Linear(8, 5))),
        {"block.up": "colwise", "block.norm": "l2_norm", "block.down": "rowwise"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
        exact=False,
    ),
    Case(
        "rowwise_once",
        lambda: chain(block=chain(up=nn.Linear(6, 8), down=nn.Linear(8, 5))),
        {
            "block.up": {"style": "colwise", "layout": "(1@kv, 8)"},
            "block.down": {"style": "rowwise_once", "layout": "(1@kv, 8)"},
        },
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "layer_norm",
        lambda: chain(up=nn.Linear(6, 8), norm=nn.LayerNorm(8, eps=0.5), down=nn.Linear(8, 5)),
        {"up": "colwise", "norm": "layer_norm", "down": "rowwise"},
        (call(numbers(2, 3, 6)), call(numbers(6)), call(numbers(0, 6))),
        compiles=True,
        exact=False,
    ),
    Case(
        "layer_norm without a bias",
        lambda: chain(up=nn.Linear(6, 8), norm=nn.LayerNorm(8, bias=False), down=nn.Linear(8, 5)),
        {"up": "colwise", "norm": "layer_norm", "down": "rowwise"},
        (call(numbers(2, 3, 6)),),
        exact=False,
    ),
    Case(
        "group_rms_norm, a group on both ranks",
        lambda: chain(block=GatedBlock(1)),
        normed_in_groups(1),
        (call(numbers(2, 3, 6)),),
        compiles=True,
        exact=False,
    ),
    Case(
        "group_rms_norm, a group a rank",
        lambda: chain(block=GatedBlock(2)),
        normed_in_groups(2),
        (call(numbers(2, 3, 6)),),
        exact=False,
    ),
    Case(
        "cut_buffers",
        lambda: chain(block=Multiplied()),
        {
            "block": {"style": "cut_buffers", "layout": "(2, 8*)"},
            "block.up": "packed_colwise",
            "block.down": "rowwise",
        },
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "partial",
        lambda: chain(part=Biased()),
        {"part": "all_reduce", "part.up": "colwise", "part.down": "rowwise", "part.offset": "partial"},
        (call(numbers(2, 6)),),
    ),
    Case(
        "own: forward",
        lambda: chain(up=nn.Linear(6, 8), norm=nn.RMSNorm(8, eps=0.5), down=nn.Linear(8, 5)),
        {"up": "colwise", "norm": "tests.strategies:AllHeadsNorm", "down": "rowwise"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
        exact=False,
    ),
    Case(
        "own: after",
        lambda: chain(up=nn.Linear(6, 8), act=nn.ReLU(), down=nn.Linear(8, 5)),
        {"up": "colwise", "down": "float_sum"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "own: place",
        lambda: chain(up=nn.Linear(6, 8), act=nn.ReLU(), down=nn.Linear(8, 5, bias=False)),
        {"up": "packed_colwise", "down": "tests.strategies:Halves"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "own: around",
        lambda: chain(head=nn.Linear(6, 8, bias=False)),
        {"head": "tests.strategies:WholeForward"},
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case(
        "own: before",
        lambda: chain(part=WithShared()),
        {
            "part": "all_reduce",
            "part.up": "colwise",
            "part.down": "rowwise",
            "part.shared": "tests.strategies:Shared",
        },
        (call(numbers(2, 3, 6)),),
        compiles=True,
    ),
    Case("packed, two halves", GatedMlp, {"gate_up": "packed_colwise", "down": "rowwise"}, (call(numbers(2, 3, 6)),)),
    Case(
        "packed, equal blocks",
        GatedMlp,
        {"gate_up": {"style": "packed_colwise", "blocks": [1, 1]}, "down": "rowwise"},
        (call(numbers(2, 3, 6)),),
    ),
    Case(
        "packed, unequal blocks",
        lambda: chain(qkv=nn.Linear(6, 24), act=nn.ReLU(), out=nn.Linear(24, 5)),
        {"qkv": {"style": "packed_colwise", "blocks": BLOCKS}, "out": {"style": "packed_rowwise", "blocks": BLOCKS}},
        (call(numbers(2, 3, 6)),),
    ),
    EMBEDDING,
    Case(
        "embedding_rowwise, ids by keyword",
        lambda: chain(embed=nn.Embedding(10, 4)),
        {"embed": "embedding_rowwise"},
        (call(input=IDS),),
        at="embed",
    ),
    Case(
        "embedding_rowwise, padding_idx on rank 0",
        lambda: chain(embed=nn.Embedding(10, 4, padding_idx=3)),
        {"embed": "embedding_rowwise"},
        (call(IDS),),
    ),
    Case(
        "embedding_rowwise, padding_idx on rank 1",
        lambda: chain(embed=nn.Embedding(10, 4, padding_idx=9)),
        {"embed": "embedding_rowwise"},
        (call(IDS),),
    ),
    Case(
        "embedding_colwise",
        lambda: chain(embed=nn.Embedding(10, 4)),
        {"embed": "embedding_colwise"},
        (call(IDS), call(torch.tensor(5))),
    ),
    Case(
        "all_reduce",
        Whole,
        {"part": "all_reduce", "part.up": "colwise", "part.down": "rowwise"},
        (call(numbers(2, 6)), call(None)),
    ),
    Case(
        "all_gather",
        lambda: chain(part=Placed()),
        {"part": "all_gather", "part.up": "colwise", "part.table": {"style": "colwise", "dim": 1}},
        (call(numbers(2, 3, 6)), call(numbers(0, 3, 6))),
        compiles=True,
    ),
    Case(
        "ep_dispatch_experts, without being asked",
        lambda: Routes(by_name=False),
        ROUTED["experts"],
        (ROUTING,),
    ),
    Case(
        "moe_tp_experts",
        Mixture,
        {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"},
        (call(numbers(4, 6), numbers(4, 3, seed=1)),),
    ),
)


def whole_module(case: Case) -> nn.Module:
    """Return a case's module with its values, the same in every process."""
    module = case.build()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed))
    return module


@torch.inference_mode()
def outputs(module: Any, case: Case) -> list[torch.Tensor | None]:
    callee = module.get_submodule(case.at) if case.at else module
    return [callee(*args, **kwargs) for args, kwargs in case.calls]


def loaded(case: Case, folder: Path, *, hooks: bool = True) -> nn.Module:
    """Return a case's module with this rank's parameters."""
    with torch.device("meta"):
        module = case.build()
    shard = open_shard(folder / case.name, dist.get_rank())
    attach(module, shard)
    if hooks:
        install_hooks(module, shard.manifest)
    return module


def run_case(case: Case, folder: Path) -> Outcome:
    return {"outputs": outputs(loaded(case, folder), case)}


def run_compiled(case: Case, folder: Path) -> Outcome:
    return {"outputs": outputs(torch.compile(loaded(case, folder), backend="eager", fullgraph=True), case)}


def call_compiled_before(folder: Path) -> Outcome:
    """Compile a caller of the module first, then install: the hooks must fire all the same."""
    module = loaded(PAIR, folder, hooks=False)

    def caller(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    compiled = torch.compile(caller, backend="eager")
    before = outputs(compiled, PAIR)
    install_hooks(module, open_shard(folder / PAIR.name, dist.get_rank()).manifest)
    return {"before": before, "outputs": outputs(compiled, PAIR)}


def part_of_the_sequence(folder: Path) -> Outcome:
    """Tell how many positions the blocks got."""
    module = loaded(SEQUENCE, folder)
    lengths = []
    for args, kwargs in SEQUENCE.calls:
        module(*args, **kwargs)
        lengths.append([block.length for block in module.blocks])
    return {"lengths": lengths}


def install_on_fewer_inputs(folder: Path) -> Outcome:
    """Install the step of divided experts on a module that takes none: nothing is changed."""
    module = nn.ModuleDict({"experts": Experts()})
    manifest = open_shard(folder / "experts by name", dist.get_rank()).manifest
    try:
        install_hooks(module, manifest)
    finally:
        assert not hasattr(module["experts"], "num_experts")
        assert not module["experts"]._forward_hooks
    return {}


def install_unknown_strategy(folder: Path) -> Outcome:
    """Install a split of a strategy that this process does not have: nothing is changed."""
    module = PAIR.build()
    manifest = open_shard(folder / PAIR.name, dist.get_rank()).manifest
    gone = msgspec.structs.replace(manifest.modules["down"], style="tests.strategies:Gone", after="own")
    manifest = msgspec.structs.replace(manifest, modules={**manifest.modules, "up": gone})
    try:
        install_hooks(module, manifest)
    finally:
        assert not any(child._forward_hooks for child in module.modules())
    return {}


def install_twice(folder: Path) -> Outcome:
    module = loaded(PAIR, folder)
    install_hooks(module, open_shard(folder / PAIR.name, dist.get_rank()).manifest)
    return {}


def look_up(ids: list[int]) -> Callable[[Path], Outcome]:
    """Return the check that looks ids up which are not in the vocabulary."""

    def check(folder: Path) -> Outcome:
        with torch.inference_mode():
            return {"outputs": [loaded(EMBEDDING, folder)(torch.tensor(ids))]}

    return check


def fewer_features(folder: Path) -> Outcome:
    """Call a module that cuts its input with an input that is cut already."""
    case = next(case for case in CASES if case.name == "rowwise_split_input")
    with torch.inference_mode():
        return {"outputs": [loaded(case, folder).get_submodule("down")(numbers(2, 4))]}


def call_without_inputs(folder: Path) -> Outcome:
    with torch.inference_mode():
        return {"outputs": [loaded(EMBEDDING, folder).get_submodule("embed")()]}


def backward(folder: Path) -> Outcome:
    module = loaded(PAIR, folder)
    for parameter in module.parameters():
        parameter.requires_grad_()
    module(numbers(2, 6)).sum().backward()
    return {}


def backward_to_inputs(folder: Path) -> Outcome:
    loaded(PAIR, folder)(numbers(2, 6).requires_grad_()).sum().backward()
    return {}


def share_generator(_: Path) -> Outcome:
    torch.manual_seed(dist.get_rank())
    apart = torch.rand(4)
    share_generator_state(dist.group.WORLD, torch.device("cpu"))
    return {"apart": apart, "outputs": [torch.rand(4)]}


def split_for_four(folder: Path) -> Outcome:
    load_model(folder / "four")
    return {}


def split_for_four_hooks(folder: Path) -> Outcome:
    install_hooks(PAIR.build(), open_shard(folder / "four", dist.get_rank()).manifest)
    return {}


def load_model_from(name: str) -> Callable[[Path], Outcome]:
    """Return the check that loads a folder of this rank with `load_model`, the class being PAIR's."""

    def check(folder: Path) -> Outcome:
        def build(*_: object) -> nn.Module:
            with torch.device("meta"):
                return PAIR.build()

        models.build_model = build
        return {"outputs": outputs(load_model(folder / f"{name} {dist.get_rank()}"), PAIR)}

    return check


CHECKS: dict[str, Callable[[Path], Outcome]] = {
    "call compiled before": call_compiled_before,
    "parts": part_of_the_sequence,
    "fewer inputs": install_on_fewer_inputs,
    "unknown strategy": install_unknown_strategy,
    "install twice": install_twice,
    "id too high": look_up([2, 10]),
    "id too low": look_up([-1, 2]),
    "fewer features": fewer_features,
    "no inputs": call_without_inputs,
    "backward": backward,
    "backward to inputs": backward_to_inputs,
    "generator": share_generator,
    "split for four": split_for_four,
    "hooks of four": split_for_four_hooks,
    "good": load_model_from("good"),
    "damaged": load_model_from("damaged"),
    "other split": load_model_from("other split"),
    "unfinished": load_model_from("unfinished"),
}


def attempt(action: Callable[..., Outcome], *args: Any) -> Outcome:
    """Return an action's outcome with its error's class and text, and the seconds that it took."""
    started = time.monotonic()
    found: Outcome = {"error": "", "message": ""}
    try:
        found |= action(*args)
    except Exception as error:  # noqa: BLE001 - told by the test
        found |= {"error": type(error).__name__, "message": str(error)}
    return {**found, "seconds": time.monotonic() - started}


def main(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    # A rank that waits for one which never comes gives up before the next collective does.
    store.set_timeout(STORE_TIMEOUT)
    torch.set_num_threads(1)
    found: dict[str, Outcome] = {}
    for case in CASES:
        found[case.name] = attempt(run_case, case, folder)
        if case.compiles:
            found[f"{case.name}, compiled"] = attempt(run_compiled, case, folder)
    for name, check in CHECKS.items():
        found[name] = attempt(check, folder)
        # Nothing is left over from a check: a collective that one rank began alone would meet this one.
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        found[name]["total"] = total.item()
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
