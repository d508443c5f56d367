"""Reporting on a cache: what it holds and what was removed, as facts that JSON can carry and as lines for a person."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from reshard.cache.listing import Item
from reshard.cache.pruning import Pruned, reason_in_use
from reshard.lines import Facts, format_rows, human_bytes, human_span


def build_listing(cache: Path, items: Sequence[Item], now: float) -> Facts:
    """Return what a cache holds; ages are in seconds."""
    return {
        "cache": str(cache),
        "nbytes": sum(item.nbytes for item in items),
        "items": [_item(item, now) for item in items],
    }


def build_pruned(cache: Path, pruned: Pruned, gone: Sequence[Item], now: float, *, dry_run: bool) -> Facts:
    """Return what was removed from a cache, or would be, and what had to stay."""
    removed = [{**_item(item, now), "reason": reason} for item, reason in pruned.going if item in gone]
    return {
        "cache": str(cache),
        "dry_run": dry_run,
        "nbytes_removed": sum(item["nbytes"] for item in removed),
        "removed": removed,
        "kept": [{**_item(item, now), "reason": reason} for item, reason in pruned.staying],
    }


def _item(item: Item, now: float) -> Facts:
    return {
        "name": item.name,
        "state": item.state,
        "problem": item.problem,
        "nbytes": item.nbytes,
        "age_s": round(now - item.made),
        "unused_s": round(now - item.used),
        "users": [{"host": user.host, "pid": user.pid} for user in item.users],
        "in_use": reason_in_use(item),
    }


def format_listing(facts: Facts) -> Iterator[str]:
    """Yield a line for all that a cache holds."""
    yield from format_rows(
        [
            (
                item["name"],
                item["state"],
                human_bytes(item["nbytes"]),
                f"made {human_span(item['age_s'])} ago",
                f"used {human_span(item['unused_s'])} ago",
                item["problem"] or item["in_use"],
            )
            for item in facts["items"]
        ]
    )


def format_total(facts: Facts) -> Iterator[str]:
    """Yield the line on the whole of a cache."""
    number = len(facts["items"])
    yield f"{facts['cache']}: {number} {'folder' if number == 1 else 'folders'}, {human_bytes(facts['nbytes'])}"


def format_pruned(facts: Facts) -> Iterator[str]:
    """Yield why each split was removed, or had to stay."""
    verb = "would remove" if facts["dry_run"] else "removed"
    yield from _reasons(verb, facts["removed"])
    yield from _reasons("kept", facts["kept"])
    yield f"{facts['cache']}: {verb} {human_bytes(facts['nbytes_removed'])}"


def _reasons(verb: str, items: Iterable[Facts]) -> Iterator[str]:
    for item in items:
        yield f"{verb} {item['name']} ({human_bytes(item['nbytes'])}): {item['reason']}"
