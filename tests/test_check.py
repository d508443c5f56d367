"""`reshard check` names what is wrong with a plan: tiny models of transformers, plans with one known fault each.

All plans that run are run by one launch of processes; the fault is known by construction, and right plans must pass.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from manifests.errors import DegreeError, LoadError, PlanError
from reshard.checks.checking import Wanted, check, check_all
from reshard.checks.verdict import format_check
from reshard.cli import main
from reshard.options import Options
from reshard.planning import plan_split
from reshard.sources.folder import LocalFolder

SMOLLM2 = Path(__file__).parent.parent / "build" / "models" / "smollm2"
VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "head_dim": 24}),
    "llama6": ("llama", {**COMMON, "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 6}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("phi3", GROUPED),
    "gpt_neox": ("gpt_neox", COMMON),
}

ATTENTION = "model.layers.*.self_attn"
MLP = "model.layers.*.mlp"
EXPERTS = "model.layers.*.mlp.experts"
EMBEDDINGS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
HEADS = {
    f"{ATTENTION}.q_proj": "colwise",
    f"{ATTENTION}.k_proj": "colwise",
    f"{ATTENTION}.v_proj": "colwise",
    f"{ATTENTION}.o_proj": "rowwise",
}
LLAMA: dict[str, Any] = {
    **EMBEDDINGS,
    **HEADS,
    f"{MLP}.gate_proj": "colwise",
    f"{MLP}.up_proj": "colwise",
    f"{MLP}.down_proj": "rowwise",
}
MIXTRAL: dict[str, Any] = {
    **EMBEDDINGS,
    **HEADS,
    EXPERTS: "moe_tp_experts",
    f"{EXPERTS}.gate_up_proj": "packed_colwise",
    f"{EXPERTS}.down_proj": "rowwise",
}
PHI3: dict[str, Any] = {
    **EMBEDDINGS,
    f"{ATTENTION}.qkv_proj": "colwise",
    f"{ATTENTION}.o_proj": "rowwise",
    f"{MLP}.gate_up_proj": "packed_colwise",
    f"{MLP}.down_proj": "rowwise",
}
NEOX: dict[str, Any] = {
    "gpt_neox.embed_in": "embedding_rowwise",
    "gpt_neox.layers.*.attention.query_key_value": "colwise",
    "gpt_neox.layers.*.attention.dense": "rowwise",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise",
    "lm_head": "colwise_gather_output",
}
RIGHT: dict[str, dict[str, Any]] = {"llama": LLAMA, "mixtral": MIXTRAL, "phi3": PHI3, "gpt_neox": NEOX}


def changed(model: str, *left_out: str, **rules: Any) -> dict[str, Any]:
    """Return the right plan of a model without some rules, and with others."""
    return {name: rule for name, rule in {**RIGHT[model], **rules}.items() if name not in left_out}


LAYER = "model.layers.0"
FAULTS: dict[str, tuple[str, dict[str, Any], str, str, str, str]] = {
    # name: model, plan, the module that parts, the module that is to blame, its rule, words of the hint
    "a missing half: down_proj": (
        "llama",
        changed("llama", f"{MLP}.down_proj"),
        f"{LAYER}.mlp.down_proj",
        f"{LAYER}.mlp.down_proj",
        "",
        "gate_proj, up_proj give each rank a part, so down_proj is the other half of the pair: rowwise",
    ),
    "a missing half: o_proj": (
        "llama",
        changed("llama", f"{ATTENTION}.o_proj"),
        f"{LAYER}.self_attn.o_proj",
        f"{LAYER}.self_attn.o_proj",
        "",
        "q_proj, k_proj, v_proj give each rank a part, so o_proj is the other half of the pair: rowwise",
    ),
    "a missing half in one layer": (
        "llama",
        changed("llama", **{"model.layers.1.mlp.down_proj": "replicate"}),
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.down_proj = replicate",
        "rowwise",
    ),
    "o_proj takes its part twice": (
        "llama",
        changed("llama", **{f"{ATTENTION}.o_proj": "rowwise_split_input"}),
        f"{LAYER}.self_attn.o_proj",
        f"{LAYER}.self_attn.o_proj",
        f"{ATTENTION}.o_proj = rowwise_split_input",
        "give each rank its part already",
    ),
    "up_proj gives the whole": (
        "llama",
        changed("llama", **{f"{MLP}.up_proj": "rowwise_split_input"}),
        f"{LAYER}.mlp",
        f"{LAYER}.mlp.up_proj",
        f"{MLP}.up_proj = rowwise_split_input",
        "parts from gate_proj and the whole from up_proj",
    ),
    "gate_proj is whole": (
        "llama",
        changed("llama", f"{MLP}.gate_proj"),
        f"{LAYER}.mlp",
        f"{LAYER}.mlp.gate_proj",
        "",
        "parts from up_proj and the whole from gate_proj",
    ),
    "swapped": (
        "gpt_neox",
        changed(
            "gpt_neox",
            **{
                "gpt_neox.layers.*.mlp.dense_h_to_4h": "rowwise",
                "gpt_neox.layers.*.mlp.dense_4h_to_h": "colwise",
            },
        ),
        "gpt_neox.layers.0.mlp.dense_h_to_4h",
        "gpt_neox.layers.0.mlp.dense_h_to_4h",
        "gpt_neox.layers.*.mlp.dense_h_to_4h = rowwise",
        "nothing before dense_h_to_4h gives the ranks parts: colwise",
    ),
    "a fused weight as plain rows": (
        "phi3",
        changed("phi3", **{f"{MLP}.gate_up_proj": "colwise"}),
        f"{LAYER}.mlp.activation_fn",
        f"{LAYER}.mlp.gate_up_proj",
        f"{MLP}.gate_up_proj = colwise",
        "gate_up_proj.weight holds several blocks of 96 features",
    ),
    "a fused weight by blocks of wrong proportions": (
        "phi3",
        changed("phi3", **{f"{MLP}.gate_up_proj": {"style": "packed_colwise", "blocks": [1, 3]}}),
        f"{LAYER}.mlp.activation_fn",
        f"{LAYER}.mlp.gate_up_proj",
        f"{MLP}.gate_up_proj = packed_colwise by blocks [1, 3]",
        "several blocks of 96 features",
    ),
    "fused queries, keys and values as plain rows": (
        "phi3",
        changed("phi3", **{f"{ATTENTION}.qkv_proj": {"style": "colwise", "layout": "(128*)"}}),
        f"{LAYER}.self_attn.o_proj",
        f"{LAYER}.self_attn.qkv_proj",
        f"{ATTENTION}.qkv_proj = colwise by (128*)",
        "cut for other heads",
    ),
    "queries, keys and values of every head as blocks": (
        "gpt_neox",
        changed(
            "gpt_neox",
            **{"gpt_neox.layers.*.attention.query_key_value": {"style": "colwise", "layout": "(3, 4*, 16)"}},
        ),
        "gpt_neox.layers.0.attention.dense",
        "gpt_neox.layers.0.attention.query_key_value",
        "gpt_neox.layers.*.attention.query_key_value = colwise by (3, 4*, 16)",
        "cut for other heads",
    ),
    "query heads in another order than key heads": (
        "llama",
        changed("llama", **{f"{ATTENTION}.q_proj": {"style": "colwise", "layout": "(2, 2*, 24)"}}),
        f"{LAYER}.self_attn.o_proj",
        f"{LAYER}.self_attn.q_proj",
        f"{ATTENTION}.q_proj = colwise by (2, 2*, 24)",
        "cut for other heads",
    ),
    "keys whole, queries cut": (
        "llama",
        changed("llama", f"{ATTENTION}.k_proj"),
        f"{LAYER}.self_attn",
        f"{LAYER}.self_attn.k_proj",
        "",
        "parts from q_proj, v_proj and the whole from k_proj",
    ),
    "queries whole, keys cut": (
        "llama",
        changed("llama", f"{ATTENTION}.q_proj"),
        f"{LAYER}.self_attn",
        f"{LAYER}.self_attn.q_proj",
        "",
        "parts from k_proj, v_proj and the whole from q_proj",
    ),
    "an output layer whose parts are not joined": (
        "llama",
        changed("llama", lm_head="colwise"),
        "",
        "lm_head",
        "lm_head = colwise",
        "nothing joins them; colwise_gather_output would",
    ),
    "an embedding cut like a linear layer": (
        "llama",
        changed("llama", **{"model.embed_tokens": "colwise"}),
        "model.embed_tokens",
        "model.embed_tokens",
        "model.embed_tokens = colwise",
        "embedding_rowwise masks",
    ),
    "an embedding without its mask": (
        "llama",
        changed("llama", "model.embed_tokens", **{"model.embed_tokens.weight": "embedding_rowwise"}),
        "model.embed_tokens",
        "model.embed_tokens",
        "model.embed_tokens.weight = embedding_rowwise",
        "embedding_rowwise masks",
    ),
    "a rule for the parameter only": (
        "llama",
        changed("llama", f"{MLP}.down_proj", **{f"{MLP}.down_proj.weight": "rowwise"}),
        f"{LAYER}.mlp.down_proj",
        f"{LAYER}.mlp.down_proj",
        f"{MLP}.down_proj.weight = rowwise",
        f"write {LAYER}.mlp.down_proj = rowwise",
    ),
    "experts that nothing sums": (
        "mixtral",
        changed("mixtral", EXPERTS),
        f"{LAYER}.mlp.experts",
        f"{LAYER}.mlp.experts",
        f"{EXPERTS}.down_proj = rowwise",
        "give experts itself moe_tp_experts",
    ),
    "experts that are summed twice": (
        "mixtral",
        changed("mixtral", **{MLP: "all_reduce"}),
        f"{LAYER}.mlp",
        f"{LAYER}.mlp",
        f"{MLP} = all_reduce",
        "every rank has 2 times the right value",
    ),
    "stacked experts as plain rows": (
        "mixtral",
        changed("mixtral", **{f"{EXPERTS}.gate_up_proj": "colwise"}),
        f"{LAYER}.mlp.experts.act_fn",
        f"{LAYER}.mlp.experts",
        f"{EXPERTS}.gate_up_proj = colwise",
        "experts.gate_up_proj holds several blocks of 96 features",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    from loader.tiny import randomize

    folder = tmp_path_factory.mktemp("models")
    for number, (name, (model_type, values)) in enumerate(MODELS.items()):
        config = transformers.CONFIG_MAPPING[model_type](**values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, seed=number)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what checks find of all plans, right and wrong, on two ranks."""
    plans = {name: (name, plan) for name, plan in RIGHT.items()}
    plans |= {name: (model, plan) for name, (model, plan, *_) in FAULTS.items()}
    checks = [
        Wanted(plan_split(LocalFolder(models / model), 2, Options(plan=plan)), model) for model, plan in plans.values()
    ]
    return dict(zip(plans, check_all(checks, tmp_path_factory.mktemp("checks"), timeout_s=20), strict=True))


@pytest.mark.parametrize("model", RIGHT)
def test_a_right_plan_is_right(model, found):
    facts = found[model]
    assert facts["right"]
    assert facts["finding"] is None
    assert facts["not_compared"] == {}
    assert 0 < facts["largest"][0]["difference"] < 1e-5
    # q, k, v and an MLP's modules and activations, two layers; the embedding's sum and two of each layer.
    assert facts["divided"] >= 8
    assert facts["collectives"]["allreduce"] == 5
    assert sum(facts["collectives"].values()) == 6


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_plan_is_named_at_the_first_module_that_parts(name, found):
    _, _, module, blamed, rule, hint = FAULTS[name]
    facts = found[name]
    assert not facts["right"]
    finding = facts["finding"]
    assert finding["module"] == module
    assert finding["blamed"][0]["module"] == blamed
    if rule:
        assert rule in finding["blamed"][0]["rules"]
    else:
        assert finding["blamed"][0]["rules"] == ()
    assert hint in finding["hint"]


@pytest.mark.parametrize(
    ("model", "ranks", "plan", "words"),
    [
        ("phi3", 2, changed("phi3", **{f"{MLP}.gate_up_proj": {"style": "packed_colwise", "blocks": [1, 2, 4]}}), (
            "gate_up_proj.weight: 192 is not a multiple of its blocks [1, 2, 4]",
        )),
        ("llama", 2, changed("llama", **{f"{ATTENTION}.q_proj": {"style": "colwise", "layout": "(5*, 24)"}}), (
            "q_proj.weight: the layout (5*, 24) has 120 elements", "the tensor 96",
        )),
        ("llama", 2, changed("llama", **{f"{MLP}.middle_proj": "colwise"}), ("middle_proj = colwise", "take nothing")),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused_before_anything_runs(model, ranks, plan, words, models):
    with pytest.raises(PlanError) as caught:
        plan_split(LocalFolder(models / model), ranks, Options(plan=plan))
    assert all(word in str(caught.value) for word in words)


def test_a_cut_head_is_refused_before_anything_runs(models):
    # 72 rows divide by 4, 6 heads do not.
    with pytest.raises(DegreeError) as caught:
        plan_split(LocalFolder(models / "llama6"), 4, Options(plan=LLAMA))
    assert caught.value.allowed == (1, 2, 3, 6)
    assert any("q_proj.weight" in line for line in caught.value.misfits)


def reshard(*args: object) -> Result:
    result = CliRunner().invoke(main, [*map(str, args)], prog_name="reshard")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_command_says_right_and_what_no_rule_names(models, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = reshard("check", models / "llama", "--tp", 2, "-q")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("LlamaForCausalLM (llama), the built-in plan of llama, tp 2, 12 tokens")
    # A model of 2 layers: 13 modules each, and 6 around them.
    assert lines[1].startswith("right: 32 modules give what they give in one process")
    assert "no rule names 5 tensors, 1.3 kB, " in result.stdout
    assert "collectives: 5 allreduce, 1 allgather" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_lines_name_the_module_the_rule_and_what_would_do(found):
    lines = [*format_check(found["a rule for the parameter only"])]
    assert lines[1].startswith(f"parts at {LAYER}.mlp.down_proj: its output [1, 12, 64] differs on rank ")
    assert lines[2] == f"  the module: {LAYER}.mlp.down_proj: {MLP}.down_proj.weight = rowwise"
    assert lines[3].endswith(f"write {LAYER}.mlp.down_proj = rowwise")
    assert lines[4] == f"right until then, last: {LAYER}.mlp.up_proj"


@pytest.mark.skipif(not SMOLLM2.exists(), reason="`make models` fetches it")
def test_a_real_model_is_right():
    facts = check(SMOLLM2, tp=3)
    assert facts["right"]
    assert facts["not_compared"] == {}
    # q, k, v, what o_proj gets, gate, up, the activation and what down_proj gets.
    assert facts["divided"] == 30 * 8
    assert facts["largest"][0]["difference"] < 5e-5


def test_a_parameter_that_the_split_lacks_is_named(models, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(models / "llama" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((models / "llama" / "config.json").read_text())
    result = reshard("check", tmp_path, "--tp", 2, "-q")
    assert result.exit_code == LoadError.exit_code
    assert "model.layers.1.mlp.up_proj.weight" in result.stderr


def test_a_tiny_model_needs_a_configuration_only(tmp_path):
    import transformers

    # The first three layers have no experts.
    transformers.Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"], hidden_size=5120, head_dim=128, first_k_dense_replace=3
    ).save_pretrained(tmp_path)
    result = reshard("check", tmp_path, "--tp", 2, "--tiny", "-q", "--json")
    assert result.exit_code == 0, result.stdout + result.stderr
    facts = json.loads(result.stdout)
    assert facts["right"]
    assert facts["tiny"]["made"] == "sizes"
    assert facts["tiny"]["layers"] == 4
    assert facts["tiny"]["parameters"] < 20e6
    assert facts["tiny"]["sizes"]["num_hidden_layers"] == [46, 4]


def test_a_tiny_model_shows_a_wrong_plan_and_the_exit_code_says_it(tmp_path):
    import transformers

    transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    plan = tmp_path / "wrong.json"
    plan.write_text(json.dumps(changed("llama", f"{ATTENTION}.o_proj")))
    result = reshard("check", tmp_path, "--tp", 2, "--tiny", "--json", "--plan", plan)
    assert result.exit_code == 9
    finding = json.loads(result.stdout)["finding"]
    assert (finding["module"], finding["what"]) == (f"{LAYER}.self_attn.o_proj", "raises")
    error = json.loads(result.stderr)["error"]
    assert (error["kind"], error["module"]) == ("CheckError", f"{LAYER}.self_attn.o_proj")


def test_a_model_without_a_configuration_cannot_be_made_tiny(tmp_path):
    result = reshard("check", tmp_path, "--tp", 2, "--tiny")
    assert result.exit_code == LoadError.exit_code
    assert "no config.json" in result.stderr


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        # Heads times their size stays the width; whatever the ranks divide they divide.
        (
            {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
            3,
            {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 384},
        ),
        # 6 heads on 4 ranks stay what 4 ranks do not divide.
        (
            {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64},
            4,
            {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16},
        ),
        # Latent attention: the rotated part of a head stays at least 8.
        (
            {"num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            2,
            {"num_attention_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        ),
        # Experts in groups, and more words than any id.
        (
            {
                "n_routed_experts": 256,
                "n_group": 8,
                "num_experts_per_tok": 8,
                "vocab_size": 99999,
                "eos_token_id": 99998,
            },
            2,
            {"n_routed_experts": 8, "n_group": 2, "num_experts_per_tok": 2, "vocab_size": 193, "eos_token_id": 192},
        ),
        # What a composite's parts share stays shared.
        (
            {
                "text_config": {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": 128},
                "vision_config": {"out_hidden_size": 2048},
            },
            2,
            {
                "text_config": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
                "vision_config": {"out_hidden_size": 64},
            },
        ),
    ],
)
def test_sizes_shrink_together(config, ranks, expected):
    from loader.shrinking import shrink_sizes

    assert shrink_sizes(config, ranks) == expected
