"""A model before it is divided: its tensors, sizes and ties."""

from collections.abc import Mapping
from typing import NamedTuple

from manifests.manifest import Part
from reshard.sizes import ScopedSizes


class RuntimeTensor(NamedTuple):
    """A tensor of the running model, before it is placed; ``parts`` as in the manifest."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    unused: bool = False


class Model(NamedTuple):
    """What placing needs to know of a model.

    Attributes:
        tensors: Its tensors by name.
        sizes: Its sizes.
        ties: Parameters that are another one: name to name.
        scale_blocks: Rows and columns that one entry of an FP8 block scale stands for, or empty.
    """

    tensors: Mapping[str, RuntimeTensor]
    sizes: ScopedSizes
    ties: Mapping[str, str]
    scale_blocks: tuple[int, ...] = ()
