"""Building a class without memory for its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers is put on meta; buffers keep their values.

    Source: ``init_empty_weights`` of accelerate, with ``include_buffers=False``.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
