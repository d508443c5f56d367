r"""Export the tensor-parallel plans of the installed diffusers, as JSON.

The output is data for ``reshard.catalogue.diffusers``. A class's plan is its ``_tp_plan``. Where that leaves the blocks
of a fused weight to the built model (``_tp_packed_col_blocks`` and ``_tp_packed_row_blocks`` on the module), they are
written as a layout over the configuration: each class is built on meta with several configurations, and every block
must be one and the same function of the configuration in all of them, so a class that computes its blocks in a new way
is refused, not guessed.

Source: hooks/tensor_parallel.py of diffusers for the styles, the classes' ``__init__`` for the blocks.
"""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import click
import diffusers
import torch
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from diffusers.models import transformers as transformer_modules
from diffusers.models.modeling_utils import ModelMixin

OUT = Path(__file__).parent.parent / "reshard" / "catalogue" / "diffusers.json"

HEADS, HEAD_SIZE, RATIO = "num_attention_heads", "attention_head_dim", "mlp_ratio"

PROBES = (
    {HEADS: 2, HEAD_SIZE: 8, RATIO: 3},
    {HEADS: 3, HEAD_SIZE: 16, RATIO: 2},
    {HEADS: 5, HEAD_SIZE: 4, RATIO: 6},
)
"""Configurations of which no two formulas for a block's size give the same sizes."""

WIDTH = "(H*, hd)"
"""The axis of the heads; a head is never cut."""

INNER = "F*"
"""The inner features of an MLP whose ratio the configuration has."""

PACKED = {
    PackedColwiseParallel: ("packed_colwise", "_tp_packed_col_blocks"),
    PackedRowwiseParallel: ("packed_rowwise", "_tp_packed_row_blocks"),
}


class Probe(NamedTuple):
    """A class built on meta, and the configuration that it was built with."""

    model: ModelMixin
    config: dict[str, int]

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.config[HEADS] * self.config[HEAD_SIZE]


def export_catalogue() -> dict[str, Any]:
    """Return the whole catalogue."""
    classes = sorted(classes_with_plan(), key=lambda cls: cls.__name__)
    return {
        "source": f"diffusers {diffusers.__version__}",
        "classes": {cls.__name__: export_class(cls) for cls in classes},
    }


def classes_with_plan() -> Iterator[type[ModelMixin]]:
    """Yield the public transformers that set a plan of their own."""
    for found in pkgutil.iter_modules(transformer_modules.__path__):
        module = importlib.import_module(f"{transformer_modules.__name__}.{found.name}")
        for name, member in vars(module).items():
            own = inspect.isclass(member) and member.__module__ == module.__name__ and issubclass(member, ModelMixin)
            if own and member._tp_plan and hasattr(diffusers, name):
                yield member


def export_class(cls: type[ModelMixin]) -> dict[str, Any]:
    """Return the entry of one class.

    Raises:
        ValueError: A style or a block cannot be said in the catalogue's terms.
    """
    probes = [build_probe(cls, config) for config in PROBES]
    entry: dict[str, Any] = {
        "plan": {pattern: export_rule(pattern, style, probes) for pattern, style in cls._tp_plan.items()},
        "sizes": {"H": HEADS, "hd": HEAD_SIZE},
        "defaults": {name: default_of(cls, name) for name in (HEADS, HEAD_SIZE)},
    }
    entry["bindings"] = [*head_axes(entry["plan"], probes)]
    if any(INNER in rule.get("layout", "") for rule in entry["plan"].values() if isinstance(rule, dict)):
        # The classes multiply by a ratio that need not be whole, and cut off what is behind the point.
        entry["products"] = {"F": [HEADS, HEAD_SIZE, RATIO]}
        entry["defaults"][RATIO] = default_of(cls, RATIO)
    return entry


def build_probe(cls: type[ModelMixin], wanted: dict[str, int]) -> Probe:
    """Return the class, built without memory for its parameters, with one layer of each kind."""
    known = inspect.signature(cls.__init__).parameters
    layers = {name: 1 for name in ("num_layers", "num_single_layers") if name in known}
    config = {name: value for name, value in wanted.items() if name in known}
    with torch.device("meta"):
        return Probe(cls(**layers, **config), config)


def default_of(cls: type[ModelMixin], name: str) -> int | float:
    """Return the value that a class gives what its configuration leaves out."""
    default: int | float = inspect.signature(cls.__init__).parameters[name].default
    return default


def export_rule(pattern: str, style: Any, probes: list[Probe]) -> str | dict[str, Any]:
    """Return a rule as a style's name, or as a table for fused weights.

    Raises:
        ValueError: The style is not known, or its blocks are no formula over the configuration.
    """
    if isinstance(style, str):
        return style
    if type(style) not in PACKED:
        raise ValueError(f"{pattern}: {style!r}: not a style that is exported")
    name, attribute = PACKED[type(style)]
    if style.blocks is not None:
        return {"style": name, "blocks": list(style.blocks)}
    blocks = [getattr(module_of(pattern, probe), attribute) for probe in probes]
    if len({len(sizes) for sizes in blocks}) > 1:
        raise ValueError(f"{pattern}: {blocks}: not one number of blocks for all configurations")
    factors = [block_factors(pattern, sizes, probes) for sizes in zip(*blocks, strict=True)]
    return {"style": name, "layout": " + ".join(segment(same, len(list(group))) for same, group in groupby(factors))}


def module_of(pattern: str, probe: Probe) -> torch.nn.Module:
    """Return the first module that a pattern fits."""
    return probe.model.get_submodule(pattern.replace("*", "0"))


def segment(factors: str, count: int) -> str:
    """Return blocks of one size as a segment of a layout."""
    return f"({factors})" if count == 1 else f"({count}, {factors})"


def block_factors(pattern: str, sizes: tuple[int, ...], probes: list[Probe]) -> str:
    """Return the factors of a block from its sizes in all probes.

    Raises:
        ValueError: It is none of the functions that are known.
    """
    if all(size == probe.width for size, probe in zip(sizes, probes, strict=True)):
        return WIDTH.strip("()")
    if all(RATIO in p.config and size == int(p.width * p.config[RATIO]) for size, p in zip(sizes, probes, strict=True)):
        return INNER
    ratios = {size / probe.width for size, probe in zip(sizes, probes, strict=True)}
    if len(ratios) == 1 and (ratio := ratios.pop()) == int(ratio):
        return f"{int(ratio)}*H*hd*"
    raise ValueError(f"{pattern}: blocks of {sizes}: no known formula over {HEADS}, {HEAD_SIZE} and {RATIO}")


def head_axes(plan: dict[str, Any], probes: list[Probe]) -> Iterator[dict[str, str]]:
    """Yield the axes of the plan's modules that hold heads, for plans of a user's own.

    They are those of an attention, all as wide as all heads together, and those with a layout.

    Raises:
        ValueError: A module of an attention has another width.
    """
    for pattern, choice in plan.items():
        rule = {"style": choice} if isinstance(choice, str) else choice
        under, _, suffix = pattern.partition(".*.")
        side = "out" if rule["style"] in ("colwise", "packed_colwise") else "in"
        if "layout" in rule:
            yield {"under": under, "suffix": suffix, side: rule["layout"]}
        elif suffix.startswith("attn."):
            dim = 0 if side == "out" else 1
            if not all(module_of(pattern, probe).weight.shape[dim] == probe.width for probe in probes):
                raise ValueError(f"{pattern}: not as wide as all heads")
            yield {"under": under, "suffix": suffix, side: WIDTH}


@click.command()
@click.option("--out", default=OUT, show_default=True, type=click.Path(dir_okay=False, path_type=Path), help="File.")
def main(out: Path) -> None:
    """Write the catalogue of the installed diffusers."""
    catalogue = export_catalogue()
    out.write_text(json.dumps(catalogue, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    click.echo(f"{out}: {len(catalogue['classes'])} classes of {catalogue['source']}", err=True)


if __name__ == "__main__":
    main()
