"""Checking a manifest: what its types do not say, so that whoever reads it can rely on every number and every name.

Types refuse negative numbers. Here are the numbers and names that must fit each other: shapes and axes, ranks and
meshes, extents and sizes, parts and sources. Whether tensors are covered by their parts, a verifier finds out.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from manifests.dtypes import BITS, MAX_DIMS, atoms
from manifests.dtypes import nbytes as tensor_nbytes
from manifests.errors import ManifestError, PlanError
from manifests.layout import Mesh, mesh_sizes
from manifests.names import is_file_name, tensor_name_problem
from manifests.placement import Placement, bound_axis
from manifests.runs import Runs
from manifests.shown import shown, shown_name

MAX_RANKS = 1 << 16
"""A rank has a file of its own."""
TILE_NBYTES = 4 << 20
"""Of each of which there is a hash."""
_LAYOUTS = ("runtime", "checkpoint")
_CONVERTED = {"F64", "F32", "F16", "BF16"}
"""Dtypes from which and to which a split converts numbers."""


class _MisfitError(Exception):
    """What does not fit, without the manifest's name."""


def check_manifest(manifest: Any, label: str) -> None:  # noqa: ANN401 - a Manifest, whose module imports this one
    """Refuse a whole manifest whose names or numbers do not fit each other.

    Raises:
        ManifestError: Two do not.
    """
    check_runtime(manifest, label)
    try:
        for file in manifest.files:
            check_extents(file.tensors, file, manifest.tensors, label)
        source = manifest.source
        stored: dict[str, Any] = {}
        dropped = set(source.dropped)
        _check_file_names(
            [*(file.name for file in source.files), *manifest.carried, *([source.index] if source.index else [])]
        )
        for file in source.files:
            for name, tensor in file.tensors.items():
                if name in stored:
                    raise _MisfitError(f"source: {shown_name(name)} is in two files")
                _check_shape(name, tensor.dtype, tensor.shape)
                tiles = -(-tensor_nbytes(tensor.dtype, tensor.shape) // TILE_NBYTES)
                if len(tensor.tiles) != tiles and not (name in dropped and not tensor.tiles):
                    raise _MisfitError(f"source: {shown_name(name)}: {len(tensor.tiles)} hashes, {tiles} expected")
                stored[name] = tensor
        _check_parts(manifest.tensors, stored)
    except _MisfitError as error:
        raise ManifestError(f"{label}: {error}") from error


def check_runtime(manifest: Any, label: str) -> None:  # noqa: ANN401 - a manifest, or what a loader needs of one
    """Refuse a manifest of which what a loader uses does not fit.

    Raises:
        ManifestError: It does not.
    """
    try:
        if not 1 <= manifest.world_size <= MAX_RANKS:
            raise _MisfitError(f"world_size is {manifest.world_size}; it is from 1 to {MAX_RANKS}")
        if manifest.layout not in _LAYOUTS:
            raise _MisfitError(f"layout is {shown(manifest.layout)}; known are {', '.join(_LAYOUTS)}")
        held = sum(file.nbytes for file in manifest.files)
        for name, tensor in manifest.tensors.items():
            _check_shape(name, tensor.dtype, tensor.shape)
            if tensor.placement.partial and tensor_nbytes(tensor.dtype, tensor.shape) > held:
                raise _MisfitError(f"{shown_name(name)}: {shown(list(tensor.shape))} is more than all files hold")
            if problem := _placement_problem(tensor.placement, tensor.shape, manifest.world_size):
                raise _MisfitError(f"{shown_name(name)}: {problem}")
        _check_files(manifest.files, manifest.carried, manifest.world_size)
        for one, other in manifest.ties.items():
            if one in manifest.tensors or other not in manifest.tensors:
                raise _MisfitError(
                    f"ties: {shown_name(one)} is tied to {shown_name(other)}, which does not fit tensors"
                )
        for name, module in manifest.modules.items():
            if problem := _mesh_problem(module.mesh, manifest.world_size) or _axis_problem(module.axis):
                raise _MisfitError(f"modules: {shown_name(name)}: {problem}")
    except _MisfitError as error:
        raise ManifestError(f"{label}: {error}") from error


def check_extents(extents: Mapping[str, Any], file: Any, tensors: Mapping[str, Any], label: str) -> None:  # noqa: ANN401
    """Refuse extents that do not lie in their file, or are of tensors that are none of the manifest's.

    Raises:
        ManifestError: One does not.
    """
    if problem := _extents_problem(extents, file, tensors):
        raise ManifestError(f"{label}: {file.name}: {problem}")


def _extents_problem(extents: Mapping[str, Any], file: Any, tensors: Mapping[str, Any]) -> str:  # noqa: ANN401
    most = file.nbytes - file.data_offset
    for name, extent in extents.items():
        if name not in tensors:
            return f"holds {shown_name(name)}, which is not in tensors"
        if extent.offset + extent.nbytes > most:
            return f"{shown_name(name)} ends at byte {extent.offset + extent.nbytes} of {most} bytes of data"
        if extent.offset % max(BITS[tensors[name].dtype] // 8, 1):
            return f"{shown_name(name)}: byte {extent.offset} is no place for {tensors[name].dtype}"
        if len(extent.tiles) != -(-extent.nbytes // TILE_NBYTES):
            return f"{shown_name(name)}: {len(extent.tiles)} hashes for {extent.nbytes} bytes in tiles of 4 MiB"
    return ""


def _check_files(files: Iterable[Any], carried: Iterable[str], world_size: int) -> None:
    _check_file_names([*(file.name for file in files), *carried, "manifest.json"])
    for file in files:
        owners = file.owners
        if any(rank >= world_size for rank in owners) or list(owners) != sorted(set(owners)):
            raise _MisfitError(f"{file.name}: owners {shown(list(owners))} are not ascending ranks below {world_size}")
        if file.data_offset > file.nbytes:
            raise _MisfitError(f"{file.name}: its data starts at byte {file.data_offset} of {file.nbytes}")


def _check_file_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not is_file_name(name):
            raise _MisfitError(f"{shown(name)} is not the name of a file in its folder")
        if name in seen:
            raise _MisfitError(f"two files have the name {shown(name)}")
        seen.add(name)


def _check_shape(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if problem := tensor_name_problem(name, renamed=True):
        raise _MisfitError(f"a tensor has {problem}: {shown(name)}")
    if dtype not in BITS:
        raise _MisfitError(f"{shown_name(name)}: unknown dtype {shown(dtype)}")
    if len(shape) > MAX_DIMS or prod(size or 1 for size in shape) * BITS[dtype] >= 1 << 64:
        raise _MisfitError(f"{shown_name(name)}: the shape {shown(list(shape))} is larger than a file can hold")


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


def _check_parts(tensors: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        inside = _addressed(tensor.dtype, tensor.shape)
        if not tensor.parts and name not in stored:
            raise _MisfitError(f"{shown_name(name)}: has no parts, and the source no tensor of its name")
        for origin, links, shape in [(p.source, p.links, p.shape) for p in tensor.parts] or [(name, (), ())]:
            if origin not in stored:
                raise _MisfitError(f"{shown_name(name)}: made from {shown_name(origin)}, which the source lacks")
            source = stored[origin]
            if source.dtype != tensor.dtype and not {source.dtype, tensor.dtype} <= _CONVERTED:
                raise _MisfitError(f"{shown_name(name)}: made from {shown_name(origin)}, which is of {source.dtype}")
            outside = shape or _addressed(source.dtype, source.shape)
            if not (_fit(links, outside, inside) if links else outside == inside):
                raise _MisfitError(f"{shown_name(name)}: its links from {shown_name(origin)} lead out of it")


def _addressed(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = atoms(dtype, shape)
    return (tensor_nbytes(dtype, shape),) if found is None else found


def _fit(links: tuple[Any, ...], outside: tuple[int, ...], inside: tuple[int, ...]) -> bool:
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
