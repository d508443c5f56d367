"""Checking a manifest: what its types do not say, so that whoever reads it can rely on every number and every name.

Types refuse negative numbers. Here are the numbers and names that must fit each other: shapes and axes, ranks and
meshes, extents and sizes, parts and sources. Whether tensors are covered by their parts, a verifier finds out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from typing import Any

from manifests.columns import Extents, Numbers, SourceTensors, pick
from manifests.contents import Link, Manifest, Tensor
from manifests.dtypes import BITS, MAX_DIMS, atoms
from manifests.dtypes import nbytes as tensor_nbytes
from manifests.errors import ManifestError, PlanError
from manifests.layout import Mesh, mesh_sizes
from manifests.names import find_odd_name, is_file_name
from manifests.placement import Placement, bound_axis
from manifests.runs import Runs
from manifests.shown import shown, shown_name
from manifests.wire import PartTable

MAX_RANKS = 1 << 16
"""A rank has a file of its own."""
_LAYOUTS = ("runtime", "checkpoint")
_CONVERTED = {"F64", "F32", "F16", "BF16"}
"""Dtypes from which and to which a split converts numbers."""


def check_manifest(manifest: Manifest, parts: PartTable) -> None:
    """Refuse a whole manifest whose names or numbers do not fit each other.

    Args:
        manifest: The manifest, as it was decoded.
        parts: The table of its tensors' parts.

    Raises:
        ManifestError: Two do not.
    """
    check_runtime(manifest)
    for file in manifest.files:
        check_extents(Extents.of(file.tensors), file, manifest.tensors)
    source = manifest.source
    _check_file_names(
        [*(file.name for file in source.files), *manifest.carried, *([source.index] if source.index else [])]
    )
    columns = [SourceTensors.of(file.tensors) for file in source.files]
    for rows in columns:
        _check_names(rows.names)
        for kind, (dtype, shape) in enumerate(rows.types):
            if problem := _shape_problem(dtype, shape):
                raise ManifestError(f"{_shown_first(rows.names, rows.kinds, kind)}: {problem}")
    names = [*chain.from_iterable(rows.names for rows in columns)]
    stored = set(names)
    if len(stored) < len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise ManifestError(f"source: {shown_name(twice)} is there twice")
    for name, tensor in _different(manifest.tensors):
        if tensor.cast and tensor.cast not in BITS:
            raise ManifestError(f"{shown_name(name)}: converted from {shown(tensor.cast)}, an unknown dtype")
    if strange := manifest.tensors.keys() - parts.tensors.keys() - stored:
        raise ManifestError(f"{shown_name(min(strange))}: has no parts, and the source no tensor of its name")
    _check_parts(manifest.tensors, parts, names, columns)


def check_runtime(manifest: Any) -> None:  # noqa: ANN401 - a manifest, or what a loader needs of one
    """Refuse a manifest of which what a loader uses does not fit.

    Raises:
        ManifestError: It does not.
    """
    if not 1 <= manifest.world_size <= MAX_RANKS:
        raise ManifestError(f"world_size is {manifest.world_size}; it is from 1 to {MAX_RANKS}")
    if manifest.layout not in _LAYOUTS:
        raise ManifestError(f"layout is {shown(manifest.layout)}; known are {', '.join(_LAYOUTS)}")
    _check_names(manifest.tensors, renamed=True)
    held = sum(file.nbytes for file in manifest.files)
    for name, tensor in _different(manifest.tensors):
        if problem := _shape_problem(tensor.dtype, tensor.shape) or _placement_problem(
            tensor.placement, tensor.shape, manifest.world_size
        ):
            raise ManifestError(f"{shown_name(name)}: {problem}")
        if tensor.placement.partial and tensor_nbytes(tensor.dtype, tensor.shape) > held:
            raise ManifestError(f"{shown_name(name)}: {shown(list(tensor.shape))} is more than all files hold")
    _check_files(manifest.files, manifest.carried, manifest.world_size)
    for one, other in manifest.ties.items():
        if one in manifest.tensors or other not in manifest.tensors:
            raise ManifestError(f"ties: {shown_name(one)} is tied to {shown_name(other)}, which does not fit tensors")
    for name, module in manifest.modules.items():
        for mesh, axis in [(module.mesh, module.axis), *((entry.mesh, entry.axis) for entry in module.inputs)]:
            if problem := _mesh_problem(mesh, manifest.world_size) or _axis_problem(axis):
                raise ManifestError(f"modules: {shown_name(name)}: {problem}")
    for name, values in manifest.attributes.items():
        for attribute, value in values.items():
            if isinstance(value, tuple) and len(value) != manifest.world_size:
                where = f"{shown_name(name)}: {shown_name(attribute)}"
                raise ManifestError(f"attributes: {where}: {len(value)} numbers for {manifest.world_size} ranks")


def _different(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors without those that are the same object as one before."""
    different: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in different:
            different[id(tensor)] = name, tensor
    return different.values()


def _shown_first(names: Sequence[str], kinds: Sequence[int], kind: int) -> str:
    return shown_name(names[kinds.index(kind)]) if kind in kinds else "source"


def check_extents(extents: Extents, file: Any, tensors: Mapping[str, Tensor]) -> None:  # noqa: ANN401 - a file of either
    """Refuse extents that do not lie in their file, or are of tensors that are none of the manifest's.

    Raises:
        ManifestError: One does not.
    """
    names = set(extents.names)
    if len(names) < len(extents.names):
        raise ManifestError(f"{file.name}: holds {shown_name(Counter(extents.names).most_common(1)[0][0])} twice")
    if strange := names - tensors.keys():
        raise ManifestError(f"{file.name}: holds {shown_name(min(strange))}, which is not in tensors")
    end, most = sum(extents.sizes), file.nbytes - file.data_offset
    if end > most:
        raise ManifestError(f"{file.name}: its tensors end at byte {end} of {most} bytes of data")
    for name, begin in zip(extents.names, accumulate(extents.sizes, initial=0), strict=False):
        if begin % max(BITS[tensors[name].dtype] // 8, 1):
            dtype = tensors[name].dtype
            raise ManifestError(f"{file.name}: {shown_name(name)}: byte {begin} is no place for {dtype}")


def _check_files(files: Iterable[Any], carried: Iterable[str], world_size: int) -> None:
    _check_file_names([*(file.name for file in files), *carried, "manifest.json"])
    for file in files:
        owners = file.owners
        if any(rank >= world_size for rank in owners) or list(owners) != sorted(set(owners)):
            raise ManifestError(f"{file.name}: owners {shown(list(owners))} are not ascending ranks below {world_size}")
        if file.data_offset > file.nbytes:
            raise ManifestError(f"{file.name}: its data starts at byte {file.data_offset} of {file.nbytes}")


def _check_file_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not is_file_name(name):
            raise ManifestError(f"{shown(name)} is not the name of a file in its folder")
        if name in seen:
            raise ManifestError(f"two files have the name {shown(name)}")
        seen.add(name)


def _check_names(names: Collection[str], *, renamed: bool = False) -> None:
    if found := find_odd_name(names, renamed=renamed):
        raise ManifestError(f"a tensor has {found[1]}: {shown(found[0])}")


def _shape_problem(dtype: str, shape: tuple[int, ...]) -> str:
    if dtype not in BITS:
        return f"unknown dtype {shown(dtype)}"
    if len(shape) > MAX_DIMS or prod(size or 1 for size in shape) * BITS[dtype] >= 1 << 64:
        return f"the shape {shown(list(shape))} is larger than a file can hold"
    return ""


@lru_cache(maxsize=4096)
def _placement_problem(placement: Placement, shape: tuple[int, ...], world_size: int) -> str:
    if placement.cuts and (problem := _mesh_problem(placement.mesh, world_size)):
        return problem
    dims = [cut.dim for cut in placement.cuts]
    if len(set(dims)) != len(dims) or any(dim >= len(shape) for dim in dims):
        return f"cuts dims {dims} of {len(shape)}"
    known = mesh_sizes(placement.mesh).keys()
    for cut in placement.cuts:
        if problem := _axis_problem(cut.axis):
            return problem
        axis = bound_axis(cut.axis)
        if unknown := axis.mesh_axes() - known:
            return f"divides over {min(unknown)}, which its mesh lacks"
        if -(-axis.size // cut.unit) != shape[cut.dim]:
            return f"an axis of {axis.size} in units of {cut.unit} along a dimension of {shape[cut.dim]}"
    return ""


def _mesh_problem(mesh: Mesh, world_size: int) -> str:
    sizes = [size for _, size in mesh]
    if mesh and (prod(sizes[:32]) != world_size or len(sizes) > 32 or len({name for name, _ in mesh}) != len(mesh)):
        return f"a mesh of {shown(mesh)}, not of {world_size} ranks"
    return ""


@lru_cache(maxsize=4096)
def _axis_problem(notation: str) -> str:
    try:
        if notation:
            bound_axis(notation)
    except PlanError as error:
        return str(error)
    return ""


def _check_parts(
    tensors: Mapping[str, Tensor], parts: PartTable, names: Sequence[str], columns: Sequence[SourceTensors]
) -> None:
    """Refuse parts whose links lead out of their sources or their tensors, or whose sources are of another kind."""
    numbers = Numbers[tuple[str, tuple[int, ...]]]()
    kinds = [kind for rows in columns for kind in pick([numbers[kind] for kind in rows.types], rows.kinds)]
    types = [*numbers]
    known: dict[tuple[object, ...], bool] = {}
    right: set[tuple[object, ...]] = set()
    for name, (sources, forms) in parts.tensors.items():
        tensor = tensors[name]
        inside = _addressed(tensor.dtype, tensor.shape)
        whole = inside, tensor.dtype, tuple(forms), *set(taken := pick(kinds, sources))
        if len(whole) == 4 and whole in right:
            continue  # made from sources of one kind, as a tensor of another layer
        for kind, number in set(zip(taken, forms, strict=True)):
            key = kind, number, inside, tensor.dtype
            if key not in known:
                form, (dtype, shape) = parts.forms[number], types[kind]
                outside = form.shape or _addressed(dtype, shape)
                fits = _fit(form.links, outside, inside) if form.links else outside == inside
                known[key] = fits and _may_become(dtype, tensor.dtype)
            if not known[key]:
                raise ManifestError(
                    f"{shown_name(name)}: its links lead out of it, or out of what it is made of, or that is of "
                    f"another dtype than {tensor.dtype}"
                )
        right.add(whole)
    whole_kinds = dict(zip(names, kinds, strict=True))
    alone: dict[tuple[int, int], bool] = {}
    for name, tensor in tensors.items():
        if name in parts.tensors:
            continue
        dtype, shape = types[kind := whole_kinds[name]]
        key_alone = kind, id(tensor)
        if key_alone not in alone:
            same = _addressed(dtype, shape) == _addressed(tensor.dtype, tensor.shape)
            alone[key_alone] = same and _may_become(dtype, tensor.dtype)
        if not alone[key_alone]:
            raise ManifestError(f"{shown_name(name)}: is {shown(list(tensor.shape))} {tensor.dtype}, the source's not")


def _may_become(stored: str, dtype: str) -> bool:
    return stored == dtype or {stored, dtype} <= _CONVERTED


def _addressed(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = atoms(dtype, shape)
    return (tensor_nbytes(dtype, shape),) if found is None else found


def _fit(links: tuple[Link, ...], outside: tuple[int, ...], inside: tuple[int, ...]) -> bool:
    """Tell whether every dimension has one link, and the links' runs lie in the dimensions."""
    if sorted(link.src for link in links if link.src is not None) != list(range(len(outside))):
        return False
    if sorted(link.dst for link in links if link.dst is not None) != list(range(len(inside))):
        return False
    return all(
        _runs_fit(
            link.runs,
            1 if link.src is None else outside[link.src],
            1 if link.dst is None else inside[link.dst],
        )
        for link in links
    )


@lru_cache(maxsize=4096)
def _runs_fit(runs: Runs, src_size: int, dst_size: int) -> bool:
    return all(
        run.src + (run.repeat - 1) * run.src_step + run.length <= src_size
        and run.dst + (run.repeat - 1) * run.dst_step + run.length <= dst_size
        and (run.repeat == 1 or run.dst_step >= run.length)
        for run in runs
    )
