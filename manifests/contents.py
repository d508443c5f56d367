"""What a split is, as types: all that the manifest (`manifests.manifest`) says of it."""

from collections.abc import Mapping

import msgspec

from manifests.columns import Extent, SourceTensor
from manifests.layout import Mesh
from manifests.placement import REPLICATED, Placement
from manifests.runs import Count, Positive, Run

FORMAT = "reshard"
VERSION = 2

PerRank = int | tuple[int, ...]
"""A number for all ranks, or one for each."""


class Link(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one dimension of a source runs into one dimension of a tensor.

    Attributes:
        src: Dimension of the source, or None where the source has none: it is stacked at the run's ``dst``.
        dst: Dimension of the tensor, or None where only entry ``src`` of the source's dimension is taken.
        runs: The copied entries, in atoms of the dtype.
    """

    src: Count | None
    dst: Count | None
    runs: tuple[Run, ...]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One source's contribution to a tensor: the product of its links. No links: the whole source as it is.

    Attributes:
        source: The source tensor's name.
        links: From its dimensions to the tensor's.
        shape: What the links take for its shape, of as many elements; its own if empty.
    """

    source: str
    links: tuple[Link, ...] = ()
    shape: tuple[Count, ...] = ()


class Tensor(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tensor of the running model.

    Attributes:
        dtype: As in the safetensors header.
        shape: The whole tensor's shape, in elements.
        placement: How it is divided.
        parts: Where it came from; none means the whole source tensor of the same name.
        unused: Whether no rank needs it: it is kept for merging only, under its stored name, with ``.unused`` after it
            if only a part of the stored tensor is not needed.
        cast: The dtype of what it came from, if the split converted it; empty if it did not.
    """

    dtype: str
    shape: tuple[Count, ...]
    placement: Placement = REPLICATED
    parts: tuple[Part, ...] = ()
    unused: bool = False
    cast: str = ""


class SplitFile(msgspec.Struct, frozen=True):
    """A safetensors file of the split.

    Attributes:
        name: Its name in the folder.
        owners: The ranks that open it; none for tensors that no rank needs.
        nbytes: Bytes of the whole file.
        data_offset: Where the data starts, in bytes from the start of the file.
        header: xxh3-128 of the header text, padding included.
        tensors: What it holds, in order.
    """

    name: str
    owners: tuple[Count, ...]
    nbytes: Count
    data_offset: Count
    header: str
    tensors: Mapping[str, Extent]

    @property
    def data_nbytes(self) -> int:
        """Bytes of all parts."""
        return self.nbytes - self.data_offset


class SourceFile(msgspec.Struct, frozen=True):
    """A safetensors file of the source.

    Attributes:
        name: Its name relative to the source folder.
        nbytes: Bytes of the whole file.
        header: xxh3-128 of the header text.
        tensors: What it held, in order of offset.
        metadata: Its ``__metadata__``.
    """

    name: str
    nbytes: Count
    header: str
    tensors: Mapping[str, SourceTensor]
    metadata: dict[str, str] | None = None


class Source(msgspec.Struct, frozen=True):
    """The checkpoint that was split.

    Attributes:
        files: Its safetensors files.
        index: The name of its index file, if it had one.
        repo: The hub id, for a checkpoint of the hub.
        revision: The hub commit.
        dropped: Stored names of tensors that were left out on request.
    """

    files: tuple[SourceFile, ...]
    index: str = ""
    repo: str = ""
    revision: str = ""
    dropped: tuple[str, ...] = ()


class Model(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The model class that the tensors are for.

    Attributes:
        library: "transformers", "diffusers", or "" for any torch module.
        type: The configuration's model type.
        architecture: The class, as ``architectures`` in the configuration names it.
    """

    library: str = ""
    type: str = ""
    architecture: str = ""


class Input(msgspec.Struct, frozen=True, array_like=True):
    """An argument of a module's forward that has entries for all ranks, of which each needs its own.

    Attributes:
        name: The argument's name.
        dim: The dimension that is divided; it has the axis once, or several times, one after the other.
        axis: The axis.
        mesh: What the axis is divided over.
    """

    name: str
    dim: int
    axis: str
    mesh: Mesh


class Module(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What happens around one module's forward.

    Attributes:
        style: The style that the plan gave it.
        before: The step on its inputs.
        after: The step on its output.
        axis: The divided axis that a step refers to: ids for mask_ids, input features for slice_input, output
            features for all_gather, experts for route_local.
        mesh: What the axis is divided over, where that is not all ranks.
        inputs: The arguments of which a rank takes its part, before all else.
    """

    style: str
    before: str = ""
    after: str = ""
    axis: str = ""
    mesh: Mesh = ()
    inputs: tuple[Input, ...] = ()


class Rule(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rule of the plan, as it was applied."""

    pattern: str
    style: str
    layout: str = ""
    blocks: tuple[int, ...] = ()
    dim: int | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole split.

    Attributes:
        format: Always "reshard".
        version: Of the format.
        key: xxh3-128 of all that decides the output bytes; every file of the split carries it.
        world_size: Number of ranks.
        layout: "runtime" or "checkpoint": whose names and layout the tensors have.
        model: The class that they are for.
        source: The checkpoint that was split.
        plan: The rules that applied.
        sizes: The numbers that layouts were bound with.
        tensors: Every tensor, by its name in the layout.
        files: Every safetensors file.
        ties: Parameters that are another one: name to name.
        modules: What happens around the forward of modules, by module name.
        attributes: What to set on modules: module name to attribute to value, one for all ranks or one for each.
        carried: xxh3-128 of every other file that was carried over.
        digest: xxh3-128 of this manifest, encoded with an empty digest.
    """

    format: str = FORMAT
    version: int = VERSION
    key: str
    world_size: Positive
    layout: str
    model: Model
    source: Source
    plan: tuple[Rule, ...]
    sizes: dict[str, int]
    tensors: dict[str, Tensor]
    files: tuple[SplitFile, ...]
    ties: dict[str, str]
    modules: dict[str, Module]
    attributes: dict[str, dict[str, PerRank]]
    carried: dict[str, str]
    digest: str = ""
