"""Operations on tensors of which nothing is read, against those of torch and of transformers on real ones."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from manifests.errors import CheckpointError, PlanError
from manifests.manifest import Link, Part
from manifests.runs import Run
from reshard.catalogue.architecture import Converter
from reshard.recipes.lazy import (
    Lazy,
    chunk,
    concatenate,
    interleave,
    permute_for_rope,
    reshape,
    select,
    split,
    stack,
    transpose,
    unstack,
)
from reshard.recipes.operations import Tensors, Work, apply
from tests.carrying import carry_out
from tests.checkpoints import count, mentions


def carried(lazy: Lazy, sources: dict[str, Tensor]) -> Tensor:
    return torch.from_numpy(carry_out(lazy.parts, lazy.shape, {name: x.numpy() for name, x in sources.items()}))


def lazily(name: str, x: Tensor, dtype: str = "F32") -> Lazy:
    links = tuple(Link(dim, dim, (Run(0, 0, size),)) for dim, size in enumerate(x.shape))
    return Lazy(dtype, tuple(x.shape), (Part(name, links),), stored=True)


A, B, C = count(2, 3), count(2, 3, start=10), count(2, 3, start=20)
SOURCES = {"a": A, "b": B, "c": C}
LAZY = [lazily(name, x) for name, x in SOURCES.items()]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_stack_is_torch_stack(dim: int) -> None:
    made = stack(LAZY, dim, "t")
    assert carried(made, SOURCES).equal(torch.stack([A, B, C], dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenate_is_torch_cat(dim: int) -> None:
    made = concatenate(LAZY, dim, "t")
    assert carried(made, SOURCES).equal(torch.cat([A, B, C], dim))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("stacked", [0, 1, 2])
def test_stacks_may_be_joined_and_joins_stacked(stacked: int, dim: int) -> None:
    joined = concatenate([stack(LAZY[:2], stacked, "t"), stack(LAZY[1:], stacked, "t")], dim, "t")
    parts = [torch.stack([A, B], stacked), torch.stack([B, C], stacked)]
    assert carried(joined, SOURCES).equal(torch.cat(parts, dim))
    if dim < 2:
        both = stack([concatenate(LAZY[:2], dim, "t"), concatenate(LAZY[1:], dim, "t")], stacked, "t")
        assert carried(both, SOURCES).equal(torch.stack([torch.cat([A, B], dim), torch.cat([B, C], dim)], stacked))


def test_a_stack_of_scalars_is_a_vector() -> None:
    scalars = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    made = stack([lazily(name, x) for name, x in scalars.items()], 0, "t")
    assert carried(made, scalars).tolist() == [1.0, 2.0]


SHAPES = [(4, 6), (2, 4, 6), (4, 1, 2), (6,), (2, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_those_of_torch(shape: tuple[int, ...]) -> None:
    x = {"x": count(*shape)}
    for dim, size in enumerate(shape):
        if size % 2 == 0:
            for mine, theirs in zip(chunk(lazily("x", x["x"]), dim, 2, "t"), x["x"].chunk(2, dim), strict=False):
                assert carried(mine, x).equal(theirs)
        sizes = [size // 3, size - size // 3, 0]
        for mine, theirs in zip(split(lazily("x", x["x"]), dim, sizes, "t"), x["x"].split(sizes, dim), strict=True):
            assert mine.shape == theirs.shape
            assert carried(mine, x).equal(theirs)
        for mine, theirs in zip(unstack(lazily("x", x["x"]), dim, "t"), x["x"].unbind(dim), strict=True):
            assert carried(mine, x).equal(theirs)


def random_change(rng: random.Random, lazy: Lazy, x: Tensor) -> tuple[Lazy, Tensor]:
    """Return a tensor and its value after a random operation."""
    dim = rng.randrange(x.ndim)
    kind = rng.choice(("transpose", "interleave", "back", "permute", "piece", "stack", "concat", "unstack", "select"))
    if kind == "transpose":
        other = rng.randrange(x.ndim)
        return transpose(lazy, dim, other, "t"), x.transpose(dim, other)
    if kind in ("interleave", "back") and x.shape[dim] % 2 == 0:
        moved = x.movedim(dim, 0)
        halves = [moved[: len(moved) // 2], moved[len(moved) // 2 :]]
        theirs = torch.stack(halves, 1).flatten(0, 1) if kind == "back" else torch.cat([moved[::2], moved[1::2]])
        return interleave(lazy, dim, "t", inverse=kind == "back"), theirs.movedim(0, dim)
    if kind == "permute" and x.ndim in (1, 2) and x.shape[0] % 4 == 0:
        theirs = torch.cat([torch.cat([head[::2], head[1::2]]) for head in x.chunk(2)])
        return permute_for_rope(lazy, 2, "t"), theirs
    if kind == "piece":
        at = rng.randint(0, x.shape[dim])
        sizes = [at, x.shape[dim] - at]
        return split(lazy, dim, sizes, "t")[sizes[1] > sizes[0]], x.split(sizes, dim)[sizes[1] > sizes[0]]
    if kind == "stack" and x.ndim < 4:
        return stack([lazy, lazy], dim, "t"), torch.stack([x, x], dim)
    if kind == "concat":
        return concatenate([lazy, lazy], dim, "t"), torch.cat([x, x], dim)
    if kind == "unstack" and x.ndim > 1:
        at = rng.randrange(x.shape[dim])
        return unstack(lazy, dim, "t")[at], x.unbind(dim)[at]
    if kind == "select":
        half = x.shape[dim] // 2
        runs = (Run(half, 0, x.shape[dim] - half), Run(0, x.shape[dim] - half, half))
        return select(lazy, dim, runs if half else runs[:1]), x.roll(-half, dim)
    return lazy, x


def test_operations_after_each_other_are_those_of_torch() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        source = count(*(rng.choice((1, 2, 3, 4, 8)) for _ in range(rng.randint(1, 3))))
        lazy, x = lazily("x", source), source
        for _ in range(rng.randint(1, 5)):
            if x.numel() > 500:
                break
            lazy, x = random_change(rng, lazy, x)
            assert lazy.shape == x.shape, seed
        assert carried(lazy, {"x": source}).equal(x), seed


def test_a_stored_tensor_is_seen_under_another_shape() -> None:
    x = {"x": count(4, 6)}
    seen = reshape(lazily("x", x["x"]), (2, 2, 3, 2), "t")
    assert carried(seen, x).equal(x["x"].reshape(2, 2, 3, 2))
    assert carried(transpose(seen, 0, 3, "t"), x).equal(x["x"].reshape(2, 2, 3, 2).transpose(0, 3))
    assert reshape(lazily("x", x["x"]), (4, 6), "t") == lazily("x", x["x"])


class Case(NamedTuple):
    """A converter with the stored shapes of its sources, and transformers' own operations."""

    converter: Converter
    shapes: dict[str, list[tuple[int, ...]]]
    theirs: list[Any]


def case(sources: Any, targets: Any, operations: Any, shapes: Any, theirs: Any) -> Case:
    return Case(Converter(tuple(sources), tuple(targets), tuple(operations)), shapes, theirs)


def build_cases() -> dict[str, Case]:
    from transformers import core_model_loading as theirs

    one = {"s": [(8, 6)]}
    return {
        "experts": case(
            ("g.*.w", "u.*.w"), ("gu",), (("stack", 0), ("concat", 1)),
            {"g.*.w": [(2, 3)] * 4, "u.*.w": [(5, 3)] * 4}, [theirs.MergeModulelist(0), theirs.Concatenate(1)],
        ),
        "experts of one projection": case(
            ("d.*.w",), ("d",), (("stack", 1),), {"d.*.w": [(2, 3)] * 3}, [theirs.MergeModulelist(1)]
        ),
        "joined in the order of the converter": case(
            ("q", "k", "v"), ("qkv",), (("concat", 0),),
            {"v": [(2, 3)], "q": [(4, 3)], "k": [(1, 3)]}, [theirs.Concatenate(0)],
        ),
        "shards": case(
            ("e.*.w",), ("e",), (("concat", 0),), {"e.*.w": [(2, 3), (2, 3), (1, 3)]}, [theirs.Concatenate(0)]
        ),
        "chunks": case(("s",), ("a", "b"), (("chunk", 1),), one, [theirs.Chunk(1)]),
        "chunks of pairs": case(
            ("s",), ("a", "b"), (("interleave", 0), ("chunk", 0)), one, [theirs.Interleave(0), theirs.Chunk(0)]
        ),
        "pairs": case(("s",), ("a",), (("interleave", 1),), one, [theirs.Interleave(1)]),
        "no longer pairs": case(
            ("s",), ("a",), (("interleave", 1, True),), one, [theirs.Interleave(1, inverse=True)]
        ),
        "transposed": case(
            ("s",), ("a",), (("transpose", 1, 2),), {"s": [(2, 3, 4)]}, [theirs.Transpose(1, 2)]
        ),
        "taken apart": case(("s",), ("a.*.w",), (("unstack", 0),), {"s": [(3, 1, 4)]}, [theirs.SplitModulelist(0)]),
        "a convolution": case(
            ("s",), ("a",), (("conv3d_to_linear",),), {"s": [(2, 3, 2, 2, 4)]}, [theirs.Conv3dToLinear(3, (2, 2, 4))]
        ),
        "no convolution": case(("s",), ("a",), (("conv3d_to_linear",),), one, [theirs.Conv3dToLinear(3, (1, 1, 2))]),
        "into a convolution": case(
            ("s",), ("a",), (("linear_to_conv3d", 3, (1, 1, "two")),), one, [theirs.LinearToConv3d(3, (1, 1, 2))]
        ),
        "text and vision experts": case(
            ("g.*.w", "u.*.w"), ("text", "vision"), (("ernie_experts", 0, 1),),
            {"g.*.w": [(2, 3)] * 6, "u.*.w": [(2, 3)] * 6}, [theirs.ErnieFuseAndSplitTextVisionExperts(0, 1)],
        ),
        "message queries": case(
            ("q", "kv"), ("m",), (("merge_message_queries",),),
            {"q": [(6, 4)], "kv": [(6, 4)]}, [theirs.Inkling2LoopMergeMessageQueries()],
        ),
    }  # fmt: skip


CASES = build_cases()


def stored(shapes: dict[str, list[tuple[int, ...]]]) -> tuple[dict[str, Tensor], Tensors, dict[str, list[Tensor]]]:
    """Return tensors of these shapes by name, without reading, and by source."""
    names = [(source, f"{source} {i}", shape) for source, group in shapes.items() for i, shape in enumerate(group)]
    sources = {name: count(*shape, start=1000 * i) for i, (_, name, shape) in enumerate(names)}
    lazy: Tensors = {}
    real: dict[str, list[Tensor]] = {}
    for source, name, _ in names:
        lazy.setdefault(source, []).append(lazily(name, sources[name]))
        real.setdefault(source, []).append(sources[name])
    return sources, lazy, real


def work(converter: Converter, **sizes: int) -> Work:
    return Work(converter, "m.t", {"two": 2, **sizes}.get, (), [])


def applied(converter: Converter, state: Tensors, **sizes: int) -> Tensors:
    for operation in converter.operations:
        state = apply(operation, state, work(converter, **sizes))
    return state


@pytest.mark.parametrize("kind", CASES)
def test_converters_are_those_of_transformers(kind: str) -> None:
    converter, shapes, operations = CASES[kind]
    sources, state, expected = stored(shapes)
    for operation in operations:
        expected = operation.convert(
            expected, source_patterns=list(converter.sources), target_patterns=list(converter.targets), config=None
        )
    made = applied(converter, state)
    assert made.keys() == expected.keys()
    for target, theirs in expected.items():
        (mine,) = made[target]
        assert mine.shape == theirs.shape, target
        assert carried(mine, sources).equal(theirs), target


class Config(NamedTuple):
    """As much of a configuration as the operations look at."""

    num_attention_heads: int = 2
    unpadded_vocab_size: int = 5

    def get_text_config(self) -> "Config":
        return self


@pytest.mark.parametrize("shape", [(12, 3), (12,)])
@pytest.mark.parametrize("names", [None, ("q", "k")])
def test_rope_is_permuted_as_by_transformers(shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    from transformers.core_model_loading import Chunk, PermuteForRope

    targets = ("x.q", "x.k", "x.v")
    converter = Converter(("s",), targets, (("chunk", 0), ("rope_permute", "heads", names)))
    sources, state, expected = stored({"s": [(3 * shape[0], *shape[1:])]})
    patterns = {"source_patterns": ["s"], "target_patterns": list(targets)}
    chunks = Chunk(0).convert(expected, **patterns)
    theirs = PermuteForRope(permute_layer_names=names and list(names)).convert(chunks, config=Config(), **patterns)
    made = applied(converter, state, heads=2)
    for target in targets:
        assert carried(made[target][0], sources).equal(theirs[target]), target
        back = permute_for_rope(made[target][0], 2, "t", inverse=True)
        if names is None or "v" not in target:
            assert carried(back, sources).equal(chunks[target])


def test_of_a_padded_vocabulary_the_rest_is_kept_apart() -> None:
    converter = Converter(("s",), ("s",), (("unpad_vocab", "words"),))
    sources, state, _ = stored({"s": [(8, 3)]})
    use = work(converter, words=5)
    (made,) = apply(converter.operations[0], state, use)["s"]
    assert carried(made, sources).equal(sources["s 0"][:5])
    (rest,) = use.unused
    assert carried(rest, sources).equal(sources["s 0"][5:])
    again = work(converter, words=8)
    assert carried(apply(converter.operations[0], state, again)["s"][0], sources).equal(sources["s 0"])
    assert again.unused == []


def test_a_transpose_may_depend_on_the_stored_shape() -> None:
    converter = Converter(("s",), ("s",), (("transpose", 1, 2, ("1", "3*two", 4)),))
    sources, state, _ = stored({"s": [(1, 6, 4)]})
    assert carried(applied(converter, state)["s"][0], sources).equal(sources["s 0"])
    sources, state, _ = stored({"s": [(1, 4, 6)]})
    assert carried(applied(converter, state)["s"][0], sources).equal(sources["s 0"].transpose(1, 2))


def test_what_computes_is_refused_by_its_name() -> None:
    converter = Converter(("w", "scale"), ("t",), (("computes", "Dequantize"),))
    _, state, _ = stored({"w": [(2, 2)], "scale": [(2, 1)]})
    with pytest.raises(CheckpointError) as caught:
        applied(converter, state)
    assert mentions(caught.value, "m.t", "Dequantize", "w and scale")
    # Without its scales a tensor is in the format of the model.
    assert list(applied(converter, {"w": state["w"]})) == ["t"]
    with pytest.raises(PlanError) as unknown:
        apply(("twist", 1), state, work(converter))
    assert mentions(unknown.value, "twist")


F4 = Lazy("F4", (4, 3), (Part("x", (Link(0, 0, (Run(0, 0, 4),)), Link(1, 1, (Run(0, 0, 3),)))),), stored=True)
"""4 x 6 elements, two in a byte."""


def test_pieces_of_shared_bytes_are_whole_bytes() -> None:
    assert [piece.shape for piece in chunk(F4, 1, 3, "t")] == [(4, 1)] * 3
    assert [piece.shape for piece in split(F4, 1, [4, 2], "t")] == [(4, 2), (4, 1)]
    with pytest.raises(CheckpointError) as caught:
        split(F4, 1, [3, 3], "t")
    assert mentions(caught.value, "t", "3 + 3", "6")


X = lazily("x", count(6, 4))
REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pieces that do not add up": (lambda: split(X, 0, [2, 2], "m.t"), ("m.t", "2 + 2", 6)),
    "chunks that do not divide": (lambda: chunk(X, 0, 4, "m.t"), ("m.t", 6, 4)),
    "an odd number of pairs": (lambda: interleave(lazily("x", count(3)), 0, "m.t"), ("m.t", 3)),
    "rows that are no heads": (lambda: permute_for_rope(X, 2, "m.t"), ("m.t", 6, "2 heads")),
    "no such dim": (lambda: transpose(X, 0, 2, "m.t"), ("m.t", "no dim 2")),
    "columns of shared bytes": (lambda: transpose(F4, 0, 1, "m.t"), ("m.t", "F4")),
    "pairs of shared bytes": (lambda: interleave(F4, 1, "m.t"), ("m.t", "F4")),
    "another number of elements": (lambda: reshape(X, (5, 5), "m.t"), ("m.t", [6, 4], [5, 5])),
    "another shape of a piece": (lambda: reshape(chunk(X, 0, 2, "m.t")[0], (12,), "m.t"), ("m.t", "as it is")),
    "a size that is not known": (
        lambda: applied(Converter(("s",), ("a", "b"), (("split", 0, ("H*hd", 2)),)), {"s": [X]}),
        ("m.t", "H", "config.json"),
    ),
    "two tensors for one": (
        lambda: apply(("interleave", 0), {"s": [X, X]}, work(Converter(("s",), ("t",), ()))),
        ("m.t", "2 stored tensors"),
    ),
    "an odd number of experts of two kinds": (
        lambda: applied(Converter(("s",), ("t", "v"), (("ernie_experts", 0, 1),)), {"s": [X] * 3}),
        ("m.t", "2 equal stacks", 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    attempt, words = REFUSED[kind]
    with pytest.raises(CheckpointError) as caught:
        attempt()
    assert mentions(caught.value, *words)


def test_carrying_out_finds_an_entry_that_is_written_twice() -> None:
    """The oracle of these tests can fail."""
    with pytest.raises(AssertionError):
        carry_out((X.parts[0], X.parts[0]), (6, 4), {"x": np.zeros((6, 4))})
    with pytest.raises(AssertionError):
        carry_out(chunk(X, 0, 2, "t")[0].parts, (6, 4), {"x": np.zeros((6, 4))})
