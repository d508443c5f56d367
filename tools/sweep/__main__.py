"""Run the sweep: ``python -m tools.sweep``; ``make sweep`` does it for everything.

What is there already is not run again, unless something that decides it has changed.
"""

import argparse
import fnmatch
import json
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

from tools.shares import PAGE as SHARES
from tools.shares import shown_rows
from tools.sweep.cases import ROOT, Case, Subject, cases_of, ours_key, peer_key, subjects
from tools.sweep.pool import work_through
from tools.sweep.records import Record, Store, record
from tools.sweep.report import write_report

PEER_FILE = Path(__file__).parent / "peer.json"
TABLE = ROOT / "docs" / "sweep.md"


def main() -> int:
    """Run what is missing, write the table if nothing is, and tell what is not right."""
    options = parse_options()
    rows = [row for row in subjects(options.work) if fnmatch.fnmatch(row.name, options.only)]
    store = Store(options.work / "records")
    key = peer_key() if options.peer else ours_key()
    for tp in options.degrees:
        cases = [case for row in rows for case in cases_of(row, tp, peer=options.peer, uneven=options.uneven)]
        todo = [case for case in cases if wanted(store, case, key, options)]
        run(tp, todo, options.work, store, key)
    if options.only == "*" and options.degrees == [2, 4] and not options.uneven:
        if options.peer:
            keep_peer(rows, store, key)
        write_report(TABLE, rows, store, kept_peer(), shown_rows(SHARES.read_text("utf-8")))
    return tell(rows, options, store)


def parse_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="types whose name fits, as in a shell")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks")
    parser.add_argument("--peer", action="store_true", help="run transformers' own tensor parallelism instead of ours")
    parser.add_argument("--uneven", default="", choices=["ceil", "pad"], help="for numbers of ranks that do not divide")
    parser.add_argument("--fresh", action="store_true", help="run also what is there")
    parser.add_argument("--failed", action="store_true", help="run only what is missing or was not right")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "sweep", help="folder for models and outcomes")
    return parser.parse_args()


def wanted(store: Store, case: Case, key: str, options: argparse.Namespace) -> bool:
    """Tell whether a case is to be run."""
    if options.failed:
        found = store.get(case.name)
        return found is None or not found.right
    return options.fresh or store.get(case.name, key) is None


def run(tp: int, cases: list[Case], work: Path, store: Store, key: str) -> None:
    """Work through the cases; each is kept as soon as it is done."""
    if not cases:
        return
    started, done = time.monotonic(), 0
    print(f"{len(cases)} cases at tp {tp}", flush=True)

    def keep(name: str) -> None:
        nonlocal done
        done += 1
        found = record(json.loads((work / "outcomes" / f"{name}.json").read_text()))
        store.put(name, key, found)
        mark = "right" if found.right else f"NOT RIGHT, {found.stage}: {found.error[:150]}"
        print(f"{done}/{len(cases)} {time.monotonic() - started:.0f} s {name}: {mark}", flush=True)

    forget_models(work)
    work_through(tp, cases, work, keep)


def forget_models(work: Path) -> None:
    """Remove the tiny models, if they would be made otherwise now."""
    mark = work / "models" / "key"
    if not mark.exists() or mark.read_text() != peer_key():
        shutil.rmtree(work / "models", ignore_errors=True)
        mark.parent.mkdir(parents=True)
        mark.write_text(peer_key())


def keep_peer(rows: list[Subject], store: Store, key: str) -> None:
    """Write what the peer did to the file that is committed."""
    names = [case.name for tp in (2, 4) for row in rows for case in cases_of(row, tp, peer=True)]
    head = {"transformers": version("transformers"), "torch": version("torch"), "key": key}
    kept = {name: found._asdict() for name in sorted(names) if (found := store.get(name))}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in kept.items())
    PEER_FILE.write_text(f'{json.dumps(head)[:-1]}, "records": {{\n{lines}\n}}}}\n')


def kept_peer() -> tuple[dict[str, Record], bool]:
    """Return what the peer did, and whether it was with the tiny models and versions of now."""
    if not PEER_FILE.exists():
        return {}, True
    content = json.loads(PEER_FILE.read_text())
    return {name: Record(**fields) for name, fields in content["records"].items()}, content["key"] == peer_key()


def tell(rows: list[Subject], options: argparse.Namespace, store: Store) -> int:
    """Print how many are right; return 1 if one of ours is not."""
    wrong = 0
    for tp in options.degrees:
        cases = [case for row in rows for case in cases_of(row, tp, peer=options.peer, uneven=options.uneven)]
        found = [store.get(case.name) for case in cases]
        right = sum(entry is not None and entry.right for entry in found)
        wrong += len(found) - right
        print(f"tp {tp}: {right} of {len(found)} right")
    return int(wrong > 0 and not options.peer)


if __name__ == "__main__":
    sys.exit(main())
