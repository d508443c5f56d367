"""The sizes that layouts are bound with: formulas over a model's configuration."""

from collections.abc import Mapping
from typing import Any

from manifests.errors import PlanError
from manifests.expression import UnknownSizeError, evaluate


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
        if name in self._open:
            raise PlanError(f"sizes: {' -> '.join([*self._open, name])}: refers to itself")
        self._open.append(name)
        try:
            value = evaluate(self._formulas[name], self.get)
        except UnknownSizeError:
            return None
        finally:
            self._open.pop()
        self.used[name] = value
        return value

    def _from_config(self, name: str) -> int | None:
        found = self._find(name) or self._find(f"text_config.{name}")
        # A null is not an absence: the class then computes the value, as the formulas do.
        value = found[0] if found else self._defaults.get(self._aliases.get(name, name))
        if value is None:
            return None
        if type(value) is not int:
            raise PlanError(f"config.json: {name} is {value!r}; a layout needs one whole number")
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
