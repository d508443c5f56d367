"""Degrees: which numbers of ranks divide what a plan divides, and over which mesh.

The modules of one attention share a mesh of key and value heads by copies (kv x rep), so that every rank's query heads
meet their own key and value heads. A head is never cut.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from manifests.layout import Axis, Mesh, misfits, rank_runs
from manifests.natural import kind_of
from manifests.placement import Cut, Placement, dim_runs
from manifests.runs import numel
from reshard.uneven import Grain, Uneven, fit

MAX_LISTED_DEGREE = 128


class Wanted(NamedTuple):
    """One dimension that is to be divided.

    Attributes:
        dim: The dimension.
        axis: The logical axis that it runs along.
        unit: Elements of the axis that one entry stands for.
        shorter: Whether the last rank's part may be shorter than the others'; none may be empty.
        grain: Where it may be cut if it does not divide.
        summed: Whether it is input features, along which the ranks' products are added up.
        plain: Whether nothing is known of it but its size.
    """

    dim: int
    axis: Axis
    unit: int = 1
    shorter: bool = False
    grain: Grain = Grain()
    summed: bool = False
    plain: bool = False

    def fitted(self, mesh: Mesh, policy: Uneven) -> "Wanted":
        """Return what is divided over a mesh, by a policy for what the mesh does not divide."""
        if self.shorter and policy != "pad":
            return self
        axis = fit(self.axis, mesh, policy, self.grain)
        even = axis == self.axis and not misfits(axis, mesh)
        return self if even else self._replace(axis=axis, shorter=True)


class Demand(NamedTuple):
    """The wish to divide a tensor.

    Attributes:
        name: The tensor's name.
        dtype: The tensor's dtype.
        shape: The tensor's shape, in elements.
        cuts: Its dimensions that are to be divided.
        group: The module whose children share a mesh.
        partial: Whether one of the ranks that hold the same part uses it, the others zeros.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[Wanted, ...]
    group: str
    partial: bool = False

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The names of the mesh axes over which it is to be divided."""
        return _mesh_axes(self.cuts)

    @property
    def is_plain(self) -> bool:
        """Whether it is granted without regard to the module that the tensor is in."""
        return self.mesh_axes <= {"tp"}

    def renamed(self, name: str) -> "Demand":
        """Return the wish for a tensor whose name differs in its numbers alone."""
        above = len(self.name.split(".")) - len(self.group.split(".")) if self.group else 0
        return self._replace(name=name, group=name.rsplit(".", above)[0] if above else "")

    def fitted(self, mesh: Mesh, policy: Uneven) -> "Demand":
        """Return the wish as a mesh can grant it, by a policy for what the mesh does not divide."""
        cuts = tuple(cut.fitted(mesh, policy) for cut in self.cuts) if policy else self.cuts
        return self if cuts == self.cuts else self._replace(cuts=cuts)

    def placed(self, mesh: Mesh) -> Placement:
        """Return the placement that grants the wish over a mesh; of equal wishes it is one object."""
        return _placed(self.cuts, mesh, self.partial)


class Granted(NamedTuple):
    """A wish as it was granted, with the placement that does it."""

    demand: Demand
    placement: Placement


@lru_cache(maxsize=4096)
def _placed(cuts: tuple[Wanted, ...], mesh: Mesh, partial: bool) -> Placement:
    return Placement(tuple(Cut(cut.dim, str(cut.axis), cut.unit) for cut in cuts), mesh, partial)


@lru_cache(maxsize=4096)
def _mesh_axes(cuts: tuple[Wanted, ...]) -> frozenset[str]:
    return frozenset().union(*(cut.axis.mesh_axes() for cut in cuts))


class World(NamedTuple):
    """The ranks.

    Attributes:
        size: Their number.
        experts: Over how many of them experts are divided, the other factor dividing each expert; 1 if not at all.
        uneven: What becomes of what they do not divide: nothing, so that it is refused, "ceil" or "pad".
    """

    size: int
    experts: int = 1
    uneven: Uneven = ""

    @property
    def plain_mesh(self) -> Mesh:
        """All ranks as one axis."""
        return (("tp", self.size),)

    def expert_mesh(self, inner: str) -> Mesh | None:
        """Return the ranks as experts times what is inner: ``etp``, the parts of each, or ``rep``, its copies.

        A plan that keeps every expert whole without being asked to divide them has them over all ranks.

        Returns:
            None where the one does not divide the other.
        """
        experts = self.experts if self.experts > 1 else self.size
        each, rest = divmod(self.size, experts)
        return None if rest else (("ep", experts), (inner, each))


def allowed_degrees(demands: list[Demand], world: World) -> tuple[int, ...]:
    """Return the numbers of ranks, up to 128, that satisfy all demands; else the ranks are as of the world."""
    candidates = range(world.experts, MAX_LISTED_DEGREE + 1, world.experts)
    return tuple(degree for degree in candidates if not failing(demands, world._replace(size=degree)))


def choose_mesh(axes: Iterable[Axis], world_size: int, policy: Uneven = "") -> Mesh | None:
    """Return the mesh over which the axes of one attention are divided, or None if there is none.

    Ranks are first spread over the key and value heads, and over the query heads of a group only as far as must be:
    with as few copies of a key and value head as the number of ranks allows.

    >>> from manifests.expression import parse_axis
    >>> choose_mesh([parse_axis("(3@kv, 3@rep, 64)")], 9), choose_mesh([parse_axis("(4@kv, 7@rep, 64)")], 8)
    ((('kv', 3), ('rep', 3)), None)

    If they need not divide, it is the mesh that leaves the ranks least:

    >>> choose_mesh([parse_axis("(4@kv, 7@rep, 64)")], 8, "ceil"), choose_mesh([parse_axis("(3@kv, 3@rep)")], 4, "pad")
    ((('kv', 4), ('rep', 2)), (('kv', 4), ('rep', 1)))
    """
    axes = list(axes)
    grouped = any(factor.on == "kv" for axis in axes for factor in axis.all_factors())
    divisors = (kv for kv in range(world_size if grouped else 1, 0, -1) if world_size % kv == 0)
    meshes: list[Mesh] = [(("kv", kv), ("rep", world_size // kv)) for kv in divisors]
    even = [mesh for mesh in meshes if not any(misfits(axis, mesh) for axis in axes)]
    if not policy:
        return next(iter(even), None)
    possible = [*even, *(mesh for mesh in meshes if not any(_is_empty(axis, mesh, policy) for axis in axes))]
    return min(possible, key=lambda mesh: sum(_most(axis, mesh, policy) for axis in axes), default=None)


def _most(axis: Axis, mesh: Mesh, policy: Uneven) -> int:
    """Return how much of an axis the first rank has, and so at most any."""
    return numel(rank_runs(fit(axis, mesh, policy), mesh, 0))


def _is_empty(axis: Axis, mesh: Mesh, policy: Uneven) -> bool:
    """Tell whether the last rank has nothing of an axis, and no zeros for it either."""
    return policy != "pad" and not rank_runs(fit(axis, mesh, policy), mesh, _size(mesh) - 1)


def _uses_heads(demand: Demand) -> bool:
    return bool(demand.mesh_axes & {"kv", "rep"})


def group_meshes(demands: Iterable[Demand], world: World) -> dict[str, Mesh]:
    """Return the mesh of every group whose heads the number of ranks divides."""
    groups: dict[str, set[Axis]] = {}
    for demand in demands:
        if _uses_heads(demand):
            groups.setdefault(demand.group, set()).update(cut.axis for cut in demand.cuts)
    chosen: dict[frozenset[Axis], Mesh | None] = {}
    meshes: dict[str, Mesh] = {}
    for group, axes in groups.items():
        key = frozenset(axes)
        if key not in chosen:
            chosen[key] = choose_mesh(key, world.size, world.uneven)
        mesh = chosen[key]
        if mesh is not None:
            meshes[group] = mesh
    return meshes


def mesh_for(demand: Demand, meshes: Mapping[str, Mesh], world: World) -> Mesh | None:
    """Return the mesh that a demand's axes are divided over, or None if there is none."""
    if _uses_heads(demand):
        return meshes.get(demand.group)
    if "ep" in demand.mesh_axes:
        return world.expert_mesh("etp" if demand.partial or "etp" in demand.mesh_axes else "rep")
    return world.plain_mesh


def failing(demands: list[Demand], world: World) -> list[Demand]:
    """Return the demands that the number of ranks does not satisfy."""
    meshes = group_meshes(demands, world)
    verdicts: dict[tuple[object, ...], bool] = {}
    unsatisfied: list[Demand] = []
    for demand in demands:
        mesh = mesh_for(demand, meshes, world)
        key = (mesh, demand.cuts, demand.dtype, demand.shape)
        if key not in verdicts:
            verdicts[key] = mesh is not None and _divides(demand.fitted(mesh, world.uneven), mesh)
        if not verdicts[key]:
            unsatisfied.append(demand)
    return unsatisfied


def _divides(demand: Demand, mesh: Mesh) -> bool:
    if _size(mesh) == 1:
        return True
    if any(misfits(cut.axis, mesh) and not cut.shorter for cut in demand.cuts):
        return False
    parts = [dim_runs(demand.placed(mesh), demand.dtype, demand.shape, rank) for rank in (0, _size(mesh) - 1)]
    return None not in parts and not any(
        cut.shorter and not cut.axis.is_padded and not part[cut.dim] for part in parts if part for cut in demand.cuts
    )


def _size(mesh: Mesh) -> int:
    return prod(size for _, size in mesh)


def by_shape(demands: Iterable[Demand]) -> dict[str, list[Demand]]:
    """Gather demands that differ only in the numbers of their names."""
    groups: dict[str, list[Demand]] = {}
    for demand in demands:
        groups.setdefault(kind_of(demand.name), []).append(demand)
    return groups


def describe(kind: str, unsatisfied: list[Demand], demands: Iterable[Demand], world: World) -> str:
    """Return one line on demands of one kind that the number of ranks does not satisfy.

    Args:
        kind: The name that they share.
        unsatisfied: Those demands.
        demands: All demands of the model; those of the same group decide together.
        world: The ranks that were asked for.
    """
    first = unsatisfied[0]
    group = [demand for demand in demands if demand.group == first.group and _uses_heads(demand)]
    allowed = allowed_degrees(group if _uses_heads(first) else [first], world)
    count = f" ({len(unsatisfied)} tensors)" if len(unsatisfied) > 1 else ""
    name = kind if len(unsatisfied) > 1 else first.name
    dims = " and ".join(
        f"dim {cut.dim} has {cut.axis.size} = {cut.axis}" + (f" in blocks of {cut.unit}" if cut.unit > 1 else "")
        for cut in first.cuts
    )
    return f"{name}{count}: {dims}; {world.size} ranks do not divide it; {shown_degrees(allowed)} do"


def shown_degrees(degrees: tuple[int, ...], most: int = 12) -> str:
    """Return a list of numbers of ranks for a message.

    >>> shown_degrees((1, 3)), shown_degrees((1, 2, 4, 8), most=3), shown_degrees(())
    ('1, 3', '1, 2, 4, …', 'no number')
    """
    more = ", …" if len(degrees) > most else ""
    return ", ".join(map(str, degrees[:most])) + more or "no number"
