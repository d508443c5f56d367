"""Arguments with entries for all heads: how a plan says them, what a split holds of them, what a rank takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from loader.steps import Sequence, Site, make_step
from manifests.errors import LoadError, PlanError
from manifests.manifest import Input, Module, read_manifest
from reshard import split

PLAN: dict[str, Any] = {
    "plan": {
        "layers.*.attn.q": {"style": "colwise", "layout": "(KV@kv, g@rep, 4)"},
        "layers.*.attn.k": {"style": "colwise", "layout": "(KV@kv, 4)"},
    },
    "sizes": {"KV": "groups", "g": "heads / groups"},
    "inputs": {"layers.*.attn": {"slopes": "(KV@kv, g@rep)", "mask": {"layout": "(KV@kv, g@rep)", "dim": 1}}},
}


def checkpoint(folder: Path) -> Path:
    """Two layers, of which the second has no queries."""
    shapes = {"layers.0.attn.q.weight": (32, 8), "layers.0.attn.k.weight": (8, 8), "layers.1.attn.k.weight": (8, 8)}
    folder.mkdir()
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"heads": 8, "groups": 2}))
    return folder


def test_a_split_holds_them_with_the_mesh_of_their_heads(tmp_path: Path) -> None:
    split(checkpoint(tmp_path / "model"), tmp_path / "out", tp=4, plan=PLAN)
    mesh = (("kv", 2), ("rep", 2))
    expected = (Input("slopes", 0, "(2@kv, 4@rep)", mesh), Input("mask", 1, "(2@kv, 4@rep)", mesh))
    modules = read_manifest(tmp_path / "out").modules
    assert modules["layers.0.attn"] == Module("replicate", inputs=expected)
    assert modules["layers.1.attn"].inputs == expected


def test_patterns_have_conditions(tmp_path: Path) -> None:
    inputs = {"layers.*.attn": {"slopes": "(KV@kv, g@rep)"}, "layers.*.attn[q]": {"other": "(KV@kv, g@rep)"}}
    attributes = {"layers.*.attn": {"heads": "8 / kv / rep"}, "layers.*.attn[q]": {"heads": "(8 + 8) / kv / rep"}}
    plan = {**PLAN, "inputs": inputs, "attributes": attributes}
    split(checkpoint(tmp_path / "model"), tmp_path / "out", tp=2, plan=plan)
    manifest = read_manifest(tmp_path / "out")
    names = [[entry.name for entry in manifest.modules[f"layers.{n}.attn"].inputs] for n in (0, 1)]
    assert names == [["other"], ["slopes"]]
    assert [manifest.attributes[f"layers.{n}.attn"] for n in (0, 1)] == [{"heads": 8}, {"heads": 4}]


def test_one_rank_takes_all(tmp_path: Path) -> None:
    split(checkpoint(tmp_path / "model"), tmp_path / "out", tp=1, plan=PLAN)
    assert not any(module.inputs for module in read_manifest(tmp_path / "out").modules.values())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (4, r"inputs\.a\.slopes: a layout or a table with layout and dim expected, got 4"),
        ({"layout": "(8*)", "side": 1}, r"inputs\.a\.slopes: a layout or a table with layout and dim expected"),
        ({"layout": "(8*)", "dim": "1"}, r"inputs\.a\.slopes: dim '1' is not a whole number"),
    ],
)
def test_malformed(entry: object, message: str, tmp_path: Path) -> None:
    plan = {**PLAN, "inputs": {"a": {"slopes": entry}}}
    with pytest.raises(PlanError, match=message):
        split(checkpoint(tmp_path / "model"), tmp_path / "out", tp=2, plan=plan)


def test_a_size_that_is_not_known(tmp_path: Path) -> None:
    plan = {**PLAN, "inputs": {"layers.*.attn": {"slopes": "(depth*)"}}}
    with pytest.raises(PlanError, match=r"inputs of layers\.0\.attn: '\(depth\*\)': the size 'depth' is not known"):
        split(checkpoint(tmp_path / "model"), tmp_path / "out", tp=2, plan=plan)


class Attention(nn.Module):
    """Gives back what it gets."""

    def forward(
        self, states: torch.Tensor, slopes: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        return states, slopes, mask


ENTRIES = (Input("slopes", 0, "(2@kv, 2@rep)", (("kv", 2), ("rep", 2))), Input("mask", 1, "(2, 4*)", (("tp", 4),)))


def on_rank(rank: int, monkeypatch: pytest.MonkeyPatch, *inputs: Input) -> Attention:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    module = Attention()
    step = make_step("take_inputs", Site(module, Module("replicate", inputs=inputs), None, Sequence()))
    assert step.before is not None
    module.register_forward_pre_hook(step.before, with_kwargs=True)
    return module


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_takes_its_own_of_every_repetition(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: slopes for 3 sequences of 4 heads; a mask of 2 blocks of 4 heads."""
    attention = on_rank(rank, monkeypatch, *ENTRIES)
    states, slopes, mask = torch.zeros(3, 2), torch.arange(12).view(12, 1), torch.arange(48).view(3, 8, 2)
    for given in (attention(states, slopes, mask), attention(states, slopes=slopes, mask=mask)):
        assert given[0] is states
        assert given[1].flatten().tolist() == [rank, 4 + rank, 8 + rank]
        assert torch.equal(given[2], mask[:, [rank, 4 + rank]])


def test_what_is_one_for_all_heads_or_not_passed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = on_rank(1, monkeypatch, *ENTRIES)
    mask = torch.ones(3, 1, 2)
    assert attention(torch.zeros(3, 2), None, mask)[1:] == (None, mask)
    assert attention(torch.zeros(3, 2))[1:] == (None, None)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = on_rank(1, monkeypatch, *ENTRIES)
    with pytest.raises(LoadError, match="its input 'slopes' has 6 entries in dimension 0, its split expects 4 or a"):
        attention(torch.zeros(3, 2), torch.zeros(6, 1))
    with pytest.raises(LoadError, match="Attention: its forward takes no 'bias', of which the split takes a part"):
        on_rank(0, monkeypatch, Input("bias", 0, "(4*)", (("tp", 4),)))
