"""What share of a model's bytes a rank holds: ``python -m tools.shares`` writes the tables of docs/shares.md.

Every type of the sweep is built without values, in the proportions of its configuration's defaults, with what
`tools.proportions` gives beside them where those are no model. The planner decides what each of 2 and 4 ranks holds: by
the plan of transformers, and by ours.
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
from tools import decoders
from tools.proportions import PROPORTIONS
from tools.sweep.cases import ROOT, Subject, subjects
from tools.sweep.tiny import model_class

PAGE = ROOT / "docs" / "shares.md"
HEADING = "## By type\n"
DEGREES = (2, 4)
MOST = {2: 0.52, 4: 0.28}
"""The share above which a type needs a reason, by the number of ranks."""

Found = float | str
"""A share, or why there is none; of heads that the ranks do not divide, the share by ``--uneven ceil`` in words."""


class Shares(NamedTuple):
    """A row of the table.

    Attributes:
        name: The type.
        numel: Elements of the model.
        peer: By the plan of transformers, for every number of ranks; empty if it has none.
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
            model = build(types[name].model_type)
            print("\n".join([line(measure(types[name], model), {}), *whole(model, options.whole)]), flush=True)
        return 0
    head = PAGE.read_text("utf-8").partition(HEADING)[0].partition(decoders.HEADING)[0]
    rows = [measure(subject, build(subject.model_type)) for subject in types.values()]
    text = "\n".join([*decoders.section(options.work), HEADING, *table(rows, reasons(head)), ""])
    PAGE.write_text(head + text, encoding="utf-8")
    return 0


def compared_types(work: Path) -> dict[str, Subject]:
    """Return the types of the sweep by name, without the variants, which are of tiny models alone."""
    return {row.name: row for row in subjects(work) if "+" not in row.name}


def build(model_type: str) -> Any:
    """Return a model of a type without values, of real proportions."""
    from transformers import CONFIG_MAPPING

    given = PROPORTIONS.get(model_type)
    config = CONFIG_MAPPING[model_type](**(given.values if given else {}))
    with torch.device("meta"):
        return model_class(model_type)._from_config(config, dtype=torch.bfloat16)


def measure(subject: Subject, model: Any) -> Shares:
    """Return what the ranks hold of a model."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    peer = [_share(model, tp, "transformers") for tp in DEGREES] if subject.has_peer else []
    return Shares(subject.name, numel, tuple(peer), tuple(_share(model, tp, "reshard") for tp in DEGREES))


def _share(model: Any, tp: int, source: str) -> Found:
    try:
        return _largest(place(model, tp, source), tp)
    except DegreeError as error:
        degrees = f"tp {', '.join(map(str, error.allowed))}"
    except PlanError:
        return "none"
    try:
        return f"{_largest(place(model, tp, source, uneven='ceil'), tp):.2f} uneven"
    except PlanError:
        return degrees


def _largest(placed: Mapping[str, Tensor], tp: int) -> float:
    ranks = [sum(_nbytes_of(tensor, rank) for tensor in placed.values()) for rank in range(tp)]
    return max(ranks) / sum(nbytes(tensor.dtype, tensor.shape) for tensor in placed.values())


def place(model: Any, tp: int, source: str = "reshard", uneven: str = "") -> dict[str, Tensor]:
    """Return the tensors of a model as a plan places them."""
    tensors, ties = tensors_of(model)
    options = {"label": type(model).__name__, "plan_source": source, "uneven": uneven}
    return resolve_model(tensors, config_of(model), None, tp, ties=ties, **options).resolution.tensors


def _nbytes_of(tensor: Tensor, rank: int) -> int:
    return nbytes(tensor.dtype, local_shape(tensor.placement, tensor.dtype, tensor.shape, rank))


def whole(model: Any, lines: int) -> Iterator[str]:
    """Yield the largest of what every rank holds, with its share of the model."""
    placed = place(model, DEGREES[0], uneven="ceil")
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


class Shown(NamedTuple):
    """A row of the page.

    Attributes:
        peer: What it shows of the plan of transformers, for every number of ranks.
        ours: The same of ours.
        reason: The key of the reason for a share above the bound.
    """

    peer: tuple[str, ...]
    ours: tuple[str, ...]
    reason: str

    @property
    def above(self) -> bool:
        """Whether it needs a reason."""
        pairs = zip(DEGREES, self.ours, strict=True)
        return any(not text.startswith("0.") or "uneven" in text or float(text) > MOST[tp] for tp, text in pairs)


def shown_rows(page: str) -> dict[str, Shown]:
    """Return the rows of a page by type."""
    lines = [text for text in page.partition(HEADING)[2].splitlines() if text.startswith("| ")]
    rows = [[cell.strip() for cell in text[1:-1].split("|")] for text in lines]
    return {row[0]: Shown(tuple(row[2:4]), tuple(row[4:6]), row[6]) for row in rows if row[0] != "type"}


def table(rows: list[Shares], known: Mapping[str, str]) -> list[str]:
    """Return the table of all rows."""
    head = "| type | parameters | transformers: tp 2 | tp 4 | ours: tp 2 | tp 4 | reason |"
    return [head, "|---|---|---|---|---|---|---|", *(line(row, known) for row in sorted(rows))]


def line(row: Shares, known: Mapping[str, str]) -> str:
    """Return a row of the table."""
    found = (*(row.peer or ["-"] * len(DEGREES)), *row.ours)
    shown = " | ".join(share if isinstance(share, str) else f"{share:.2f}" for share in found)
    return f"| {row.name} | {row.numel / 1e9:.2f} B | {shown} | {known.get(row.name, '')} |"


if __name__ == "__main__":
    sys.exit(main())
