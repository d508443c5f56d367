"""The sizes that layouts are bound with: formulas over a model's configuration."""

import re
from collections.abc import Mapping
from typing import Any

from manifests.errors import PlanError
from manifests.expression import MAX_SIZE, UnknownSizeError, evaluate
from manifests.shown import shown, shown_name
from reshard.catalogue import Architecture, part_of_config, type_values

MAX_CHAIN = 50
"""Formulas that refer to one another in a row."""
_LAYER = re.compile(r"(?:[0-9]*[^.0-9][^.]*\.)*([0-9]+)(?=\.|$)")
"""A name up to its first part that is a number."""


class Sizes:
    """Looks names up: formulas first, then the configuration, then the defaults of its class.

    A name may be a path into the configuration (``text_config.hidden_size``). A composite configuration is searched in
    its ``text_config`` as well.

    Attributes:
        used: The value of every formula that was asked for.
        consulted: The configuration's names that were found on the way, with their values.

    >>> sizes = Sizes({"g": "H / KV", "H": "num_attention_heads"}, {"num_attention_heads": 9, "KV": 3})
    >>> sizes.get("g"), sizes.get("hd")
    (3, None)
    """

    def __init__(
        self,
        formulas: Mapping[str, str],
        config: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._formulas = formulas
        self._config = config
        self._defaults = defaults or {}
        self._aliases = aliases or {}
        self._open: list[str] = []
        self._unknown: set[str] = set()
        self.used: dict[str, int] = {}
        self.consulted: dict[str, int] = {}

    def get(self, name: str) -> int | None:
        """Return a size, or None where nothing gives it a value.

        Raises:
            PlanError: A formula refers to itself, or the configuration holds something else than a whole number.
        """
        if name in self.used:
            return self.used[name]
        if name not in self._formulas:
            return self._from_config(name)
        if name in self._unknown:
            return None
        if name in self._open:
            raise PlanError(f"sizes: {shown(' -> '.join([*self._open, name]))}: refers to itself")
        if len(self._open) == MAX_CHAIN:
            raise PlanError(f"sizes: {shown_name(self._open[0])}: a chain of more than {MAX_CHAIN} formulas")
        self._open.append(name)
        try:
            value = evaluate(self._formulas[name], self.get)
        except UnknownSizeError:
            self._unknown.add(name)
            return None
        finally:
            self._open.pop()
        self.used[name] = value
        return value

    def of_layer(self, number: int) -> "Sizes":
        """Return the sizes of a layer, which are these where the configuration says nothing else of it.

        >>> sizes = Sizes({}, {"heads": 8, "per_layer_config": {"03": {"heads": 2}}})
        >>> sizes.of_layer(3).get("heads"), sizes.of_layer(4) is sizes
        (2, True)
        """
        if not self.layered:
            return self
        layers = self._config["per_layer_config"]
        own = next((values for key, values in layers.items() if _is_number(str(key), number)), None)
        if not isinstance(own, Mapping):
            return self
        return Sizes(self._formulas, {**self._config, **own}, self._defaults, self._aliases)

    @property
    def layered(self) -> bool:
        """Whether layers may have sizes of their own."""
        return isinstance(self._config.get("per_layer_config"), Mapping)

    def stated(self) -> "Sizes":
        """Return what the configuration itself says, without the defaults of its class."""
        return Sizes(self._formulas, self._config, {}, self._aliases)

    def peek(self, name: str) -> object:
        """Return what the configuration or its defaults say of a name; it does not count as consulted."""
        found = self._find(name) or self._find(f"text_config.{name}")
        # A null is not an absence: the class then computes the value, as the formulas do.
        return found[0] if found else self._defaults.get(self._aliases.get(name, name))

    def _from_config(self, name: str) -> int | None:
        value = self.peek(name)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise PlanError(
                f"config.json: {shown_name(name)} is {shown(value)}; a layout needs one whole number from 0"
            )
        self.consulted[name] = value
        return value

    def _find(self, path: str) -> tuple[Any] | None:
        """Return the configuration's value in a tuple, or None where it has no such name."""
        value: Any = self._config
        for part in path.split("."):
            key = next(
                (key for key in (part, self._aliases.get(part, "")) if isinstance(value, dict) and key in value), ""
            )
            if not key:
                return None
            value = value[key]
        return (value,)


def _is_number(text: str, number: int) -> bool:
    return text.isdecimal() and text.isascii() and text.lstrip("0").rjust(1, "0") == str(number)


class ScopedSizes:
    """The sizes of a model, of its sub-models, and of layers that have some of their own.

    Attributes:
        root: The model's own.
        scopes: Those of its sub-models, by the module that each is.
    """

    def __init__(self, root: Sizes, scopes: Mapping[str, Sizes] | None = None) -> None:
        self.root = root
        self.scopes = dict(scopes or {})
        self._layers: dict[str, Sizes] = {}

    @property
    def layered(self) -> bool:
        """Whether layers may have sizes of their own."""
        return any(sizes.layered for sizes in (self.root, *self.scopes.values()))

    def of(self, name: str) -> Sizes:
        """Return the sizes of the innermost sub-model that holds a module or a tensor, and of its layer."""
        holding = [prefix for prefix in self.scopes if f"{name}.".startswith(f"{prefix}.") or not prefix]
        scope = max(holding, key=len, default="")
        sizes = self.scopes[scope] if holding else self.root
        inside = name.removeprefix(f"{scope}.") if scope else name
        layer = _LAYER.match(inside)
        if layer is None:
            return sizes
        module = f"{scope}.{layer[0]}" if scope else layer[0]
        if module not in self._layers:
            self._layers[module] = sizes.of_layer(int(layer[1]))
        return self._layers[module]

    @property
    def used(self) -> dict[str, int]:
        """The value of every formula that was asked for; those of sub-models and layers under their names."""
        return self._gather("used")

    @property
    def consulted(self) -> dict[str, int]:
        """The configuration's names that were found on the way; those of sub-models and layers under their names."""
        return self._gather("consulted")

    def _gather(self, what: str) -> dict[str, int]:
        whole = {id(self.root), *map(id, self.scopes.values())}
        layers = {module: sizes for module, sizes in self._layers.items() if id(sizes) not in whole}
        inner = {
            f"{prefix}.{name}" if prefix else name: value
            for prefix, sizes in {**self.scopes, **layers}.items()
            for name, value in getattr(sizes, what).items()
        }
        return {**getattr(self.root, what), **inner}


def scoped_sizes(
    formulas: Mapping[str, str], config: Mapping[str, Any], architecture: Architecture | None = None
) -> ScopedSizes:
    """Return the sizes of a model and of its sub-models, each from its own part of the configuration.

    Args:
        formulas: The formulas, the same for all.
        config: The configuration.
        architecture: The class; without one there are no sub-models and no defaults.
    """
    if architecture is None:
        return ScopedSizes(Sizes(formulas, config))
    root = Sizes(formulas, config, architecture.defaults, architecture.aliases)
    scopes = {
        scope.prefix: Sizes(
            formulas,
            part_of_config(config, architecture.model_type, scope.config_path),
            *type_values(scope.model_type),
        )
        for scope in architecture.scopes
        if scope.config_path
    }
    for module, values in architecture.blocks.items():
        scopes[module] = Sizes(formulas, {**config, **values}, architecture.defaults, architecture.aliases)
    return ScopedSizes(root, scopes)
