"""Which split and which ranks a rank file belongs to: what its ``__metadata__`` says."""

from collections.abc import Mapping

KEY = "reshard.key"
WORLD_SIZE = "reshard.world_size"
RANKS = "reshard.ranks"


def belonging(key: str, world_size: int, owners: tuple[int, ...]) -> dict[str, str]:
    """Return the ``__metadata__`` of a rank file.

    >>> belonging("0a", 2, (1,))
    {'format': 'pt', 'reshard.key': '0a', 'reshard.world_size': '2', 'reshard.ranks': '1'}
    >>> belonging("0a", 2, (0, 1))["reshard.ranks"], belonging("0a", 1, (0,))["reshard.ranks"]
    ('all', '0')
    """
    everyone = len(owners) == world_size > 1
    ranks = "all" if everyone else ",".join(map(str, owners))
    return {"format": "pt", KEY: key, WORLD_SIZE: str(world_size), RANKS: ranks}


def foreign(metadata: Mapping[str, str] | None, expected: Mapping[str, str]) -> str:
    """Return why a file is not the one that is expected, by its ``__metadata__``; empty if it may be.

    >>> foreign(belonging("0a", 2, (1,)), belonging("0a", 2, (0,)))
    'is the file of rank 1, that of rank 0 is expected'
    """
    found = metadata or {}
    if found.get(KEY) != expected[KEY]:
        return f"belongs to another split: its key is {found.get(KEY, 'none')}, {expected[KEY]} is expected"
    if found.get(WORLD_SIZE) != expected[WORLD_SIZE]:
        return f"is of {found.get(WORLD_SIZE, 'no number of')} ranks, {expected[WORLD_SIZE]} are expected"
    if found.get(RANKS) != expected[RANKS]:
        mine = found.get(RANKS)
        return f"is the file of {_ranks(mine)}, that of {_ranks(expected[RANKS])} is expected"
    return ""


def _ranks(text: str | None) -> str:
    if not text:
        return "no rank"
    return "all ranks" if text == "all" else f"rank {text}"
