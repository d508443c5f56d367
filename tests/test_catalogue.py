"""The catalogue, against the classes and configurations of transformers that it was exported from."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.core_model_loading import (
    revert_weight_conversion,
)

from manifests.errors import CheckpointError, PlanError
from manifests.header import StoredTensor
from reshard import plan
from reshard.catalogue import (
    Architecture,
    Scope,
    built_in_plan,
    default_sizes,
    exported,
    find_architecture,
    model_types,
    ours,
    own_plans,
)
from reshard.catalogue.tables import FOLDER, Entries
from reshard.recipes.recipe import runtime_tensors
from reshard.sizes import Sizes, scoped_sizes
from reshard.ties import is_tied
from tests.checkpoints import count, mentions, save
from tools.catalogue.entries import add_type, without_empty
from tools.catalogue.finding import find_classes
from tools.catalogue.plans import PlanMismatchError, check_joined, names_of
from tools.catalogue.small import build_small, own_config
from tools.export_catalogue import OUT, dump

CLASSES = {
    "LlamaForCausalLM": "llama",
    "LlamaModel": "exaone",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llava",
    "Gemma3Model": "gemma3",
    "MuseSparkForConditionalGeneration": "muse_spark",
    "T5GemmaForConditionalGeneration": "t5gemma",
    "Glm4MoeForCausalLM": "sarvam_moe",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_thinker",
    "PI0ForConditionalGeneration": "pi0",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "NemotronHForCausalLM": "nemotron_h",
}
"""Classes of every kind: plain, run as another type's, a plan twice, composites, one part twice, experts, hybrid."""

CONVERTED = {
    "MixtralForCausalLM": "mixtral",
    "DoryForCausalLM": "dory",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl_moe",
    "Inkling2LoopForCausalLM": "inkling2_loop_text",
    "HrmTextForCausalLM": "hrm_text",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "LaraMiniForCausalLM": "lara_mini",
    "MistralLarge4ForConditionalGeneration": "mistral_large4",
    "LlavaNextForConditionalGeneration": "llava_next",
}
"""Classes whose conversions are of every kind."""


def model_of(name: str, model_type: str) -> PreTrainedModel:
    (cls,) = [cls for cls in find_classes(model_type) if cls.__name__ == name]
    return build_small(cls, model_type)


def written_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return what config.json holds."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {**config, "architectures": [type(model).__name__]}


def architecture_of(model: PreTrainedModel) -> Architecture:
    found = find_architecture(written_config(model))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "model_type"), CLASSES.items())
def test_plans_are_those_that_transformers_makes(name: str, model_type: str) -> None:
    model = model_of(name, model_type)
    mine = built_in_plan(architecture_of(model), "transformers")
    names = names_of(model)
    for rules, theirs in ((mine.rules, model.tp_plan), (mine.expert_rules, model.ep_plan)):
        assert {rule.pattern: rule.style for rule in rules if rule.pattern in names} == {
            pattern: style for pattern, style in theirs.items() if pattern in names
        }
    assert any(rule.pattern in names for rule in mine.rules)


def test_every_type_with_a_plan_has_it() -> None:
    """The rule for embeddings is added where the base model has one."""
    found = 0
    for name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
        theirs = dict(config_class.base_model_tp_plan or {}), dict(config_class.base_model_ep_plan or {})
        if not any(theirs):
            continue
        entry = exported()["types"][name]
        tp_plan = entry.get("plan", {})
        assert tp_plan in (theirs[0], {"embed_tokens": "embedding_rowwise", **theirs[0]}), name
        assert entry.get("ep_plan", {}) == theirs[1], name
        found += 1
    assert found == 166


def test_every_public_class_of_a_part_is_known() -> None:
    """A class is known by any of the types in whose table it is; sub-models of no class of their own are parts."""
    assert {"gemma3", "llama4", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "aria", "voxtral"} < {*model_types()}
    classes = [one for entry in exported()["types"].values() for one in entry.get("classes", {}).values()]
    parts = {scope[1] for one in classes for scope in one["scopes"]}
    planned = {name for name, entry in exported()["types"].items() if "plan" in entry or "ep_plan" in entry}
    assert parts == planned | own_plans().keys()


@pytest.mark.parametrize(("name", "model_type"), CONVERTED.items())
def test_stored_names_become_the_models(name: str, model_type: str) -> None:
    """What transformers would write, converted back, has the names and shapes of the model."""
    model = model_of(name, model_type)
    own = model.state_dict()
    stored = {
        stored_name: StoredTensor("F32" if tensor.is_floating_point() else "I64", tuple(tensor.shape), 0, 0)
        for stored_name, tensor in revert_weight_conversion(model, dict(own)).items()
    }
    assert stored.keys() != own.keys() or name == "Inkling2LoopForCausalLM"
    sizes = scoped_sizes(default_sizes(), written_config(model), architecture_of(model))
    made = runtime_tensors(stored, architecture_of(model), lambda tensor: sizes.of(tensor).get)
    assert {key: tensor.shape for key, tensor in made.items() if not tensor.unused} == {
        key: tuple(tensor.shape) for key, tensor in own.items()
    }


@pytest.mark.parametrize(
    "model_type", ["qwen2_vl", "gemma3", "paddleocr_vl", "shieldgemma2", "vibevoice", "llava", "aria"]
)
def test_the_flag_that_ties(model_type: str) -> None:
    """Of the composite and of its text model, each absent, false and true."""
    config_class = CONFIG_MAPPING[model_type]
    text = own_config(model_type).text_config.model_type
    name = next(key for key, one in exported()["types"][model_type]["classes"].items() if one.get("ties"))
    seen = set()
    for flag in (None, False, True):
        for inner in (None, False, True):
            outer = {} if flag is None else {"tie_word_embeddings": flag}
            part = {"model_type": text, **({} if inner is None else {"tie_word_embeddings": inner})}
            config = {**outer, "text_config": part, "model_type": model_type, "architectures": [name]}
            expected = bool(config_class.from_dict({**outer, "text_config": part}).tie_word_embeddings)
            found = find_architecture(config)
            assert found is not None
            assert is_tied(config, found, next(iter(found.ties))) == expected, (flag, inner)
            seen.add(expected)
    assert seen == {False, True}


def test_defaults_hold_when_other_values_are_given() -> None:
    """A size that a class computes from others is not among its defaults."""
    checked = 0
    types = ("llama", "gemma2", "deepseek_v3", "qwen3_next", "falcon_h1", "gptj", "zaya", "youtu", "mixtral")
    for model_type in types:
        defaults = exported()["types"][model_type]["defaults"]
        config_class = CONFIG_MAPPING[model_type]
        own = config_class()
        for field in dataclasses.fields(config_class):
            value = getattr(own, field.name, None)
            if type(value) is not int or "token" in field.name:
                continue
            try:
                changed = config_class(**{field.name: 2 * value})
            except (ValueError, TypeError, StrictDataclassError):
                continue
            for name, expected in defaults.items():
                if name != field.name:
                    assert getattr(changed, name) == expected, (model_type, field.name, name)
                    checked += 1
    assert checked > 1000


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", "num_attention_heads": 6, "hidden_size": 96},
}


def sizes_of(config: Mapping[str, Any], module: str) -> Sizes:
    return scoped_sizes(default_sizes(), config, find_architecture(config)).of(module)


def test_a_part_has_the_sizes_of_its_part_of_the_configuration() -> None:
    text = sizes_of(GEMMA3, "model.language_model.layers.0.self_attn.q_proj")
    assert (text.get("H"), text.get("hidden_size")) == (6, 96)
    # Not written: the class's own.
    assert text.get("KV") == CONFIG_MAPPING["gemma3_text"]().num_key_value_heads
    alone = sizes_of({**GEMMA3, "text_config": None}, "model.language_model.layers.0")
    assert alone.get("H") == CONFIG_MAPPING["gemma3_text"]().num_attention_heads


@pytest.mark.parametrize("model_type", ["dots3_note_text", "embedding_gemma2_text"])
def test_a_layer_may_have_sizes_of_its_own(model_type: str) -> None:
    config = own_config(model_type)
    written = json.loads(config.to_json_string(use_diff=False))
    sizes = scoped_sizes(default_sizes(), written)
    seen = set()
    for number in range(config.num_hidden_layers):
        layer = config.per_layer_config[number]
        found = tuple(sizes.of(f"model.layers.{number}.self_attn.q_proj").get(name) for name in ("H", "KV"))
        assert found == (layer.num_attention_heads, layer.num_key_value_heads), number
        seen.add(found)
    assert len(seen) > 1


def test_files_of_old_hold_the_values_of_a_part_themselves() -> None:
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "num_attention_heads": 10}
    assert CONFIG_MAPPING["qwen2_vl"].from_dict(config).text_config.num_attention_heads == 10
    assert sizes_of(config, "model.language_model.layers.0").get("H") == 10


def test_a_file_chooses_the_type_of_a_part() -> None:
    """A llava may be of any text model; its plan, its conversions and its sizes are then that type's."""
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_moe", "num_attention_heads": 6},
    }
    found = find_architecture(config)
    assert found is not None
    assert found.scopes == (
        Scope("model.vision_tower", "clip_vision_model", "vision_config"),
        Scope("model.language_model", "qwen3_moe", "text_config"),
    )
    assert any(converter.scope == "language_model" for converter in found.converters)
    rules = {rule.pattern: rule.style for rule in built_in_plan(found, "transformers").rules}
    expected = CONFIG_MAPPING["qwen3_moe"].base_model_tp_plan
    assert {pattern: rules[f"model.language_model.{pattern}"] for pattern in expected} == expected
    assert sizes_of(config, "model.language_model.layers.0").get("H") == 6


def test_a_composite_of_parts_without_plan_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "xlnet"},
        "vision_config": {"model_type": "swin"},
    }
    with pytest.raises(PlanError) as caught:
        plan(save(tmp_path / "m", {"model.language_model.w": count(4)}, config), tp=1)
    assert mentions(caught.value, "llava", "text_config xlnet", "vision_config swin", "--plan")


TIED = {
    "model_type": "t5gemma2",
    "architectures": ["T5Gemma2ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "encoder": {"text_config": {}},
    "decoder": {},
}


@pytest.mark.parametrize(
    ("stored", "ties"),
    [
        ("encoder.text_model", {"lm_head.out_proj": "encoder.text_model", "decoder": "encoder.text_model"}),
        ("decoder", {"encoder.text_model": "decoder", "lm_head.out_proj": "decoder"}),
    ],
)
def test_several_names_tied_to_one(tmp_path: Path, stored: str, ties: dict[str, str]) -> None:
    """Whichever of them is stored is the others."""

    def parameter(module: str) -> str:
        return f"{module}.weight" if module.startswith("lm_head") else f"model.{module}.embed_tokens.weight"

    folder = save(tmp_path / "m", {parameter(stored): count(8, 4)}, TIED)
    resolution = plan(folder, tp=2).resolution
    assert resolution.ties == {parameter(one): parameter(other) for one, other in ties.items()}


def test_what_is_not_stored_and_not_tied(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "m", {"model.decoder.embed_tokens.weight": count(8, 4)}, {**TIED, "tie_word_embeddings": False}
    )
    with pytest.raises(CheckpointError) as caught:
        plan(folder, tp=2)
    assert mentions(caught.value, "is not stored", "tie_word_embeddings is false")


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_neox", "llava", "diffusion_gemma", "sarvam_moe"])
def test_entries_are_what_is_exported_now(model_type: str) -> None:
    types: dict[str, Any] = {}
    for used in add_type(model_type, types):
        check_joined(used, types)
    assert without_empty(types[model_type]) == exported()["types"][model_type]


def test_a_plan_that_its_parts_do_not_make_is_noticed() -> None:
    types: dict[str, Any] = {}
    (used,) = [one for one in add_type("mixtral", types) if one.name == "MixtralForCausalLM"]
    del types["mixtral"]["plan"]["layers.*.mlp.experts"]
    with pytest.raises(PlanMismatchError, match=r"MixtralForCausalLM: tp_plan: model\.layers\.\*\.mlp\.experts"):
        check_joined(used, types)


def test_the_file_is_as_it_is_written() -> None:
    """In one order and one form, so that a new export shows what has changed, and of a size that loads at once."""
    text = OUT.read_text("utf-8")
    assert dump(json.loads(text)) + "\n" == text
    assert len(text) < 1_500_000
    assert {*ours()["types"]} <= {*exported()["types"]}


def test_an_entry_is_decoded_when_it_is_first_asked_for() -> None:
    decoded: list[str] = []

    def decode(name: str) -> dict[str, int]:
        decoded.append(name)
        return {"length": len(name)}

    entries = Entries(("bert", "llama", "bert"), decode)
    assert ([*entries], len(entries), "llama" in entries, "t5" in entries) == (["bert", "llama"], 2, True, False)
    assert decoded == []
    assert (entries["llama"], entries.get("llama"), entries.get("t5")) == ({"length": 5}, {"length": 5}, None)
    with pytest.raises(KeyError, match="t5"):
        entries["t5"]
    assert decoded == ["llama"]


def test_our_tables_are_what_the_files_say() -> None:
    """The files are taken apart at the headers of tables; tomllib reads them whole."""
    whole: dict[str, dict[str, Any]] = {}
    for path in sorted((FOLDER / "ours").iterdir()):
        for kind, tables in tomllib.loads(path.read_text("utf-8")).items():
            whole.setdefault(kind, {}).update(tables)
    parts = whole.pop("parts")
    found = ours()
    assert found.keys() == whole.keys() == {"attributes", "bindings", "class_bindings", "classes", "sizes", "types"}
    for kind in ("types", "classes"):
        stored = whole.pop(kind)
        assert [*found[kind]] == [*stored]
        alone = {name: tables for name, tables in stored.items() if "like" not in tables}
        assert alone == {name: found[kind][name] for name in alone}
    assert whole == {kind: found[kind] for kind in whole}
    # Rules of a part, then the type's own; a type's tables, and for those that it lacks another's.
    assert found["types"]["deepseek_v3"] == parts["latent_attention"]
    assert found["types"]["deepseek_v3"] is found["types"]["deepseek_v3"]


def test_the_exported_types_are_what_the_file_says() -> None:
    assert json.loads(OUT.read_text("utf-8")) == {**exported(), "types": dict(exported()["types"])}
