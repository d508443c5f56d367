"""Degrees: which numbers of ranks divide what a plan divides, and over which mesh.

The modules of one attention share a mesh of key and value heads by copies (kv x rep), so that every rank's query heads
meet their own key and value heads. A head is never cut.
"""

from collections.abc import Iterable, Mapping
from math import gcd, prod
from typing import NamedTuple

from manifests.layout import Axis, Mesh, misfits
from manifests.natural import kind_of
from manifests.placement import Cut, Placement, dim_runs

MAX_LISTED_DEGREE = 128


class Demand(NamedTuple):
    """A rule's wish to cut one dimension of one tensor.

    Attributes:
        name: The tensor's name.
        dtype: The tensor's dtype.
        shape: The tensor's shape, in elements.
        axis: The logical axis that the dimension runs along.
        dim: The dimension.
        unit: Elements of the axis that one entry stands for.
        group: The module whose children share a mesh.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: Axis
    dim: int
    unit: int
    group: str

    def placed(self, mesh: Mesh) -> Placement:
        """Return the placement that grants the wish over a mesh."""
        return Placement((Cut(self.dim, str(self.axis), self.unit),), mesh)


def allowed_degrees(demands: list[Demand]) -> tuple[int, ...]:
    """Return the numbers of ranks, up to 128, that satisfy all demands."""
    return tuple(degree for degree in range(1, MAX_LISTED_DEGREE + 1) if not failing(demands, degree))


def choose_mesh(axes: Iterable[Axis], world_size: int) -> Mesh | None:
    """Return the mesh over which the axes of one attention are divided, or None if there is none.

    Ranks are first spread over the key and value heads, and over the query heads of a group only as far as must be:
    with as few copies of a key and value head as the number of ranks allows.

    >>> from manifests.expression import parse_axis
    >>> choose_mesh([parse_axis("(3@kv, 3@rep, 64)")], 9), choose_mesh([parse_axis("(4@kv, 7@rep, 64)")], 8)
    ((('kv', 3), ('rep', 3)), None)
    """
    axes = list(axes)
    factors = [factor for axis in axes for factor in axis.all_factors()]
    heads = gcd(*(factor.size for factor in factors if factor.on == "kv")) or 1
    for kv in range(min(heads, world_size), 0, -1):
        mesh: Mesh = (("kv", kv), ("rep", world_size // kv))
        if world_size % kv == 0 and not any(misfits(axis, mesh) for axis in axes):
            return mesh
    return None


def _uses_heads(axis: Axis) -> bool:
    return bool(axis.mesh_axes() & {"kv", "rep"})


def _group_axes(demands: Iterable[Demand]) -> dict[str, set[Axis]]:
    groups: dict[str, set[Axis]] = {}
    for demand in demands:
        if _uses_heads(demand.axis):
            groups.setdefault(demand.group, set()).add(demand.axis)
    return groups


def group_meshes(demands: Iterable[Demand], world_size: int) -> dict[str, Mesh]:
    """Return the mesh of every group whose heads the number of ranks divides."""
    chosen: dict[frozenset[Axis], Mesh | None] = {}
    meshes: dict[str, Mesh] = {}
    for group, axes in _group_axes(demands).items():
        key = frozenset(axes)
        if key not in chosen:
            chosen[key] = choose_mesh(key, world_size)
        mesh = chosen[key]
        if mesh is not None:
            meshes[group] = mesh
    return meshes


def mesh_for(demand: Demand, meshes: Mapping[str, Mesh], world_size: int) -> Mesh:
    """Return the mesh that a demand's axis is divided over."""
    return meshes[demand.group] if _uses_heads(demand.axis) else (("tp", world_size),)


def failing(demands: list[Demand], world_size: int) -> list[Demand]:
    """Return the demands that the number of ranks does not satisfy."""
    meshes = group_meshes(demands, world_size)
    verdicts: dict[tuple[object, ...], bool] = {}
    unsatisfied: list[Demand] = []
    for demand in demands:
        mesh = meshes.get(demand.group) if _uses_heads(demand.axis) else (("tp", world_size),)
        key = (mesh, demand.axis, demand.dim, demand.unit, demand.dtype, demand.shape)
        if key not in verdicts:
            verdicts[key] = mesh is not None and _divides(demand, mesh)
        if not verdicts[key]:
            unsatisfied.append(demand)
    return unsatisfied


def _divides(demand: Demand, mesh: Mesh) -> bool:
    if prod(size for _, size in mesh) == 1:
        return True
    if misfits(demand.axis, mesh):
        return False
    return dim_runs(demand.placed(mesh), demand.dtype, demand.shape, 0) is not None


def by_shape(demands: Iterable[Demand]) -> dict[str, list[Demand]]:
    """Gather demands that differ only in the numbers of their names."""
    groups: dict[str, list[Demand]] = {}
    for demand in demands:
        groups.setdefault(kind_of(demand.name), []).append(demand)
    return groups


def describe(kind: str, unsatisfied: list[Demand], demands: Iterable[Demand], world_size: int) -> str:
    """Return one line on demands of one kind that the number of ranks does not satisfy.

    Args:
        kind: The name that they share.
        unsatisfied: Those demands.
        demands: All demands of the model; those of the same group decide together.
        world_size: The number of ranks that was asked for.
    """
    first = unsatisfied[0]
    group = [demand for demand in demands if demand.group == first.group and _uses_heads(demand.axis)]
    allowed = allowed_degrees(group if _uses_heads(first.axis) else [first])
    count = f" ({len(unsatisfied)} tensors)" if len(unsatisfied) > 1 else ""
    unit = f" in blocks of {first.unit}" if first.unit > 1 else ""
    name = kind if len(unsatisfied) > 1 else first.name
    return (
        f"{name}{count}: dim {first.dim} has {first.axis.size} = {first.axis}{unit}; "
        f"{world_size} ranks do not divide it; {shown_degrees(allowed)} do"
    )


def shown_degrees(degrees: tuple[int, ...], most: int = 12) -> str:
    """Return a list of numbers of ranks for a message.

    >>> shown_degrees((1, 3)), shown_degrees((1, 2, 4, 8), most=3), shown_degrees(())
    ('1, 3', '1, 2, 4, …', 'no number')
    """
    more = ", …" if len(degrees) > most else ""
    return ", ".join(map(str, degrees[:most])) + more or "no number"
