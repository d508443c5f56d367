"""Kind K: experts, each by itself or stacked."""

import torch

from tests.cases.case import Case, cut, even, of, take
from tests.checkpoints import count

MIXTRAL = "model.layers.0.block_sparse_moe."
SINGLE = {f"{MIXTRAL}gate.weight": count(11, 4)} | {
    f"{MIXTRAL}experts.{number}.{name}.weight": count(4, 4, dtype=torch.bfloat16, start=10 * number + 3 * at)
    for number in (0, 1, 10)
    for at, name in enumerate(("w1", "w3", "w2"))
}
STACKED = "model.layers.0.mlp.experts."
GATE_UP, DOWN = f"{STACKED}gate_up_proj", f"{STACKED}down_proj"
STACKS = {
    GATE_UP: count(2, 8, 4, dtype=torch.bfloat16),
    DOWN: count(2, 4, 4, dtype=torch.bfloat16, start=64),
}
EACH = "model.layers.*.block_sparse_moe.experts.*."

EXPERTS = (
    Case(
        "k01 every expert by itself",
        of(SINGLE, model_type="mixtral", num_local_experts=11),
        {f"{EACH}w1": "colwise", f"{EACH}w3": "colwise", f"{EACH}w2": "rowwise"},
        cut(SINGLE, {name: int(".w2." in name) for name in SINGLE if "experts" in name}, even(4, 2)),
    ),
    # Most of the model: that it is on every rank is said.
    Case(
        "k01 no rule for the experts",
        of(SINGLE, model_type="mixtral", num_local_experts=11),
        {"model.layers.*.block_sparse_moe.gate": "replicate"},
        (SINGLE, SINGLE),
        said=("whole on every rank: 10 tensors, 464 bytes", "no rule names it"),
    ),
    Case(
        "k02 stacked in three dimensions",
        of(STACKS, model_type="qwen3_moe", num_experts=2),
        {
            "model.layers.*.mlp.experts.gate_up_proj": {"style": "packed_colwise", "blocks": [4, 4]},
            "model.layers.*.mlp.experts.down_proj": "rowwise",
        },
        tuple(
            {GATE_UP: take(STACKS[GATE_UP], 1, rows), DOWN: take(STACKS[DOWN], 2, columns)}
            for rows, columns in (([(0, 2), (4, 6)], [(0, 2)]), ([(2, 4), (6, 8)], [(2, 4)]))
        ),
    ),
)
