"""Tracing: what every module of a model gets and gives in one forward, written to files as it happens.

A trace is two files, ``NAME.json`` (the events, in the order in which forwards ended) and ``NAME.bin`` (the values,
little-endian, one after the other). An event has the module's name, which of its calls it was, and the first tensor of
its output; for modules that own parameters also the first tensor that they got. Both are seen from outside: before the
steps that a split puts in front of a forward, and after those behind it. Memory is that of one tensor.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manifests.errors import ReshardError

Facts = dict[str, Any]


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that run within it, by name; what merely waits for one is left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.counts[func.name().partition("::")[2].partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Trace:
    """Records the forwards of a model's modules. Put on after the hooks of a split."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self._path = path
        self._events: list[Facts] = []
        self._open: list[tuple[str, Facts | None]] = []
        self._calls: Counter[str] = Counter()
        self._values: BinaryIO = path.with_suffix(".bin").open("wb")
        for name, module in model.named_modules():
            keep = any(True for _ in module.parameters(recurse=False))
            module.register_forward_pre_hook(self._enter(name, keep=keep), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave(name), with_kwargs=True)

    def _enter(self, name: str, *, keep: bool) -> Any:  # noqa: ANN401
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._open.append((name, self._write(first_tensor((args, kwargs)), keep=keep)))

        return hook

    def _leave(self, name: str) -> Any:  # noqa: ANN401
        def hook(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: object) -> None:
            given = None
            while self._open:
                # What was left by an exception that the model itself caught is no event.
                opened, given = self._open.pop()
                if opened == name:
                    break
            call = self._calls[name]
            self._calls[name] += 1
            written = self._write(first_tensor(output), keep=True)
            self._events.append({"module": name, "call": call, "input": given, "output": written})

        return hook

    def _write(self, tensor: torch.Tensor | None, *, keep: bool) -> Facts | None:
        """Write a tensor's values if they are to be kept; return what is known of it."""
        if tensor is None:
            return None
        facts: Facts = {"shape": list(tensor.shape)}
        if keep and not tensor.is_complex() and not tensor.is_meta:
            values = tensor.detach().to("cpu")
            values = values.float() if values.is_floating_point() else values.long()
            facts["dtype"] = "f4" if values.is_floating_point() else "i8"
            facts["offset"] = self._values.tell()
            values.contiguous().numpy().tofile(self._values)
        return facts

    def close(self, *, error: BaseException | None = None, **facts: Any) -> None:  # noqa: ANN401
        """Write the events, and the error that ended the forward with the forwards that were open.

        ``facts`` are written beside them.
        """
        self._values.close()
        facts["events"] = self._events
        if error is not None:
            facts["raised"] = {
                "error": f"{type(error).__name__}: {error}",
                "open": [name for name, _ in self._open],
                "input": self._open[-1][1] if self._open else None,
                "call": self._calls[self._open[-1][0]] if self._open else 0,
                "ours": isinstance(error, ReshardError),
                "in_collective": raised_in_collective(error),
            }
        self._path.with_suffix(".json").write_text(json.dumps(facts))


def first_tensor(value: object) -> torch.Tensor | None:
    """Return the first tensor in a value, in depth; None if there is none."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := first_tensor(item)) is not None), None)
    return None


def raised_in_collective(error: BaseException) -> bool:
    """Tell whether an error came out of a collective: then the fault is that of another rank."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "distributed" in trace.tb_frame.f_globals.get("__name__", "").split(".")
