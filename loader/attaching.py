"""Attaching: gives a module the parameters and buffers of its rank's shard."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from loader.dtypes import torch_dtype, torch_shape
from loader.shard import Shard
from manifests.errors import LoadError

Convert = Callable[[str, torch.Tensor], torch.Tensor]


def attach(module: nn.Module, shard: Shard, *, convert: Convert | None = None, any_float: bool = False) -> None:
    """Replace a module's parameters and buffers by the shard's, tie what is tied, set the attributes.

    The module has the whole model's shapes before (on any device, also meta), and its rank's shapes after. Everything
    is checked first: the module is unchanged if anything does not fit. What is tied is what the split says, and what
    the module itself has as one parameter under two names.

    Args:
        module: The model, as its class builds it.
        shard: Its rank's tensors.
        convert: Applied to every tensor, by name; for a change of dtype. Dtypes are not compared then.
        any_float: Whether a parameter of a floating-point dtype of at least 16 bits may get a tensor of another one.

    Raises:
        LoadError: A parameter is in no file, a tensor is no parameter, a shape or a dtype differs, or an attribute is
            not there.
    """
    check_fits(module, shard, dtypes="any" if convert else "any float" if any_float else "same")
    modules = dict(module.named_modules(remove_duplicate=False))
    ties = {**ties_of(module, shard), **shard.manifest.ties}
    for name in shard:
        tensor = shard[name]
        _set(modules, name, convert(name, tensor) if convert else tensor)
    for name, source in ties.items():
        owner, leaf = _owner(modules, name)
        source_owner, source_leaf = _owner(modules, source)
        owner.register_parameter(leaf, source_owner.get_parameter(source_leaf))
    for name, values in shard.manifest.attributes.items():
        for attribute, value in values.items():
            _set_attribute(modules[name], attribute, value[shard.rank] if isinstance(value, tuple) else value)


def check_fits(module: nn.Module, shard: Shard, *, dtypes: Literal["same", "any float", "any"] = "same") -> None:
    """Compare a module with a shard; nothing is changed.

    Args:
        module: The model.
        shard: Its rank's tensors.
        dtypes: Which dtypes a parameter may get that has another one; those of floating point have 16 bits or more.

    Raises:
        LoadError: They do not fit, for the reasons that `attach` lists.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = dict(_named(modules, lambda child: child._parameters))
    buffers = dict(_named(modules, lambda child: child._buffers))
    fleeting = _named(modules, lambda child: dict.fromkeys(child._non_persistent_buffers_set, True))
    state = set(parameters) | (set(buffers) - {name for name, _ in fleeting})
    ties, own = shard.manifest.ties, ties_of(module, shard)
    problems: list[str] = []
    for name in shard:
        tensor = shard.manifest.tensors[name]
        mine = parameters.get(name, buffers.get(name))
        if mine is None:
            problems.append(f"{name}: in the split, but no parameter of the model")
        elif tuple(mine.shape) != (expected := torch_shape(tensor.dtype, tensor.shape)):
            problems.append(f"{name}: {list(mine.shape)} in the model, {list(expected)} in the split")
        elif (dtype := torch_dtype(tensor.dtype)) != mine.dtype and not _may_become(dtype, mine.dtype, dtypes):
            problems.append(f"{name}: {mine.dtype} in the model, {dtype} in the split")
    missing = (
        state - set(shard) - set(ties) - set(own) - {name for name in unsaved(module) if not parameters[name].is_meta}
    )
    problems += [f"{name}: a parameter of the model, but in no file" for name in sorted(missing)]
    problems += [
        f"{name}: is {source} in the model, which is divided; give the plan a rule for it, and the two under [ties]"
        for name, source in own.items()
        if shard.manifest.tensors[source].placement.cuts
    ]
    for name, source in ties.items():
        problems += [f"{n}: tied, but no parameter of the model" for n in (name, source) if n not in parameters]
    stranded = [name for name, buffer in buffers.items() if buffer.is_meta and name not in shard]
    problems += [f"{name}: a buffer without values (on meta), and in no file" for name in stranded]
    problems += _missing_attributes(modules, shard)
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise LoadError(f"{type(module).__name__}: the split is not of this model:\n{shown}{more}")


def ties_of(module: nn.Module, shard: Shard) -> dict[str, str]:
    """Return the parameters of a module that neither file nor split knows, and that are one with one of the shard."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    held = {id(parameters[name]): name for name in shard if name in parameters}
    unknown = parameters.keys() - set(shard) - shard.manifest.ties.keys()
    return {name: held[id(parameters[name])] for name in sorted(unknown) if id(parameters[name]) in held}


def _may_become(dtype: torch.dtype, mine: torch.dtype, dtypes: str) -> bool:
    floats = all(one.is_floating_point and one.itemsize > 1 for one in (dtype, mine))
    return dtypes == "any" or (dtypes == "any float" and floats)


def unsaved(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of a model of transformers that its class computes and does not save."""
    names = getattr(module, "_keys_to_ignore_on_save", None) or ()
    return tuple(name for name, _ in module.named_parameters() if name in names)


Entry = TypeVar("Entry")


def _named(
    modules: Mapping[str, nn.Module], entries: Callable[[nn.Module], Mapping[str, Entry | None]]
) -> Iterator[tuple[str, Entry]]:
    """Yield what modules have, by its full name; what has two names comes twice."""
    for prefix, child in modules.items():
        for name, entry in entries(child).items():
            if entry is not None:
                yield (f"{prefix}.{name}" if prefix else name), entry


def _owner(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return modules[parent], leaf


def _set(modules: Mapping[str, nn.Module], name: str, tensor: torch.Tensor) -> None:
    owner, leaf = _owner(modules, name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _missing_attributes(modules: Mapping[str, nn.Module], shard: Shard) -> list[str]:
    """Return what is wrong with the attributes that the split sets."""
    problems: list[str] = []
    for name, values in shard.manifest.attributes.items():
        if name not in modules:
            problems.append(f"{name}: the split sets its attributes, but no module of the model")
            continue
        for attribute in values:
            try:
                attrgetter(attribute)(modules[name])
            except AttributeError:
                kind = type(modules[name]).__name__
                problems.append(f"{name}: {kind} has no attribute {attribute}, which the split sets")
    return problems


def _set_attribute(owner: nn.Module, attribute: str, value: int) -> None:
    head, _, inner = attribute.partition(".")
    if not inner:
        setattr(owner, head, value)
        return
    current = getattr(owner, head)
    view = current if isinstance(current, LocalView) else LocalView(current)
    view.set_local(inner, value)
    setattr(owner, head, view)


class LocalView:
    """An object as one module sees it: some attributes have the rank's values, all others are the object's own.

    A configuration is shared by all modules of a model, so a rank's number of heads cannot be written into it.
    """

    _whole: object
    _local: dict[str, Any]

    def __init__(self, whole: object) -> None:
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_local", {})

    def set_local(self, name: str, value: int) -> None:
        """Give an attribute a value of this module's own."""
        self._local[name] = value

    def __getattr__(self, name: str) -> object:
        if name in ("_whole", "_local"):
            raise AttributeError(name)
        return self._local[name] if name in self._local else getattr(self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._local:
            self._local[name] = value
        else:
            setattr(self._whole, name, value)
