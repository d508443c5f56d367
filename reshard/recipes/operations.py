"""Operations: what the catalogue says is done with the tensors of a converter, as transformers does it.

An operation takes and returns tensors by source or target pattern. All of them only move bytes
(`reshard.recipes.lazy`); what computes is refused by its name.

Source: the subclasses of ``ConversionOps`` in ``transformers/core_model_loading.py`` of transformers 5.24.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from manifests.errors import CheckpointError, PlanError
from manifests.expression import Lookup, UnknownSizeError, evaluate
from reshard.catalogue.architecture import Converter, Operation
from reshard.recipes.lazy import (
    Lazy,
    chunk,
    concatenate,
    interleave,
    permute_for_rope,
    reshape,
    split,
    stack,
    transpose,
    unstack,
)

Tensors = dict[str, list[Lazy]]
"""The tensors of a converter by source or target pattern, in the order in which they came."""


class Work(NamedTuple):
    """One use of a converter.

    Attributes:
        converter: The converter.
        target: Name of the first tensor that it makes.
        lookup: Gives the sizes of the sub-model.
        experts: How many tensors may be stacked, as the configuration says; empty if it does not.
        unused: Takes what no target needs.
    """

    converter: Converter
    target: str
    lookup: Lookup
    experts: tuple[int, ...]
    unused: list[Lazy]


def apply(operation: Operation, tensors: Tensors, work: Work) -> Tensors:
    """Return what an operation of the catalogue makes of the tensors of a converter.

    Raises:
        CheckpointError: The tensors do not fit the operation, or it computes.
        PlanError: The operation is not known.
    """
    name, *arguments = operation
    if name not in _OPERATIONS:
        raise PlanError(f"{work.target}: the catalogue has the operation {name!r}, which is not known")
    return _OPERATIONS[name](tensors, work, *arguments)


def check_complete(tensors: Tensors, work: Work) -> None:
    """Check that something is stored for every source of a converter.

    Raises:
        CheckpointError: It is not.
    """
    sources = work.converter.sources
    if absent := [source for source in sources if not tensors.get(source)]:
        raise CheckpointError(f"{work.target}: is made of {' and '.join(sources)}; no tensor is named like {absent[0]}")


def _single(tensors: Tensors, work: Work) -> Lazy:
    """Return the one tensor that an operation takes."""
    count = sum(map(len, tensors.values()))
    if count != 1:
        raise CheckpointError(f"{work.target}: {count} stored tensors become this parameter of the model")
    return next(iter(tensors.values()))[0]


def _size(formula: int | str, work: Work) -> int:
    if isinstance(formula, int):
        return formula
    try:
        return evaluate(formula, work.lookup)
    except UnknownSizeError as error:
        raise CheckpointError(f"{work.target}: {error}; config.json must say it") from error


def _stack(tensors: Tensors, work: Work, dim: int) -> Tensors:
    _check_counts(tensors, work)
    targets = work.converter.targets
    return {
        targets[0] if len(tensors) == 1 else source: [stack(group, dim, work.target)]
        for source, group in tensors.items()
    }


def _check_counts(tensors: Tensors, work: Work) -> None:
    check_complete(tensors, work)
    lengths = [len(tensors[source]) for source in work.converter.sources]
    if len(set(lengths)) > 1 or (work.experts and lengths[0] not in work.experts):
        expected = f", config.json says {' or '.join(map(str, work.experts))}" if work.experts else ""
        counts = " and ".join(map(str, lengths))
        raise CheckpointError(f"{work.target}: is stacked from {counts} tensors{expected}; some are missing")


def _concat(tensors: Tensors, work: Work, dim: int) -> Tensors:
    check_complete(tensors, work)
    ordered = [lazy for source in work.converter.sources for lazy in tensors[source]]
    return {work.converter.targets[0]: [concatenate(ordered, dim, work.target)]}


def _chunk(tensors: Tensors, work: Work, dim: int) -> Tensors:
    targets = work.converter.targets
    pieces = chunk(_single(tensors, work), dim, len(targets), work.target)
    return {target: [piece] for target, piece in zip(targets, pieces, strict=True)}


def _split(tensors: Tensors, work: Work, dim: int, sizes: Sequence[int | str]) -> Tensors:
    targets = work.converter.targets
    pieces = split(_single(tensors, work), dim, [_size(size, work) for size in sizes], work.target)
    return {target: [piece] for target, piece in zip(targets, pieces, strict=True)}


def _unstack(tensors: Tensors, work: Work, dim: int) -> Tensors:
    made: Tensors = {}
    for source, group in tensors.items():
        pattern = work.converter.targets[0] if len(tensors) == 1 else source
        for position, piece in enumerate(unstack(_single({source: group}, work), dim, work.target)):
            made[pattern.replace("*", str(position))] = [piece]
    return made


def _in_place(tensors: Tensors, work: Work, change: Callable[[Lazy], Lazy]) -> Tensors:
    """Apply a change to the one tensor, under its pattern if others are made of it, else under the target's."""
    changed = change(_single(tensors, work))
    several = len(work.converter.targets) > 1
    return {next(iter(tensors)) if several else work.converter.targets[0]: [changed]}


def _transpose(tensors: Tensors, work: Work, one: int, other: int, *expected: Sequence[int | str]) -> Tensors:
    """Exchange two dimensions; with an expected shape only if the tensor does not have it."""
    lazy = _single(tensors, work)
    if expected and lazy.shape == tuple(_size(size, work) for size in expected[0]):
        return _in_place(tensors, work, lambda lazy: lazy)
    return _in_place(tensors, work, lambda lazy: transpose(lazy, one, other, work.target))


def _interleave(tensors: Tensors, work: Work, dim: int, inverse: bool = False) -> Tensors:
    return _in_place(tensors, work, lambda lazy: interleave(lazy, dim, work.target, inverse=inverse))


def _rope_permute(
    tensors: Tensors,
    work: Work,
    heads: int | str,
    names: Sequence[str] | None = None,
    inverse: bool = False,
) -> Tensors:
    """Permute the tensors whose patterns have one of the names, or all."""
    sources, targets = work.converter.sources, work.converter.targets
    made: Tensors = {}
    for pattern, group in tensors.items():
        lazy = _single({pattern: group}, work)
        if names is None or any(name in pattern for name in names):
            lazy = permute_for_rope(lazy, _size(heads, work), work.target, inverse=inverse)
        made[targets[0] if len(targets) == len(sources) == 1 else pattern] = [lazy]
    return made


def _conv3d_to_linear(tensors: Tensors, work: Work, *_: Any) -> Tensors:  # noqa: ANN401 - not needed this way
    lazy = _single(tensors, work)
    if len(lazy.shape) == 2:
        return _in_place(tensors, work, lambda lazy: lazy)
    if len(lazy.shape) != 5:
        raise CheckpointError(f"{work.target}: a stored tensor of {len(lazy.shape)} dimensions is no 3-d convolution")
    flat = (lazy.shape[0], prod(lazy.shape[1:]))
    return _in_place(tensors, work, lambda lazy: reshape(lazy, flat, work.target))


def _linear_to_conv3d(tensors: Tensors, work: Work, channels: int | str, kernel: Sequence[int | str]) -> Tensors:
    inner = [_size(size, work) for size in (channels, *kernel)]
    return _in_place(tensors, work, lambda lazy: reshape(lazy, (lazy.shape[0], *inner), work.target))


def _unpad_vocab(tensors: Tensors, work: Work, size: int | str) -> Tensors:
    """Keep the first rows; the others are kept apart, so that a merge gives them back."""
    lazy = _single(tensors, work)
    rows = min(_size(size, work), lazy.shape[0])
    kept, rest = split(lazy, 0, (rows, lazy.shape[0] - rows), work.target)
    if rest.shape[0]:
        work.unused.append(rest)
    return {work.converter.targets[0]: [kept]}


def _fuse_text_and_vision_experts(tensors: Tensors, work: Work, stack_dim: int = 0, concat_dim: int = 1) -> Tensors:
    """Stack the first share of every source's tensors for the first target, the next for the next, and join sources."""
    check_complete(tensors, work)
    sources, targets = work.converter.sources, work.converter.targets
    lengths = [len(tensors[source]) for source in sources]
    if len(set(lengths)) > 1 or lengths[0] % len(targets):
        counts = " and ".join(map(str, lengths))
        raise CheckpointError(
            f"{work.target}: {len(targets)} equal stacks are made of {counts} tensors; some are missing"
        )
    share = lengths[0] // len(targets)
    made: Tensors = {}
    for position, target in enumerate(targets):
        mine = slice(position * share, (position + 1) * share)
        stacks = [stack(tensors[source][mine], stack_dim, work.target) for source in sources]
        made[target] = [concatenate(stacks, concat_dim, work.target)]
    return made


def _merge_message_queries(tensors: Tensors, work: Work) -> Tensors:
    """Make [layers, 4, width] of the pairs (query, mlp) and (key, value) of every layer, in the order q, k, v, mlp."""
    check_complete(tensors, work)
    pairs = []
    for source in work.converter.sources:
        lazy = _single({source: tensors[source]}, work)
        rows = lazy.shape[0]
        pairs.append(reshape(lazy, (rows // 2, 2, *lazy.shape[1:]), work.target))
    queries, keys_values = pairs
    query, mlp = chunk(queries, 1, 2, work.target)
    return {work.converter.targets[0]: [concatenate([query, keys_values, mlp], 1, work.target)]}


def _computes(tensors: Tensors, work: Work, name: str) -> Tensors:
    """Let a lone tensor of the first source pass, which is in the model's format already; refuse what is computed."""
    first = work.converter.sources[0]
    if len(work.converter.sources) > 1 and list(tensors) == [first]:
        return {work.converter.targets[0]: [_single(tensors, work)]}
    raise CheckpointError(
        f"{work.target}: is computed ({name}) from {' and '.join(tensors)}, and splitting only moves bytes; "
        "save the model from transformers in its own format first"
    )


_OPERATIONS: dict[str, Callable[..., Tensors]] = {
    "stack": _stack,
    "concat": _concat,
    "chunk": _chunk,
    "split": _split,
    "unstack": _unstack,
    "transpose": _transpose,
    "interleave": _interleave,
    "rope_permute": _rope_permute,
    "conv3d_to_linear": _conv3d_to_linear,
    "linear_to_conv3d": _linear_to_conv3d,
    "unpad_vocab": _unpad_vocab,
    "ernie_experts": _fuse_text_and_vision_experts,
    "merge_message_queries": _merge_message_queries,
    "computes": _computes,
}
