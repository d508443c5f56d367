"""The wire form of a manifest: what its JSON looks like, so that it is small and soon decoded.

Values that many tensors share stand once in a table, and tensors have numbers of them (FORMAT.md). What is long and
seldom needed stands on lines of its own: a line feed stands before and after the values of ``source``, of ``parts`` and
of every file's ``tensors``, and nowhere else but at the end. To JSON it is white space. A reader that needs little of a
large manifest takes every other line, with the numbers of the lines that it left out in their places, and decodes these
when it needs them.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from manifests.columns import Extents, Numbers, SourceTensors, pick
from manifests.contents import Link, Part, Source, SourceFile, Tensor
from manifests.errors import ManifestError
from manifests.placement import REPLICATED, Placement
from manifests.runs import Count


class Kind(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What tensors have in common: `manifests.contents.Tensor` without its parts."""

    dtype: str
    shape: tuple[Count, ...]
    placement: Placement = REPLICATED
    unused: bool = False
    cast: str = ""


class TensorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor of the model: its name, and the number of its kind."""

    names: list[str]
    kinds: list[Count]
    table: list[Kind]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> "TensorTable":
        """Return the table of tensors; of many it is quick if those that are alike are one object."""
        numbers = Numbers[Kind]()
        known = {
            key: numbers[Kind(tensor.dtype, tensor.shape, tensor.placement, tensor.unused, tensor.cast)]
            for key, tensor in {id(tensor): tensor for tensor in tensors.values()}.items()
        }
        return TensorTable(list(tensors), [*map(known.__getitem__, map(id, tensors.values()))], list(numbers))

    def expand(self, parts: Mapping[str, tuple[Part, ...]]) -> dict[str, Tensor]:
        """Return the tensors, those of one kind that have no parts as one object.

        Args:
            parts: Where tensors came from.

        Raises:
            ManifestError: The columns do not fit together.
        """
        alike = [Tensor(kind.dtype, kind.shape, kind.placement, (), kind.unused, kind.cast) for kind in self.table]
        tensors = _named(self.names, pick(alike, self.kinds))
        if strange := parts.keys() - tensors.keys():
            raise ManifestError(f"{min(strange)}: has parts, but is no tensor")
        tensors.update((name, msgspec.structs.replace(tensors[name], parts=made)) for name, made in parts.items())
        return tensors


class Form(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a source contributes to a tensor: `manifests.contents.Part` without the source."""

    links: tuple[Link, ...] = ()
    shape: tuple[Count, ...] = ()


class PartTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where tensors came from.

    Attributes:
        forms: The different forms of parts.
        tensors: By the name of each tensor that has parts, the numbers of its sources and of their forms.
    """

    forms: list[Form]
    tensors: dict[str, tuple[list[Count], list[Count]]]

    @staticmethod
    def of(tensors: Mapping[str, Tensor], sources: Iterable[str]) -> "PartTable":
        """Return the table of tensors' parts, given the names of all sources."""
        parts = {name: tensor.parts for name, tensor in tensors.items() if tensor.parts}
        numbers = {source: number for number, source in enumerate(sources)} if parts else {}
        forms = Numbers[tuple[tuple[Link, ...], tuple[int, ...]]]()
        made = {
            name: ([numbers[part.source] for part in mine], [forms[part.links, part.shape] for part in mine])
            for name, mine in parts.items()
        }
        return PartTable([Form(*form) for form in forms], made)

    def expand(self, sources: Sequence[str]) -> dict[str, tuple[Part, ...]]:
        """Return the parts of tensors.

        Raises:
            ManifestError: The columns do not fit together.
        """
        links, shapes = [form.links for form in self.forms], [form.shape for form in self.forms]
        parts: dict[str, tuple[Part, ...]] = {}
        for name, (places, forms) in self.tensors.items():
            if len(places) != len(forms) or not places:
                raise ManifestError(f"{name}: its parts are {len(places)} sources and {len(forms)} forms")
            parts[name] = (*map(Part, pick(sources, places), pick(links, forms), pick(shapes, forms)),)
        return parts


class ExtentTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of the split holds, in order of offset: names, bytes, and the hashes of all one after another."""

    names: list[str]
    nbytes: list[Count]
    tiles: str

    @staticmethod
    def of(extents: Extents) -> "ExtentTable":
        """Return the table of a file."""
        return ExtentTable(list(extents.names), list(extents.sizes), extents.tiles)

    def expand(self) -> Extents:
        """Return what the file holds.

        Raises:
            ManifestError: The columns do not fit together.
        """
        return Extents(self.names, self.nbytes, self.tiles)


class SourceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of the source held, in order of offset; ``types`` are the different dtypes with their shapes."""

    names: list[str]
    kinds: list[Count]
    types: list[tuple[str, tuple[Count, ...]]]
    tiles: str


class WireSourceFile(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A file of the source: `manifests.contents.SourceFile`."""

    name: str
    nbytes: Count
    header: str
    tensors: SourceTable
    metadata: dict[str, str] | None = None


class WireSource(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checkpoint that was split: `manifests.contents.Source`."""

    files: tuple[WireSourceFile, ...]
    index: str = ""
    repo: str = ""
    revision: str = ""
    dropped: tuple[str, ...] = ()

    @staticmethod
    def of(source: Source) -> "WireSource":
        """Return the wire form of a source."""
        files = []
        for file in source.files:
            rows = SourceTensors.of(file.tensors, source.dropped)
            table = SourceTable(list(rows.names), list(rows.kinds), list(rows.types), rows.tiles)
            files.append(WireSourceFile(file.name, file.nbytes, file.header, table, file.metadata))
        return WireSource(tuple(files), source.index, source.repo, source.revision, source.dropped)

    def expand(self) -> Source:
        """Return the source.

        Raises:
            ManifestError: The columns do not fit together.
        """
        dropped = frozenset(self.dropped)
        files = tuple(
            SourceFile(
                file.name,
                file.nbytes,
                file.header,
                SourceTensors(table.names, table.types, table.kinds, table.tiles, dropped),
                file.metadata,
            )
            for file in self.files
            for table in [file.tensors]
        )
        return Source(files, self.index, self.repo, self.revision, self.dropped)


def outline(text: bytes) -> tuple[bytes, list[memoryview]]:
    r"""Return every other line of a manifest, joined by the numbers of the lines between, and these lines.

    >>> outline(b'{"source":\n{"a":1}\n,"files":[{"tensors":\n{}\n}]}\n')[0]
    b'{"source":0,"files":[{"tensors":1}]}\n'
    """
    whole = memoryview(text)
    kept: list[bytes | memoryview] = []
    between: list[memoryview] = []
    at = 0
    while (begin := text.find(b"\n", at)) >= 0 and (end := text.find(b"\n", begin + 1)) >= 0:
        kept += [whole[at:begin], b"%d" % len(between)]
        between.append(whole[begin + 1 : end])
        at = end + 1
    return b"".join([*kept, whole[at:]]), between


def _named(names: list[str], values: list[Tensor]) -> dict[str, Tensor]:
    if len(names) != len(values):
        raise ManifestError(f"tensors: {len(names)} names, but {len(values)} kinds")
    named = dict(zip(names, values, strict=True))
    if len(named) != len(names):
        raise ManifestError("tensors: two have one name")
    return named
