"""Models of transformers: the class and configuration of a split, and what becomes of dtypes."""

from pathlib import Path
from typing import Any

import torch

from loader.attaching import Convert, unsaved
from loader.meta import parameters_on_meta
from manifests.errors import LoadError

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Values that the class takes beside its configuration."""


def find_class(folder: Path, name: str) -> Any:  # noqa: ANN401
    """Import and return a class of transformers, and with it nothing that its own modeling file does not import.

    Raises:
        LoadError: transformers is not installed, or has no such class.
    """
    try:
        import transformers
    except ImportError as error:
        raise LoadError(f"{folder}: needs transformers: pip install 'reshard[transformers]'") from error
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise LoadError(f"{folder}: transformers {transformers.__version__} has no class {name}")
    return model_class


def build(folder: Path, model_class: Any, dtype: torch.dtype, config_values: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return a model of transformers, built with its parameters on meta and its buffers real.

    Args:
        folder: The split, with the configuration.
        model_class: The class.
        dtype: The floating-point dtype that the class is told to have.
        config_values: Values that replace the configuration's.

    Raises:
        LoadError: The configuration has no such value, or is that of a quantized model.
    """
    import transformers
    from transformers.initialization import no_init_weights

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    chosen = {key: config_values.pop(key) for key in IMPLEMENTATIONS if key in config_values}
    for key, value in config_values.items():
        if not hasattr(config, key):
            raise LoadError(f"{folder}: {type(config).__name__} has no {key}")
        setattr(config, key, value)
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(f"{folder}: a quantized model is not built yet; use loader.open_shard for its tensors")
    with no_init_weights(), parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype, **chosen)
    # As after any other load: of a class that the catalogue does not know, only this says what is tied.
    model.tie_weights(recompute_mapping=False)
    compute_unsaved(model, dtype)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def compute_unsaved(model: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
    """Give the parameters that the class computes, and therefore does not save, their values.

    Source: ``_keys_to_ignore_on_save`` and ``_init_weights`` of the class.
    """
    for name in unsaved(model):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        empty = torch.empty(module._parameters[leaf].shape, dtype=dtype)
        module._parameters[leaf] = torch.nn.Parameter(empty, requires_grad=False)
        model._init_weights(module)


def converter(model: Any, dtype: torch.dtype) -> Convert:  # noqa: ANN401
    """Return what converts a model's tensors: one to more bits loses nothing, one to fewer leaves what the class wants.

    Source: ``_keep_in_fp32_modules`` and ``_keep_in_fp32_modules_strict`` of the class.
    """
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        wide = dtype.itemsize < tensor.dtype.itemsize and any(part in kept for part in name.split("."))
        return tensor.to(dtype) if tensor.dtype.is_floating_point and not wide else tensor

    return convert
