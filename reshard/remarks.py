"""Remarks on parts, for a reader of the report."""

from collections.abc import Iterator, Mapping

from manifests.layout import rank_runs
from manifests.natural import kind_of
from manifests.runs import numel
from reshard.degrees import Demand, Granted
from reshard.uneven import fit


def tell_parts(demands: Mapping[str, Demand], granted: Mapping[int, Granted], ranks: int) -> Iterator[str]:
    """Yield which tensors have parts of different sizes, and which parts a kernel will refuse.

    Args:
        demands: The wish for every tensor; those that were decided together are one object.
        granted: What was granted, by the identity of the wish.
        ranks: Number of ranks.
    """
    remarks: dict[int, str] = {}
    for key, found in granted.items():
        if remark := _tell_uneven(found, ranks) or _tell_too_fine(found):
            remarks[key] = remark
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, demand in demands.items() if remarks else ():
        if id(demand) in remarks:
            kinds.setdefault((kind_of(name), remarks[id(demand)]), []).append(name)
    for (kind, remark), names in kinds.items():
        yield f"{names[0] if len(names) == 1 else f'{kind} ({len(names)} tensors)'}: {remark}"


def _tell_uneven(granted: Granted, ranks: int) -> str:
    mesh = granted.placement.mesh
    for cut in granted.demand.cuts:
        most, least = (numel(rank_runs(cut.axis, mesh, rank)) for rank in (0, ranks - 1))
        if cut.shorter and most != least:
            zeros = ", filled up with zeros where it runs" if cut.axis.is_padded else ""
            return f"{most} of {cut.axis.size} entries a rank, {least} on the last{zeros}"
    return ""


def _tell_too_fine(granted: Granted) -> str:
    """Tell where the grouped matrix products of torch will refuse parts of experts that were well enough whole."""
    mesh = granted.placement.mesh
    for cut in granted.demand.cuts:
        if cut.grain.needed > 1 and not cut.shorter and fit(cut.axis, mesh, "pad", cut.grain) != cut.axis:
            most = numel(rank_runs(cut.axis, mesh, 0))
            return (
                f"{most} of {cut.axis.size} entries a rank, no multiple of {cut.grain.needed} (16 bytes), as "
                "torch's grouped_mm wants; --uneven pad gives it"
            )
    return ""
