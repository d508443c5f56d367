"""Loading a model of transformers or diffusers: its class, its rank's weights, its hooks.

The class is built with its parameters on meta and its buffers real, so nothing is allocated or initialised that the
shard will bring. Which class of which library it is, the manifest says.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from loader import diffusers_models, transformers_models
from loader.agreement import WAIT_S, Agreement, Facts, versions
from loader.attaching import Convert, attach
from loader.cached import Wanted, locate
from loader.dtypes import main_dtype
from loader.group import Place, find_place, kept
from loader.guard import align_sampling, refuse_unsafe
from loader.hooks import check_modules, install_hooks
from loader.shard import Shard, begin_shard
from loader.times import Times
from loader.ways import Check, Way
from manifests.errors import LoadError
from manifests.opening import read_file
from manifests.runtime import RuntimeManifest, read_runtime


class Library(Protocol):
    """A library of models; each module of this kind has these functions."""

    def find_class(self, folder: Path, name: str) -> Any:  # noqa: ANN401
        """Import and return a class."""

    def build(self, folder: Path, model_class: Any, dtype: torch.dtype, config_values: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return a model, built with its parameters on meta and its buffers real."""

    def converter(self, model: Any, dtype: torch.dtype) -> Convert:  # noqa: ANN401
        """Return what converts a model's tensors."""


LIBRARIES: dict[str, Library] = {"transformers": transformers_models, "diffusers": diffusers_models}

_PLAIN = (str, int, float, bool, type(None))

_log = logging.getLogger(__name__)


def load_model(
    out: str | Path,
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    read: Way = "auto",
    verify: Check = "auto",
    tp: int | None = None,
    cache: str | Path | None = None,
    build: bool = False,
    split: Mapping[str, Any] | None = None,
    wait_s: float = WAIT_S,
    **config: Any,  # noqa: ANN401 - the configuration's own
) -> Any:  # noqa: ANN401 - the class that the manifest names
    """Load this process's rank of a split model of transformers or diffusers, ready to run.

    Under torchrun the process group is started if there is none. On a CPU and a local disk the parameters are mapped:
    no weight is read before it is used.

    Args:
        out: The folder of the split; or, if one of the next four is given, a checkpoint, of which a cache holds it.
        tp: The split's number of ranks; that of the processes if not given.
        cache: The folder of the cache, which all ranks see; that of ``RESHARD_CACHE`` if not given.
        build: Whether the split is made if the cache does not hold it: once, whatever number of processes asks.
        split: How the split differs from the usual one: fields of `reshard.options.Options`.
        device: Where to load; the CPU if not given.
        group: The ranks that compute together; the default group if not given.
        dtype: Converts the floating-point tensors to this dtype, which copies them; the stored dtypes if not given.
        read: "mmap", "read" or "auto", as for `loader.open_shard`.
        verify: "headers", "full" or "auto", as for `loader.open_shard`.
        wait_s: Seconds that a rank which is ready waits for one that still loads, or that never came. One that ended
            is known at once on the same machine, after `loader.agreement.SILENCE_S` on another one.
        config: Values that replace the configuration's (``attn_implementation="eager"``).

    Raises:
        ManifestError: The folder holds no finished split.
        LoadError: The split does not fit this process, its group, or the model's class; every rank raises, and before
            any collective.
    """
    device = torch.device(device or "cpu")
    wanted = named_dtype(dtype) if isinstance(dtype, str) else dtype
    times, place = Times(), find_place(group)
    if tp is not None or cache is not None or build or split is not None:
        folder, _agreement = locate(Wanted(out, tp, cache, build, split or {}), place, wait_s)
        times.end("cache")
    else:
        folder = Path(out)
    agreement = Agreement(place, wait_s)
    with agreement.refusing(), ExitStack() as undone:
        agreement.open()
        manifest = read_runtime(folder)
        place.check(manifest)
        check_carried(folder, manifest)
        times.end("manifest")
        agreement.arrive(_facts(manifest, place, device, wanted, config))
        times.end("meeting")
        shard = begin_shard(folder, manifest, place.rank, device, read, verify)
        undone.callback(shard.stop)
        agreement.on_refusal = shard.give_up
        times.end("files")
        dtype = wanted or main_dtype(manifest.tensors.values())
        model = build_model(folder, manifest, dtype, dict(config), times)
        agreement.check()
        times.end("class")
        shard.finish()
        times.end("reading")
        _fill(model, manifest, shard, wanted, device)
        times.end("parameters")
        agreement.conclude()
        undone.pop_all()
    times.end("other ranks")
    group = agreement.group(device)
    times.end("group")
    install_hooks(model, manifest, group)
    refuse_unsafe(model, folder)
    if group is not None:
        align_sampling(model, kept(group))
    times.end("hooks")
    _log.info("%s", times)
    return model


def _fill(
    model: Any,  # noqa: ANN401
    manifest: RuntimeManifest,
    shard: Shard,
    wanted: torch.dtype | None,
    device: torch.device,
) -> None:
    """Give a model its shard, converted if a dtype is wanted, and put the rest of it on the device."""
    convert = LIBRARIES[manifest.model.library].converter(model, wanted) if wanted else None
    # The class is built in one dtype; the split has those that are stored.
    attach(model, shard, convert=convert, any_float=True)
    if device.type != "cpu":
        model.to(device)
    check_modules(model, manifest)


def _facts(
    manifest: RuntimeManifest,
    place: Place,
    device: torch.device,
    dtype: torch.dtype | None,
    config: dict[str, Any],
) -> Facts:
    """Return what must be the same on all ranks; values of a configuration as far as they are plain."""
    if place.size == 1:
        return {}
    return {
        "split": f"key {manifest.key}",
        "manifest.json": f"digest {manifest.digest}",
        "version": versions(manifest.model.library),
        "kind of device": device.type,
        "dtype": str(dtype),
        "configuration": str({name: value for name, value in config.items() if isinstance(value, _PLAIN)}),
    }


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        LoadError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"dtype {name!r}: torch has none of that name")
    return dtype


def check_carried(folder: Path, manifest: RuntimeManifest) -> None:
    """Compare the files that the model is built from with those that were carried over.

    Raises:
        LoadError: One is missing or was changed; values for this process go to `load_model` as arguments.
    """
    for name in ("config.json", "generation_config.json"):
        if name not in manifest.carried:
            continue
        try:
            content = read_file(folder / name)
        except OSError as error:
            raise LoadError(f"{folder / name}: {error.strerror}; copy it, or split again") from error
        if xxhash.xxh3_128_hexdigest(content) != manifest.carried[name]:
            raise LoadError(
                f"{folder / name}: was changed after the split; split again, or give the values to load_model"
            )


def build_model(
    folder: Path,
    manifest: RuntimeManifest,
    dtype: torch.dtype,
    config_values: dict[str, Any],
    times: Times,
) -> Any:  # noqa: ANN401
    """Return the model's class, built with its parameters on meta and its buffers real.

    Raises:
        LoadError: It is of neither library, the library is not installed, or it has no such class.
    """
    entry = manifest.model
    if entry.library not in LIBRARIES:
        if manifest.layout == "checkpoint" and entry.type:
            raise LoadError(
                f"{folder}: holds the tensors of {entry.architecture or entry.type} as they are stored (layout "
                "checkpoint), which its class does not have; split again with --layout runtime"
            )
        raise LoadError(
            f"{folder}: {entry.architecture or 'no class named'}: not a split of a model of transformers or diffusers; "
            "build the module and use loader.attach and loader.install_hooks"
        )
    library = LIBRARIES[entry.library]
    model_class = library.find_class(folder, entry.architecture)
    times.end("imports")
    return library.build(folder, model_class, dtype, config_values)
