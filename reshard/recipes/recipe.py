"""Recipes: the tensors of the running model as moves of stored tensors.

A stored name is renamed and put under the prefix that the class expects; its tensor is joined with others, taken apart
or turned (`reshard.recipes.operations`). Every one of these only moves bytes, so a recipe's result is links from source
dimensions to dimensions of the tensor.

Source: ``convert_and_load_state_dict_in_model`` in ``transformers/core_model_loading.py`` of transformers 5.24.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from manifests.dtypes import atom, atoms
from manifests.errors import CheckpointError
from manifests.expression import Lookup, UnknownSizeError, evaluate
from manifests.manifest import Part
from manifests.natural import kind_of
from manifests.stored import StoredTensor, StoredTensors
from reshard.catalogue.architecture import Architecture, Converter
from reshard.model import RuntimeTensor
from reshard.program import identity_links
from reshard.recipes.lazy import Lazy
from reshard.recipes.operations import Tensors, Work, apply
from reshard.recipes.renaming import Renamed, Renamer, stored_order
from reshard.recipes.scales import scale_converters

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
GATHERS = frozenset({"stack", "ernie_experts"})
"""Operations that make one tensor of a list of any length, in which a missing one does not show."""
_RANGE = re.compile(r"\{([^{}:]+):([^{}:]+)\}")
REST = ".unused"
"""Ends the name of what no target takes of a stored tensor that is otherwise used."""

LookupOf = Callable[[str], Lookup]
"""Gives the sizes of the sub-model that a tensor is in, by the tensor's name."""


def stored_tensors(tensors: StoredTensors) -> dict[str, RuntimeTensor]:
    """Return the tensors under their stored names and in their stored layout."""
    different = {id(kind): kind for kind in tensors.types}
    alike = {key: _alike(*kind) for key, kind in different.items()}
    return dict(zip(tensors.names, map(alike.__getitem__, map(id, tensors.types)), strict=True))


@lru_cache(maxsize=4096)
def _alike(dtype: str, shape: tuple[int, ...]) -> RuntimeTensor:
    """Return a stored tensor as it is; those of one dtype and shape are one object."""
    return RuntimeTensor(dtype, shape)


def runtime_tensors(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, lookup_of: LookupOf
) -> dict[str, RuntimeTensor]:
    """Return the tensors of the running model.

    Args:
        tensors: The stored tensors by name.
        architecture: The class that will run.
        lookup_of: Gives the sizes that operations refer to.

    Raises:
        CheckpointError: Stored tensors that should be joined do not fit together, one is missing, or one is computed.
    """
    made: dict[str, RuntimeTensor] = {}
    uses: dict[str, _Use] = {}
    scales = scale_converters(architecture.converters, tensors)
    renamer = Renamer(architecture.renames, (*architecture.converters, *scales))
    for name in sorted(tensors, key=stored_order):
        renamed = Renamed(name) if _is_kept(name, architecture) else renamer.rename(name)
        target = _under_prefix(renamed.name, architecture)
        if _is_ignored((renamed.name, target), architecture, lookup_of(target)):
            made[name] = RuntimeTensor(tensors[name].dtype, tensors[name].shape, unused=True)
        elif renamed.converter:
            uses.setdefault(target, _Use(renamed.converter, {})).sources.setdefault(renamed.source, []).append(name)
        else:
            _add(made, target, _as_it_is(name, target, tensors[name]))
    for target, use in uses.items():
        for name, tensor in _convert(target, use, tensors, lookup_of):
            _add(made, name, tensor)
    for converters in (architecture.converters, scales):
        _check_siblings(converters, uses)
    _check_taken(tensors, made)
    return made


class _Use(NamedTuple):
    """A converter in use, with the stored names that it takes by source pattern."""

    converter: Converter
    sources: dict[str, list[str]]


def _is_kept(name: str, architecture: Architecture) -> bool:
    """Tell whether a stored name is the model's already; a bias, which may be optional, is if its weight is."""
    module, _, leaf = kind_of(name).rpartition(".")
    return any(f"{module}.{kept}" in architecture.kept for kept in (leaf, "weight" if leaf == "bias" else leaf))


def _is_ignored(names: tuple[str, ...], architecture: Architecture, lookup: Lookup) -> bool:
    likely = _any_of(architecture.ignored)
    return any(
        _ignores(pattern, name, lookup)
        for name in set(names)
        if likely.search(name)
        for pattern in architecture.ignored
    )


@lru_cache(maxsize=64)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that finds what any of the patterns may take: most names are none of theirs."""
    if not patterns:
        return re.compile(r"(?!)")
    numbered = (_RANGE.sub(r"\\d+", pattern) for pattern in patterns)
    return re.compile("|".join(f"(?:{pattern})" for pattern in numbered))


def _ignores(pattern: str, name: str, lookup: Lookup) -> bool:
    """Tell whether a pattern of ignored names takes a name.

    ``{first:end}`` in a pattern is a number from first, a formula, to below end. A number of a layer as such holds only
    for layers that the model lacks: where a small model has its extra layers a large one has layers of its own.
    """
    around = _RANGE.split(pattern)
    if len(around) == 1:
        match = re.search(pattern, name)
        layer = match and re.match(r".*?layers\.(\d+)", name[match.start() :])
        if not layer or not re.search(r"layers\\?\.\d", pattern):
            return bool(match)
        count = lookup("num_hidden_layers")
        return count is None or int(layer[1]) >= count
    before, first, end, after = around
    match = re.search(f"{before}(?P<number>\\d+){after}", name)
    if match is None:
        return False
    try:
        return evaluate(first, lookup) <= int(match["number"]) < evaluate(end, lookup)
    except UnknownSizeError:
        return False


def _add(made: dict[str, RuntimeTensor], name: str, tensor: RuntimeTensor) -> None:
    if name in made:
        raise CheckpointError(f"{name}: two stored tensors become this parameter of the model")
    made[name] = tensor


def _as_it_is(stored_name: str, name: str, stored: StoredTensor) -> RuntimeTensor:
    if stored_name == name:
        return _alike(stored.dtype, stored.shape)
    return RuntimeTensor(stored.dtype, stored.shape, (Part(stored_name),))


def _convert(
    target: str, use: _Use, tensors: Mapping[str, StoredTensor], lookup_of: LookupOf
) -> Iterator[tuple[str, RuntimeTensor]]:
    """Yield the tensors that a converter makes, by name, and what it leaves."""
    converter, lookup = use.converter, lookup_of(target)
    state: Tensors = {source: [_lazy(name, tensors[name]) for name in names] for source, names in use.sources.items()}
    if foreign := use.sources.keys() - set(converter.sources):
        names = use.sources[min(foreign)]
        raise CheckpointError(f"{target}: is made of {' and '.join(converter.sources)}, and of {names[0]} as well")
    work = Work(converter, target, lookup, _count_experts(lookup), [])
    for operation in converter.operations:
        state = apply(operation, state, work)
    named = next((pattern for pattern in state if pattern in target), "")
    before, _, after = target.partition(named) if named else ("", "", "")
    for pattern, lazies in state.items():
        if len(lazies) != 1:
            raise CheckpointError(f"{target}: {len(lazies)} stored tensors become this parameter of the model")
        name = before + pattern + after
        yield name, _runtime(name, lazies[0])
    for rest in work.unused:
        tensor = _runtime("", rest)
        yield tensor.parts[0].source + REST, tensor._replace(unused=True)


def _count_experts(lookup: Lookup) -> tuple[int, ...]:
    """Return how many experts may be stacked: those of a layer, without those that have no weights or with them."""
    count = next((count for name in EXPERT_COUNTS if (count := lookup(name)) is not None), None)
    return () if count is None else tuple(sorted({count, count + (lookup("zero_expert_num") or 0)}))


def _lazy(name: str, stored: StoredTensor) -> Lazy:
    shape = atoms(stored.dtype, stored.shape)
    if shape is None:
        raise CheckpointError(f"{name}: rows of {stored.shape[-1]} {stored.dtype} do not fill whole bytes")
    return Lazy(stored.dtype, shape, (Part(name, identity_links(shape)),), stored=True)


def _runtime(name: str, lazy: Lazy) -> RuntimeTensor:
    per_atom, _ = atom(lazy.dtype)
    shape = (*lazy.shape[:-1], lazy.shape[-1] * per_atom) if lazy.shape else ()
    parts = lazy.parts
    if lazy.stored and not parts[0].shape:
        parts = () if parts[0].source == name else (Part(parts[0].source),)
    return RuntimeTensor(lazy.dtype, shape, parts)


def _check_taken(tensors: Mapping[str, StoredTensor], made: Mapping[str, RuntimeTensor]) -> None:
    """Check that no stored tensor is lost."""
    taken = {part.source for name, tensor in made.items() for part in tensor.parts or (Part(name),)}
    if lost := tensors.keys() - taken:
        raise CheckpointError(f"{min(lost)}: is taken by a conversion, and nothing is made of it")


def _check_siblings(converters: Iterable[Converter], uses: Mapping[str, _Use]) -> None:
    """Check that a module has all of its stacked tensors or none: one of which nothing is stored is noticed here.

    Biases may be missing.
    """
    stacking = {
        converter.targets[0]: converter
        for converter in converters
        if any(name in GATHERS for name, *_ in converter.operations) and not converter.targets[0].endswith("bias")
    }
    modules: dict[tuple[str, str], set[str]] = {}
    for target, use in uses.items():
        pattern = use.converter.targets[0]
        if pattern in stacking:
            parent = pattern.rpartition(".")[0]
            modules.setdefault((parent, target.rpartition(".")[0]), set()).add(pattern)
    for (parent, module), found in modules.items():
        for pattern, converter in stacking.items():
            if pattern.rpartition(".")[0] == parent and pattern not in found:
                raise CheckpointError(
                    f"{module}{pattern.removeprefix(parent)}: is made of {', '.join(converter.sources)}; none is stored"
                )


def _under_prefix(name: str, architecture: Architecture) -> str:
    """Add or remove the base model's prefix, for a checkpoint that was saved from another class of the same type."""
    prefix, other = architecture.prefix, architecture.base_prefix
    if prefix:
        rest = name.removeprefix(f"{prefix}.")
        return rest if rest.split(".")[0] in architecture.heads else f"{prefix}.{rest}"
    return name.removeprefix(f"{other}.") if other else name
