"""JSON texts that are large enough for the quick way: it takes what the other takes, and sees a key twice."""

import json
from typing import Any

import pytest

from manifests.jsontext import DuplicateKeyError, load_object

NAMES = {f'model.layers.{at}.mlp."{at}": .weight': f"model-{at % 7}.safetensors" for at in range(20_000)}
VALUE: dict[str, Any] = {"metadata": {"total_size": 1 << 70, "x": [{"y": None}, 1.5]}, "weight_map": NAMES}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : "), ("\n,", "\n:\n")])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_large_text_is_what_it_is_for_others(separators: tuple[str, str], *, ascii_only: bool) -> None:
    value = VALUE | {"é\ud7ff\U0001f600": "é"}
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode()
    assert len(text) > 1 << 20
    assert load_object(text) == value
    assert list(load_object(text)["weight_map"]) == list(NAMES)


@pytest.mark.parametrize("colon", [":", " :", "\t\n:"])
@pytest.mark.parametrize("place", ["top", "map", "list"])
def test_a_key_twice_is_refused_wherever_it_is(place: str, colon: str) -> None:
    inner = {"top": '"weight_map":{}', "map": "", "list": '"metadata":[{"a":1,"a":1}]'}[place]
    more = f',"model.layers.7.w"{colon}"x","model.layers.7.w":"y"' if place == "map" else ""
    names = json.dumps(NAMES)[:-1] + more + "}"
    text = f'{{{inner}{"," if inner else ""}"weight_map"{colon}{names}}}'.encode()
    with pytest.raises(DuplicateKeyError):
        load_object(text)


@pytest.mark.parametrize("tail", ['"x":"\\ud800"}', '"x":NaN', '"x":1}}', '"x":"\x01"}', '"x":01}'])
def test_what_is_no_object_is_refused(tail: str) -> None:
    with pytest.raises(ValueError, match=r"UTF-8|surrogates"):
        load_object((json.dumps(VALUE)[:-1] + "," + tail).encode())
