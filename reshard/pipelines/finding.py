"""Finding out whether MODEL is a pipeline of diffusers."""

from contextlib import suppress
from pathlib import Path

from reshard.options import Options
from reshard.planning import locate

INDEX_NAME = "model_index.json"


def is_pipeline(model: str | Path, options: Options) -> bool:
    """Tell whether MODEL is a pipeline, and none of its parts was asked for.

    Raises:
        CheckpointError: It is no folder and no hub id, or the hub cannot be reached.
    """
    if options.subfolder:
        return False
    if Path(model).is_dir():
        with suppress(OSError):  # what cannot be looked into is told when it is opened
            return (Path(model) / INDEX_NAME).is_file()
        return False
    return INDEX_NAME in locate(model, options).names()
