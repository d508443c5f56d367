"""Plans: which rule takes which name, and what is no plan."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.errors import PlanError
from manifests.manifest import Rule
from manifests.styles import STYLES, axis_dim, resolve_style
from reshard import plan
from reshard.planfile import build_plan, read_plan
from reshard.plans import Matcher, Plan, anchor_rules, build_rule, modules_of
from tests.checkpoints import LLAMA, count, mentions, save


def matcher(*patterns: str) -> Matcher:
    return Matcher([Rule(pattern, "colwise") for pattern in patterns])


def pattern_of(rule: Rule | None) -> str:
    return rule.pattern if rule else ""


@pytest.mark.parametrize(
    ("patterns", "name", "taken_by"),
    [
        (["a.*"], "a.b", "a.*"),
        (["a.*"], "a", ""),
        (["a.*"], "a.b.c", ""),
        (["*.b"], "a.b", "*.b"),
        (["*"], "a.b", ""),
        # A layer's number is a whole part: 1 is not the start of 11.
        (["layers.1.w"], "layers.11.w", ""),
        (["layers.1.w", "layers.*.w"], "layers.1.w", "layers.1.w"),
        (["layers.1.w", "layers.*.w"], "layers.11.w", "layers.*.w"),
        (["layers.*.w", "layers.1.w"], "layers.1.w", "layers.1.w"),
        # Literals count from the left, whatever the order of the rules.
        (["a.*.c", "*.b.c"], "a.b.c", "a.*.c"),
        (["*.b.c", "a.*.c"], "a.b.c", "a.*.c"),
        (["*.*.c", "*.b.*"], "a.b.c", "*.b.*"),
        # A more literal beginning that leads nowhere does not hide the rest.
        (["a.b.d", "a.*.c"], "a.b.c", "a.*.c"),
        (["a.b.d", "*.*.c"], "a.b.c", "*.*.c"),
        ([], "a", ""),
    ],
)
def test_which_pattern_takes_a_name(patterns: list[str], name: str, taken_by: str) -> None:
    assert pattern_of(matcher(*patterns).find(name)) == taken_by


@pytest.mark.parametrize(
    ("patterns", "name", "taken_by", "direct"),
    [
        (["m"], "m.weight", "m", False),
        (["m"], "m.bias", "m", False),
        (["m"], "m.sub.weight", "", False),
        (["m", "m.bias"], "m.bias", "m.bias", True),
        (["m", "m.bias"], "m.weight", "m", False),
        # A key of the parameter beats a more literal one of its module.
        (["a.b", "*.*.weight"], "a.b.weight", "*.*.weight", True),
        (["m"], "m", "m", True),
        (["m"], "n", "", False),
    ],
)
def test_which_rule_takes_a_parameter(patterns: list[str], name: str, taken_by: str, direct: bool) -> None:
    rule, named = matcher(*patterns).find_for_parameter(name)
    assert (pattern_of(rule), named) == (taken_by, direct)


@pytest.mark.parametrize("name", ["a.", "a..weight", ".a", "."])
def test_names_with_empty_parts_are_taken_by_no_literal(name: str) -> None:
    assert matcher("a").find(name) is None


def test_equal_patterns_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        matcher("a.*", "b", "a.*")
    assert mentions(caught.value, "a.*", "two rules")


def test_modules_are_all_that_contain_a_tensor() -> None:
    assert modules_of(["a.b.weight", "a.b.bias", "a.c.d.weight", "norm"]) == ["a", "a.b", "a.c", "a.c.d"]


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ("colwise", Rule("m", "colwise")),
        ({"style": "rowwise", "dim": -1}, Rule("m", "rowwise", dim=-1)),
        ({"style": "packed_colwise", "blocks": [2, 1, 1]}, Rule("m", "packed_colwise", blocks=(2, 1, 1))),
        ({"style": "colwise", "layout": "(H*, hd)"}, Rule("m", "colwise", layout="(H*, hd)")),
    ],
)
def test_lines_of_a_plan(choice: object, rule: Rule) -> None:
    assert build_rule("m", choice, "plan") == rule


@pytest.mark.parametrize(
    ("pattern", "choice", "words"),
    [
        ("", "colwise", ("not a dotted name",)),
        ("a..b", "colwise", ("a..b", "not a dotted name")),
        (".a", "colwise", ("not a dotted name",)),
        ("m", "columnwise", ("m", "unknown style 'columnwise'", *STYLES)),
        ("m", 3, ("m", "3")),
        ("m", None, ("m", "None")),
        ("m", ["colwise"], ("m", "colwise")),
        ("m", {}, ("m", "style")),
        ("m", {"style": 1}, ("m", "style")),
        ("m", {"style": "colwise", "axis": 1}, ("m", "unknown key 'axis'", "layout")),
        ("m", {"style": "colwise", "blocks": [1, 2]}, ("m", "colwise takes no blocks", "packed_colwise")),
        ("m", {"style": "packed_colwise", "blocks": [1, 0]}, ("m", "[1, 0]")),
        ("m", {"style": "packed_colwise", "blocks": [1, True]}, ("m", "blocks")),
        ("m", {"style": "packed_colwise", "blocks": [1.5]}, ("m", "[1.5]")),
        ("m", {"style": "packed_colwise", "blocks": "1,2"}, ("m", "'1,2'")),
        ("m", {"style": "packed_colwise", "blocks": [1, 2], "layout": "(4*)"}, ("m", "layout")),
        ("m", {"style": "colwise", "layout": 4}, ("m", "layout 4")),
        ("m", {"style": "replicate", "layout": "(4*)"}, ("m", "replicate takes no layout")),
        ("m", {"style": "colwise_gather_output", "layout": "(4*)"}, ("m", "takes no layout")),
        ("m", {"style": "colwise", "dim": "0"}, ("m", "dim '0'")),
        ("m", {"style": "colwise", "dim": True}, ("m", "dim True")),
    ],
)
def test_malformed_lines_are_refused(pattern: str, choice: object, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        build_rule(pattern, choice, "tp.toml")
    assert mentions(caught.value, "tp.toml: ", *words)


NAMES = ["model.layers.0.up.weight", "model.layers.1.up.weight", "lm_head.weight"]
TWO_TOWERS = ["text.layers.0.up.weight", "vision.layers.0.up.weight"]


@pytest.mark.parametrize(
    ("names", "prefix", "pattern", "anchored"),
    [
        (NAMES, "model", "layers.*.up", "model.layers.*.up"),
        (NAMES, "model", "model.layers.*.up", "model.layers.*.up"),
        (NAMES, "model", "layers.*.up.weight", "model.layers.*.up.weight"),
        (NAMES, "model", "lm_head", "lm_head"),
        (NAMES, "", "layers.*.up", "model.layers.*.up"),
        (["base.model.layers.0.up.weight"], "", "layers.*.up", "base.model.layers.*.up"),
        # What fits nowhere stays as it is, to be reported under its own name.
        (NAMES, "model", "blocks.*.up", "blocks.*.up"),
        (TWO_TOWERS, "", "text.layers.*.up", "text.layers.*.up"),
        (TWO_TOWERS, "", "*.layers.*.up", "*.layers.*.up"),
    ],
)
def test_rules_may_be_relative_to_the_base_model(names: list[str], prefix: str, pattern: str, anchored: str) -> None:
    rules = anchor_rules(Plan("plan", (Rule(pattern, "colwise"),)), names, prefix).rules
    assert rules == (Rule(anchored, "colwise"),)


def test_a_rule_that_fits_under_two_prefixes_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        anchor_rules(Plan("tp.toml", (Rule("layers.*.up", "colwise"),)), TWO_TOWERS, "")
    assert mentions(caught.value, "tp.toml", "layers.*.up", "under text", "under vision")


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


TOML = """
[plan]
"layers.*.up" = "colwise"
"layers.*.qkv" = { style = "colwise", layout = "(3, H*, hd)" }
[sizes]
H = "num_heads"
hd = 64
[attributes]
"layers.*" = { heads = "H / tp" }
"""
DOCUMENT: dict[str, Any] = {
    "plan": {"layers.*.up": "colwise", "layers.*.qkv": {"style": "colwise", "layout": "(3, H*, hd)"}},
    "sizes": {"H": "num_heads", "hd": 64},
    "attributes": {"layers.*": {"heads": "H / tp"}},
}


@pytest.mark.parametrize(("name", "text"), [("tp.toml", TOML), ("tp.json", json.dumps(DOCUMENT))])
def test_plan_files(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, name, text)
    assert read_plan(path) == Plan(
        label=str(path),
        rules=(Rule("layers.*.up", "colwise"), Rule("layers.*.qkv", "colwise", layout="(3, H*, hd)")),
        sizes={"H": "num_heads", "hd": "64"},
        attributes={"layers.*": {"heads": "H / tp"}},
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tp.json", '{"layers.*.up": "colwise", "plan": "rowwise"}'),
        ("tp.toml", '"layers.*.up" = "colwise"\nplan = "rowwise"'),
    ],
)
def test_a_bare_dictionary_is_a_plan_whatever_its_modules_are_called(tmp_path: Path, name: str, text: str) -> None:
    rules = read_plan(write(tmp_path, name, text)).rules
    assert rules == (Rule("layers.*.up", "colwise"), Rule("plan", "rowwise"))


def test_the_dictionary_of_a_transformers_configuration_is_a_plan() -> None:
    from transformers import LlamaConfig

    rules = build_plan(dict(LlamaConfig.base_model_tp_plan), "plan").rules
    assert {rule.pattern: rule.style for rule in rules} == LlamaConfig.base_model_tp_plan


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tp.json", "", ("not JSON",)),
        ("tp.json", "[]", ("not a JSON object",)),
        ("tp.json", '{"a": "colwise", "a": "rowwise"}', ("'a' twice",)),
        ("tp.json", b'{"\xff": "colwise"}', ("not JSON in UTF-8",)),
        ("tp.toml", "a = ", ("not TOML",)),
        ("tp.toml", "layers.*.up = 'colwise'", ("not TOML",)),
        ("tp.toml", "a = 'colwise'\na = 'rowwise'", ("not TOML",)),
        ("tp.toml", b"\xff = 1", ("not TOML in UTF-8",)),
        ("tp.toml", "model.up = 'colwise'", ("model", "style")),
        ("tp.toml", "", ("no rules",)),
        ("tp.json", "{}", ("no rules",)),
        ("tp.json", '{"plan": {}}', ("no rules",)),
        (
            "tp.json",
            '{"plan": {"a": "colwise"}, "size": {}}',
            ("table 'size'", "attributes, experts, inputs, plan, sizes"),
        ),
        ("tp.json", '{"plan": {"a": "colwise"}, "sizes": []}', ("sizes is not a table",)),
        ("tp.json", '{"plan": {"a": "colwise"}, "sizes": {"H": 1.5}}', ("sizes.H", "1.5")),
        ("tp.json", '{"plan": {"a": "colwise"}, "sizes": {"H": true}}', ("sizes.H", "True")),
        ("tp.json", '{"plan": {"a": "colwise"}, "attributes": {"a": {"H": []}}}', ("attributes.a.H", "[]")),
        ("tp.json", '{"plan": {"a": "colwise"}, "attributes": {"a": 3}}', ("attributes", "a")),
        ("tp.json", '{"plan": {"a": "colwise"}, "attributes": {"a": null}}', ("attributes", "a")),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, name: str, text: str | bytes, words: tuple[str, ...]) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert mentions(caught.value, path, *words)


def test_a_plan_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(PlanError) as caught:
            read_plan(path)
        assert mentions(caught.value, path, "cannot be read")


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": count(4, 4, start=100 * i) for i in (0, 1, 10, 11)}
    return save(tmp_path_factory.mktemp("plans") / "m", {**tensors, "model.norm.weight": torch.ones(4)})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"model.layers.*.mlp.up": "colwise"}, ("1 of 1 rules", "model.layers.*.mlp.up = colwise")),
        (
            {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.gate_proj": "colwise", "lm_head": "rowwise"},
            ("2 of 3 rules", "layers.*.mlp.gate_proj = colwise", "lm_head = rowwise"),
        ),
        ({"model.layers.*.mlp.up_proj.weight.data": "colwise"}, ("1 of 1 rules",)),
        # The module's rule would set the hooks of one style around a weight that is cut by another.
        (
            {"model.layers.*.mlp.up_proj": "rowwise", "model.layers.*.mlp.up_proj.weight": "colwise"},
            ("1 of 2", "model.layers.*.mlp.up_proj = rowwise"),
        ),
        # A rule that keeps its tensor whole takes nothing, either.
        ({"model.norm": "rowwise"}, ("1 of 1 rules", "model.norm = rowwise")),
    ],
)
def test_rules_that_take_nothing_are_named(two_layers: Path, rules: Mapping[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(two_layers, tp=2, plan=rules)
    assert mentions(caught.value, *words, "model.layers.0.mlp.up_proj.weight")


def test_a_rule_for_layer_1_takes_layer_1_only(two_layers: Path) -> None:
    rules = {"layers.1.mlp.up_proj": "colwise", "layers.*.mlp.up_proj": "replicate"}
    tensors = plan(two_layers, tp=2, plan=rules).resolution.tensors
    assert [name for name, tensor in tensors.items() if tensor.placement.cuts] == ["model.layers.1.mlp.up_proj.weight"]


def test_a_plan_given_twice_under_both_names_is_refused(two_layers: Path) -> None:
    rules = {"layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.up_proj": "rowwise"}
    with pytest.raises(PlanError) as caught:
        plan(two_layers, tp=2, plan=rules)
    assert mentions(caught.value, "model.layers.*.mlp.up_proj", "two rules")


def test_a_plan_for_another_prefix_is_understood_or_refused(tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    folder = save(tmp_path / "m", {name: count(4, 4), "model.visual.qkv.weight": count(6, 4)})
    with pytest.raises(PlanError) as caught:
        plan(folder, tp=2, plan={"model.layers.*.mlp.up_proj": "colwise"})
    assert mentions(caught.value, "model.layers.*.mlp.up_proj")
    tensors = plan(folder, tp=2, plan={"layers.*.mlp.up_proj": "colwise"}).resolution.tensors
    assert tensors[name].placement.cuts


def test_a_plan_of_the_other_layout_says_which_layout_it_speaks(tmp_path: Path) -> None:
    stored_name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    config = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 1}
    experts = {stored_name.replace("w1", w): count(4, 4) for w in ("w1", "w2", "w3")}
    folder = save(
        tmp_path / "m", {**experts, "model.embed_tokens.weight": count(8, 4), "lm_head.weight": count(8, 4)}, config
    )
    for layout, other, rules in (
        ("runtime", "checkpoint", {"model.layers.*.block_sparse_moe.experts.*.w1": "colwise"}),
        ("checkpoint", "runtime", {"model.layers.*.mlp.experts.down_proj": "rowwise"}),
    ):
        with pytest.raises(PlanError) as caught:
            plan(folder, tp=2, plan=rules, layout=layout)
        assert mentions(caught.value, f"--layout {other}")
        assert plan(folder, tp=2, plan=rules, layout=other).layout == other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "stored"}, ("'stored'", "runtime, checkpoint")),
        ({"plan_source": "vllm"}, ("'vllm'", "reshard, transformers")),
        ({}, ("no model_type", "--plan")),
    ],
)
def test_other_choices_are_refused(two_layers: Path, options: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(two_layers, tp=2, **options)
    assert mentions(caught.value, *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nope"}, ("no built-in plan", "'nope'", "--plan")),
        ({"model_type": ["llama"]}, ("no built-in plan",)),
        ({"model_type": "llama"}, ("no class", "LlamaForCausalLM")),
        ({"model_type": "llama", "architectures": ["NopeForMaskedLM"]}, ("NopeForMaskedLM", "LlamaForCausalLM")),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, ("no class", "LlamaForCausalLM")),
    ],
)
def test_models_without_a_built_in_plan(tmp_path: Path, config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", {"w": count(4)}, config), tp=1)
    assert mentions(caught.value, *words)


def test_an_unknown_style_lists_those_that_there_are() -> None:
    with pytest.raises(PlanError) as caught:
        resolve_style("column")
    assert mentions(caught.value, "'column'", *STYLES)
    assert resolve_style("rowwise").bias == "partial"


@pytest.mark.parametrize(
    ("axis", "dims"), [("out", (0, 0, 1)), ("in", (0, 1, 2)), ("vocab", (0, 0, 0)), ("hidden", (0, 1, 2))]
)
def test_dims_of_logical_axes(axis: Any, dims: tuple[int, ...]) -> None:
    """A linear weight is (out, in), an embedding (vocab, hidden), stacked experts (expert, out, in)."""
    assert tuple(axis_dim(axis, ndim) for ndim in (1, 2, 3)) == dims
    if axis in ("out", "in"):
        linear = torch.nn.Linear(3, 5).weight
        assert linear.shape[axis_dim(axis, 2)] == {"out": 5, "in": 3}[axis]
