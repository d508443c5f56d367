"""Lines: the facts of a report, as a person reads them.

Nothing but the facts is known here, and nothing is printed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from manifests.contents import PerRank
from manifests.natural import kind_of

Facts = dict[str, Any]
"""Plain values: texts, numbers, and lists and dictionaries of them."""

MOST_KINDS = 5


def human_bytes(nbytes: int) -> str:
    """Return a number of bytes for a person, in decimal units.

    >>> human_bytes(89_669_632), human_bytes(999_999), human_bytes(12)
    ('89.7 MB', '1.0 MB', '12 bytes')
    """
    if nbytes < 1000:
        return f"{nbytes} bytes"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} PB"


def human_span(seconds: float) -> str:
    """Return a span of time for a person, in the largest unit of which it has two.

    >>> human_span(119), human_span(7300), human_span(3 * 86400)
    ('119 s', '2 h', '3 d')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_split(facts: Facts) -> Iterator[str]:
    """Yield the lines on a split; ``out`` is where it goes, ``seconds``, if given, how long it took."""
    whole, files = facts["whole"], _count(len(facts["files"]), "file")
    yield (
        f"{facts['source']}: {_model_name(facts['model'])}, {_count(facts['tensors'], 'tensor')}, "
        f"{_exact(facts['nbytes_model'])}; {facts['plan']}, layout {facts['layout']}, tp {facts['world_size']}"
    )
    yield from _format_ranks(facts["ranks"])
    yield f"whole on every rank: {_format_total(whole)}"
    for kind in whole["kinds"][:MOST_KINDS]:
        yield f"  {_exact(kind['nbytes'])}: {kind['name']} ({_count(kind['tensors'], 'tensor')}): {kind['reason']}"
    if len(whole["kinds"]) > MOST_KINDS:
        yield f"  and {_count(len(whole['kinds']) - MOST_KINDS, 'smaller kind')}"
    if facts["rank_0_only"]["tensors"]:
        yield f"on rank 0 only: {_format_total(facts['rank_0_only'])}"
    if facts["unused"]["tensors"]:
        yield f"unused by the model, opened by no rank: {_format_total(facts['unused'])}"
    if facts["dropped"]:
        yield f"left out: {_count(len(facts['dropped']), 'unused tensor')}: {_some(facts['dropped'])}"
    yield from _format_converted(facts["converted"])
    if facts["not_converted"]:
        count = _count(len(facts["not_converted"]), "tensor")
        yield f"kept at another precision than asked for: {count}: {_some(facts['not_converted'])}"
    yield from format_notes(facts)
    read, written = human_bytes(facts["nbytes_read"]), human_bytes(facts["nbytes_written"])
    if "seconds" in facts:
        yield f"read {read}, wrote {written} in {files} in {facts['seconds']:.1f} s"
    else:
        yield f"would read {read} and write {written} in {files} to {facts['out']}"


def format_notes(facts: Facts) -> Iterator[str]:
    """Yield what a reader should know: notes of the plan, weight files that were passed over."""
    for note in facts["notes"]:
        yield f"note: {note}"
    if facts["ignored"]:
        count = _count(len(facts["ignored"]), "weight file")
        yield f"note: ignored {count} beside the checkpoint: {_some(facts['ignored'])}"


def format_plan(facts: Facts) -> Iterator[str]:
    """Yield a line for every tensor."""
    rows = [
        (tensor["name"], tensor["rule"] or "no rule", _format_placement(tensor), _format_shape(tensor))
        for tensor in facts["tensors"]
    ]
    yield from format_rows(rows)


def format_copies(every: Iterable[Facts]) -> Iterator[str]:
    """Yield a line for every copy."""
    for copy in every:
        loops = "".join(
            f", {loop['times']} times at +{loop['source_step']} -> +{loop['output_step']}" for loop in copy["loops"]
        )
        yield (
            f"{copy['tensor']}: {copy['source']}+{copy['source_offset']} -> "
            f"{copy['output']}+{copy['output_offset']}: {copy['nbytes']} bytes{loops}"
        )


def format_show(facts: Facts) -> Iterator[str]:
    """Yield the lines on a split."""
    source = facts["source"]
    where = f" of {source['repo']} at {source['revision']}" if source["repo"] else ""
    yield (
        f"{facts['out']}: {_model_name(facts['model'])}, {_count(facts['tensors'], 'tensor')}, "
        f"world size {facts['world_size']}, layout {facts['layout']}, format version {facts['version']}"
    )
    yield f"key: {facts['key']}"
    yield f"source: {_count(source['files'], 'file')}{where}, {human_bytes(source['nbytes'])}"
    rows = [_format_file(file, facts["world_size"]) for file in facts["files"]]
    yield from (f"  {line}" for line in format_rows(rows))
    yield from _format_ranks(facts["ranks"])
    for style, hook in facts["hooks"].items():
        steps = [f"own part of {name} before" for name in hook.get("inputs", ())]
        steps += [f"{hook[when]} {when}" for when in ("before", "after") if hook[when]]
        yield f"hooks: {style}: {_count(hook['modules'], 'module')}, {' and '.join(steps)}"
    yield from _format_attributes(facts["attributes"])
    yield from (f"tie: {name} is {other}" for name, other in facts["ties"].items())
    if facts["carried"]:
        yield f"carried over: {', '.join(facts['carried'])}"
    if facts["dropped"]:
        yield f"left out: {_count(len(facts['dropped']), 'unused tensor')}: {_some(facts['dropped'])}"
    yield from _format_converted(facts["converted"])
    listing = facts.get("listing", [])
    yield from format_rows([(t["name"], _format_placement(t), _format_shape(t)) for t in listing])


def format_verified(facts: Facts) -> Iterator[str]:
    """Yield the lines on a verification."""
    files, tensors = _count(facts["files"], "file"), _count(facts["tensors"], "tensor")
    yield f"{facts['out']}: whole: {files}, {tensors}, {_exact(facts['nbytes'])} hashed"
    if facts["unknown"]:
        yield f"beside the split, and not looked at: {_count(len(facts['unknown']), 'name')}: {_some(facts['unknown'])}"


def format_merged(facts: Facts) -> Iterator[str]:
    """Yield the lines on a merge."""
    same = facts["tensors"] - len(facts["converted"])
    yield f"{_count(same, 'tensor')} with the bytes that the split read"
    if facts["converted"]:
        count = _count(len(facts["converted"]), "tensor")
        yield f"not the source's, since the split converted them: {count}: {_some(facts['converted'])}"
    if facts["identical"]:
        yield f"identical to the source's: {_count(len(facts['identical']), 'file')}: {_some(facts['identical'])}"
    if facts["rewritten"]:
        count = _count(len(facts["rewritten"]), "file")
        yield f"with another header than the source's: {count}: {_some(facts['rewritten'])}"
    if facts["dropped"]:
        count = _count(len(facts["dropped"]), "tensor")
        yield f"not here, since the split left them out: {count}: {_some(facts['dropped'])}"


def _format_converted(kinds: Iterable[Facts]) -> Iterator[str]:
    for kind in kinds:
        yield f"converted from {kind['from']} to {kind['to']}: {_count(kind['tensors'], 'tensor')}"


def _model_name(model: Facts) -> str:
    return f"{model['architecture'] or 'no class'} ({model['type'] or model['library'] or 'no model type'})"


def _format_placement(tensor: Facts) -> str:
    if not tensor["cuts"]:
        return str(tensor["placement"])
    cuts = [
        f"dim {cut['dim']} as {cut['axis']}" + (f" by {cut['unit']}" if cut["unit"] > 1 else "")
        for cut in tensor["cuts"]
    ]
    mesh = ", ".join(f"{axis} {size}" for axis, size in tensor["mesh"].items())
    return f"{', '.join(cuts)} over {mesh}"


def _format_shape(tensor: Facts) -> str:
    return f"{tensor['dtype']} {tensor['local_shape']}"


def _format_file(file: Facts, world_size: int) -> tuple[str, ...]:
    owners = file["owners"]
    if not owners:
        who = "no rank"
    else:
        who = "all ranks" if len(owners) == world_size > 1 else f"rank {', '.join(map(str, owners))}"
    return file["name"], who, _count(file["tensors"], "tensor"), _exact(file["nbytes"])


def _format_ranks(ranks: list[Facts]) -> Iterator[str]:
    for _, group in groupby(ranks, key=lambda rank: rank["nbytes"]):
        same = list(group)
        first, last = same[0]["rank"], same[-1]["rank"]
        who = f"rank {first}: " if first == last else f"ranks {first} to {last}: each "
        yield f"{who}{_exact(same[0]['nbytes'])}, {same[0]['share']:.3f} of the model"


def _format_attributes(attributes: Mapping[str, Mapping[str, PerRank]]) -> Iterator[str]:
    counts = Counter(
        (kind_of(module), ", ".join(f"{name} = {value}" for name, value in values.items()))
        for module, values in attributes.items()
    )
    for (kind, values), count in counts.items():
        yield f"attributes: {kind} ({_count(count, 'module')}): {values}"


def _format_total(total: Facts) -> str:
    return f"{_count(total['tensors'], 'tensor')}, {_exact(total['nbytes'])}"


def format_rows(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows as lines, their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _exact(nbytes: int) -> str:
    human = human_bytes(nbytes)
    return human if human.endswith("bytes") else f"{nbytes} bytes ({human})"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
