"""The table in docs: every type, ours beside the peer's."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.shares import Shown
from tools.sweep.cases import Subject, cases_of
from tools.sweep.inputs import tiny_inputs
from tools.sweep.records import Record, Store
from tools.sweep.types import STANDS

REASONS_FILE = Path(__file__).parent / "reasons.toml"
DEGREES = (2, 4)

HEAD = """# The sweep

Written by `make sweep` (7 minutes on 2 cores; what has not changed is not run again), with what `make sweep-peer` left
in `tools/sweep/peer.json` (5 minutes) and the reasons in `tools/sweep/reasons.toml`; not by hand.

Every model type that has a plan in transformers {transformers}, or one of ours alone ([coverage.md](coverage.md)), as a
tiny random model, through the whole path: saved in its published layout, split, loaded in N processes, one forward, 6
greedy tokens; against one process. Right means that no output differs by more than 1e-4 of the largest one (float32),
and that all tokens are equal. The peer is transformers' own tensor parallelism, run on the same models.

* **ours**: right or not at 2 and at 4 ranks; with the experts divided over both of 2 ranks (`2 ep 2`), over pairs of 4
  ranks (`4 ep 2`) and over all 4 (`4 ep 4`). A tiny model has 4 heads in 2 groups, so at 4 ranks every head of keys
  and values is on two of them. Refused: with an error that says why, before anything is written.
* **diff**: the largest difference of all, relative to the largest value.
* **share**: of the bytes of a model of real proportions, on the rank that has most of 2 and of 4 ranks
  ([shares.md](shares.md)). At most .52 and .28, or there is a **reason**, one of the [closed
  list](shares.md#why-a-share-is-above-52-at-2-ranks-or-28-at-4), where is also said what you can do. `uneven`: of heads
  that the ranks do not divide, with `--uneven ceil`.
* **tiny**: of the parameters of the tiny model, which the ranks were found to have, at 2 and 4 ranks, and with experts
  divided at 2. Its norms, latents and copied heads weigh more.
* **collectives** of one forward at 2 ranks: `r` all-reduce, `g` all-gather, `s` reduce-scatter; after the semicolon
  with experts divided.
* **peer**: the same of transformers, which divides experts over all ranks or none.
* A dash: the type has no experts that transformers would divide; under peer also, that transformers has no plan.
* Types without a public class are run as a part of the composite in brackets. `image`, `sound`: the model gets one
  beside the prompt. `no tokens`: only the forward is compared, the class generates nothing.
* A name with a plus is a variant: layers that the type has with other values of its configuration.

"""

COLUMNS = (
    *("type", "input", "ours: tp 2", "tp 4", "2 ep 2", "4 ep 2", "4 ep 4", "diff", "share", "reason", "tiny"),
    "collectives",
    *("peer: tp 2", "tp 4", "2 ep 2", "4 ep 4", "collectives"),
)
TABLE = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


Degree = tuple[int, int]
"""Numbers of ranks, and over how many of them experts are divided."""

OURS: dict[Degree, str] = {
    (2, 1): "tp 2",
    (4, 1): "tp 4",
    (2, 2): "tp 2 ep 2",
    (4, 2): "tp 4 ep 2",
    (4, 4): "tp 4 ep 4",
}
PEER = {degree: name for degree, name in OURS.items() if degree != (4, 2)}


class Row(NamedTuple):
    """What is known of a subject: its outcomes, ours and the peer's, and its share in real proportions."""

    subject: Subject
    ours: dict[Degree, Record]
    peer: dict[Degree, Record]
    real: Shown | None = None


def write_report(
    file: Path,
    subjects: Sequence[Subject],
    store: Store,
    peer: tuple[dict[str, Record], bool],
    shares: Mapping[str, Shown],
) -> None:
    """Write the table, what is not right and why, and totals.

    Args:
        file: Where to.
        subjects: The rows.
        store: The outcomes of ours.
        peer: Those of the peer, and whether they are of the tiny models and versions of now.
        shares: What ranks hold of models of real proportions, by type.
    """
    from importlib.metadata import version

    outcomes, peer_is_current = peer
    rows = [_gather(subject, store, outcomes, shares) for subject in subjects]
    text = HEAD.format(transformers=version("transformers"))
    if not peer_is_current:
        text += (
            "The peer's outcomes are of other tiny models or versions; `make sweep-peer` brings them up to date.\n\n"
        )
    text += "## Totals\n\n" + "".join(_totals(rows))
    text += "\n## By type\n\n" + TABLE + "".join(map(_line, rows))
    text += "\n## What is not right, and why\n\n" + "".join(_complaints(rows))
    file.write_text(text)


def _gather(subject: Subject, store: Store, peer: Mapping[str, Record], shares: Mapping[str, Shown]) -> Row:
    row = Row(subject, {}, {}, shares.get(subject.name))
    for tp in DEGREES:
        for case in cases_of(subject, tp, peer=False):
            if found := store.get(case.name):
                row.ours[tp, case.experts] = found
        for case in cases_of(subject, tp, peer=True):
            if case.name in peer:
                row.peer[tp, case.experts] = peer[case.name]
    return row


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    yield "| | ours | peer | peer right, ours not | more collectives for no smaller share |\n|---|---|---|---|---|\n"
    for degree, name in OURS.items():
        ours = [row.ours[degree] for row in rows if degree in row.ours]
        peer = [row.peer[degree] for row in rows if degree in row.peer]
        both = [(row.ours[degree], row.peer[degree]) for row in rows if degree in row.ours and degree in row.peer]
        behind = sum(theirs.right and not mine.right for mine, theirs in both)
        more = sum(needs_more(mine, theirs) for mine, theirs in both)
        cells = [_rightly(ours), *([_rightly(peer), str(behind), str(more)] if peer else ["-"] * 3)]
        yield f"| {name} | {' | '.join(cells)} |\n"


def _rightly(found: Sequence[Record]) -> str:
    return f"{sum(entry.right for entry in found)} of {len(found)}"


def needs_more(mine: Record, theirs: Record) -> bool:
    """Tell whether ours needs more collectives where the peer's is right and a rank of ours holds no less."""
    comparable = mine.right and theirs.right and round(mine.share, 3) >= round(theirs.share, 3)
    return comparable and _total(mine) > _total(theirs)


def _total(found: Record) -> int:
    return sum(found.collectives.values())


def _line(row: Row) -> str:
    ours, peer = row.ours, row.peer
    differences = [found.difference for found in ours.values() if found.difference is not None]
    shown = [ours[degree].share for degree in ((2, 1), (4, 1), (2, 2)) if degree in ours]
    cells = [
        _label(row.subject),
        _described(row),
        *(_mark(ours.get(degree)) for degree in OURS),
        f"{max(differences):.0e}" if differences else "",
        ", ".join(row.real.ours) if row.real else "",
        row.real.reason if row.real else "",
        " ".join(f"{share:.2f}" for share in shown if share is not None),
        _counted(ours),
        *(_mark(peer.get(degree)) for degree in PEER),
        _counted(peer),
    ]
    return f"| {' | '.join(cells)} |\n"


def _label(subject: Subject) -> str:
    if subject.name in STANDS:
        return f"{subject.name} ({subject.model_type})"
    return subject.name


def _described(row: Row) -> str:
    """Return what the model is run on."""
    given = tiny_inputs(row.subject.model_type)
    words = [word for word, names in KINDS_OF_INPUT.items() if not given.keys().isdisjoint(names)]
    if "input_ids" in given:
        words.insert(0, "text")
    if all(found.tokens == "none" for found in (*row.ours.values(), *row.peer.values()) if not found.error):
        words.append("no tokens")
    return ", ".join(words)


KINDS_OF_INPUT = {
    "image": {"pixel_values", "grid_thw"},
    "sound": {"input_features", "input_values", "audio_input_ids"},
    "vectors": {"inputs_embeds", "noise_embeds"},
}


def _mark(found: Record | None) -> str:
    if found is None:
        return "-"
    if found.stage == "split" and found.error.startswith(("PlanError", "DegreeError")):
        return "refused"
    return "right" if found.right else "**no**"


def _counted(found: dict[Degree, Record]) -> str:
    texts = [_short(found[key].collectives) for key in ((2, 1), (2, 2)) if key in found and found[key].collectives]
    return "; ".join(texts)


def _short(collectives: dict[str, int]) -> str:
    letters = {"all_reduce": "r", "all_gather": "g", "reduce_scatter": "s", "all_to_all": "a", "broadcast": "b"}
    return " ".join(f"{collectives[name]}{letter}" for name, letter in letters.items() if name in collectives) or "0"


def _complaints(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what is not right, by its reason: the one that is known, or the error."""
    reasons = tomllib.loads(REASONS_FILE.read_text())
    for whose, title in (("ours", "### Ours\n\n"), ("peer", "\n### The peer\n\n")):
        by_reason: dict[str, dict[str, list[str]]] = {}
        for row in rows:
            for degree, found in getattr(row, whose).items():
                if not found.right:
                    reason = _reason(row.subject.name, found, reasons[whose])
                    by_reason.setdefault(reason, {}).setdefault(row.subject.name, []).append(OURS[degree])
        yield title
        yield from (f"* {reason}: {_listed(names)}.\n" for reason, names in by_reason.items())
        if not by_reason:
            yield "Nothing.\n"


def _reason(name: str, found: Record, known: dict[str, str]) -> str:
    """Return the reason that is known of a type, of all types with such an error, or the error itself."""
    error = f"{found.stage}: {found.error}"
    for pattern, reason in known.items():
        if pattern == name or re.search(pattern, error):
            return reason
    flat = error.replace("`", "'").replace("|", "/")
    return f"`{flat[:180]}{'...' if len(flat) > 180 else ''}`"


def _listed(names: dict[str, list[str]]) -> str:
    """Return names, each with where it is not right; alike ones together."""
    by_degrees: dict[tuple[str, ...], list[str]] = {}
    for name, degrees in names.items():
        by_degrees.setdefault(tuple(degrees), []).append(f"`{name}`")
    return "; ".join(f"{', '.join(alike)} ({', '.join(degrees)})" for degrees, alike in by_degrees.items())
