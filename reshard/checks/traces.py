"""Traces of a checked model: reads them, and compares what the ranks made with what one process made.

Written by `loader.tracing`. A rank's tensor is either the whole one, or a part of it: then it must be the part that the
axes around the module give the rank. Values stay in their files until they are compared, a module at a time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from manifests.layout import Axis, Mesh, Segment, misfits, plain_axis, rank_runs
from manifests.manifest import Tensor
from manifests.placement import bound_axis
from manifests.runs import divide_unit, expand, numel

Facts = dict[str, Any]
Array = npt.NDArray[Any]
Division = tuple[Axis, Mesh]
"""An axis, and the mesh over which it is divided."""


class Trace:
    """What one process recorded of one forward.

    Attributes:
        events: The ends of forwards, in order.
        raised: What ended the forward early, or None.
        failed: Why the model could not be loaded, or None.
        collectives: How often each collective ran.
    """

    def __init__(self, path: Path) -> None:
        facts = json.loads(path.with_suffix(".json").read_text())
        self.events: list[Facts] = facts.get("events", [])
        self.raised: Facts | None = facts.get("raised")
        self.failed: Facts | None = facts.get("failed")
        self.collectives: dict[str, int] = facts.get("collectives", {})
        values = path.with_suffix(".bin")
        empty = not values.exists() or values.stat().st_size == 0
        self._values = np.empty(0, np.uint8) if empty else np.memmap(values, np.uint8, "r")
        self._by_call = {(event["module"], event["call"]): event for event in self.events}

    def find(self, module: str, call: int) -> Facts | None:
        """Return the event of a module's call, or None if it did not end."""
        return self._by_call.get((module, call))

    def array(self, tensor: Facts) -> Array:
        """Return a recorded tensor's values."""
        kind = np.dtype("<" + tensor["dtype"])
        nbytes = prod(tensor["shape"]) * kind.itemsize
        block = self._values[tensor["offset"] : tensor["offset"] + nbytes]
        return np.frombuffer(block.tobytes(), kind).reshape(tensor["shape"])


class Compared(NamedTuple):
    """What became of one tensor of one module.

    Attributes:
        module: The module; empty for the model itself.
        call: Which of its calls, from 0.
        side: "input" or "output".
        outcome: "equal"; "part": every rank has its part; "differs"; "divided": every rank has a part, and not the one
            that its axes give; "unknown": not comparable, for the reason in ``why``.
        whole: The shape in one process.
        local: The shape on rank 0.
        difference: The largest over the ranks, relative to ``largest``.
        largest: The largest value in one process.
        rank: The rank with the largest difference.
        sums: Whether the ranks' values add up to the right ones.
        times: How many times the right value every rank has; 0 if it is no multiple.
        why: For "unknown".
    """

    module: str
    call: int
    side: str
    outcome: str
    whole: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    difference: float = 0.0
    largest: float = 0.0
    rank: int = 0
    sums: bool = False
    times: int = 0
    why: str = ""

    @property
    def parted(self) -> bool:
        """Whether the ranks have something else than one process."""
        return self.outcome in ("differs", "divided")


class Divisions:
    """The axes by which tensors of the model are divided, looked up by module."""

    def __init__(self, tensors: Mapping[str, Tensor], world_size: int) -> None:
        self._world: Mesh = (("tp", world_size),)
        self._own: dict[str, dict[Division, None]] = {}
        self._within: dict[str, dict[Division, None]] = {}
        for name, tensor in tensors.items():
            for cut in tensor.placement.cuts:
                division = bound_axis(cut.axis), tensor.placement.mesh
                module = name.rpartition(".")[0]
                self._own.setdefault(module, {})[division] = None
                while module:
                    self._within.setdefault(module, {})[division] = None
                    module = module.rpartition(".")[0]

    def candidates(self, module: str, size: int) -> Iterator[Sequence[Division]]:
        """Yield groups of divisions for a dimension of a module's inputs or outputs, the surest first.

        The module's own, if one has the dimension's size: then nothing else is right. Else those of the modules around
        it, the nearest first, with the segments of their axes; and the plain one.
        """
        own = [division for division in self._own.get(module, ()) if division[0].size % size == 0]
        if exact := [division for division in own if division[0].size == size]:
            yield exact
            return
        yield own
        scope = module
        while scope:
            scope = scope.rpartition(".")[0]
            yield [*chain.from_iterable(_with_segments(division) for division in self._within.get(scope, ()))]
        yield [(plain_axis(size), self._world)]

    def cut(self, module: str) -> bool:
        """Tell whether a tensor that the module itself owns is divided."""
        return module in self._own

    def sizes(self, module: str) -> set[int]:
        """Return the sizes of the divided axes of the tensors that the module itself owns."""
        return {axis.size for axis, _ in self._own.get(module, ())}


def _with_segments(division: Division) -> Iterator[Division]:
    """Yield an axis and the axes of its blocks, as a model takes a fused output apart."""
    axis, mesh = division
    yield division
    for segment in axis.segments:
        factors = segment.factors
        if len(axis.segments) > 1:
            yield Axis((segment,)), mesh
        if len(factors) > 1 and not factors[0].on:
            yield Axis((Segment(factors[1:], segment.body),)), mesh


class Comparison:
    """Compares the traces of the ranks with that of one process."""

    def __init__(self, whole: Trace, ranks: Sequence[Trace], divisions: Divisions, tolerance: float) -> None:
        self.whole = whole
        self.ranks = ranks
        self.divisions = divisions
        self.tolerance = tolerance

    def run(self) -> Iterator[Compared]:
        """Yield, for every event of one process and in its order, what became of the input and of the output."""
        for event in self.whole.events:
            for side in ("input", "output"):
                tensor = event[side]
                if side == "output" or (tensor and "offset" in tensor):
                    yield self._compare(event, side)

    def _compare(self, event: Facts, side: str) -> Compared:
        module, call, tensor = event["module"], event["call"], event[side]

        def unknown(why: str) -> Compared:
            return Compared(module, call, side, "unknown", why=why)

        found = [trace.find(module, call) for trace in self.ranks]
        if any(other is None for other in found):
            return unknown("not called on every rank")
        locals_ = [other[side] for other in found if other is not None]
        if tensor is None or any(local is None for local in locals_):
            return unknown("gives no tensor")
        if any("offset" not in one for one in (tensor, *locals_)):
            return unknown("gives no real numbers")
        shapes = {tuple(local["shape"]) for local in locals_}
        whole_shape = tuple(tensor["shape"])
        if len(shapes) > 1:
            return unknown("its shape differs between ranks")
        shape = shapes.pop()
        dims = [dim for dim, sizes in enumerate(zip(whole_shape, shape, strict=False)) if sizes[0] != sizes[1]]
        if len(shape) != len(whole_shape) or len(dims) > 1:
            return unknown(f"{list(whole_shape)} in one process, {list(shape)} on a rank")
        whole = self.whole.array(tensor)
        arrays = [trace.array(local) for trace, local in zip(self.ranks, locals_, strict=True)]
        base = Compared(module, call, side, "equal", whole_shape, shape, largest=_largest(whole))
        if dims:
            return self._compare_parts(base, whole, arrays, dims[0])
        return self._measure(base, [whole] * len(arrays), arrays, "differs")

    def _compare_parts(self, base: Compared, whole: Array, arrays: list[Array], dim: int) -> Compared:
        """Compare the ranks' parts with those that an axis around the module gives; the closest one counts."""
        best: Compared | None = None
        for group in self.divisions.candidates(base.module, whole.shape[dim]):
            for division in group:
                parts = [_part(whole, dim, division, rank) for rank in range(len(arrays))]
                expected = [part for part in parts if part is not None and part.shape == arrays[0].shape]
                if len(expected) < len(arrays):
                    continue
                found = self._measure(base, expected, arrays, "divided")
                if not found.parted:
                    return found._replace(outcome="part")
                if best is None or found.difference < best.difference:
                    best = found
        if best is None and whole.shape[dim] != base.local[dim] * len(arrays):
            why = f"{list(base.whole)} in one process, {list(base.local)} on a rank"
            return base._replace(outcome="unknown", why=why)
        return best or base._replace(outcome="divided", difference=float("inf"))

    def _measure(self, base: Compared, expected: Sequence[Array], arrays: list[Array], parted: str) -> Compared:
        scale = base.largest or 1.0
        differences = [_distance(array, wanted) / scale for array, wanted in zip(arrays, expected, strict=True)]
        rank = int(np.argmax(differences))
        found = base._replace(difference=differences[rank], rank=rank)
        if found.difference <= self.tolerance:
            return found
        if parted == "divided":
            return found._replace(outcome=parted)
        whole = expected[0]
        sums = _distance(sum(arrays[1:], arrays[0]), whole) / scale <= self.tolerance * len(arrays)
        return found._replace(outcome=parted, sums=sums, times=self._multiple(whole, arrays, scale))

    def _multiple(self, whole: Array, arrays: list[Array], scale: float) -> int:
        """Return how many times the right values every rank has, from 2 to the number of ranks; else 0."""
        for times in range(2, len(arrays) + 1):
            if all(_distance(array, whole * times) / scale <= self.tolerance * times for array in arrays):
                return times
        return 0


def _part(whole: Array, dim: int, division: Division, rank: int) -> Array | None:
    """Return a rank's part of a tensor, or None where the axis does not divide the dimension."""
    axis, mesh = division
    size = whole.shape[dim]
    if not size or axis.size % size or misfits(axis, mesh):
        return None
    runs = divide_unit(rank_runs(axis, mesh, rank), axis.size // size, axis.size)
    if runs is None or not numel(runs):
        return None
    picked: Array = np.concatenate([np.arange(src, src + length) for src, _, length in expand(runs)])
    return np.take(whole, picked, axis=dim)


def _largest(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.abs(array)
    return float(finite.max()) if finite.size else 0.0


def _distance(one: Array, other: Array) -> float:
    """Return the largest difference; equal infinities, as in masks, do not differ."""
    if not one.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, 0.0, np.abs(one.astype(np.float64) - other.astype(np.float64)))
    apart = np.where(np.isnan(one) & np.isnan(other), 0.0, apart)
    largest = float(apart.max())
    return float("inf") if np.isnan(largest) else largest
