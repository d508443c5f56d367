"""Numbers converted at the split: against torch, and against what transformers loads in that dtype."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from manifests.errors import ManifestError, PlanError
from reshard import merge, plan, report, split, verify
from reshard.engine.conversion import convert
from tests.checkpoints import count, files_of, mentions, of_rank, raw, save

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def all_numbers(dtype: str) -> Tensor:
    """Every number of 16 bits; of wider dtypes those, their neighbours, ties between them, and any."""
    if dtype in ("F16", "BF16"):
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(TORCH[dtype])
    halves = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([halves + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = torch.cat([bits, torch.randint(0, 1 << 32, (1 << 17,), generator=torch.Generator().manual_seed(0))])
    singles = bits.to(torch.uint32).view(torch.float32)
    near_halves = all_numbers("F16").float()
    singles = torch.cat([singles, near_halves * (1 + 2**-11), near_halves * (1 + 2**-11 + 2**-20)])
    return singles if dtype == "F32" else torch.cat([singles.double() * (1 + 2.0**-40), singles.double()])


@pytest.mark.parametrize(("source", "target"), [*product(TORCH, ("F32", "F16", "BF16"))])
def test_every_number_becomes_what_torch_makes_of_it(source: str, target: str) -> None:
    numbers = all_numbers(source)
    expected = numbers.to(TORCH[target])
    made = np.empty(expected.nbytes, np.uint8)
    convert(np.frombuffer(raw(numbers), np.uint8), source, made, target)
    found = torch.from_numpy(made).view(TORCH[target])
    assert torch.equal(found.isnan(), expected.isnan())
    # Bit for bit, so that the sign of a zero counts; which NaN it is does not.
    bits = torch.int32 if target == "F32" else torch.int16
    assert torch.equal(found.view(bits)[~found.isnan()], expected.view(bits)[~found.isnan()])


TENSORS = {
    "up.weight": count(4, 6, dtype=torch.float32) / 3,
    "down.weight": (count(6, 4, dtype=torch.bfloat16) / 7),
    "half": count(5, dtype=torch.float16) / 3,
    "steps": count(3, dtype=torch.int64),
    "mask": torch.tensor([True, False]),
}
RULES = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_parts_hold_the_converted_numbers(tmp_path: Path, dtype: str) -> None:
    folder = save(tmp_path / "m", TENSORS)
    manifest = split(folder, tmp_path / "out", tp=2, plan=RULES, dtype=dtype)
    verify(tmp_path / "out")
    wanted = {name: x.to(getattr(torch, dtype)) if x.is_floating_point() else x for name, x in TENSORS.items()}
    for rank in range(2):
        expected = wanted | {
            "up.weight": wanted["up.weight"].chunk(2)[rank],
            "down.weight": wanted["down.weight"].chunk(2, 1)[rank],
        }
        held = {name: data for name, (_, _, data) in of_rank(tmp_path / "out", rank, 2).items()}
        assert held == {name: raw(x) for name, x in expected.items()}
    changed = {name for name, x in TENSORS.items() if wanted[name].dtype != x.dtype}
    assert {name for name, tensor in manifest.tensors.items() if tensor.cast} == changed
    # The source's own hashes are of the source.
    plain = split(folder, tmp_path / "plain", tp=2, plan=RULES)
    assert plain.source == manifest.source
    assert plain.key != manifest.key


def test_a_merge_of_converted_numbers_says_so(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    split(folder, tmp_path / "out", tp=2, plan=RULES, dtype="bfloat16")
    with pytest.raises(ManifestError) as caught:
        merge(tmp_path / "out", tmp_path / "back")
    assert mentions(caught.value, tmp_path / "out", "converted 2 source tensors", "--converted")
    assert not (tmp_path / "back").exists()
    made = merge(tmp_path / "out", tmp_path / "back", converted=True)
    assert set(made.converted) == {"up.weight", "half"}
    assert (made.identical, made.rewritten) == ((), ("model.safetensors",))
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, x in TENSORS.items():
        assert torch.equal(found[name], x.to(torch.bfloat16) if x.is_floating_point() else x)


def test_a_dtype_that_changes_nothing_is_no_conversion(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"a.weight": count(4, 4, dtype=torch.bfloat16)})
    split(folder, tmp_path / "out", tp=2, plan={"a": "colwise"}, dtype="bfloat16")
    merge(tmp_path / "out", tmp_path / "back")
    name = "model.safetensors"
    assert files_of(tmp_path / "back")[name] == files_of(folder)[name]


def test_the_report_counts_what_is_converted(tmp_path: Path) -> None:
    facts = report.build_split(plan(save(tmp_path / "m", TENSORS), tp=2, plan=RULES, dtype="bfloat16"))
    assert facts["converted"] == [
        {"from": "F16", "to": "BF16", "tensors": 1},
        {"from": "F32", "to": "BF16", "tensors": 1},
    ]
    assert facts["not_converted"] == []


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_an_unknown_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", TENSORS), tp=2, plan=RULES, dtype=dtype)
    assert mentions(caught.value, dtype, "bfloat16, float16, float32")


def test_a_quantized_checkpoint_is_not_converted(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", TENSORS, config), tp=2, plan=RULES, dtype="bfloat16")
    assert mentions(caught.value, "bfloat16", "quantized")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_what_transformers_keeps_in_float32_is_kept(tmp_path: Path, stored: str, dtype: str) -> None:
    """A Glm4Moe, whose router stays in float32, and a gpt-oss-like rule for float16 alone is in its table."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).to(getattr(torch, stored)).save_pretrained(tmp_path / "m")
    expected = Glm4MoeForCausalLM.from_pretrained(tmp_path / "m", dtype=getattr(torch, dtype)).state_dict()
    split(tmp_path / "m", tmp_path / "out", tp=1, dtype=dtype)
    held = of_rank(tmp_path / "out", 0, 1)
    assert set(held) <= set(expected)
    for name, (_, _, data) in held.items():
        assert data == raw(expected[name]), name
    kept = {name for name in held if expected[name].dtype != getattr(torch, dtype)}
    assert kept == ({name for name in held if ".gate." in name} if dtype != "float32" else set())
    facts = report.build_split(plan(tmp_path / "m", tp=1, dtype=dtype))
    assert set(facts["not_converted"]) == kept
    json.dumps(facts)
