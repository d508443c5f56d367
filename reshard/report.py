"""Reports: what a split, a plan or a manifest holds, as facts that JSON can carry.

The text that a person reads is made from the same facts (`reshard.lines`), so the two cannot differ. Sizes are bytes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from manifests.dtypes import nbytes as tensor_nbytes
from manifests.manifest import Manifest, Model, Module, SplitFile, Tensor
from manifests.natural import kind_of, natural_key
from manifests.placement import Placement, local_shape
from reshard.casting import count_casts, names_kept
from reshard.lines import Facts
from reshard.planning import SplitPlan, reason_whole
from reshard.program import copies
from reshard.rankfile import PlannedFile

if TYPE_CHECKING:
    from reshard.merging import Merged
    from reshard.verifying import Report


def build_split(planned: SplitPlan) -> Facts:
    """Return what a split will hold, and what stays whole and why."""
    tensors, checkpoint = planned.resolution.tensors, planned.checkpoint
    return {
        "source": checkpoint.folder.label,
        "model": _model(planned.model),
        "plan": planned.plan.label,
        "layout": planned.layout,
        "world_size": planned.world_size,
        "key": planned.key,
        "tensors": len(tensors),
        "nbytes_model": _model_nbytes(tensors),
        "nbytes_read": planned.program.nbytes_read,
        "nbytes_written": planned.nbytes_written,
        "files": _files(planned.files),
        "ranks": _ranks(planned.files, tensors, planned.world_size),
        "whole": _build_whole(planned),
        "rank_0_only": _total(
            tensor for tensor in tensors.values() if tensor.placement.partial and not tensor.placement.cuts
        ),
        "unused": _total(tensor for tensor in tensors.values() if tensor.unused),
        "dropped": list(planned.dropped),
        "converted": _converted(tensors),
        "not_converted": names_kept(tensors, planned.options.dtype),
        "notes": list(planned.resolution.notes),
        "ignored": list(checkpoint.ignored),
    }


def build_plan(planned: SplitPlan) -> Facts:
    """Return every tensor with its rule, its placement and the shape of a rank's part."""
    rules = planned.resolution.rules
    return {
        "source": planned.checkpoint.folder.label,
        "model": _model(planned.model),
        "plan": planned.plan.label,
        "layout": planned.layout,
        "world_size": planned.world_size,
        "tensors": [
            {
                "name": name,
                "rule": f"{rules[name].pattern} = {rules[name].style}" if name in rules else "",
                **_placed(tensor),
            }
            for name, tensor in _in_order(planned.resolution.tensors)
        ],
        "notes": list(planned.resolution.notes),
        "ignored": list(planned.checkpoint.ignored),
    }


def build_copies(planned: SplitPlan) -> Iterator[Facts]:
    """Yield every strided copy, in bytes.

    ``nbytes`` bytes go from ``source_offset`` to ``output_offset``, both counted from the start of their files; each
    loop, outermost first, does so ``times`` times at ``source_step`` and ``output_step``.
    """
    program = planned.program
    for move in program.moves:
        for gather, scatter, copy in copies(move):
            loops = list(copy.loops)
            run = loops.pop().size if loops and loops[-1].src_step == loops[-1].dst_step == 1 else 1
            item = move.item_nbytes
            yield {
                "tensor": move.name,
                "source": program.input_files[gather.source.file],
                "source_offset": gather.source.offset + copy.src * item,
                "output": program.output_files[scatter.file],
                "output_offset": scatter.offset + copy.dst * item,
                "nbytes": run * item,
                "loops": [
                    {"times": loop.size, "source_step": loop.src_step * item, "output_step": loop.dst_step * item}
                    for loop in loops
                ],
            }


def build_show(out: str, manifest: Manifest, *, every_tensor: bool) -> Facts:
    """Return what a split holds; ``listing`` has every tensor if asked for."""
    source = manifest.source
    facts: Facts = {
        "out": out,
        "model": _model(manifest.model),
        "world_size": manifest.world_size,
        "layout": manifest.layout,
        "key": manifest.key,
        "version": manifest.version,
        "source": {
            "repo": source.repo,
            "revision": source.revision,
            "files": len(source.files),
            "nbytes": sum(file.nbytes for file in source.files),
        },
        "tensors": len(manifest.tensors),
        "files": _files(manifest.files),
        "ranks": _ranks(manifest.files, manifest.tensors, manifest.world_size),
        "hooks": _build_hooks(manifest.modules.values()),
        "attributes": manifest.attributes,
        "ties": manifest.ties,
        "carried": list(manifest.carried),
        "converted": _converted(manifest.tensors),
        "dropped": list(source.dropped),
    }
    if every_tensor:
        facts["listing"] = [{"name": name, **_placed(tensor)} for name, tensor in _in_order(manifest.tensors)]
    return facts


def build_verified(out: str, found: "Report") -> Facts:
    """Return what a verification found whole."""
    return {
        "out": out,
        "files": found.files,
        "tensors": found.tensors,
        "nbytes": found.nbytes,
        "unknown": list(found.unknown),
    }


def build_merged(destination: str, merged: "Merged") -> Facts:
    """Return what a merge gave back."""
    return {
        "destination": destination,
        "tensors": merged.tensors,
        "identical": list(merged.identical),
        "rewritten": list(merged.rewritten),
        "dropped": list(merged.dropped),
        "converted": list(merged.converted),
    }


def _converted(tensors: Mapping[str, Tensor]) -> list[Facts]:
    return [
        {"from": source, "to": target, "tensors": count}
        for (source, target), count in sorted(count_casts(tensors).items())
    ]


def _model(model: Model) -> Facts:
    return {"library": model.library, "type": model.type, "architecture": model.architecture}


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: natural_key(item[0]))


def _model_nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the running model's own tensors, each counted once."""
    different = {id(tensor): tensor for tensor in tensors.values()}
    return sum(
        tensor_nbytes(different[key].dtype, different[key].shape) * count
        for key, count in Counter(map(id, tensors.values())).items()
        if not different[key].unused
    )


def _files(files: Sequence[PlannedFile] | Sequence[SplitFile]) -> list[Facts]:
    return [
        {"name": file.name, "owners": list(file.owners), "nbytes": file.nbytes, "tensors": _count(file)}
        for file in files
    ]


def _count(file: PlannedFile | SplitFile) -> int:
    return len(file.names if isinstance(file, PlannedFile) else file.tensors)


def _ranks(
    files: Sequence[PlannedFile] | Sequence[SplitFile], tensors: Mapping[str, Tensor], world_size: int
) -> list[Facts]:
    """Return the data bytes of the files that each rank opens, and their share of the model's."""
    held = [0] * world_size
    for file in files:
        for rank in file.owners:
            held[rank] += file.data_nbytes
    whole = _model_nbytes(tensors) or 1
    return [{"rank": rank, "nbytes": nbytes, "share": round(nbytes / whole, 3)} for rank, nbytes in enumerate(held)]


def _build_whole(planned: SplitPlan) -> Facts:
    """Return what every rank holds whole, by kind and reason, the largest first."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, tensor in planned.resolution.tensors.items():
        if tensor.placement.cuts or tensor.placement.partial or tensor.unused:
            continue
        kind = (kind_of(name), reason_whole(planned.resolution, name))
        counts[kind] += 1
        sizes[kind] += tensor_nbytes(tensor.dtype, tensor.shape)
    return {
        "tensors": counts.total(),
        "nbytes": sizes.total(),
        "kinds": [
            {"name": kind[0], "reason": kind[1], "tensors": counts[kind], "nbytes": nbytes}
            for kind, nbytes in sizes.most_common()
        ],
    }


def _total(tensors: Iterable[Tensor]) -> Facts:
    sizes = [tensor_nbytes(tensor.dtype, tensor.shape) for tensor in tensors]
    return {"tensors": len(sizes), "nbytes": sum(sizes)}


def _placed(tensor: Tensor) -> Facts:
    placement = tensor.placement
    local = local_shape(placement, tensor.dtype, tensor.shape, 0)
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "placement": "unused" if tensor.unused else _placement_kind(placement),
        "cuts": [{"dim": cut.dim, "axis": cut.axis, "unit": cut.unit} for cut in placement.cuts],
        "mesh": dict(placement.mesh),
        "local_shape": list(local),
    }


def _placement_kind(placement: Placement) -> str:
    return "rank 0 only" if placement.partial else "cut" if placement.cuts else "replicated"


def _build_hooks(modules: Iterable[Module]) -> Facts:
    hooks: Facts = {}
    for module in modules:
        hook = hooks.setdefault(module.style, {"modules": 0, "before": module.before, "after": module.after})
        hook["modules"] += 1
        if module.inputs:
            hook["inputs"] = [entry.name for entry in module.inputs]
    return hooks
