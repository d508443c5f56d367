"""The inputs of a module, by their place in its forward, however a caller passes them."""

import inspect
from typing import Any

from torch import nn

from loader.steps.site import Inputs
from manifests.errors import LoadError


class InputNames:
    """The names of a module's inputs, looked up once.

    A forward that takes anything (``*args, **kwargs``) names none; then the first that is passed is the first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._label = type(module).__name__
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(module.forward).parameters.values()
        self._names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def index(self, name: str) -> int:
        """Return the place of an input.

        Raises:
            LoadError: There is none of this name.
        """
        if name not in self._names:
            raise LoadError(f"{self._label}: its forward takes no {name!r}, of which the split takes a part")
        return self._names.index(name)

    def find(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the input at a place, or None if it was not passed."""
        return args[at] if at < len(args) else kwargs.get(self._names[at])

    def get(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - what was passed
        """Return the input at a place.

        Raises:
            LoadError: It was not passed.
        """
        return args[at] if at < len(args) else kwargs[self._key(at, kwargs)]

    def put(self, at: int, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:  # noqa: ANN401
        """Return the inputs with another value at a place.

        Raises:
            LoadError: It was not passed.
        """
        if at < len(args):
            return (*args[:at], value, *args[at + 1 :]), kwargs
        return args, {**kwargs, self._key(at, kwargs): value}

    def _key(self, at: int, kwargs: dict[str, Any]) -> str:
        if at < len(self._names) and self._names[at] in kwargs:
            return self._names[at]
        if at == 0 and kwargs:
            return next(iter(kwargs))
        what = f"its input {self._names[at]!r}" if at and at < len(self._names) else "inputs"
        raise LoadError(f"{self._label}: was called without {what}")
