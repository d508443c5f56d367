"""Mapping a rank file: tensors that are views of the file's pages, or of one copy of them on a device.

On a CPU a mapping is private: nothing is read before it is used, clean pages are shared by the processes of a machine,
and a parameter that is written to gets a page of its own.
"""

import mmap
from pathlib import Path

import torch
import xxhash

from manifests.dtypes import atom
from manifests.errors import CheckpointError, LoadError
from manifests.header import read_header
from manifests.manifest import Extent, Manifest, SplitFile

_MAP_NORESERVE = 0x4000  # linux/mman.h; Python's mmap names it from 3.13 on

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype.

    Raises:
        LoadError: torch has none.
    """
    if dtype not in TORCH_DTYPES:
        raise LoadError(f"torch has no dtype for {dtype}; read the rank file with another library")
    return TORCH_DTYPES[dtype]


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that torch gives a tensor: it counts two F4 elements as one.

    >>> torch_shape("F4", (4, 8)), torch_shape("F32", (4, 8))
    ((4, 4), (4, 8))
    """
    per_atom, _ = atom(dtype)
    return (*shape[:-1], shape[-1] // per_atom) if shape and per_atom > 1 else shape


class MappedFile:
    """A rank file as one block of bytes, on the CPU or copied to a device."""

    def __init__(self, folder: Path, file: SplitFile, manifest: Manifest, device: torch.device) -> None:
        self.file = file
        check_rank_file(folder, file, manifest)
        data_nbytes = file.nbytes - file.data_offset
        if data_nbytes == 0:
            self._block = torch.empty(0, dtype=torch.uint8, device=device)
            return
        with (folder / file.name).open("rb") as stream:
            pages = mmap.mmap(
                stream.fileno(),
                file.nbytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        block = torch.frombuffer(pages, dtype=torch.uint8, offset=file.data_offset, count=data_nbytes)
        self._block = block if device.type == "cpu" else block.to(device)

    def tensor(self, dtype: str, shape: tuple[int, ...], extent: Extent) -> torch.Tensor:
        """Return a tensor of the file as a view.

        Raises:
            LoadError: torch has no such dtype.
        """
        view = self._block[extent.offset : extent.offset + extent.nbytes]
        return view.view(torch_dtype(dtype)).view(torch_shape(dtype, shape))


def check_rank_file(folder: Path, file: SplitFile, manifest: Manifest) -> None:
    """Compare a file's size and header with the manifest, before it is mapped.

    Raises:
        LoadError: It is missing, short, long, of another split, or not the file that was written.
    """
    path = folder / file.name
    try:
        actual = path.stat().st_size
        if actual != file.nbytes:
            raise LoadError(f"{path}: {actual} bytes, {file.nbytes} expected; split again or copy the file again")
        header = read_header(path)
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; copy it, or split again") from error
    except (OSError, CheckpointError) as error:
        raise LoadError(f"{path}: cannot be used: {error}") from error
    key = (header.metadata or {}).get("reshard.key", "none")
    if key != manifest.key:
        raise LoadError(f"{path}: belongs to another split: its key is {key}, the manifest's {manifest.key}")
    if xxhash.xxh3_128_hexdigest(header.raw) != file.header:
        raise LoadError(f"{path}: its header is not the one that was written")
