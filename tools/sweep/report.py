"""The table in docs: every type, ours beside the peer's."""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.sweep.cases import Subject, cases_of
from tools.sweep.inputs import INPUTS
from tools.sweep.records import Record, Store
from tools.sweep.sizes import STANDS

REASONS_FILE = Path(__file__).parent / "reasons.toml"
DEGREES = (2, 4)

HEAD = """# The sweep

Written by `make sweep`; not by hand.

Every model type that has a plan in transformers {transformers}, as a tiny random model, through the whole path: saved
in its published layout, split, loaded in N processes, one forward, 6 greedy tokens; against one process. Right means
that no output differs by more than 1e-4 of the largest one (float32), and that all tokens are equal. The peer is
transformers' own tensor parallelism, run on the same models.

* **ours**: right or not at 2 and at 4 ranks, and with the experts divided by 2 at 2 (`tp 2 ep`) and at 4 (`tp 4 ep`).
  A tiny model has 4 heads in 2 groups, so at 4 ranks every head of keys and values is on two of them.
* **diff**: the largest difference of all, relative to the largest value.
* **share**: of the parameters on the rank that has most, at 2 and 4 ranks, and with experts divided at 2.
* **collectives** of one forward at 2 ranks: `r` all-reduce, `g` all-gather, `s` reduce-scatter; after the semicolon
  with experts divided.
* **peer**: the same of transformers. It divides experts over all ranks or none; at 2 ranks that is the same as ours.
* A dash: the type has no experts that transformers would divide.
* Types without a public class are run as a part of the composite in brackets. `image`, `sound`: the model gets one
  beside the prompt. `no tokens`: only the forward is compared, the class generates nothing.
* A name with a plus is a variant: layers that the type has with other values of its configuration.

"""

COLUMNS = ("type", "input", "ours: tp 2", "tp 4", "tp 2 ep", "tp 4 ep", "diff", "share", "collectives")
COLUMNS += ("peer: tp 2", "tp 4", "tp 2 ep", "collectives")
TABLE = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


class Row(NamedTuple):
    """What is known of a subject.

    Attributes:
        subject: The type.
        ours: Outcomes by degree: "2", "4", "2ep", "4ep".
        peer: The same of the peer, where "4ep" is with the experts over all 4 ranks.
    """

    subject: Subject
    ours: dict[str, Record]
    peer: dict[str, Record]


def write_report(
    file: Path, subjects: Sequence[Subject], store: Store, peer: dict[str, Record], peer_is_current: bool
) -> None:
    """Write the table, what is not right and why, and totals."""
    from importlib.metadata import version

    rows = [_gather(subject, store, peer) for subject in subjects]
    text = HEAD.format(transformers=version("transformers"))
    if not peer_is_current:
        text += (
            "The peer's outcomes are of other tiny models or versions; `make sweep-peer` brings them up to date.\n\n"
        )
    text += "## Totals\n\n" + "".join(_totals(rows))
    text += "\n## By type\n\n" + TABLE + "".join(map(_line, rows))
    text += "\n## What is not right, and why\n\n" + "".join(_complaints(rows))
    file.write_text(text)


def _gather(subject: Subject, store: Store, peer: dict[str, Record]) -> Row:
    row = Row(subject, {}, {})
    for tp in DEGREES:
        for case in cases_of(subject, tp, peer=False):
            if found := store.get(case.name):
                row.ours[_degree(tp, case.experts)] = found
        for case in cases_of(subject, tp, peer=True):
            if case.name in peer:
                row.peer[_degree(tp, case.experts)] = peer[case.name]
    return row


def _degree(tp: int, experts: int) -> str:
    return f"{tp}ep" if experts > 1 else str(tp)


def _totals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table: how many are right, of ours and of the peer."""
    yield "| | ours | peer | peer right, ours not | more collectives than the peer |\n|---|---|---|---|---|\n"
    for key, name in (("2", "tp 2"), ("4", "tp 4"), ("2ep", "tp 2, experts over 2"), ("4ep", "tp 4, experts over 2")):
        ours = [row.ours[key] for row in rows if key in row.ours]
        peer = [row.peer[key] for row in rows if key in row.peer and key != "4ep"]
        both = [(row.ours[key], row.peer[key]) for row in rows if key in row.ours and key in row.peer and key != "4ep"]
        behind = sum(theirs.right and not mine.right for mine, theirs in both)
        more = sum(_total(mine) > _total(theirs) for mine, theirs in both if mine.right and theirs.right)
        cells = [f"{sum(found.right for found in ours)} of {len(ours)}"]
        cells += [f"{sum(found.right for found in peer)} of {len(peer)}", str(behind), str(more)] if peer else ["-"] * 3
        yield f"| {name} | {' | '.join(cells)} |\n"


def _total(found: Record) -> int:
    return sum(found.collectives.values())


def _line(row: Row) -> str:
    """Return a row of the table."""
    ours, peer = row.ours, row.peer
    differences = [found.difference for found in ours.values() if found.difference is not None]
    shares = [f"{ours[key].share:.2f}" for key in ("2", "4", "2ep") if key in ours and ours[key].share is not None]
    cells = [
        _label(row.subject),
        _described(row),
        *(_mark(ours.get(key)) for key in ("2", "4", "2ep", "4ep")),
        f"{max(differences):.0e}" if differences else "",
        " ".join(shares),
        _counted(ours),
        *(_mark(peer.get(key)) for key in ("2", "4", "2ep")),
        _counted(peer),
    ]
    return f"| {' | '.join(cells)} |\n"


def _label(subject: Subject) -> str:
    if subject.name in STANDS:
        return f"{subject.name} ({subject.model_type})"
    return subject.name


def _described(row: Row) -> str:
    """Return what the model is run on."""
    given = INPUTS[row.subject.model_type](_generator()) if row.subject.model_type in INPUTS else {}
    words = [word for word, names in KINDS_OF_INPUT.items() if not given.keys().isdisjoint(names)]
    if not given or "input_ids" in given:
        words.insert(0, "text")
    if all(found.tokens == "none" for found in (*row.ours.values(), *row.peer.values()) if not found.error):
        words.append("no tokens")
    return ", ".join(words)


KINDS_OF_INPUT = {
    "image": {"pixel_values", "grid_thw"},
    "sound": {"input_features", "audio_input_ids"},
    "vectors": {"inputs_embeds", "noise_embeds"},
}


def _generator() -> object:
    import torch

    return torch.Generator()


def _mark(found: Record | None) -> str:
    if found is None:
        return "-"
    return "right" if found.right else "**no**"


def _counted(found: dict[str, Record]) -> str:
    texts = [_short(found[key].collectives) for key in ("2", "2ep") if key in found and not found[key].error]
    return "; ".join(texts)


def _short(collectives: dict[str, int]) -> str:
    letters = {"all_reduce": "r", "all_gather": "g", "reduce_scatter": "s", "all_to_all": "a", "broadcast": "b"}
    return " ".join(f"{collectives[name]}{letter}" for name, letter in letters.items() if name in collectives) or "0"


def _complaints(rows: Iterable[Row]) -> Iterator[str]:
    """Yield what is not right, ours first, with the reason that is known."""
    reasons = tomllib.loads(REASONS_FILE.read_text()) if REASONS_FILE.exists() else {}
    for whose, title in (("ours", "### Ours\n\n"), ("peer", "\n### The peer\n\n")):
        yield title
        known, told = reasons.get(whose, {}), False
        for row in rows:
            wrong = {key: found for key, found in getattr(row, whose).items() if not found.right}
            if wrong:
                told = True
                reason = known.get(row.subject.name, "")
                yield f"* `{row.subject.name}` {_described_errors(wrong)}{'. ' + reason if reason else ''}\n"
        if not told:
            yield "Nothing.\n"


def _described_errors(wrong: dict[str, Record]) -> str:
    """Return the errors, each with the degrees that have it."""
    by_error: dict[str, list[str]] = {}
    for key, found in wrong.items():
        by_error.setdefault(f"{found.stage}: {found.error}", []).append(f"tp {key}".replace("ep", " ep"))
    return "; ".join(f"({', '.join(keys)}) {_tidy(error)}" for error, keys in by_error.items())


def _tidy(error: str) -> str:
    """Return an error in one line that Markdown shows as it is."""
    flat = " ".join(error.split()).replace("`", "'").replace("|", "/")
    return f"`{flat[:180]}{'...' if len(flat) > 180 else ''}`"
