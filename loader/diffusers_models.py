"""Models of diffusers: the class and configuration of a split, and what becomes of dtypes.

Source: ``ModelMixin.from_pretrained`` of diffusers 0.42, except that the stored dtypes are kept where none is asked
for, and not converted to float32.
"""

import json
from pathlib import Path
from typing import Any

import torch

from loader.attaching import Convert
from loader.meta import parameters_on_meta
from manifests.errors import LoadError


def find_class(folder: Path, name: str) -> Any:  # noqa: ANN401
    """Import and return a class of diffusers.

    Raises:
        LoadError: diffusers is not installed, or has no such model.
    """
    try:
        import diffusers
        from diffusers.models.modeling_utils import ModelMixin
    except ImportError as error:
        raise LoadError(f"{folder}: needs diffusers: pip install 'reshard[diffusers]'") from error
    model_class = getattr(diffusers, name, None)
    if ModelMixin not in getattr(model_class, "__mro__", ()):
        raise LoadError(f"{folder}: diffusers {diffusers.__version__} has no model {name}")
    return model_class


def build(folder: Path, model_class: Any, dtype: torch.dtype, config_values: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return a model of diffusers, built with its parameters on meta and its buffers real.

    Args:
        folder: The split, with the configuration.
        model_class: The class.
        dtype: The default dtype while the class is built.
        config_values: Values that replace the configuration's.

    Raises:
        LoadError: The class takes no such value, or the model is quantized.
    """
    from diffusers.models.modeling_utils import no_init_weights

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("quantization_config") is not None:
        raise LoadError(f"{folder}: a quantized model is not built yet; use loader.open_shard for its tensors")
    for key, value in config_values.items():
        if key not in model_class._get_init_keys(model_class):
            raise LoadError(f"{folder}: {model_class.__name__} takes no {key}")
        config[key] = value
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), parameters_on_meta():
            model = model_class.from_config(config)
    finally:
        torch.set_default_dtype(default)
    model.register_to_config(_name_or_path=str(folder))
    return model.eval()


def converter(model: Any, dtype: torch.dtype) -> Convert:  # noqa: ANN401
    """Return what converts a model's tensors; what the class wants in float32 is converted to that.

    Source: ``load_model_dict_into_meta`` of diffusers, with the class's ``_keep_in_fp32_modules``.
    """
    wanted = model._keep_in_fp32_modules or ()
    kept = [wanted] if isinstance(wanted, str) else [*wanted]

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        wide = any(part in kept for part in name.split("."))
        return tensor.to(torch.float32 if wide else dtype) if tensor.dtype.is_floating_point else tensor

    return convert
