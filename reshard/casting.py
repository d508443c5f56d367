"""Casting: the dtype that a split is asked to have, as a step of its own that says what it does.

Splitting moves bytes; this is its one exception, and it happens only on request. Numbers of floating point become those
of one dtype, but for what transformers keeps in float32 as well, and for what no rank needs.

Source: ``_get_dtype_plan`` in ``transformers/modeling_utils.py`` and ``convert_and_load_state_dict_in_model`` in
``transformers/core_model_loading.py`` of transformers 5.24.
"""

import re
from collections.abc import Mapping

import msgspec

from manifests.errors import PlanError
from manifests.manifest import Tensor
from reshard.catalogue import Architecture, exported

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""By the names that are asked for."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What is converted. Numbers of 8 bits and fewer are a quantized format, and mean nothing without their scales."""
_REST = ".unused"


def cast_tensors(
    tensors: dict[str, Tensor], dtype: str, architecture: Architecture | None, config: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return the tensors with those of floating point in a dtype.

    Args:
        tensors: The tensors by name.
        dtype: One of `DTYPES`, or empty for the stored ones.
        architecture: The class, which may keep some in float32.
        config: The content of ``config.json``.

    Raises:
        PlanError: The checkpoint is quantized.
    """
    if not dtype:
        return tensors
    if config.get("quantization_config"):
        raise PlanError(f"dtype {dtype}: the checkpoint is quantized; only numbers of floating point are converted")
    target = DTYPES[dtype]
    if architecture is None and target != "F32":
        return _cast_unknown(tensors, target, config.get("model_type"))
    kept = _kept(architecture, target)
    known: dict[tuple[int, str], Tensor] = {}
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = id(tensor), "F32" if kept(name) else target
        if key not in known:
            known[key] = _cast(tensor, key[1])
        made[name] = known[key]
    return made


def _cast_unknown(tensors: Mapping[str, Tensor], target: str, model_type: object) -> dict[str, Tensor]:
    """Return the tensors of a model of no known class: what its type keeps in float32 stays as it is stored."""
    entry = exported()["types"].get(model_type, {}) if isinstance(model_type, str) else {}
    kept = _Kept(tuple(entry.get("float32", ())))
    return {name: tensor if kept(name) else _cast(tensor, target) for name, tensor in tensors.items()}


def _cast(tensor: Tensor, target: str) -> Tensor:
    """Return a tensor in another dtype; what is unused of a stored tensor has the dtype of the rest of it."""
    whole_unused = tensor.unused and not tensor.parts
    if tensor.dtype not in FLOATS or tensor.dtype == target or whole_unused:
        return tensor
    return msgspec.structs.replace(tensor, dtype=target, cast=tensor.dtype)


class _Kept:
    """Tells whether a tensor stays in float32, by its name."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(f"(?:{one.replace('*', '.*')})" for one in patterns)) if patterns else None

    def __call__(self, name: str) -> bool:
        return self._pattern is not None and self._pattern.search(name.removesuffix(_REST)) is not None


def _kept(architecture: Architecture | None, target: str) -> _Kept:
    if architecture is None or target == "F32":
        return _Kept(())
    return _Kept((*architecture.float32, *(architecture.float32_for_float16 if target == "F16" else ())))


def count_casts(tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], int]:
    """Return how many tensors were converted, by their dtypes before and after."""
    counts: dict[tuple[str, str], int] = {}
    for tensor in tensors.values():
        if tensor.cast:
            counts[tensor.cast, tensor.dtype] = counts.get((tensor.cast, tensor.dtype), 0) + 1
    return counts


def names_kept(tensors: Mapping[str, Tensor], dtype: str) -> list[str]:
    """Return the tensors of floating point that have another dtype than was asked for."""
    target = DTYPES.get(dtype)
    return [
        name
        for name, tensor in tensors.items()
        if target and tensor.dtype in FLOATS and tensor.dtype != target and not tensor.unused
    ]
