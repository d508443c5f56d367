"""Splits of a cache: which folder holds that of a model, found by its key, or made.

The key follows from the model's headers and from the plan, so finding takes the splitter's planning, but no weight.
Here, and in `loader.parallelize`, the package imports `reshard`, when it is asked for; a folder given by its path
needs nothing of it. Of the ranks one looks, and the others wait for what it finds or makes, however long that takes.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loader.agreement import Agreement
from loader.group import Place
from manifests.errors import LoadError

VARIABLE = "RESHARD_CACHE"

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A split that is asked for.

    Attributes:
        model: The checkpoint: a folder or a hub id.
        tp: Number of ranks; that of the processes if None.
        cache: The folder of the cache; that of the environment if None.
        build: Whether it is made if it is not there.
        options: The fields of `reshard.options.Options`.
    """

    model: str | Path
    tp: int | None
    cache: str | Path | None
    build: bool
    options: Mapping[str, Any]


def locate(wanted: Wanted, place: Place, wait_s: float) -> tuple[Path, Agreement]:
    """Return the folder of a split of a cache, the same to all ranks.

    Args:
        wanted: What is asked for, the same by all ranks.
        place: This process's place among them.
        wait_s: Seconds to wait for a rank that never came.

    Returns:
        The folder, and the agreement of the ranks on it, which is to be kept while another one is made: with it goes
        the store through which they meet.

    Raises:
        LoadError: The cache holds no such split, and it is not to be made; or another rank cannot go on.
        ReshardError: What `reshard.split` raises.
    """
    agreement = Agreement(place, wait_s)
    with agreement.refusing():
        cache, tp = _cache_of(wanted), wanted.tp or place.size
        place.check_size(tp)
        asked = {"model": wanted.model, "number of ranks": tp, "cache": cache, "options of the split": wanted.options}
        agreement.arrive({name: str(value) for name, value in asked.items()})
        if place.rank == 0:
            found = _find_or_build(wanted, cache, tp, agreement.check)
            agreement.tell(os.path.abspath(found))  # noqa: PTH100 - links stay
        agreement.conclude(worker=0)
        return Path(agreement.told()), agreement


def _cache_of(wanted: Wanted) -> Path:
    folder = wanted.cache or os.environ.get(VARIABLE, "")
    if not folder:
        raise LoadError(
            f"{wanted.model}: tp, build and split are for a split of a cache; give cache, or set {VARIABLE}"
        )
    return Path(folder)


def _find_or_build(wanted: Wanted, cache: Path, tp: int, check: Callable[[], None]) -> Path:
    """Return the folder of a split; ``check`` is called while it is made, and raises if that is in vain."""
    from reshard.cache.building import find, problems_of, provide
    from reshard.cache.command import command_of
    from reshard.cache.entries import entry_name
    from reshard.options import Options
    from reshard.splitting import plan

    model = wanted.model
    planned = plan(model, tp=tp, **wanted.options)
    if found := find(cache, planned.key):
        return found
    if wanted.build:
        name = entry_name(model, planned)
        return provide(planned, cache, name, notice=_log.warning, progress=lambda *_: check()).path
    command = command_of(model, tp, cache, Options(**wanted.options))
    found_instead = "; ".join(problems_of(cache, planned.key)) or f"holds no split of {model}"
    raise LoadError(
        f"{cache}: {found_instead} for {tp} ranks, key {planned.key}; make it with `{command}`, or give build=True"
    )
