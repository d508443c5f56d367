"""A strategy of one's own: a style that a user writes as one class, used by the splitter and by the loader.

    class FloatSum(Strategy):            # a linear layer cut by its inputs, its output summed in float32
        cuts = "in"
        bias = "partial"

        def after(self, module, args, output, ranks):
            return ranks.all_reduce(output.float()).to(output.dtype)

A plan names it ``"package.module:FloatSum"``, or by a short name under which it was registered. Such a name in a plan
or in the manifest of a split is all that is ever imported by name, and only a subclass of `Strategy` is used. The
splitter calls ``validate`` and ``place``, which need no torch; the loader calls the others.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import NotImplementedType
from typing import Any, ClassVar, NamedTuple, Protocol

from manifests.errors import PlanError

_NAME = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*)")
_REGISTERED: dict[str, "type[Strategy]"] = {}

Placed = tuple[str, int] | None | NotImplementedType
"""An axis in the notation of layouts and the dimension that it divides; None for whole; or as the attributes say."""


class Parameter(NamedTuple):
    """A tensor that a strategy is asked about.

    Attributes:
        name: Its name.
        dtype: As in the safetensors header.
        shape: In elements.
        world_size: Number of ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    world_size: int


class Ranks(Protocol):
    """The ranks that compute together, as the hooks see them.

    Attributes:
        rank: This one's number.
        world_size: How many there are.
        group: torch's process group; None is the default group.
    """

    rank: int
    world_size: int
    group: Any

    def all_reduce(self, tensor: Any) -> Any:  # noqa: ANN401 - a tensor of torch, which is not imported here
        """Return the sum over the ranks; the tensor itself stays as it is."""

    def all_gather(self, tensor: Any, dim: int = -1) -> Any:  # noqa: ANN401
        """Return the ranks' tensors, which have one shape, joined along a dimension in the order of ranks."""


class Strategy:
    """A style. A subclass sets those attributes and writes those methods that it needs.

    There is one instance for every module that a rule takes, made without arguments when the hooks are installed, and
    another one for every parameter that is placed.

    Attributes:
        cuts: As in the table of styles: "out", "in", "vocab", "hidden", or "" for none.
        bias: "cut", "partial" (rank 0 alone has it) or "whole".
        contiguous: Whether the ranks' parts are one contiguous run each, whatever heads or blocks the axis has.
        packed: Whether the axis is blocks, each divided by itself.
        before: A step's name; or a method ``(self, module, args, kwargs, ranks)`` that returns the module's inputs,
            ``args`` and ``kwargs``.
        after: A step's name; or a method ``(self, module, args, output, ranks)`` that returns the module's output.
    """

    cuts: ClassVar[str] = ""
    bias: ClassVar[str] = "whole"
    contiguous: ClassVar[bool] = False
    packed: ClassVar[bool] = False
    before: Any = ""
    after: Any = ""

    def validate(self, parameter: Parameter) -> None:
        """Raise a ValueError if a parameter of the module does not suit the strategy. Called before anything is cut."""

    def place(self, parameter: Parameter) -> Placed:
        """Return how one parameter of the module is divided.

        Returns:
            An axis in the notation of layouts and a dimension (``("(8*)", 0)``); None for whole on every rank;
            NotImplemented, as here, for what the class's attributes say.
        """
        by_attributes: Placed = NotImplemented
        return by_attributes

    def around(self, module: Any, ranks: Ranks) -> AbstractContextManager[Any]:  # noqa: ANN401
        """Return a context manager within which the module's forward runs."""
        raise NotImplementedError

    def forward(
        self,
        module: Any,  # noqa: ANN401
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Ranks,
    ) -> Any:  # noqa: ANN401
        """Return the module's output in place of its own forward, which is ``original``."""
        raise NotImplementedError


def writes(strategy: type[Strategy], method: str) -> bool:
    """Tell whether a strategy has a method of its own, rather than none or a step's name.

    >>> writes(Strategy, "around"), writes(Strategy, "before")
    (False, False)
    """
    own = getattr(strategy, method)
    return callable(own) and own is not getattr(Strategy, method)


def register(name: str, strategy: type[Strategy]) -> None:
    """Give a strategy a short name, for plans and for splits that are read in this process.

    Raises:
        PlanError: Not a subclass of `Strategy`, or the name is a style's, another strategy's, or has a colon.
    """
    from manifests.styles import STYLES  # noqa: PLC0415 - the table's module imports this one

    _check_class(name, strategy)
    if not name or ":" in name:
        raise PlanError(f"strategy {name!r}: not a short name, which has no colon")
    if name in STYLES or _REGISTERED.get(name, strategy) is not strategy:
        raise PlanError(f"strategy {name!r}: there is a style of this name; choose another")
    _REGISTERED[name] = strategy


def find_strategy(name: str) -> type[Strategy] | None:
    """Return the strategy that a name means, or None if it is neither registered nor of the form package.module:Name.

    Raises:
        PlanError: It cannot be imported, or is not a subclass of `Strategy`.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        module = import_module(found["module"])
    except ImportError as error:
        raise PlanError(f"strategy {name}: cannot be imported: {error}; {_remedy(found['module'], error)}") from error
    except Exception as error:
        raise PlanError(f"strategy {name}: its module cannot be imported: {type(error).__name__}: {error}") from error
    strategy = getattr(module, found["attribute"], None)
    if strategy is None:
        raise PlanError(f"strategy {name}: {found['module']} has no {found['attribute']}")
    return _check_class(name, strategy)


def _check_class(name: str, strategy: object) -> type[Strategy]:
    if not isinstance(strategy, type) or not issubclass(strategy, Strategy):
        raise PlanError(f"strategy {name}: not a subclass of manifests.strategy.Strategy")
    return strategy


def _remedy(module: str, error: ImportError) -> str:
    missing = error.name or module
    if f"{module}.".startswith(f"{missing}."):
        return f"install the package that has {module}, or put its folder on PYTHONPATH, on both sides"
    return f"install {missing.partition('.')[0]}, which {module} imports"


def place_parameter(strategy: type[Strategy], parameter: Parameter) -> Placed:
    """Return how a strategy divides a parameter of a module that it was given.

    Raises:
        PlanError: The parameter does not suit it, or it does not answer in the form of `Strategy.place`.
    """
    own = strategy()
    where = f"{parameter.name}: {strategy.__name__}"
    try:
        own.validate(parameter)
        placed = own.place(parameter)
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
    if placed is None or placed is NotImplemented:
        return placed
    ndim = len(parameter.shape)
    match placed:
        case (str() as axis, int() as dim) if -ndim <= dim < ndim:
            return axis, dim % ndim
    raise PlanError(f"{where}.place: {placed!r} is no axis with one of {ndim} dimensions, None or NotImplemented")
