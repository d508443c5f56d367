"""Merging a split: the source tensors again, under their names, in their files, byte for byte."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from manifests.dtypes import nbytes as tensor_nbytes
from manifests.errors import ManifestError
from manifests.header import StoredTensor, encode_header
from manifests.manifest import MANIFEST_NAME, Manifest, Part, SourceFile, SplitFile, digest_of, read_manifest
from reshard.collecting import without_collector
from reshard.engine import Hashes, run_program
from reshard.engine.limits import BUDGET_NBYTES
from reshard.moves import Place, build_program, merge_moves
from reshard.program import Program
from reshard.proof import check_program
from reshard.publishing.destination import check_apart, check_destination
from reshard.publishing.files import sync_file, write_synced
from reshard.publishing.staging import Staging, held_nbytes, kept, mend, staged
from reshard.splitting import TotalProgress, counted, prepare
from reshard.tiles import differing_tiles
from reshard.verifying import check_carried, check_copies, check_file, check_tiles, damaged, places_of


class Merged(NamedTuple):
    """What a merge made.

    Attributes:
        tensors: Number of tensors, each with the bytes that the split read.
        identical: Names of the files that are identical to the source's, header included.
        rewritten: Names of the files with another header: the source's was not written by the safetensors library.
        dropped: Stored names of tensors that the split left out.
        converted: Stored names of tensors that are not the source's, since the split converted their numbers.
    """

    tensors: int
    identical: tuple[str, ...]
    rewritten: tuple[str, ...]
    dropped: tuple[str, ...]
    converted: tuple[str, ...] = ()


class _Target(NamedTuple):
    source: SourceFile
    header: bytes
    tensors: dict[str, StoredTensor]

    def pieces(self) -> tuple[bytes]:
        """Return the header as the pieces that are written."""
        return (self.header,)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(stored.nbytes for stored in self.tensors.values())


def merge(
    out: str | Path,
    destination: str | Path,
    *,
    converted: bool = False,
    resume: bool = True,
    jobs: int = 2,
    memory: int = BUDGET_NBYTES,
    progress: TotalProgress | None = None,
) -> Merged:
    """Give back the source tensors of a split.

    Every byte is checked twice: against the hash that the split wrote with it, and against the hash of the source as
    the split read it.

    Args:
        out: The folder of the split.
        destination: The folder to make.
        converted: Whether numbers that the split converted are given back as they are, which are not the source's.
        resume: Whether what a killed run of the same merge has made is gone on with; it is removed otherwise.
        jobs: Number of worker threads.
        memory: Bytes that the process may take, its buffers above all.
        progress: Called with the bytes finished so far and their total.

    Raises:
        ManifestError: The folder holds no finished split, or one that converted numbers and it was not asked for them.
        DamageError: A part is not what was written; nothing is published.
        OutputError: The destination exists, lacks space, or cannot be written.
    """
    folder, destination = Path(out), Path(destination)
    manifest = read_manifest(folder)
    changed = _converted(manifest)
    if changed and not converted:
        raise ManifestError(
            f"{folder}: the split converted {len(changed)} source tensors ({min(changed)} to {changed[min(changed)]}), "
            "so it does not hold the source; --converted gives them back as they are now"
        )
    problems = [line for file in manifest.files for line in check_file(folder, file, manifest)]
    problems += [*check_copies(manifest), *check_carried(folder, manifest)]
    if problems:
        raise damaged(str(folder), problems)
    targets = [_target(file, manifest.source.dropped, changed) for file in manifest.source.files]
    program = _program(manifest, targets)
    check_program(
        program, [target.nbytes for target in targets], [len(target.header) for target in targets], whole_inputs=False
    )
    check_apart(destination, folder)
    mend(destination)
    total = sum(target.nbytes for target in targets)
    check_destination(destination, total - held_nbytes(destination), force=False)
    key = _key(folder, manifest, converted=converted)

    def keep(staging: Staging, error: BaseException) -> str:
        return kept(staging, error, total)

    with staged(destination, force=False, key=key, resume=resume, keep=keep) as staging, without_collector():
        sized = {target.source.name: (target.pieces, target.nbytes) for target in targets}
        paths = prepare(staging.content, sized, staging.journal)
        inputs = [folder / file.name for file in manifest.files]
        report = counted(progress, program.nbytes_read)
        hashes = run_program(
            program, inputs, paths, jobs=jobs, memory=memory, progress=report, journal=staging.journal, key=key
        )
        _check_hashes(manifest, program, hashes, changed)
        _check_unread(folder, manifest, hashes)
        for path in paths:
            sync_file(path)
        _write_index(manifest, staging.content, changed)
        for name in manifest.carried:
            shutil.copyfile(folder / name, staging.content / name)
            sync_file(staging.content / name)
    same = {target.source.name for target in targets if _is_identical(target)}
    names = [target.source.name for target in targets]
    return Merged(
        tensors=sum(len(target.tensors) for target in targets),
        identical=tuple(name for name in names if name in same),
        rewritten=tuple(name for name in names if name not in same),
        dropped=manifest.source.dropped,
        converted=tuple(changed),
    )


def _key(folder: Path, manifest: Manifest, *, converted: bool) -> str:
    """Return what decides the bytes of a merge."""
    parts = [(folder / file.name).stat() for file in manifest.files]
    digest = xxhash.xxh3_128_hexdigest((folder / MANIFEST_NAME).read_bytes())
    return digest_of(["merge", digest, converted, [(part.st_size, part.st_mtime_ns) for part in parts]])


def _converted(manifest: Manifest) -> dict[str, str]:
    """Return the source tensors whose numbers the split converted, and to which dtype.

    Raises:
        ManifestError: Parts of one were converted to different dtypes.
    """
    dtypes: dict[str, set[str]] = {}
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts or (Part(name),):
            dtypes.setdefault(part.source, set()).add(tensor.dtype)
    stored = {name: tensor.dtype for file in manifest.source.files for name, tensor in file.tensors.items()}
    changed: dict[str, str] = {}
    for name, found in dtypes.items():
        if len(found) > 1:
            raise ManifestError(f"{name}: its parts were converted to {' and to '.join(sorted(found))}; split it anew")
        if found != {stored[name]}:
            (changed[name],) = found
    return changed


def _target(source: SourceFile, dropped: tuple[str, ...], converted: Mapping[str, str]) -> _Target:
    stored: dict[str, StoredTensor] = {}
    at = 0
    for name, tensor in source.tensors.items():
        if name in dropped:
            continue
        dtype = converted.get(name, tensor.dtype)
        size = tensor_nbytes(dtype, tensor.shape)
        stored[name] = StoredTensor(dtype, tensor.shape, at, at + size)
        at += size
    return _Target(source, encode_header(stored, source.metadata), stored)


def _is_identical(target: _Target) -> bool:
    return xxhash.xxh3_128_hexdigest(target.header[8:]) == target.source.header


def _program(manifest: Manifest, targets: list[_Target]) -> Program:
    places = {
        name: Place(position, len(target.header) + stored.begin, 0)
        for position, target in enumerate(targets)
        for name, stored in target.tensors.items()
    }
    sources = {name: (stored.dtype, stored.shape) for target in targets for name, stored in target.tensors.items()}
    moves = merge_moves(manifest.tensors, places_of(manifest), sources, places)
    return build_program((file.name for file in manifest.files), (t.source.name for t in targets), moves)


def _check_hashes(manifest: Manifest, program: Program, hashes: Hashes, converted: Mapping[str, str]) -> None:
    findings: list[str] = []
    for source, tiles in hashes.read.items():
        file: SplitFile = manifest.files[source.file]
        findings += (
            f"{file.name}: {source.name}: {damage} are not those that were written"
            for damage in differing_tiles(file.tensors[source.name].tiles, tiles, source.nbytes)
        )
    expected = {name: tensor.tiles for file in manifest.source.files for name, tensor in file.tensors.items()}
    for move, written in zip(program.moves, hashes.written, strict=True):
        if move.name in converted:
            continue
        findings += (
            f"{move.name}: {damage} are not those that the split read"
            for damage in differing_tiles(expected[move.name], written[0], move.nbytes)
        )
    if findings:
        raise damaged("merge", findings)


def _check_unread(folder: Path, manifest: Manifest, hashes: Hashes) -> None:
    """Check the copies that no source tensor was made from."""
    read = {(source.file, source.name) for source in hashes.read}
    findings: list[str] = []
    for position, file in enumerate(manifest.files):
        unread = {name: extent for name, extent in file.tensors.items() if (position, name) not in read}
        findings += check_tiles(folder, msgspec.structs.replace(file, tensors=unread))
    if findings:
        raise damaged("merge", findings)


def _write_index(manifest: Manifest, folder: Path, converted: Mapping[str, str]) -> None:
    if not manifest.source.index:
        return
    kept = [
        (name, file.name, tensor_nbytes(converted.get(name, tensor.dtype), tensor.shape))
        for file in manifest.source.files
        for name, tensor in file.tensors.items()
        if name not in manifest.source.dropped
    ]
    content = {
        "metadata": {"total_size": sum(size for _, _, size in kept)},
        "weight_map": {name: file for name, file, _ in sorted(kept)},
    }
    write_synced(folder / manifest.source.index, json.dumps(content, indent=2).encode() + b"\n")
