"""Pruning: which splits of a cache may go, by size, age and use, and which must not, whatever is asked for."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from manifests import uses
from manifests.errors import OutputError
from reshard.cache.listing import Item
from reshard.cache.removing import remove

GRACE_S = 3600.0
"""How long nothing is removed after it was made or wanted, if nothing else is asked for."""

_SPLITS = ("whole", "unreadable")


class Limits(NamedTuple):
    """What a cache is pruned to; what is None is not asked for.

    Attributes:
        nbytes: The most bytes of all splits; those that were used longest ago go first.
        age_s: How long ago a split may have been made.
        unused_s: How long ago it may have been wanted last.
        grace_s: How long everything stays after it was made or wanted.
    """

    nbytes: int | None = None
    age_s: float | None = None
    unused_s: float | None = None
    grace_s: float = GRACE_S


class Pruned(NamedTuple):
    """What is to go, and what would but must stay, each with the reason."""

    going: list[tuple[Item, str]]
    staying: list[tuple[Item, str]]


def choose(items: Sequence[Item], limits: Limits, now: float) -> Pruned:
    """Decide what goes. What is damaged or abandoned goes in any case.

    Args:
        items: All that the cache holds.
        limits: What is asked for.
        now: In seconds since 1970.
    """
    chosen = Pruned([], [])
    left: list[Item] = []
    for item in items:
        reason = _reason_to_go(item, limits, now)
        if not reason or not _settle(chosen, item, reason, limits, now):
            left.append(item)
    if limits.nbytes is None:
        return chosen
    total = sum(item.nbytes for item in left if item.state in _SPLITS)
    held = [item for item, _ in chosen.staying]
    for item in sorted(left, key=lambda item: item.used):
        if total <= limits.nbytes:
            break
        if item.state in _SPLITS and item not in held:
            reason = f"the splits have {total} bytes, {limits.nbytes} are asked for"
            total -= item.nbytes if _settle(chosen, item, reason, limits, now) else 0
    return chosen


def _settle(chosen: Pruned, item: Item, reason: str, limits: Limits, now: float) -> bool:
    """Put an item to what goes, and return true, unless it must stay."""
    stays = _reason_to_stay(item, limits, now)
    (chosen.staying if stays else chosen.going).append((item, stays or reason))
    return not stays


def _reason_to_go(item: Item, limits: Limits, now: float) -> str:
    if item.state in ("damaged", "abandoned"):
        return item.state
    if item.state in _SPLITS and limits.age_s is not None and now - item.made > limits.age_s:
        return "older than asked for"
    if item.state in _SPLITS and limits.unused_s is not None and now - item.used > limits.unused_s:
        return "unused for longer than asked for"
    return ""


def _reason_to_stay(item: Item, limits: Limits, now: float) -> str:
    if reason := reason_in_use(item):
        return reason
    if now - item.used < limits.grace_s:
        return f"within the grace time of {limits.grace_s:.0f} s"
    return ""


def reason_in_use(item: Item) -> str:
    """Return who of this machine uses a split, or is making it; empty if nobody does."""
    if not item.users:
        return "being made" if item.state == "being made" else ""
    verb = "being made" if item.state == "being made" else "in use"
    return f"{verb} by process {', '.join(str(user.pid) for user in item.users)} on {item.users[0].host}"


def remove_items(items: Iterable[Item]) -> tuple[list[Item], list[str]]:
    """Remove items of a cache; one that a process of this machine began to use meanwhile stays.

    Returns:
        Those that are gone, and why others could not be removed.
    """
    gone: list[Item] = []
    problems: list[str] = []
    for item in items:
        try:
            if remove(item.path, unless=_is_used(item.path)):
                gone.append(item)
        except OutputError as error:
            problems.append(str(error))
    return gone, problems


def _is_used(split: Path) -> Callable[[Path], bool]:
    return lambda _: bool(uses.users_here(split))
