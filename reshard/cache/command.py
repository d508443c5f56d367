"""The command that makes a split of a cache, for whoever finds none."""

import shlex
from pathlib import Path

from reshard.options import Options

_FLAGS = {
    "plan": "--plan",
    "plan_source": "--plan-source",
    "layout": "--layout",
    "revision": "--revision",
    "subfolder": "--subfolder",
    "variant": "--variant",
    "self_contained": "--self-contained",
    "max_file_nbytes": "--max-file-size",
    "drop_unused": "--drop-unused",
    "experts": "--ep",
    "uneven": "--uneven",
    "dtype": "--dtype",
}


def command_of(model: str | Path, world_size: int, cache: Path, options: Options) -> str:
    """Return the command that makes a split; a plan that is no file cannot be named in it.

    >>> command_of("org/name", 4, Path("/my splits"), Options(experts=2, drop_unused=True))
    "reshard org/name --tp 4 --cache '/my splits' --drop-unused --ep 2"
    """
    words = ["reshard", str(model), "--tp", str(world_size), "--cache", str(cache)]
    for name, flag in _FLAGS.items():
        value = getattr(options, name)
        if value != Options._field_defaults[name]:
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
