"""Every conversion of the catalogue, against the tensors that transformers loads of the same folder in one process.

The suite takes a representative set; ``CONVERSIONS=all`` takes every type of which a class renames or converts, and a
list of types, ``CONVERSIONS=mixtral,kimi_k25``, takes those.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from safetensors.torch import load_file

from manifests.manifest import Part
from reshard import merge, split, verify
from reshard.catalogue import exported
from reshard.choosing import build_tensors, choose_architecture
from reshard.model import RuntimeTensor
from reshard.options import Options
from reshard.sources.checkpoint import open_checkpoint
from reshard.sources.folder import LocalFolder
from tests.carrying import carry_out
from tools.sweep.tiny import tiny_model

CHOSEN = (
    "dory",  # layers that are two in the file
    "ernie4_5_vl_moe",  # transposed, chunked, experts of two kinds
    "exaone",  # renamed throughout
    "gpt_neox",  # renamed for one class
    "hrm_text",  # chunked
    "kimi_k25",  # rope permuted, groups of renames, scoped experts
    "kimi_linear",  # joined
    "lara_mini",  # split by sizes
    "llava",  # a composite under prefixes
    "mistral_large4",  # rope permuted, renames of a scope
    "mixtral",  # stacked
    "qwen2_vl",  # prefixes of parts
    "qwen3_vl_moe",  # transposed or not
    "qwen4_exp_text",  # shards joined
    "sarvam_moe",  # split by sizes, stacked
)
RUNTIME = ("axk1", "deepseek_v4", "laguna", "mistral_large4_text", "mixtral")
"""Types of which files in the layout of the running model are taken too: renamings would spoil names of some."""

OURS = {"youtu": "embed_tokens.weight", "zaya": "balancing_biases"}
"""Tensors that transformers changes after it has read them."""

UNEQUAL = {
    "shieldgemma2": "transformers does not find again what it saves",
    "ultravbert": "the head of its vision model, off by default, is among the names that are ignored",
}
UNEQUAL_RUNTIME = {
    **UNEQUAL,
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), "a renaming spoils what few of its layers have"),
}


def chosen(default: tuple[str, ...]) -> list[str]:
    wanted = os.environ.get("CONVERSIONS", "")
    if wanted != "all":
        return wanted.split(",") if wanted else list(default)
    keys = ("renames", "converters")
    return [
        name
        for name, entry in exported()["types"].items()
        if entry.get("classes") and any(part.get(key) for part in (entry, *entry["classes"].values()) for key in keys)
    ]


def build(model_type: str) -> Any:
    try:
        return tiny_model(model_type, {})
    except (
        ImportError, ValueError, KeyError, AttributeError, TypeError, RuntimeError, StrictDataclassError
    ) as error:  # fmt: skip
        if "CONVERSIONS" not in os.environ:
            raise
        pytest.skip(f"{model_type}: cannot be built: {str(error)[:200]}")


def bits(x: torch.Tensor) -> NDArray[Any]:
    """Return a tensor for numpy, which lacks some dtypes; only its bytes are compared."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(same[x.element_size()]).numpy()


def ours(folder: Path) -> tuple[dict[str, RuntimeTensor], dict[str, NDArray[Any]]]:
    """Return the recipes of a folder and its stored tensors."""
    checkpoint = open_checkpoint(LocalFolder(folder))
    options = Options()
    recipes = build_tensors(checkpoint, choose_architecture(checkpoint, options), options)
    stored = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return recipes, {name: bits(x) for tensors in stored for name, x in tensors.items()}


def theirs(model_class: Any, folder: Path) -> tuple[dict[str, NDArray[Any]], set[str]]:
    """Return the tensors that transformers loads, and the names of those that it does not find."""
    loaded, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["mismatched_keys"]
    return {name: bits(x) for name, x in loaded.state_dict().items()}, set(info["missing_keys"])


def check(model_class: Any, folder: Path, *, changed: str = "", heads: bool = False) -> None:
    """Compare the recipes of a folder with what transformers loads.

    Args:
        model_class: The class that loads it.
        folder: The folder.
        changed: Part of the names of tensors that transformers changes after it has read them.
        heads: Whether tensors may be stored that the class does not have.
    """
    recipes, stored = ours(folder)
    expected, missing = theirs(model_class, folder)
    used = {name: recipe for name, recipe in recipes.items() if not recipe.unused}
    if heads:
        used = {name: recipe for name, recipe in used.items() if name in expected}
    assert used.keys() <= expected.keys()
    for name in expected.keys() - used.keys() - missing:
        # Of tied parameters one is stored.
        twins = [other for other in used if np.array_equal(expected[other], expected[name])]
        assert twins, f"{name} is made of nothing"
    compared = [name for name in used.keys() - missing if not changed or changed not in name]
    assert len(compared) > 10
    for name in compared:
        made = carry_out(used[name].parts or (Part(name),), used[name].shape, stored)
        assert (made.dtype, made.shape) == (expected[name].dtype, expected[name].shape), name
        assert np.array_equal(made, expected[name]), name


@pytest.mark.parametrize("model_type", chosen(CHOSEN))
def test_tensors_are_those_that_transformers_loads(model_type: str, tmp_path: Path) -> None:
    if model_type in UNEQUAL:
        pytest.skip(UNEQUAL[model_type])
    model = build(model_type)
    model.save_pretrained(tmp_path)
    check(type(model), tmp_path, changed=OURS.get(model_type, ""))


@pytest.mark.parametrize("model_type", chosen(RUNTIME))
def test_files_in_the_models_own_layout_are_left_as_they_are(model_type: str, tmp_path: Path) -> None:
    if model_type in UNEQUAL_RUNTIME:
        pytest.skip(UNEQUAL_RUNTIME[model_type])
    model = build(model_type)
    model.save_pretrained(tmp_path, save_original_format=False)
    check(type(model), tmp_path, changed=OURS.get(model_type, ""))


@pytest.mark.parametrize("model_type", ["gpt_neox", "kimi_k25", "llava", "mixtral", "qwen2_vl"])
def test_a_model_and_its_base_model_take_each_others_files(model_type: str, tmp_path: Path) -> None:
    """The base model's names lack a prefix that the whole model's have, and the whole model has a head."""
    model = build(model_type)
    base = model.base_model
    model.save_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    for folder, loading in ((tmp_path / "whole", base), (tmp_path / "base", model)):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(loading).__name__]}))
        check(type(loading), folder, heads=loading is base)


MERGED = ("ernie4_5_vl_moe", "hrm_text", "kimi_k25", "sarvam_moe")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_type", MERGED)
def test_what_was_converted_is_merged_to_the_same_files(model_type: str, tp: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(model_type).save_pretrained(folder, max_shard_size="150KB")
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert len(files) > 1
    split(folder, tmp_path / "out", tp=tp)
    verify(tmp_path / "out")
    assert sorted(merge(tmp_path / "out", tmp_path / "back").identical) == sorted(files)
    for name, content in files.items():
        assert (tmp_path / "back" / name).read_bytes() == content
