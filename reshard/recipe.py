"""Recipes: the tensors of the running model as moves of stored tensors.

A stored name is renamed, joined with others (stacked, concatenated), and put under the prefix that the class expects.
Every one of these only moves bytes, so a recipe's result is links from source dimensions to dimensions of the tensor.

Source: ``rename_source_key`` and ``WeightTransform`` in ``transformers/core_model_loading.py`` of transformers 5.24.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from manifests.dtypes import atom, atoms
from manifests.errors import CheckpointError
from manifests.header import StoredTensor
from manifests.manifest import Link, Part
from manifests.natural import natural_key
from manifests.runs import Run, Runs, expand, fold
from reshard.catalogue import Architecture, Converter
from reshard.placing import RuntimeTensor
from reshard.program import identity_links


class Lazy(NamedTuple):
    """A tensor made of stored ones, none of them read. ``shape`` is in atoms."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def stored_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, RuntimeTensor]:
    """Return the tensors under their stored names and in their stored layout."""
    return {name: RuntimeTensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def runtime_tensors(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, experts: int | None = None
) -> dict[str, RuntimeTensor]:
    """Return the tensors of the running model.

    Args:
        tensors: The stored tensors by name.
        architecture: The class that will run.
        experts: How many experts a layer has, as its configuration says.

    Raises:
        CheckpointError: Stored tensors that should be joined do not fit together, or one is missing.
    """
    made: dict[str, RuntimeTensor] = {}
    joined: dict[str, tuple[Converter, list[list[str]]]] = {}
    for name in sorted(tensors, key=natural_key):
        if any(re.search(pattern, name) for pattern in architecture.ignored):
            made[name] = RuntimeTensor(tensors[name].dtype, tensors[name].shape, unused=True)
            continue
        renamed = name
        for pattern, replacement in architecture.renames:
            renamed = _replace(renamed, pattern, replacement) or renamed
        for converter in architecture.converters:
            target, source = _convert(renamed, converter)
            if target:
                joined.setdefault(target, (converter, [[] for _ in converter.sources]))[1][source].append(name)
                break
        else:
            _add(made, renamed, _as_it_is(name, renamed, tensors[name]))
    for target, (converter, names) in joined.items():
        _add(made, target, _join(target, converter, names, tensors, experts))
    _check_siblings(architecture, joined)
    return _under_prefix(made, architecture)


def _add(made: dict[str, RuntimeTensor], name: str, tensor: RuntimeTensor) -> None:
    if name in made:
        raise CheckpointError(f"{name}: two stored tensors become this parameter of the model")
    made[name] = tensor


def _as_it_is(stored_name: str, name: str, stored: StoredTensor) -> RuntimeTensor:
    parts = () if stored_name == name else (Part(stored_name),)
    return RuntimeTensor(stored.dtype, stored.shape, parts)


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern as transformers does: ``*.`` is any text up to a dot, and a name ends with the pattern."""
    ending = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else ""
    return re.compile(pattern.replace("*.", r".*\.") + ending)


def _replace(name: str, pattern: str, replacement: str) -> str:
    """Return the name with the pattern's first match replaced, or an empty text if nothing matches."""
    match = _compile(pattern).search(name)
    return name.replace(match.group(), replacement, 1) if match else ""


def _convert(name: str, converter: Converter) -> tuple[str, int]:
    by_length = sorted(enumerate(converter.sources), key=lambda item: -len(item[1]))
    for position, pattern in by_length:
        if target := _replace(name, pattern, converter.target):
            return target, position
    return "", 0


def _check_siblings(architecture: Architecture, joined: Mapping[str, tuple[Converter, list[list[str]]]]) -> None:
    """Check that a module has all of its joined tensors or none: one of which nothing is stored is noticed here."""
    modules: dict[str, dict[str, list[Converter]]] = {}
    for target, (converter, _) in joined.items():
        parent = converter.target.rpartition(".")[0]
        modules.setdefault(parent, {}).setdefault(target.rpartition(".")[0], []).append(converter)
    for parent, found in modules.items():
        expected = [converter for converter in architecture.converters if converter.target.rpartition(".")[0] == parent]
        for module, converters in found.items():
            for converter in expected:
                if converter not in converters:
                    raise CheckpointError(
                        f"{module}{converter.target.removeprefix(parent)}: is made of {', '.join(converter.sources)}; "
                        "none is stored"
                    )


def _join(
    target: str,
    converter: Converter,
    names: list[list[str]],
    tensors: Mapping[str, StoredTensor],
    experts: int | None,
) -> RuntimeTensor:
    groups = [[_lazy(name, tensors[name]) for name in group] for group in names]
    if not all(groups):
        absent = converter.sources[[bool(group) for group in groups].index(False)]
        raise CheckpointError(
            f"{target}: is made of {' and '.join(converter.sources)}; no tensor is named like {absent}"
        )
    for operation, dim in converter.operations:
        if operation == "stack":
            lengths = [len(group) for group in groups]
            groups = [[stack(group, dim, target)] for group in groups]
            if len({*lengths, experts or lengths[0]}) > 1:
                expected = f", config.json says {experts}" if experts is not None else ""
                counts = " and ".join(map(str, lengths))
                raise CheckpointError(f"{target}: is stacked from {counts} tensors{expected}; some are missing")
        else:
            groups = [[concatenate([lazy for group in groups for lazy in group], dim, target)]]
    if len(groups) != 1 or len(groups[0]) != 1:
        raise CheckpointError(f"{target}: {sum(map(len, groups))} stored tensors become this parameter of the model")
    lazy = groups[0][0]
    per_atom, _ = atom(lazy.dtype)
    return RuntimeTensor(lazy.dtype, (*lazy.shape[:-1], lazy.shape[-1] * per_atom), lazy.parts)


def _lazy(name: str, stored: StoredTensor) -> Lazy:
    shape = atoms(stored.dtype, stored.shape)
    if shape is None:
        raise CheckpointError(f"{name}: rows of {stored.shape[-1]} {stored.dtype} do not fill whole bytes")
    return Lazy(stored.dtype, shape, (Part(name, identity_links(shape)),))


def stack(tensors: Iterable[Lazy], dim: int, target: str) -> Lazy:
    """Return the tensors as entries of a new dimension.

    Raises:
        CheckpointError: Their dtypes or shapes differ.
    """
    tensors = list(tensors)
    first = tensors[0]
    _check_alike([(lazy.dtype, lazy.shape) for lazy in tensors], target)
    parts: list[Part] = []
    for position, lazy in enumerate(tensors):
        for part in lazy.parts:
            links = [
                Link(link.src, link.dst + 1 if link.dst is not None and link.dst >= dim else link.dst, link.runs)
                for link in part.links
            ]
            parts.append(Part(part.source, (*links, Link(None, dim, (Run(0, position, 1),)))))
    return Lazy(first.dtype, (*first.shape[:dim], len(tensors), *first.shape[dim:]), tuple(parts))


def concatenate(tensors: Iterable[Lazy], dim: int, target: str) -> Lazy:
    """Return the tensors joined along a dimension.

    Raises:
        CheckpointError: Their dtypes differ, or their shapes in another dimension.
    """
    tensors = list(tensors)
    first = tensors[0]
    _check_alike([(lazy.dtype, (*lazy.shape[:dim], *lazy.shape[dim + 1 :])) for lazy in tensors], target)
    parts: list[Part] = []
    start = 0
    for lazy in tensors:
        for part in lazy.parts:
            links = [
                Link(link.src, link.dst, _shift(link.runs, start)) if link.dst == dim else link for link in part.links
            ]
            parts.append(Part(part.source, tuple(links)))
        start += lazy.shape[dim]
    return Lazy(first.dtype, (*first.shape[:dim], start, *first.shape[dim + 1 :]), tuple(parts))


@lru_cache(maxsize=4096)
def _shift(runs: Runs, by: int) -> Runs:
    return fold((src, dst + by, length) for src, dst, length in expand(runs))


def _check_alike(kinds: list[tuple[str, tuple[int, ...]]], target: str) -> None:
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(set(kinds)))
        raise CheckpointError(f"{target}: its stored tensors do not fit together: {listed}")


def _under_prefix(made: dict[str, RuntimeTensor], architecture: Architecture) -> dict[str, RuntimeTensor]:
    """Add or remove the base model's prefix where the checkpoint was saved from another class of the same type."""
    prefix, other = architecture.prefix, architecture.base_prefix
    if prefix and not any(name.startswith(f"{prefix}.") for name in made):
        return {
            name if tensor.unused or name.split(".")[0] in architecture.heads else f"{prefix}.{name}": _named(
                name, tensor
            )
            for name, tensor in made.items()
        }
    if not prefix and other and any(name.startswith(f"{other}.") for name in made):
        return {
            name if tensor.unused else name.removeprefix(f"{other}."): _named(name, tensor)
            for name, tensor in made.items()
        }
    return made


def _named(name: str, tensor: RuntimeTensor) -> RuntimeTensor:
    """Return the tensor with its source spelt out, for a name that changes."""
    return tensor if tensor.parts or tensor.unused else tensor._replace(parts=(Part(name),))
