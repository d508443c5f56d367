"""Verdict: what a check found, as a person reads it; made from the facts of `reshard.checks.checking`."""

from collections.abc import Iterator

from reshard.lines import Facts, human_bytes

MOST_KINDS = 5
MOST_SIZES = 6


def format_check(facts: Facts) -> Iterator[str]:
    """Yield the lines on a check."""
    model = facts["model"]
    yield (
        f"{facts['source']}: {model['architecture']} ({model['type']}), {facts['plan']}, tp {facts['world_size']}, "
        f"{facts['tokens']} tokens"
    )
    if facts["tiny"]:
        yield from _format_tiny(facts["tiny"])
    if facts["right"]:
        yield (
            f"right: {facts['modules']} modules give what they give in one process, "
            f"{facts['divided']} of {facts['tensors']} tensors in parts"
        )
    else:
        yield from format_finding(facts["finding"])
    if facts["largest"]:
        yield (
            "largest differences: "
            + ", ".join(
                f"{one['module'] or 'the model'} ({one['side']}) {one['difference']:.1e}" for one in facts["largest"]
            )
            + f"; {facts['tolerance']:.0e} is allowed"
        )
    collectives = ", ".join(f"{count} {name}" for name, count in facts["collectives"].items())
    yield f"collectives: {collectives or 'none'}"
    yield from (f"not compared: {count} tensors: {why}" for why, count in facts["not_compared"].items())
    yield from _format_uncovered(facts["uncovered"])
    yield from (f"note: {note}" for note in facts["notes"])


def format_finding(finding: Facts) -> Iterator[str]:
    """Yield the lines on where the ranks part, the module first."""
    yield f"parts at {finding['module'] or 'the model'}: {finding['message']}"
    for one in finding["blamed"]:
        rules = "; ".join(one["rules"]) or "no rule names it"
        gives = f", gives {one['gives']}" if one["gives"] else ""
        yield f"  {one['role']}: {one['module'] or 'the model'}: {rules}{gives}"
    if finding["hint"]:
        yield f"  {finding['hint']}"
    yield f"right until then, last: {finding['after']}" if finding["after"] else "nothing before it was compared"


def _format_tiny(tiny: Facts) -> Iterator[str]:
    sizes = [f"{name} {new} of {old}" for name, (old, new) in tiny["sizes"].items()]
    more = f" and {len(sizes) - MOST_SIZES} more" if len(sizes) > MOST_SIZES else ""
    yield f"tiny: {tiny['parameters']} random parameters: {', '.join(sizes[:MOST_SIZES])}{more}"
    if tiny["made"] != "sizes":
        yield "note: the class does not run with smaller widths, so they are as they were"


def _format_uncovered(uncovered: Facts) -> Iterator[str]:
    if not uncovered["tensors"]:
        return
    yield (
        f"no rule names {uncovered['tensors']} tensors, {human_bytes(uncovered['nbytes'])}, "
        f"{100 * uncovered['share']:.3g} % of the model, whole on every rank"
    )
    for kind in uncovered["kinds"][:MOST_KINDS]:
        yield f"  {human_bytes(kind['nbytes'])}: {kind['name']} ({kind['tensors']})"
    if len(uncovered["kinds"]) > MOST_KINDS:
        yield f"  and {len(uncovered['kinds']) - MOST_KINDS} smaller kinds"
