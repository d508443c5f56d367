"""The lines of a manifest: what is long and seldom needed stands on lines of its own.

A line feed stands before and after the value of ``source``, of every tensor's ``parts`` and of every file's
``tensors``, and nowhere else but at the end. To JSON it is white space. A reader that needs little of a large manifest
takes every other line, with the numbers of the lines that it left out in their places, and decodes these when it needs
them.
"""

from typing import Any

import msgspec

from manifests.placement import REPLICATED, Placement

_Maybe = msgspec.Raw | msgspec.UnsetType


class _Tensor(msgspec.Struct, omit_defaults=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    placement: Placement = REPLICATED
    parts: _Maybe = msgspec.UNSET
    unused: bool = False
    cast: str = ""


def encode_in_lines(manifest: Any) -> bytes:  # noqa: ANN401 - a Manifest, whose module imports this one
    """Return a manifest's members in their order, as JSON in lines, without the last line feed."""
    members = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    members["source"] = _on_a_line(manifest.source)
    members["tensors"] = {
        name: _Tensor(
            tensor.dtype,
            tensor.shape,
            tensor.placement,
            _on_a_line(tensor.parts) if tensor.parts else msgspec.UNSET,
            tensor.unused,
            tensor.cast,
        )
        for name, tensor in manifest.tensors.items()
    }
    members["files"] = [
        {name: getattr(file, name) for name in file.__struct_fields__} | {"tensors": _on_a_line(file.tensors)}
        for file in manifest.files
    ]
    return msgspec.json.encode(members)


def _on_a_line(value: object) -> msgspec.Raw:
    return msgspec.Raw(b"\n" + msgspec.json.encode(value) + b"\n")


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
