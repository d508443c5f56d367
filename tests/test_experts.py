"""Experts divided over ranks: the bytes of every rank against torch slices, the steps, and what is refused."""

from pathlib import Path

import msgspec
import pytest
import torch

from loader import open_shard
from manifests.errors import DegreeError, ManifestError, PlanError
from manifests.manifest import encode_manifest
from reshard import merge, plan, split, verify
from tests.checkpoints import Stored, count, mentions, of_rank, raw, save

E, INNER, HIDDEN = 4, 6, 5
GATE_UP, DOWN = count(E, 2 * INNER, HIDDEN), count(E, HIDDEN, INNER, start=1000)
ROUTER = count(E, HIDDEN, start=5000)
TENSORS = {"moe.experts.gate_up_proj": GATE_UP, "moe.experts.down_proj": DOWN, "moe.router.weight": ROUTER}
PLAN = {
    "plan": {
        "moe.experts.gate_up_proj": "packed_colwise",
        "moe.experts.down_proj": "rowwise",
        "moe.experts": "moe_tp_experts",
    },
    "experts": {
        "moe.experts.gate_up_proj": "grouped_gemm",
        "moe.experts.down_proj": "grouped_gemm",
        "moe.experts": "ep_dispatch_experts",
    },
}


def stored(tensor: torch.Tensor) -> Stored:
    return "F32", tuple(tensor.shape), raw(tensor)


def test_experts_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    manifest = split(folder, tmp_path / "out", tp=2, experts=2, plan=PLAN)
    for rank in range(2):
        mine = of_rank(tmp_path / "out", rank, 2)
        assert mine["moe.experts.gate_up_proj"] == stored(GATE_UP.chunk(2)[rank])
        assert mine["moe.experts.down_proj"] == stored(DOWN.chunk(2)[rank])
        assert mine["moe.router.weight"] == stored(ROUTER)
    step = manifest.modules["moe.experts"]
    assert (step.before, step.after, step.axis) == ("route_local", "all_reduce", "(4@ep)")
    assert step.mesh == (("ep", 2), ("rep", 1))


@pytest.mark.parametrize(("ep", "parts"), [(2, 3), (4, 3)])
def test_experts_and_their_width(tmp_path: Path, ep: int, parts: int) -> None:
    """Ranks are experts times parts of an expert; gate and up are each cut by themselves."""
    folder = save(tmp_path / "m", TENSORS)
    split(folder, tmp_path / "out", tp=ep * parts, experts=ep, plan=PLAN)
    for rank in range(ep * parts):
        group, part = divmod(rank, parts)
        gate, up = GATE_UP.chunk(ep)[group].chunk(2, 1)
        mine = of_rank(tmp_path / "out", rank, ep * parts)
        expected = torch.cat([gate.chunk(parts, 1)[part], up.chunk(parts, 1)[part]], 1)
        assert mine["moe.experts.gate_up_proj"] == stored(expected)
        assert mine["moe.experts.down_proj"] == stored(DOWN.chunk(ep)[group].chunk(parts, 2)[part])
    verify(tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_without_ep_the_rules_for_divided_experts_do_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    manifest = split(folder, tmp_path / "out", tp=2, plan=PLAN)
    assert manifest.modules["moe.experts"].before == ""
    assert of_rank(tmp_path / "out", 1, 2)["moe.experts.down_proj"] == stored(DOWN.chunk(2, 2)[1])


def test_another_mesh_is_another_key(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    keys = {plan(folder, tp=2, experts=experts, plan=PLAN).key for experts in (1, 2)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("tp", "ep", "words"),
    [
        (4, 3, ("ep", "3", "4")),
        (2, 0, ("ep", "0")),
        (2, 4, ("ep", "4", "2")),
    ],
)
def test_ep_that_is_no_divisor_is_refused(tmp_path: Path, tp: int, ep: int, words: tuple[str, ...]) -> None:
    folder = save(tmp_path / "m", TENSORS)
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=tp, experts=ep, plan=PLAN)
    assert mentions(caught.value, *words)


@pytest.mark.parametrize("ep", [3, 8])
def test_parts_that_do_not_divide_the_experts_are_refused(tmp_path: Path, ep: int) -> None:
    folder = save(tmp_path / "m", TENSORS)
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=ep, experts=ep, plan=PLAN)
    assert mentions(caught.value, "moe.experts.down_proj", "4@ep", f"ep {ep}", "ep must divide the 4 experts")


def test_experts_that_no_rule_divides_are_copied(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    bare = {"plan": {"moe.router": "replicate"}, "experts": PLAN["experts"]}
    manifest = split(folder, tmp_path / "out", tp=4, experts=2, plan=bare)
    assert manifest.modules["moe.experts"].mesh == (("ep", 2), ("rep", 2))
    for rank in range(4):
        mine = of_rank(tmp_path / "out", rank, 4)
        assert mine["moe.experts.down_proj"] == stored(DOWN.chunk(2)[rank // 2])
    merge(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_parameters_of_an_expert_are_all_divided_or_none(tmp_path: Path) -> None:
    """A bias that is whole on the ranks that share an expert would be counted by each."""
    bias = count(E, HIDDEN, start=9000)
    folder = save(tmp_path / "m", {**TENSORS, "moe.experts.down_proj_bias": bias})
    rules = {**PLAN, "experts": {**PLAN["experts"], "moe.experts.down_proj_bias": "grouped_gemm"}}
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=4, experts=2, plan=rules)
    assert mentions(caught.value, "moe.experts.down_proj_bias", "ep 4")


def test_a_plan_without_rules_for_experts_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, experts=2, plan=PLAN["plan"])
    assert mentions(caught.value, "ep 2", "experts")


def test_dispatch_without_divided_experts_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", TENSORS)
    alone = {"plan": PLAN["plan"], "experts": {"moe.experts": "ep_dispatch_experts"}}
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, experts=2, plan=alone)
    assert mentions(caught.value, "moe.experts", "ep_dispatch_experts")


def test_a_free_factor_is_what_remains_of_the_dimension(tmp_path: Path) -> None:
    """Heads of an unknown width stay whole: 3 heads of 4 rows on 3 ranks, and not on 2."""
    weight = count(12, 5)
    folder = save(tmp_path / "m", {"m.weight": weight}, {"num_attention_heads": 3})
    layout = {"m": {"style": "colwise", "layout": "(H*, ?)"}}
    split(folder, tmp_path / "out", tp=3, plan=layout)
    assert [of_rank(tmp_path / "out", rank, 3)["m.weight"] for rank in range(3)] == [stored(x) for x in weight.chunk(3)]
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=2, plan=layout)
    assert mentions(caught.value, "m.weight", "(3*, 4)")


def test_a_free_factor_that_does_not_come_out_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", {"m.weight": count(10, 5)}, {"num_attention_heads": 3})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=3, plan={"m": {"style": "colwise", "layout": "(H*, ?)"}})
    assert mentions(caught.value, "m.weight", "multiple of 3", "10")


def test_a_bias_of_the_rank_that_counts_it_must_be_in_its_file(tmp_path: Path) -> None:
    """With pairs of ranks for each half of the experts, the first of each pair counts the bias: ranks 0 and 2."""
    bias = count(E, HIDDEN, start=9000)
    counted = {"moe.experts.down_proj_bias": "partial"}
    divided = {"moe.experts.down_proj_bias": "grouped_gemm"}
    rules = {"plan": PLAN["plan"] | counted, "experts": PLAN["experts"] | divided}
    folder = save(tmp_path / "m", {**TENSORS, "moe.experts.down_proj_bias": bias})
    out = tmp_path / "out"
    manifest = split(folder, out, tp=4, experts=2, plan=rules)
    parts = [open_shard(out, rank)["moe.experts.down_proj_bias"] for rank in range(4)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, bias.chunk(2)[rank // 2] if rank % 2 == 0 else torch.zeros(2, HIDDEN))
    name = "rank-00002-of-00004.safetensors"
    files = []
    for file in manifest.files:
        held = {key: extent for key, extent in file.tensors.items() if "bias" not in key or file.name != name}
        files.append(msgspec.structs.replace(file, tensors=held))
    (out / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=tuple(files))))
    with pytest.raises(ManifestError) as caught:
        open_shard(out, 2)
    assert mentions(caught.value, "moe.experts.down_proj_bias", "rank 2", "in none of its files")
    assert len(list(open_shard(out, 3))) == len(manifest.tensors)


def test_a_plan_that_keeps_experts_whole_divides_them_over_all_ranks(tmp_path: Path) -> None:
    """Nobody asks for it: the table `plan` has the rules. Asked to divide them over fewer, the others are copies."""
    folder = save(tmp_path / "m", TENSORS)
    both = {"plan": PLAN["experts"], "experts": PLAN["experts"]}
    for experts, parts in ((1, 4), (2, 2)):
        out = tmp_path / str(experts)
        manifest = split(folder, out, tp=4, experts=experts, plan=both)
        assert manifest.modules["moe.experts"].mesh == (("ep", parts), ("rep", 4 // parts))
        for rank in range(4):
            mine = of_rank(out, rank, 4)
            assert mine["moe.experts.down_proj"] == stored(DOWN.chunk(parts)[rank * parts // 4])
            assert mine["moe.router.weight"] == stored(ROUTER)
        merge(out, tmp_path / f"back {experts}")
        merged = tmp_path / f"back {experts}/model.safetensors"
        assert merged.read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(DegreeError) as caught:
        plan(folder, tp=3, plan=both["plan"])
    assert mentions(caught.value, "moe.experts.down_proj", "4", "tp 1, 2, 4 would do")
