"""What share of a model's bytes a rank holds: ``python -m tools.shares`` writes the table of docs/shares.md.

Every type is built without values, in the proportions of its configuration's defaults or, where those are no model, of
a published one (`PUBLISHED`). The planner decides what each of 2 and 4 ranks holds: by the plan of transformers, and by
ours.
"""

import argparse
import fnmatch
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loader.parallel import config_of, tensors_of
from manifests.dtypes import nbytes
from manifests.errors import DegreeError, PlanError
from manifests.manifest import Tensor
from manifests.natural import kind_of
from manifests.placement import local_shape
from reshard.resolving import resolve_model
from tools.sweep.cases import ROOT, subjects
from tools.sweep.tiny import model_class
from tools.sweep.types import rotary, rotary_by_layer

PAGE = ROOT / "docs" / "shares.md"
HEADING = "## By type\n"
DEGREES = (2, 4)
MOST = {2: 0.52, 4: 0.28}
"""The share above which a type needs a reason, by the number of ranks."""

Found = float | str
"""A share, or why there is none."""


class Shares(NamedTuple):
    """A row of the table.

    Attributes:
        name: The type.
        numel: Elements of the model.
        peer: By the plan of transformers, for every number of ranks.
        ours: The same by ours.
    """

    name: str
    numel: int
    peer: tuple[Found, ...]
    ours: tuple[Found, ...]

    @property
    def above(self) -> bool:
        """Whether ours needs a reason: rounded as it is shown, it is above the bound, or there is none."""
        pairs = zip(DEGREES, self.ours, strict=True)
        return any(isinstance(share, str) or round(share, 2) > MOST[tp] for tp, share in pairs)


def main() -> int:
    """Write the table, or print the rows that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.shares", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="print the types whose name fits, as in a shell")
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="print also N lines of what stays whole")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "sweep", help="folder for the list of types")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    types = compared_types(options.work)
    if options.only:
        for name in fnmatch.filter(types, options.only):
            model = build(types[name])
            print("\n".join([line(measure(name, model), {}), *whole(model, options.whole)]), flush=True)
        return 0
    head = PAGE.read_text("utf-8").partition(HEADING)[0]
    rows = [measure(name, build(model_type)) for name, model_type in types.items()]
    PAGE.write_text("\n".join([head + HEADING, *table(rows, reasons(head)), ""]), encoding="utf-8")
    return 0


def compared_types(work: Path) -> dict[str, str]:
    """Return the types for which transformers has a plan, each with the type that is built for it."""
    return {row.name: row.model_type for row in subjects(work) if row.has_peer and "+" not in row.name}


def build(model_type: str) -> Any:
    """Return a model of a type without values, of published proportions."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**PUBLISHED.get(model_type, {}))
    with torch.device("meta"):
        return model_class(model_type)._from_config(config, dtype=torch.bfloat16)


def measure(name: str, model: Any) -> Shares:
    """Return what the ranks hold of a model."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    peer, ours = ([_share(model, tp, source) for tp in DEGREES] for source in ("transformers", "reshard"))
    return Shares(name, numel, tuple(peer), tuple(ours))


def _share(model: Any, tp: int, source: str) -> Found:
    try:
        placed = place(model, tp, source)
    except DegreeError as error:
        return f"tp {', '.join(map(str, error.allowed))}"
    except PlanError:
        return "none"
    ranks = [sum(_nbytes_of(tensor, rank) for tensor in placed.values()) for rank in range(tp)]
    return max(ranks) / sum(nbytes(tensor.dtype, tensor.shape) for tensor in placed.values())


def place(model: Any, tp: int, source: str = "reshard") -> dict[str, Tensor]:
    """Return the tensors of a model as a plan places them."""
    tensors, ties = tensors_of(model)
    label = type(model).__name__
    resolved = resolve_model(tensors, config_of(model), None, tp, ties=ties, label=label, plan_source=source)
    return resolved.resolution.tensors


def _nbytes_of(tensor: Tensor, rank: int) -> int:
    return nbytes(tensor.dtype, local_shape(tensor.placement, tensor.dtype, tensor.shape, rank))


def whole(model: Any, lines: int) -> Iterator[str]:
    """Yield the largest of what every rank holds, with its share of the model."""
    placed = place(model, DEGREES[0])
    total = sum(nbytes(tensor.dtype, tensor.shape) for tensor in placed.values())
    kinds: dict[str, int] = {}
    for name, tensor in placed.items():
        if not tensor.placement.cuts:
            kinds[kind_of(name)] = kinds.get(kind_of(name), 0) + nbytes(tensor.dtype, tensor.shape)
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1])[:lines]:
        yield f"  {100 * size / total:6.2f} % {kind}"


def reasons(page: str) -> dict[str, str]:
    """Return the key of the reason that a page gives for a type; they are the rows of its table of reasons."""
    found: dict[str, str] = {}
    for text in page.splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if text.startswith("| **") and len(cells) == 4:
            found |= dict.fromkeys(cells[1].replace("`", "").replace(",", " ").split(), cells[0].strip("*"))
    return found


def table(rows: list[Shares], known: Mapping[str, str]) -> list[str]:
    """Return the table of all rows."""
    head = "| type | parameters | transformers: tp 2 | tp 4 | ours: tp 2 | tp 4 | reason |"
    return [head, "|---|---|---|---|---|---|---|", *(line(row, known) for row in sorted(rows))]


def line(row: Shares, known: Mapping[str, str]) -> str:
    """Return a row of the table."""
    shown = " | ".join(share if isinstance(share, str) else f"{share:.2f}" for share in (*row.peer, *row.ours))
    return f"| {row.name} | {row.numel / 1e9:.2f} B | {shown} | {known.get(row.name, '')} |"


PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": rotary_by_layer({"layer_types": ["full_attention", "sliding_attention"] * 20}),
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 12,
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
            "moe_intermediate_size": 1408,
        }
    },
    "deepseek_ocr2_text": {
        "num_hidden_layers": 12,
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        "moe_intermediate_size": 1408,
    },
    "deepseek_v2": {"moe_intermediate_size": 1408, "intermediate_size": 10944},
    "diffusion_gemma_text": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128, **rotary()},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, **rotary()},
    "hunyuan_vl_text": {"head_dim": 128, **rotary()},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nanochat": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 32},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "nemotron_h": {
        "layer_types": (["linear_attention", "mlp"] * 5 + ["linear_attention", "full_attention", "mlp"]) * 4,
        "num_hidden_layers": 52,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    "qwen3_omni_moe_text": {"num_attention_heads": 32, "head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}
"""Values of published models, of types whose defaults are no model that can be built or divided."""


if __name__ == "__main__":
    sys.exit(main())
