"""Strategies of a user's own, for the tests: one for every hook. Importing them needs no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manifests.strategy import Parameter, Placed, Ranks, Strategy, register


class AllHeadsNorm(Strategy):
    """An RMS norm over the features of all heads, of which a rank has some: the mean square is that of all ranks."""

    cuts = "out"

    def validate(self, parameter: Parameter) -> None:
        if len(parameter.shape) != 1:
            raise ValueError(f"a norm's weight has one dimension, not {len(parameter.shape)}")

    def forward(self, module: Any, original: Any, args: Any, kwargs: Any, ranks: Ranks) -> Any:
        (x,) = args
        square = ranks.all_reduce(x.float().square().mean(-1, keepdim=True)) / ranks.world_size
        return (x.float() * (square + module.eps).rsqrt()).to(x.dtype) * module.weight


class FloatSum(Strategy):
    """A linear layer that is cut by its inputs, its output summed in float32."""

    cuts = "in"
    bias = "partial"

    def after(self, module: Any, args: Any, output: Any, ranks: Ranks) -> Any:
        return ranks.all_reduce(output.float()).to(output.dtype)


class Halves(Strategy):
    """A weight whose cut is said by `place`, with the steps of the table."""

    after = "all_reduce"

    def place(self, parameter: Parameter) -> Placed:
        if len(parameter.shape) == 1:
            return None
        return f"(2, {parameter.shape[-1] // 2}*)", -1


class WholeForward(Strategy):
    """A weight of which a rank keeps a part, whole while its module runs."""

    cuts = "out"

    @contextmanager
    def around(self, module: Any, ranks: Ranks) -> Iterator[None]:
        part = module._parameters["weight"]
        module._parameters["weight"] = ranks.all_gather(part, 0)
        try:
            yield
        finally:
            module._parameters["weight"] = part


class Shared(Strategy):
    """A module that is whole on every rank, inside of one whose output is summed."""

    def before(self, module: Any, args: Any, kwargs: Any, ranks: Ranks) -> Any:
        return (args[0] / ranks.world_size, *args[1:]), kwargs


register("float_sum", FloatSum)
