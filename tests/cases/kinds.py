"""Kinds I, J and L: numbers that must keep their dtype, blocks of scales, adapters, formats that are not read."""

from pathlib import Path

import numpy as np
import torch

from manifests.errors import DegreeError, PlanError
from tests.cases.case import Case, cut, even, of, refused, take
from tests.checkpoints import count, save

F8 = torch.float8_e4m3fn
MLP = "model.layers.0.mlp."
DOWN, UP = f"{MLP}down_proj.weight", f"{MLP}up_proj.weight"
ROUTER = {
    f"{MLP}gate.e_score_correction_bias": torch.from_numpy(np.linspace(6.817, 7.063, 238).astype(np.float32)),
    f"{MLP}gate.weight": count(238, 4, dtype=torch.bfloat16),
    f"{MLP}shared_experts.up_proj.weight": count(4, 4, dtype=torch.bfloat16),
}
GOOD = {
    DOWN: count(4, 8, dtype=F8),
    f"{DOWN}_scale_inv": count(2, 2, start=1),
    UP: count(8, 4, dtype=F8, start=3),
    f"{UP}_scale_inv": count(4, 1, start=9),
}
BAD = {DOWN: count(4, 12, dtype=F8), f"{DOWN}_scale_inv": count(2, 3, start=1)}
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 4]}
ROWWISE = {"model.layers.*.mlp.down_proj": "rowwise"}
ADAPTER = {
    f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_{side}.weight": count(*shape)
    for name in "qo"
    for side, shape in (("A", (2, 8)), ("B", (8, 2)))
}


def adapter(folder: Path) -> None:
    save(folder, ADAPTER, adapter_config='{"peft_type": "LORA", "r": 2}')
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


KINDS = (
    Case(
        "i01 a router's bias in float32",
        of(ROUTER, model_type="deepseek_v3", n_routed_experts=238),
        {"model.layers.*.mlp.shared_experts.up_proj": "colwise"},
        cut(ROUTER, {f"{MLP}shared_experts.up_proj.weight": 0}, even(4, 2)),
    ),
    refused("j01 a cut inside a block", of(BAD, intermediate_size=12, quantization_config=FP8), ROWWISE, f"{DOWN}",
            "blocks of 4", "2 ranks do not divide it", refusal=DegreeError),
    Case(
        "j02 scales are cut with their weights",
        of(GOOD, quantization_config=FP8),
        {**ROWWISE, "model.layers.*.mlp.up_proj": "colwise"},
        tuple(
            {
                DOWN: take(GOOD[DOWN], 1, [(4 * rank, 4 * rank + 4)]),
                f"{DOWN}_scale_inv": take(GOOD[f"{DOWN}_scale_inv"], 1, [(rank, rank + 1)]),
                UP: take(GOOD[UP], 0, [(4 * rank, 4 * rank + 4)]),
                f"{UP}_scale_inv": take(GOOD[f"{UP}_scale_inv"], 0, [(2 * rank, 2 * rank + 2)]),
            }
            for rank in range(2)
        ),
    ),
    # Whole scales beside a cut weight would be wrong numbers.
    refused("j02 blocks that nothing tells the size of", of({n: GOOD[n] for n in (DOWN, f"{DOWN}_scale_inv")}), ROWWISE,
            f"{DOWN}_scale_inv", "2 entries", refusal=PlanError),
    refused("j03 another quantized format", of(BAD, quantization_config={"quant_method": "awq"}), ROWWISE,
            "quantized by 'awq'"),
    refused("j03 packed numbers that the configuration does not mention",
            of({f"{MLP}down_proj.qweight": count(4, 4, dtype=torch.int32)}), ROWWISE, "qweight", "quantized"),
    refused("l01 an adapter", adapter, {"model.layers.*.self_attn.q_proj": "colwise"}, "adapter"),
    refused("l01 an adapter's tensors under a model's name", of(ADAPTER), ROWWISE, "lora_A", "adapter"),
    refused("l01 an adapter inside a model", of({f"{MLP}up_proj.base_layer.weight": count(4, 4), UP: count(4, 4)}),
            {"model.layers.*.mlp.up_proj": "colwise"}, "base_layer", "adapter"),
)  # fmt: skip
