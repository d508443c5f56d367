"""Verifying a split: sizes, headers, coverage, and the hash of every tile."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from manifests.belonging import belonging, foreign
from manifests.errors import CheckpointError, DamageError, ReshardError
from manifests.header import Header, read_header
from manifests.manifest import MANIFEST_NAME, Extent, Manifest, SplitFile, check_published, read_manifest
from manifests.placement import local_shape, part_of
from reshard.moves import Place, build_input, build_program, split_moves
from reshard.program import check_program
from reshard.splitting import TotalProgress, counted
from reshard.tiles import TileHasher, differing_tiles

_BLOCK_NBYTES = 1 << 20
_SHOWN = 100
"""Findings in the text of an error; all of them are in its ``findings``."""


class Report(NamedTuple):
    """What was found whole.

    Attributes:
        files: Number of safetensors files.
        tensors: Number of tensors of the model.
        nbytes: Bytes that were hashed.
        unknown: Names in the folder that the manifest does not list, and that no reader of the split opens.
    """

    files: int
    tensors: int
    nbytes: int
    unknown: tuple[str, ...] = ()


def verify(out: str | Path, *, jobs: int = 2, progress: TotalProgress | None = None) -> Report:
    """Check that a split is whole and is what its manifest says.

    Args:
        out: The folder of the split.
        jobs: Number of worker threads.
        progress: Called with the bytes finished so far and their total.

    Raises:
        ManifestError: The folder holds no finished split.
        DamageError: Something differs; ``findings`` has a line for every place.
    """
    folder = Path(out)
    check_published(folder)
    manifest = read_manifest(folder)
    findings = [*_check_coverage(manifest), *check_copies(manifest), *check_carried(folder, manifest)]
    readable = []
    for file in manifest.files:
        problems = list(check_file(folder, file, manifest))
        findings += problems
        if not problems:
            readable.append(file)
    total = sum(file.nbytes - file.data_offset for file in readable)
    report = counted(progress, total)
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        for found in pool.map(lambda file: list(check_tiles(folder, file, report)), readable):
            findings += found
    if findings:
        raise damaged(str(folder), findings)
    return Report(len(manifest.files), len(manifest.tensors), total, tuple(_unknown(folder, manifest)))


def damaged(label: str, findings: Sequence[str]) -> DamageError:
    """Return the error that tells what was found, of many findings the first."""
    shown = "\n".join(f"  {line}" for line in findings[:_SHOWN])
    more = f"\n  and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return DamageError(f"{label}: damaged:\n{shown}{more}", findings=tuple(findings))


def _unknown(folder: Path, manifest: Manifest) -> list[str]:
    known = {MANIFEST_NAME, *(file.name for file in manifest.files), *manifest.carried}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def check_file(folder: Path, file: SplitFile, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a file's size and header."""
    path = folder / file.name
    try:
        actual = path.stat().st_size
        header = read_header(path, file.name) if actual == file.nbytes else _header_of(path)
    except FileNotFoundError:
        yield f"{file.name}: missing"
        return
    except OSError as error:
        yield f"{file.name}: cannot be read: {error.strerror}"
        return
    except CheckpointError as error:
        yield str(error)
        return
    if header and (other := foreign(header.metadata, belonging(manifest.key, manifest.world_size, file.owners))):
        yield f"{file.name}: {other}"
    if actual != file.nbytes:
        yield f"{file.name}: {actual} bytes, {file.nbytes} expected"
        return
    if not header or xxhash.xxh3_128_hexdigest(header.raw) != file.header or set(header.tensors) != set(file.tensors):
        yield f"{file.name}: its header is not the one that was written"
        return
    rank = file.owners[0] if file.owners else 0
    for name, stored in header.tensors.items():
        tensor, extent = manifest.tensors[name], file.tensors[name]
        shape = local_shape(tensor.placement, tensor.dtype, tensor.shape, rank)
        if (stored.dtype, stored.shape, stored.begin) != (tensor.dtype, shape, extent.offset):
            yield (
                f"{file.name}: {name}: the header has {stored.dtype} {list(stored.shape)} at {stored.begin}, "
                f"the manifest {tensor.dtype} {list(shape)} at {extent.offset}"
            )


def _header_of(path: Path) -> Header | None:
    """Return the header of a file that has another size, if it is a whole file nevertheless."""
    try:
        return read_header(path)
    except CheckpointError:
        return None


def _check_coverage(manifest: Manifest) -> Iterator[str]:
    """Yield where the manifest does not account for every byte of the source and of the output."""
    try:
        inputs = {
            name: build_input(name, tensor.dtype, tensor.shape, position, tensor.offset)
            for position, file in enumerate(manifest.source.files)
            for name, tensor in file.tensors.items()
        }
        places = places_of(manifest)
        moves = split_moves(manifest.tensors, inputs, places)
        program = build_program(
            (file.name for file in manifest.source.files), (file.name for file in manifest.files), moves
        )
        check_program(program, [file.nbytes for file in manifest.files], [file.data_offset for file in manifest.files])
        used = {gather.source.name for move in moves for gather in move.gathers}
        for name in inputs.keys() - used - set(manifest.source.dropped):
            yield f"manifest.json: the source's {name} is in no file"
    except (KeyError, ReshardError) as error:
        yield f"manifest.json: does not cover the source: {error}"


def places_of(manifest: Manifest) -> dict[str, list[Place]]:
    """Return where every tensor's parts lie, offsets counted from the start of the files."""
    places: dict[str, list[Place]] = {name: [] for name in manifest.tensors}
    for position, file in enumerate(manifest.files):
        rank = file.owners[0] if file.owners else 0
        for name, extent in file.tensors.items():
            places[name].append(Place(position, file.data_offset + extent.offset, rank))
    return places


def check_tiles(folder: Path, file: SplitFile, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the tiles of a file that are not what was written; its size and header are checked before."""
    try:
        yield from _check_tiles(folder, file, progress)
    except OSError as error:
        yield f"{file.name}: cannot be read: {error.strerror}"


def _check_tiles(folder: Path, file: SplitFile, progress: Callable[[int], None] | None) -> Iterator[str]:
    block = memoryview(bytearray(_BLOCK_NBYTES))
    with (folder / file.name).open("rb", buffering=0) as stream:
        for name, extent in sorted(file.tensors.items(), key=lambda item: item[1].offset):
            stream.seek(file.data_offset + extent.offset)
            hasher = TileHasher()
            while hasher.nbytes < extent.nbytes:
                got = stream.readinto(block[: extent.nbytes - hasher.nbytes])
                if not got:
                    yield f"{file.name}: {name}: the file ends at byte {hasher.nbytes} of {extent.nbytes} of the tensor"
                    return
                hasher.update(block[:got])
                if progress:
                    progress(got)
            for damage in differing_tiles(extent.tiles, hasher.finish(), extent.nbytes):
                yield f"{file.name}: {name}: {damage} of the tensor are not those that were written"


def check_copies(manifest: Manifest) -> Iterator[str]:
    """Yield the parts that should be copies of each other and are not."""
    first: dict[tuple[str, tuple[int, ...]], tuple[SplitFile, int, Extent]] = {}
    for file in manifest.files:
        for name, extent in file.tensors.items():
            rank = file.owners[0] if file.owners else 0
            part = part_of(manifest.tensors[name].placement, rank)
            other, first_rank, copy = first.setdefault((name, part), (file, rank, extent))
            for damage in differing_tiles(copy.tiles, extent.tiles, extent.nbytes):
                yield (
                    f"{file.name}: {name}: the copy of rank {rank} differs from that of rank {first_rank} in "
                    f"{other.name}: {damage} of the tensor"
                )


def check_carried(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the carried files that are not what was carried over."""
    for name, expected in manifest.carried.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if xxhash.xxh3_128_hexdigest(content) != expected:
            yield f"{name}: its content is not what was carried over"
