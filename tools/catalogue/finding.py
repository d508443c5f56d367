"""Which types are in the catalogue, and the public classes of each."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from reshard.catalogue import own_plans

from .small import own_config

UNBUILT = {"nougat"}
"""Composites of which the type's own configuration is not one: nothing is known of their parts."""


def find_types() -> list[str]:
    """Return the types that have a plan, of transformers or of our own, and those of which a part has one."""
    return [name for name in sorted(CONFIG_MAPPING.keys()) if has_plan(CONFIG_MAPPING[name]) or _is_composite(name)]


def has_plan(config: PreTrainedConfig | type[PreTrainedConfig]) -> bool:
    """Tell whether a configuration has a plan of its own, or its type one of ours."""
    return bool(config.base_model_tp_plan or config.base_model_ep_plan or config.model_type in own_plans())


def _is_composite(model_type: str) -> bool:
    if not CONFIG_MAPPING[model_type].sub_configs or model_type in UNBUILT:
        return False
    return any(has_plan(config) for _, config in inner_configs(own_config(model_type)))


def inner_configs(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the configurations inside one, each with its path."""
    for name in config.sub_configs or {}:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            inner_path = f"{path}.{name}".lstrip(".")
            yield inner_path, inner
            yield from inner_configs(inner, inner_path)


def find_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """Return the public model classes that take a type's configuration.

    They are in the type's own folder. Types without modeling files of their own (exaone, sarvam_moe) run another type's
    classes, which the tables of transformers name; then all classes beside those that take the same configuration.
    """
    config_class = CONFIG_MAPPING[model_type]
    own = [cls for module in _modeling_modules(config_class.__module__) for cls in _public_classes(module)]
    found = [cls for cls in own if _takes(cls, config_class)]
    if found:
        return found
    named = [getattr(transformers, name) for name in _named_in_tables(model_type)]
    beside = [cls for one in named for cls in _public_classes(importlib.import_module(one.__module__))]
    wanted = {one.config_class for one in named}
    return list(dict.fromkeys([*named, *(cls for cls in beside if cls.config_class in wanted)]))


def _takes(cls: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> bool:
    return cls.config_class is not None and cls.config_class.model_type == config_class.model_type


@cache
def _modeling_modules(config_module: str) -> list[ModuleType]:
    package = importlib.import_module(config_module.rpartition(".")[0])
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names if name.startswith("modeling_")]


def _public_classes(module: ModuleType) -> list[type[PreTrainedModel]]:
    public = [getattr(module, name) for name in module.__all__ if not name.endswith("PreTrainedModel")]
    return [cls for cls in public if _is_model(cls)]


def _named_in_tables(model_type: str) -> list[str]:
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    names = [name for table in tables if model_type in table for name in _as_tuple(table[model_type])]
    return [name for name in dict.fromkeys(names) if _is_model(getattr(transformers, name, None))]


def _is_model(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, PreTrainedModel)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
