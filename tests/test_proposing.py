"""Proposed plans: what shapes decide, what they leave open, and that what is proposed computes what one process does.

The rules of the 40 types were recorded by ``python -m tools.proposals``, which runs every proposal in 2 and in 4
processes and compares logits and tokens with one. Here they are proposed again and must be the recorded ones; a sample
of them is run again, and all with ``FULL=1``.
"""

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import zeros

from manifests.errors import PlanError
from reshard import check, plan, propose, split
from reshard.cli import main
from reshard.model import RuntimeTensor
from reshard.options import Options
from reshard.planfile import read_plan
from reshard.proposing import Proposal, format_plan
from reshard.proposing import propose as propose_for
from reshard.resolving import resolve_model
from reshard.sources.checkpoint import open_checkpoint
from reshard.sources.folder import LocalFolder
from tests.test_docs import run
from tests.test_real_models import model_folder
from tools.proposals import (
    DRAWN,
    RECORDED,
    Proof,
    case_of,
    make_model,
    propose_scrambled,
    prove,
    scramble_config,
    scramble_name,
)

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 90,
}
PAGE = (Path(__file__).parent.parent / "docs" / "auto.md").read_text()
FULL = bool(os.environ.get("FULL"))
SAMPLE = ("cohere", "falcon", "glm_moe_dsa", "t5gemma", "yoso")
Shapes = Mapping[str, tuple[int, ...]]

GROUPED = {
    "n.weight": (64,),
    "a.q.weight": (96, 64),
    "a.k.weight": (48, 64),
    "a.v.weight": (48, 64),
    "a.o.weight": (64, 96),
}
GATED = {"n.weight": (64,), "m.g.weight": (160, 64), "m.u.weight": (160, 64), "m.d.weight": (64, 160)}


def of_blocks(
    block: Shapes, blocks: int = 2, ranks: int = 2, config: Mapping[str, Any] = CONFIG, **others: Any
) -> Proposal:
    """Return what is proposed for a model of equal blocks."""
    shapes = {f"m.l.{number}.{name}": shape for number in range(blocks) for name, shape in block.items()} | others
    return propose_for({name: RuntimeTensor("F32", shape) for name, shape in shapes.items()}, config, ranks)


def styles(proposal: Proposal) -> dict[str, str]:
    """Return the styles that are proposed, by the ends of their patterns."""
    rules = [rule for rule in proposal.rules if rule.confidence != "guess"]
    return {rule.pattern.removeprefix("m.l.*."): rule.style for rule in rules}


def why_whole(proposal: Proposal, name: str) -> str:
    (reason,) = [whole.reason for whole in proposal.whole if whole.pattern == name]
    return reason


def test_two_that_expand_and_one_that_contracts() -> None:
    proposal = of_blocks(GATED)
    assert styles(proposal) == {"m.g": "colwise", "m.u": "colwise", "m.d": "rowwise"}
    assert {rule.confidence for rule in proposal.rules} == {"certain"}
    assert "g 64->160 and u 64->160 into d 160->64" in proposal.rules[0].reason
    assert "160 is intermediate_size" in proposal.rules[0].reason


def test_without_a_configuration_the_width_is_that_of_the_norms() -> None:
    proposal = of_blocks(GATED, config={})
    assert styles(proposal) == {"m.g": "colwise", "m.u": "colwise", "m.d": "rowwise"}
    assert {rule.confidence for rule in proposal.rules} == {"likely"}
    # Nothing tells which of the two widths is that of the hidden states.
    assert not of_blocks({name: shape for name, shape in GATED.items() if name != "n.weight"}, config={}).rules


def test_one_that_expands_is_a_pair_only_if_its_width_is_a_known_one() -> None:
    pair = {"n.weight": (64,), "m.u.weight": (160, 64), "m.d.weight": (64, 160)}
    assert styles(of_blocks(pair)) == {"m.u": "colwise", "m.d": "rowwise"}
    gathered = of_blocks(pair, config={**CONFIG, "intermediate_size": 48})
    assert styles(gathered) == {"m.u": "colwise_gather_output", "m.d": "rowwise_split_input"}
    assert "may be met by something whole" in gathered.rules[0].reason


def test_a_norm_between_them_makes_gathered_ones() -> None:
    proposal = of_blocks({**GATED, "m.inner.weight": (160,)})
    assert set(styles(proposal).values()) == {"colwise_gather_output", "rowwise_split_input"}
    assert "m.inner" not in styles(proposal)
    assert "inner.weight may be over their features" in proposal.rules[0].reason


def test_features_that_are_looked_at_together() -> None:
    proposal = of_blocks(GATED, config={**CONFIG, "activation_sparsity_pattern": [0.95, 0.0]})
    assert set(styles(proposal).values()) == {"colwise_gather_output", "rowwise_split_input"}


def test_features_that_may_be_heads() -> None:
    proposal = of_blocks(GATED, config={**CONFIG, "intermediate_size": 48, "num_attention_heads": 5, "head_dim": 32})
    assert set(styles(proposal).values()) == {"colwise_gather_output", "rowwise_split_input"}
    assert "160 is as wide as all heads" in proposal.rules[0].reason


def test_one_fused_layer_has_an_order_that_shapes_do_not_show() -> None:
    fused = {"n.weight": (64,), "m.gu.weight": (320, 64), "m.d.weight": (64, 160)}
    assert styles(of_blocks(fused)) == {"m.gu": "colwise_gather_output", "m.d": "rowwise_split_input"}


def test_grouped_heads() -> None:
    proposal = of_blocks(GROUPED)
    assert {rule.pattern[6:]: rule.line for rule in proposal.rules} == {
        "a.q": {"style": "colwise", "layout": "(4*, 24)"},
        "a.k": {"style": "colwise", "layout": "(2*, 24)"},
        "a.v": {"style": "colwise", "layout": "(2*, 24)"},
        "a.o": {"style": "rowwise", "layout": "(4*, 24)"},
    }
    assert {rule.confidence for rule in proposal.rules} == {"likely"}
    assert "if the module takes its number of heads from the shape" in proposal.rules[0].reason


ALL_GATHERED = {
    "a.q": "colwise_gather_output",
    "a.k": "colwise_gather_output",
    "a.v": "colwise_gather_output",
    "a.o": "rowwise_split_input",
}


@pytest.mark.parametrize(
    ("change", "config", "ranks", "reason"),
    [
        ({}, CONFIG, 4, "4 heads, 2 of keys and values, which 4 ranks do not divide"),
        ({}, {"hidden_size": 64}, 2, "no number of heads in config.json fits"),
        ({}, {**CONFIG, "num_attention_heads": 5}, 2, "no number of heads in config.json fits"),
        ({"a.n.weight": (96,)}, CONFIG, 2, "what n.weight does to its heads is not known"),
        ({"a.sinks": (4,)}, CONFIG, 2, "what a.sinks does to its heads is not known"),
        (
            {"a.k.weight": (96, 64), "a.v.weight": (96, 64)},
            CONFIG,
            2,
            "nothing shows that they are counted by the shape",
        ),
    ],
)
def test_heads_that_are_better_not_divided(change: Shapes, config: dict[str, Any], ranks: int, reason: str) -> None:
    proposal = of_blocks({**GROUPED, **change}, config=config, ranks=ranks)
    assert styles(proposal) == ALL_GATHERED
    assert all(reason in rule.reason and rule.confidence == "certain" for rule in proposal.rules)


def test_blocks_that_use_what_another_computes() -> None:
    without = {"a.q.weight": (96, 64), "a.o.weight": (64, 96), "n.weight": (64,)}
    others = {f"m.l.2.{name}": shape for name, shape in without.items()}
    assert styles(of_blocks(GROUPED, **others)) == ALL_GATHERED


SQUARE = {**GROUPED, "a.q.weight": (64, 64), "a.o.weight": (64, 64), "a.k.weight": (32, 64), "a.v.weight": (32, 64)}


def test_a_square_output_is_not_told_from_square_queries() -> None:
    names = {name.replace("a.q.", "a.x.").replace("a.o.", "a.y."): shape for name, shape in SQUARE.items()}
    assert set(styles(of_blocks(names)).values()) == {"colwise_gather_output"}


def test_a_square_output_is_known_by_its_bias() -> None:
    biased = {name.replace("weight", "bias"): shape[:1] for name, shape in SQUARE.items() if name[2] in "qkv"}
    names = {**SQUARE, **biased}
    assert styles(of_blocks({name.replace("a.o.", "a.p."): shape for name, shape in names.items()}))["a.p"] == "rowwise"


def test_a_square_output_is_known_by_its_name() -> None:
    assert styles(of_blocks(SQUARE))["a.o"] == "rowwise"


def test_weights_that_are_turned_are_known_by_their_bias() -> None:
    turned = {
        "n.weight": (64,),
        "m.u.weight": (64, 160),
        "m.u.bias": (160,),
        "m.d.weight": (160, 64),
        "m.d.bias": (64,),
    }
    proposal = of_blocks({**turned, "s.weight": (64, 64), "s.bias": (64,)})
    assert {rule.pattern: rule.line for rule in proposal.rules} == {
        "m.l.*.m.u": {"style": "colwise", "dim": 1},
        "m.l.*.m.d": {"style": "rowwise", "dim": 0},
    }
    assert proposal.attributes == {"m.l.*.m.u": {"nf": "160 / tp"}}
    assert "whether its weight is (out, in) or (in, out) is not known" in why_whole(proposal, "m.l.*.s.weight")


STACKED = {"n.weight": (64,), "e.up": (8, 96, 64), "e.down": (8, 64, 48), "r.weight": (8, 64)}


def test_stacked_experts() -> None:
    proposal = of_blocks(STACKED, config={**CONFIG, "num_experts": 8})
    assert styles(proposal) == {"e.up": "packed_colwise", "e.down": "rowwise", "e": "moe_tp_experts"}
    assert "may choose among experts" in why_whole(proposal, "m.l.*.r.weight")
    # Not the number of experts that the configuration has.
    assert not of_blocks(STACKED, config={**CONFIG, "num_experts": 4}).rules


def test_turned_experts_are_a_guess_and_no_rule() -> None:
    turned = {"n.weight": (64,), "e.up": (8, 64, 96), "e.down": (8, 48, 64), "r.weight": (8, 64)}
    proposal = of_blocks(turned, config={**CONFIG, "num_experts": 8})
    assert {rule.confidence for rule in proposal.rules} == {"guess"}
    assert [rule.line for rule in proposal.rules][:2] == [
        {"style": "packed_colwise", "dim": 2},
        {"style": "rowwise", "dim": 1},
    ]
    assert proposal.document == {"plan": {}}
    assert why_whole(proposal, "m.l.*.e.up") == "a guess, which is a comment above"


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ({"e.bias": (8, 64)}, 2, "bias would be added by every rank"),
        ({"e.norm.weight": (64,)}, 2, "weight would be added by every rank, or see a summand"),
        ({}, 5, "5 ranks do not divide 48"),
        ({}, 16, "3 numbers a rank are no multiple of 16 bytes"),
    ],
)
def test_experts_that_are_left_whole(change: Shapes, ranks: int, reason: str) -> None:
    proposal = of_blocks({**STACKED, **change}, config={**CONFIG, "num_experts": 8}, ranks=ranks)
    assert not any(rule.pattern.startswith("m.l.*.e") for rule in proposal.rules)
    assert reason in why_whole(proposal, "m.l.*.e.up")


def test_experts_one_by_one_are_feed_forward_modules() -> None:
    each = {f"e.{number}.{name[2:]}": shape for number in range(4) for name, shape in GATED.items() if name[0] == "m"}
    proposal = of_blocks({"n.weight": (64,), **each, "r.weight": (4, 64)}, config={**CONFIG, "num_experts": 4})
    assert styles(proposal) == {"e.*.g": "colwise", "e.*.u": "colwise", "e.*.d": "rowwise"}


def test_layers_that_differ_have_rules_of_their_own() -> None:
    wide = {f"m.l.2.m.{name}.weight": shape for name, shape in (("g", (320, 64)), ("u", (320, 64)), ("d", (64, 160)))}
    proposal = of_blocks(GATED, **wide)
    assert styles(proposal)["m.g"] == "colwise"
    assert styles(proposal)["m.l.2.m.g"] == "colwise_gather_output"
    assert {rule.pattern: rule.taken for rule in proposal.rules}["m.l.*.m.g"] == 2


TABLES = {"m.e.weight": (90, 64), "h.weight": (90, 64)}


def test_embedding_and_output_layer() -> None:
    proposal = of_blocks(GATED, **TABLES)
    assert styles(proposal)["m.e"] == "embedding_rowwise"
    assert styles(proposal)["h"] == "colwise_gather_output"
    alike = of_blocks(GATED, **{"m.e.weight": (90, 64), "m.h.weight": (90, 64)})
    assert styles(alike) == styles(of_blocks(GATED))
    assert "which is which is not known" in why_whole(alike, "m.h.weight")
    biased = of_blocks(GATED, **{"m.e.weight": (90, 64), "m.h.weight": (90, 64), "m.h.bias": (90,)})
    assert (styles(biased)["m.e"], styles(biased)["m.h"]) == ("embedding_rowwise", "colwise_gather_output")


def test_the_only_table_may_be_the_output_layer_too() -> None:
    table = {"m.e.weight": (90, 64)}
    assert "may be tied to it" in why_whole(of_blocks(GATED, **table), "m.e.weight")
    causal = {**CONFIG, "architectures": ["NewLMHeadModel"]}
    assert "may be tied to it" in why_whole(of_blocks(GATED, config=causal, **table), "m.e.weight")
    assert (
        styles(of_blocks(GATED, config={**CONFIG, "architectures": ["NewModel"]}, **table))["m.e"]
        == "embedding_rowwise"
    )


def test_what_may_be_no_linear_layer_is_whole() -> None:
    own = {"n.weight": (64,), "a.in_weight": (192, 64), "a.o.weight": (64, 64)}
    assert "a matrix without a module" in why_whole(of_blocks(own), "m.l.*.a.o.weight")
    heads = {**GROUPED, "a.qn.weight": (4, 24)}
    assert "a.qn" not in styles(of_blocks(heads))


def test_a_file_says_what_the_proposal_is(tmp_path: Path) -> None:
    proposal = of_blocks({**STACKED, **GATED}, config={**CONFIG, "num_experts": 8})
    text = format_plan(proposal, "new")
    assert tomllib.loads(text) == proposal.document
    file = tmp_path / "plan.toml"
    file.write_text(text)
    assert [rule.pattern for rule in read_plan(file).rules] == [rule.pattern for rule in proposal.rules]
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert all(rule.reason in comments and f"{rule.confidence}: " in comments for rule in proposal.rules)
    assert all(f"{whole.pattern}, " in comments and whole.reason in comments for whole in proposal.whole)
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    (tmp_path / "smollm2").symlink_to(model_folder("smollm2"))
    ((command, output),) = [block.split("\n", 1) for block in re.findall(r"```console\n\$ (.*?)```", PAGE, re.DOTALL)]
    assert run(command, tmp_path) == output
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert shown in (tmp_path / "smollm2-tp3-plan.toml").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of no class."""
    folder = tmp_path_factory.mktemp("proposing") / "new"
    folder.mkdir()
    shapes = {f"m.l.{number}.{name}": shape for number in range(2) for name, shape in {**GROUPED, **GATED}.items()}
    save_file({name: zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_split_by_a_proposal_is_refused_and_the_plan_left(checkpoint: Path) -> None:
    done = CliRunner().invoke(main, [str(checkpoint), "--tp", "2", "--plan", "auto"])
    file = checkpoint.with_name("new-tp2-plan.toml")
    assert done.exit_code == PlanError.exit_code
    assert f"reshard check {checkpoint} --tp 2 --plan {file}; then split with --plan {file}" in done.stderr
    assert not checkpoint.with_name("new-tp2").exists()
    assert file.read_text() == format_plan(propose(checkpoint, tp=2), str(checkpoint))
    again = CliRunner().invoke(main, [str(checkpoint), "--tp", "2", "--plan", "auto"])
    assert (again.exit_code, "exists; --force replaces it" in again.stderr) == (5, True)
    other = checkpoint.with_name("other.toml")
    CliRunner().invoke(main, [str(checkpoint), "--tp", "2", "--plan", "auto", "--write-plan", str(other)])
    by_file, by_proposal = plan(checkpoint, tp=2, plan=other), plan(checkpoint, tp=2, plan="auto")
    assert by_file.resolution.tensors == by_proposal.resolution.tensors
    split(checkpoint, checkpoint.with_name("new-tp2"), tp=2, plan=other)


def test_the_library_refuses_as_well(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not run unproved"):
        split(checkpoint, tmp_path / "out", tp=2, plan="auto")
    with pytest.raises(PlanError, match="not run unproved"):
        resolve_model({"a": ("F32", (4,))}, {}, "auto", 2, ties={}, label="a")
    with pytest.raises(PlanError, match="no rule can be proposed for tp 7"):
        plan(checkpoint, tp=7, plan="auto")
    assert not (tmp_path / "out").exists()


def test_the_proposal_is_printed(checkpoint: Path) -> None:
    done = CliRunner().invoke(main, ["plan", str(checkpoint), "--tp", "2", "--plan", "auto"])
    assert (done.exit_code, done.stdout) == (0, format_plan(propose(checkpoint, tp=2), str(checkpoint)))
    facts = json.loads(
        CliRunner().invoke(main, ["plan", str(checkpoint), "--tp", "2", "--plan", "auto", "--json"]).stdout
    )
    assert {rule["confidence"] for rule in facts["rules"]} == {"certain", "likely"}
    assert facts["document"] == propose(checkpoint, tp=2).document
    dry = CliRunner().invoke(main, [str(checkpoint), "--tp", "2", "--plan", "auto", "--dry-run"])
    assert (dry.exit_code, "the plan proposed for tp 2" in dry.stdout) == (0, True)


def test_check_proves_a_proposal_for_a_type_without_a_plan(work: Path) -> None:
    model = make_model(case_of("gpt2", 2), work)
    facts = check(model, tp=2, plan="auto")
    assert (facts["right"], facts["plan"]) == (True, "the plan proposed for tp 2")
    assert facts["collectives"] == {"allreduce": 4, "allgather_base": 4}


RECORDS: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORDED.read_text())


def test_at_least_30_of_40_are_found_and_none_is_wrong() -> None:
    assert len(DRAWN) == 40
    for key, proofs in RECORDS.items():
        counts = Counter(Proof(**proof).verdict for proof in proofs.values())
        assert (proofs.keys(), counts["wrong"]) == ({*DRAWN}, 0), key
        assert counts["found"] >= 30, key


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proofs")


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_proposed_is_what_was_proved(name: str, work: Path) -> None:
    from reshard.choosing import build_tensors, choose_architecture

    folder = LocalFolder(make_model(case_of(name, 2), work))
    checkpoint, options = open_checkpoint(folder, ""), Options(plan="auto")
    tensors = build_tensors(checkpoint, choose_architecture(checkpoint, options), options)
    assert not {scramble_name(one) for one in tensors} & {*tensors}
    for key, proofs in RECORDS.items():
        proposal = propose_scrambled(tensors, checkpoint.config, int(key[3]), with_config="scrambled" not in key)
        assert proposal.document["plan"] == proofs[name]["rules"], key


@pytest.mark.parametrize("with_config", [True, False] if FULL else [True])
def test_ranks_with_a_proposed_plan_compute_what_one_process_does(with_config: bool, work: Path) -> None:
    proofs = prove(DRAWN if FULL else SAMPLE, 2, work, with_config=with_config)
    recorded = RECORDS["tp 2" + ("" if with_config else ", config scrambled")]
    assert {name: proof.verdict for name, proof in proofs.items()} == {
        name: recorded[name]["verdict"] for name in proofs
    }


def test_a_scrambled_configuration_tells_nothing() -> None:
    config = scramble_config({"num_heads": 4, "text_config": {"hidden_size": 64}})
    assert "num_heads" not in config
    assert next(iter(config.values())) == 4
    assert "hidden_size" not in str(config)
