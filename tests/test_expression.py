"""Formulas against Python's arithmetic, and what is not in the notation."""

import pytest

from manifests.errors import PlanError
from manifests.expression import UnknownSizeError, evaluate, parse_axis
from tests.checkpoints import mentions

SIZES = {"H": 9, "KV": 3, "hd": 64, "hidden": 576, "text_config.depth": 5, "_x": 7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("hd", 64),
        ("_x", 7),
        ("text_config.depth", 5),
        ("hidden / H", 576 // 9),
        ("H / KV * hd", 9 // 3 * 64),
        ("hd * H / KV", 64 * 9 // 3),
        ("2 + 3 * 4 - 5", 2 + 3 * 4 - 5),
        ("20 - 3 - 2", 20 - 3 - 2),
        ("24 / 2 / 3", 24 // 2 // 3),
        ("20 - (3 - 2)", 20 - (3 - 2)),
        ("(hidden / hd - 3) / (1 + 1)", (576 // 64 - 3) // 2),
        ("24 / (absent + 1) | (2)", 2),
        ("3hd", 3 * 64),
        ("2 hd + 1", 2 * 64 + 1),
        ("absent | hd", 64),
        ("absent / H | hidden / H", 64),
        ("hd | absent", 64),
        ("a | b | c | 4", 4),
        # A division by a name that is not known is no division at all.
        ("7 / absent | 2", 2),
    ],
)
def test_formulas(text: str, value: int) -> None:
    assert evaluate(text, SIZES.get) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1 +",
        "+ 1",
        "* 2",
        "1 2",
        "hd hd",
        "(2",
        "()",
        "2)",
        "(2 | 3)",
        "4.5",
        "2 ** 3",
        "a |",
        "hd,",
        "2 % 2",
        "é",
        "²",
    ],
)
def test_what_is_no_formula_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        evaluate(text, SIZES.get)
    assert mentions(caught.value, repr(text))


@pytest.mark.parametrize("text", ["hidden / 7", "1 / 2", "hd / 0", "5 / 2 * 2", "hidden / 7 | 3"])
def test_a_division_leaves_no_remainder(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        evaluate(text, SIZES.get)
    assert mentions(caught.value, repr(text), "is not a whole number")


@pytest.mark.parametrize(
    ("text", "name"), [("a", "a"), ("hd * width", "width"), ("a | b", "a"), ("(H*, head)", "head")]
)
def test_an_unknown_name_is_named(text: str, name: str) -> None:
    with pytest.raises(UnknownSizeError) as caught:
        (parse_axis if text.startswith("(") else evaluate)(text, SIZES.get)
    assert caught.value.name == name
    assert mentions(caught.value, repr(text), repr(name))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(0*)", "(0*)"),
        (" ( H * , 3 * hd ) ", "(9*, 192)"),
        ("(H@tp)", "(9*)"),
        ("(KV@kv,H/KV@rep,hd)", "(3@kv, 3@rep, 64)"),
        ("q:(2*)+k:(4)", "q:(2*) + k:(4)"),
        ("(2, [(hd) + v:(3*)])", "(2, [(64) + v:(3*)])"),
        ("([(2*)])", "([(2*)])"),
        ("(absent | 4*)", "(4*)"),
        ("(2 * 3*)", "(6*)"),
    ],
)
def test_axes_in_canonical_form(text: str, canonical: str) -> None:
    axis = parse_axis(text, SIZES.get)
    assert str(axis) == canonical
    assert parse_axis(canonical) == axis


@pytest.mark.parametrize(
    "text",
    [
        "", "4", "()", "(4", "4)", "(4*) +", "(4*)(4)", "(4*,)", "(,4)", "((4*))", "(4**)", "(*)", "(4@)", "(4*, [])",
        "(4, [(2*)], 3)", "(4, [(2*)]", "q:", "q:k:(4)", "(4*]", "(4 4*)", "(4;2)",
    ],
)  # fmt: skip
def test_what_is_no_axis_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_axis(text, SIZES.get)
    assert mentions(caught.value, repr(text))


# A factor over an axis that is in no mesh is whole on every rank.
@pytest.mark.parametrize("text", ["(4@))", "(4@2)", "(4@,)", "(4@[)"])
def test_a_mesh_axis_has_a_name(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_axis(text)
    assert mentions(caught.value, repr(text))


@pytest.mark.parametrize("text", ["(1 - 3)", "(1 - 3, 1 - 3*)"])
def test_a_factor_is_not_negative(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_axis(text)
    assert mentions(caught.value, repr(text))


def test_a_division_that_is_not_chosen_need_not_come_out() -> None:
    assert evaluate("a | b / 4", {"a": 3, "b": 2}.get) == 3
    assert evaluate("a | b / 4 | c", {"c": 5}.get) == 5
    with pytest.raises(PlanError):
        evaluate("a | b / 4", {"b": 2}.get)
