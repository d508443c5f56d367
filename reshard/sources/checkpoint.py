"""The source checkpoint: which files belong to it and what their headers say. No weight byte is read.

The index decides which files belong; without one, the single weight file does. Every header is checked before anything
else happens, and every refusal names the file.
"""

import re
from bisect import bisect_right
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from manifests.errors import CheckpointError
from manifests.jsontext import load_object
from manifests.manifest import MANIFEST_NAME
from manifests.names import is_file_name
from manifests.opening import MAX_TEXT_NBYTES
from manifests.shown import shown, shown_name
from manifests.stored import StoredTensor, StoredTensors
from reshard.sources.folder import Folder, WeightFile

STEMS = ("model", "diffusion_pytorch_model")
CONFIG_NAME = "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
_OF_ADAPTER = re.compile(r"(^|[._])(lora|hada|lokr|oft|ia3|vera)_|\.alpha$")
"""In the name of every tensor of an adapter's file, and in few of a model's."""
_WITH_ADAPTER = re.compile(r"\.(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(\.|$)")
"""In names of a model that an adapter was put on."""
_CARRIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".spm")


class SourceTensor(NamedTuple):
    """A tensor of the checkpoint and the position of its file among the checkpoint's files."""

    file: int
    stored: StoredTensor


class SourceTensors(Mapping[str, SourceTensor]):
    """The tensors of files, no two of one name; each is made when it is asked for.

    Attributes:
        files: The tensors of every file.
    """

    def __init__(self, files: Sequence[StoredTensors]) -> None:
        self.files = files
        self._starts = [*accumulate(map(len, files), initial=0)]

    @cached_property
    def _places(self) -> dict[str, int]:
        return dict(zip(self, range(len(self)), strict=True))

    @property
    def stored(self) -> StoredTensors:
        """All of them, without their files."""
        return StoredTensors(
            [*self],
            [*chain.from_iterable(file.types for file in self.files)],
            chain.from_iterable(file.begins for file in self.files),
            chain.from_iterable(file.ends for file in self.files),
        )

    def __getitem__(self, name: str) -> SourceTensor:
        place = self._places[name]
        file = bisect_right(self._starts, place) - 1
        return SourceTensor(file, self.files[file].at(place - self._starts[file]))

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.files)

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def items(self) -> ItemsView[str, SourceTensor]:
        """Return all of them with their names."""
        return {
            name: SourceTensor(number, stored)
            for number, file in enumerate(self.files)
            for name, stored in file.items()
        }.items()


class Checkpoint(NamedTuple):
    """A checkpoint, by its headers.

    Attributes:
        folder: Where it lies.
        files: Its weight files.
        tensors: Every tensor by its stored name.
        index_name: Name of the index file, or empty.
        config: The content of ``config.json``; empty without one.
        carried: Names of the files that travel with a split: configuration, tokenizer, generation.
        ignored: Names of the weight files that do not belong to it.
    """

    folder: Folder
    files: tuple[WeightFile, ...]
    tensors: SourceTensors
    index_name: str
    config: Mapping[str, Any]
    carried: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def needed(self) -> list[str]:
        """Names of all files that a split reads."""
        return [*(file.name for file in self.files), *self.carried, *filter(None, [self.index_name])]


def open_checkpoint(folder: Folder, variant: str = "") -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        folder: Where it lies.
        variant: The variant in the file names (``fp16`` of ``model.fp16.safetensors``), or empty.

    Raises:
        CheckpointError: No weights, weights of another kind, or any file that is not whole and valid.
    """
    names = folder.names()
    if "manifest.json" in names and any(name.startswith("rank-") for name in names):
        raise CheckpointError(f"{folder.label}: a split already; `reshard merge` gives back its source")
    if "adapter_config.json" in names and not any(_single(names, stem, variant) for stem in STEMS):
        raise CheckpointError(f"{folder.label}: an adapter (adapter_config.json), which is not split; merge it first")
    if "quantize_config.json" in names:
        raise CheckpointError(f"{folder.label}: quantized (quantize_config.json); of such formats only fp8 is split")
    index = _find_index(names, variant)
    weight_map = _read_index(folder, index) if index else {}
    chosen = sorted(set(weight_map.values())) if index else [_find_single(folder, names, variant)]
    missing = [name for name in chosen if name not in names]
    if missing:
        raise CheckpointError(
            f"{folder.label}/{index}: names {len(missing)} files that are not there: {_some(missing)}; download them"
        )
    files = tuple(folder.weights(name) for name in chosen)
    tensors = _gather_tensors(folder.label, files, weight_map, index)
    _check_kind(folder.label, tensors)
    carried = tuple(name for name in names if _is_carried(name))
    for name in carried:
        folder.check(name)
    return Checkpoint(
        folder=folder,
        files=files,
        tensors=tensors,
        index_name=index,
        config=_read_config(folder, names),
        carried=carried,
        ignored=tuple(name for name in names if name.endswith(".safetensors") and name not in chosen),
    )


def _find_index(names: list[str], variant: str) -> str:
    for stem in STEMS:
        # Writers put the variant before the last dot of the index or before its ".safetensors"; both are in use.
        spellings = (
            (f"{stem}.safetensors.index.{variant}.json", f"{stem}.{variant}.safetensors.index.json")
            if variant
            else (f"{stem}.safetensors.index.json",)
        )
        for name in spellings:
            if name in names:
                return name
    return ""


def _single(names: list[str], stem: str, variant: str) -> str:
    name = f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"
    return name if name in names else ""


def _find_single(folder: Folder, names: list[str], variant: str) -> str:
    for stem in STEMS:
        if found := _single(names, stem, variant):
            return found
    weights = [name for name in names if name.endswith(".safetensors")]
    if variant:
        raise CheckpointError(f"{folder.label}: no weights of the variant {variant!r}; there are {_some(weights)}")
    if len(weights) == 1 and (part := re.search(r"-\d+-of-(\d+)\.safetensors$", weights[0])) and int(part[1]) > 1:
        raise CheckpointError(
            f"{folder.label}: {weights[0]} is one of {int(part[1])} files, and there is no index; download all of them"
        )
    if len(weights) == 1 and (named := re.fullmatch(rf"(?:{'|'.join(STEMS)})\.([\w-]+)\.safetensors", weights[0])):
        raise CheckpointError(
            f"{folder.label}: holds only the variant {named[1]!r}; ask for it with --variant {named[1]}"
        )
    if len(weights) == 1:
        return weights[0]
    if weights:
        raise CheckpointError(
            f"{folder.label}: {len(weights)} safetensors files and no index that says which belong together: "
            f"{_some(weights)}; add model.safetensors.index.json"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder.label}: no safetensors files, only {_some(pickles)}, which is not read; "
            "save the model with `save_pretrained(safe_serialization=True)`"
        )
    raise CheckpointError(
        f"{folder.label}: no safetensors files; MODEL is a folder or a hub id (org/name) with weights"
    )


def _read_index(folder: Folder, name: str) -> dict[str, str]:
    label = f"{folder.label}/{name}"
    weight_map = read_object(folder, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{label}: has no weight_map")
    known: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in known:
            weight_map[tensor] = known[file]  # one text for all that are equal
            continue
        if not is_file_name(file):
            raise CheckpointError(
                f"{label}: {shown_name(tensor)}: {shown(file)} is not the name of a file in this folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{label}: {shown_name(tensor)}: {shown(file)} is not a safetensors file")
        known[file] = file
    return weight_map


def read_object(folder: Folder, name: str) -> dict[str, Any]:
    """Return the JSON object that a file of a folder holds.

    Raises:
        CheckpointError: It cannot be read, or holds something else, or a key twice.
    """
    folder.check(name)
    text = folder.read(name, MAX_TEXT_NBYTES)
    try:
        return load_object(text)
    except ValueError as error:
        raise CheckpointError(f"{folder.label}/{name}: {error}") from error


def _gather_tensors(
    label: str, files: tuple[WeightFile, ...], weight_map: Mapping[str, str], index: str
) -> SourceTensors:
    tensors = SourceTensors([file.header.tensors for file in files])
    stray: list[str] = []
    for file in files if index else ():
        named = [*map(weight_map.get, file.header.tensors)]
        if named.count(file.name) < len(named):
            held = zip(file.header.tensors, named, strict=True)
            stray += [f"{shown_name(name)} in {file.name}" for name, home in held if home != file.name]
    # Where no name is stray, none is in two files.
    absent: list[str] = []
    if stray or len(tensors) < len(weight_map):
        there = {name for file in files for name in file.header.tensors if weight_map.get(name) == file.name}
        absent = [f"{shown_name(name)} (should be in {weight_map[name]})" for name in weight_map if name not in there]
    if absent:
        raise CheckpointError(f"{label}/{index}: names {len(absent)} tensors that their files lack: {_some(absent)}")
    if stray:
        raise CheckpointError(
            f"{label}/{index}: does not name {len(stray)} tensors that its files hold: {_some(stray)}; "
            "the index and the files are not of one checkpoint"
        )
    if not tensors:
        raise CheckpointError(f"{label}: holds no tensors")
    return tensors


def _check_kind(label: str, tensors: Mapping[str, SourceTensor]) -> None:
    """Refuse tensors that are no model's as it runs: of an adapter, or with one."""
    names = list(tensors)
    adapter = names[0] if all(map(_OF_ADAPTER.search, names)) else ""
    text = "\n".join(names)
    likely = "lora_" in text or "base_layer" in text
    if adapter or (adapter := next(filter(_WITH_ADAPTER.search, names), "") if likely else ""):
        raise CheckpointError(
            f"{label}: {shown_name(adapter)}: of an adapter, which is not split; merge it into the model "
            "(`merge_and_unload` of peft, `fuse_lora` of diffusers) and save the model again"
        )


def _read_config(folder: Folder, names: list[str]) -> dict[str, Any]:
    if CONFIG_NAME not in names:
        return {}
    return read_object(folder, CONFIG_NAME)


def _is_carried(name: str) -> bool:
    if (
        name.startswith(".")
        or name == MANIFEST_NAME
        or ".safetensors.index" in name
        or name.endswith("model.bin.index.json")
    ):
        return False
    return name.endswith(_CARRIED) or name.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY"))


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
