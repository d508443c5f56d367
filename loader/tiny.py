"""Tiny models: a random model of a configuration's class, small enough for a laptop, with every kind of layer.

Nothing is read but the configuration. Its sizes are made smaller (`loader.shrinking`); where the class does not run
with them, only its layers, experts and words are fewer; and where that fails too, it is said.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loader.shrinking import Config, cut_layers, layer_counts, per_layer, shrink_counts, shrink_sizes
from manifests.errors import LoadError

MAX_PARAMETERS = 1_500_000_000
"""More are not made for a tiny model: 6 GB in float32."""
SEED = 1


def make_tiny(config_folder: Path, out: Path, ranks: int) -> dict[str, Any]:
    """Make a tiny model of the class that a folder's ``config.json`` names, run it, and save it.

    Args:
        config_folder: A folder with ``config.json``.
        out: The folder to make.
        ranks: The number of ranks whose division of every size is kept.

    Returns:
        What was made smaller.

    Raises:
        LoadError: The class is not known, or does not run with any of the smaller configurations.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(config_folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise LoadError(f"config.json: transformers {transformers.__version__} cannot read it: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        # The tiny model's weights are plain ones.
        del config.quantization_config
    model_class = find_class(config)
    whole = named_values(config.to_dict())
    cut = cut_layers(whole, layers_to_keep(model_class, config))
    reasons: list[str] = []
    for label, small in (("sizes", shrink_sizes(cut, ranks)), ("counts", shrink_counts(cut, ranks)), ("layers", cut)):
        try:
            model = build(model_class, type(config), small)
        except Exception as error:  # noqa: BLE001 - whatever a class does with sizes that it does not expect
            reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            continue
        model.save_pretrained(out)
        return {
            "made": label,
            "architecture": model_class.__name__,
            "layers": _first_layers(small),
            "whole_layers": _first_layers(whole),
            "sizes": changed_sizes(whole, small),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
    raise LoadError(f"{model_class.__name__} cannot be made small: " + "; ".join(dict.fromkeys(reasons)))


def named_values(config: Mapping[Any, Any]) -> Config:
    """Return a configuration without the labels of classes, which are no sizes."""
    return {
        name: named_values(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not str(name).endswith(("id2label", "label2id"))
    }


def find_class(config: Any) -> Any:  # noqa: ANN401
    """Return the class that a configuration names, or the one for causal language models of its type.

    Raises:
        LoadError: transformers has none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for name in config.architectures or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    named = ", ".join(config.architectures or ()) or "none"
    raise LoadError(f"config.json: transformers {transformers.__version__} has no class (architectures: {named})")


def layers_to_keep(model_class: Any, config: Any) -> dict[int, int]:  # noqa: ANN401
    """Return, for every number of layers of a configuration, how many of the first hold every kind of layer."""
    try:
        with torch.device("meta"):
            model = model_class._from_config(config)
    except Exception as error:  # whatever a class does with a configuration that is not for it
        raise LoadError(f"{model_class.__name__} cannot be built: {type(error).__name__}: {error}") from error
    kept: dict[int, int] = {}
    values = named_values(config.to_dict())
    for count in layer_counts(values):
        said = per_layer(values, count)
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                kinds = [(kind_of_layer(layer), *said[at]) for at, layer in enumerate(module)]
                needed = max(kinds.index(kind) for kind in set(kinds)) + 1
                kept[count] = max(kept.get(count, 0), needed, min(2, count))
    return kept


def kind_of_layer(layer: nn.Module) -> tuple[Any, ...]:
    """Return what makes a layer another than the next: its modules, their parameters' shapes, their switches."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((leaf, tuple(parameter.shape)) for leaf, parameter in module.named_parameters(recurse=False)),
            tuple((key, value) for key, value in sorted(vars(module).items()) if isinstance(value, bool | str | None)),
        )
        for name, module in layer.named_modules()
    )


def build(model_class: Any, config_class: Any, small: Config) -> Any:  # noqa: ANN401
    """Return a random model of a configuration, after it has run.

    Raises:
        LoadError: It has too many parameters, or gives no finite numbers.
        Exception: Whatever the class raises.
    """
    from loader.check_worker import build_inputs

    config = config_class.from_dict(small)
    config.dtype = torch.float32
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if counted > MAX_PARAMETERS:
        raise LoadError(f"{counted} parameters even so")
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, seed=SEED)
    with torch.inference_mode():
        output = model(**build_inputs(model, 8))
    if not torch.isfinite(output[0]).all():
        raise LoadError("its output is not finite")
    return model


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int) -> None:
    """Draw matrices anew by their fan-in and biases around zero; move norms and stored buffers off their values.

    So no two tensors are alike, and nothing is zero or one that a wrong cut could hide behind.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            # Experts are stacked in three dimensions, convolutions have four.
            fan_in = tensor.shape[-1] if tensor.ndim < 4 else math.prod(tensor.shape[1:])
            tensor.copy_(noise / math.sqrt(fan_in))
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif isinstance(tensor, nn.Parameter):
            tensor.add_(0.1 * noise)
        else:
            tensor.mul_(1 + 0.1 * noise)


def changed_sizes(whole: Config, small: Config, prefix: str = "") -> dict[str, list[int]]:
    """Return the sizes that are other ones now: name to old and new."""
    return dict(_changed(whole, small, prefix))


def _changed(whole: Config, small: Config, prefix: str) -> Iterator[tuple[str, list[int]]]:
    for name, value in whole.items():
        other = small.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _changed(value, other, f"{prefix}{name}.")
        elif type(value) is int and type(other) is int and value != other and not str(name).endswith("_id"):
            yield f"{prefix}{name}", [value, other]


def _first_layers(config: Config) -> int:
    counts = [config[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in config]
    inner = config.get("text_config")
    return counts[0] if counts else _first_layers(inner) if isinstance(inner, dict) else 0
