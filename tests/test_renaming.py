"""Names: every renaming and converter of transformers, on names that it takes, against what transformers makes."""

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from manifests.errors import PlanError
from reshard.catalogue.architecture import Converter, Rename
from reshard.recipes.renaming import Renamer, stored_order

SCOPES = [None, ("", ""), ("", "model"), ("language_model", ""), ("language_model", "model"), ("tower.text", "model")]
"""(scope, base) of a sub-model; None for the whole."""


@cache
def mappings() -> dict[str, list[Any]]:
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    different = {
        repr(transforms): (kind, transforms) for kind, transforms in _build_checkpoint_conversion_mapping().items()
    }
    return dict(different.values())


def said(transform: Any) -> Rename | Converter:
    """Say a transform of transformers in the catalogue's terms, without what it does to a tensor."""
    from transformers import core_model_loading as theirs

    kinds = {
        theirs.GroupWeightRename: "group",
        theirs.Inkling2IndexOffsetWeightRename: "offset",
        theirs.LayerPairCollapse: "layer_pairs",
    }
    sources, targets = tuple(transform.source_patterns), tuple(transform.target_patterns)
    scope, base = transform.scope_prefix, transform.base_model_prefix or ""
    if isinstance(transform, theirs.WeightConverter):
        return Converter(sources, targets, (), scope, base)
    return Rename(sources, targets, kinds.get(type(transform), "plain"), getattr(transform, "offset", 0), scope, base)


def samples(pattern: str) -> Iterator[str]:
    """Yield texts that a pattern may take, or nearly."""
    text = re.sub(r"\(\?[^()]*\)", "", pattern)
    for number in ("3", "11"):
        plain = text.replace(r"(\d+)", number).replace(r"\d+", number).replace("(.+)", f"layers.{number}.w")
        plain = re.sub(r"\((\w+)\|[^)]*\)", r"\1", plain)
        plain = plain.replace(r"\1", number).replace("*", number).replace("\\", "").replace("^", "").replace("$", "")
        yield re.sub(r"[()?:|\[\]+]", "", plain)


def names_for(rng: random.Random, transforms: list[Any], scope: str) -> list[str]:
    names: set[str] = set()
    for transform in transforms:
        for pattern in (*transform.source_patterns, *transform.target_patterns):
            for text in samples(pattern):
                stem = rng.choice(
                    (text.strip("."), f"layers.{rng.randrange(12)}.{text.strip('.')}", f"m{text}", f"{text}_x")
                )
                before = rng.choice(("", scope, f"model.{scope}", "model.", "language_model."))
                names.add(before + stem + rng.choice(("", ".weight", ".bias", "_scale_inv")))
    return sorted(names)


@pytest.mark.parametrize("scope", SCOPES)
def test_names_become_those_of_transformers(scope: tuple[str, str] | None) -> None:
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    changed = converted = 0
    for number, (kind, transforms) in enumerate(mappings().items()):
        rng = random.Random(number)
        for transform in transforms:
            transform.scope_prefix, transform.base_model_prefix = scope or (None, None)
            if hasattr(transform, "_active"):
                transform._active = None
        renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        mine = [said(one) for one in transforms]
        renamer = Renamer(
            [one for one in mine if isinstance(one, Rename)], [one for one in mine if isinstance(one, Converter)]
        )
        names = sorted(names_for(rng, transforms, f"{scope[0]}." if scope and scope[0] else ""), key=dot_natural_key)
        assert names == sorted(names, key=stored_order)
        for name in names:
            expected, source = rename_source_key(name, renamings, converters)
            renamed = renamer.rename(name)
            assert (renamed.name, renamed.source or None) == (expected, source), (kind, name)
            assert (renamed.converter is None) == (source is None)
            changed += expected != name
            converted += source is not None
    # The names are not all of a kind that is left alone.
    assert changed > 500
    assert converted > 50


@pytest.mark.parametrize(
    ("renames", "stored", "runtime"),
    [
        ([(".block_sparse_moe.", ".mlp.")], "m.0.block_sparse_moe.w", "m.0.mlp.w"),
        # A pattern that ends with a letter or digit ends at the end of a word.
        ([("m.1", "n")], "m.11.w", "m.11.w"),
        ([("m.1", "n")], "m.1.w", "n.w"),
        ([("^embed_out\\.", "lm_head.")], "embed_out.weight", "lm_head.weight"),
        ([("^embed_out\\.", "lm_head.")], "x.embed_out.weight", "x.embed_out.weight"),
        ([("a", "b"), ("b", "c")], "x.a.w", "x.c.w"),
        ([("a.*.b", "c")], "a.1.b.w", "c.w"),
        ([(r"ff\.(\d+)\.w", r"layers.\1.mlp")], "m.ff.12.w", "m.layers.12.mlp"),
        # Only the first of equal texts is replaced.
        ([("a", "b")], "a.a.a", "b.a.a"),
    ],
)
def test_plain_renames(renames: list[tuple[str, str]], stored: str, runtime: str) -> None:
    from transformers.core_model_loading import WeightRenaming

    theirs = stored
    for source, target in renames:
        theirs, _ = WeightRenaming(source_patterns=source, target_patterns=target).rename_source_key(theirs)
    assert theirs == runtime
    assert Renamer([Rename((source,), (target,)) for source, target in renames], []).rename(stored).name == runtime


def test_a_group_holds_once_its_first_pattern_has_matched() -> None:
    rename = Rename((r"b.(\d+).n0", r"b.(\d+).n1"), (r"b.\1.n1", r"b.\1.n2"), "group")
    assert Renamer([rename], []).rename("b.0.n1.w").name == "b.0.n1.w"
    renamer = Renamer([rename], [])
    assert [renamer.rename(f"b.{i}.n{k}.w").name for i in (0, 7) for k in (0, 1)] == [
        "b.0.n1.w", "b.0.n2.w", "b.7.n1.w", "b.7.n2.w",
    ]  # fmt: skip
    # Another checkpoint starts anew.
    assert Renamer([rename], []).rename("b.0.n1.w").name == "b.0.n1.w"


def test_of_two_converters_with_one_pattern_the_last_converts() -> None:
    one, other = Converter(("q",), ("a", "b"), (("chunk", 0),)), Converter(("q",), ("c",), (("interleave", 0),))
    renamed = Renamer([], [one, other]).rename("x.q.w")
    assert (renamed.name, renamed.converter, renamed.source) == ("x.a.w", other, "q")


def test_an_unknown_kind_is_the_catalogues_fault() -> None:
    with pytest.raises(PlanError, match="'sideways'"):
        Renamer([Rename(("a",), ("b",), "sideways")], []).rename("a")
