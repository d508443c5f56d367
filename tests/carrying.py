"""Recipes carried out on numpy arrays: what the parts and links of a tensor say, without the program or the engine."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from manifests.manifest import Link, Part
from manifests.runs import Run


def carry_out(parts: Sequence[Part], shape: tuple[int, ...], sources: Mapping[str, NDArray]) -> NDArray:
    """Return the tensor that is made of the sources, every entry of it exactly once."""
    first = sources[parts[0].source]
    made, written = np.zeros(shape, first.dtype), np.zeros(shape, np.int8)
    for part in parts:
        source = sources[part.source].reshape(part.shape) if part.shape else sources[part.source]
        links = part.links or tuple(_identity(source.shape))
        from_source = sorted((link for link in links if link.src is not None), key=lambda link: link.src)
        into = sorted((link for link in links if link.dst is not None), key=lambda link: link.dst)
        assert [link.src for link in from_source] == list(range(source.ndim))
        assert [link.dst for link in into] == list(range(len(shape)))
        block = source[np.ix_(*(entries(link)[0] for link in from_source))]
        left = [axis for axis, link in enumerate(from_source) if link.dst is not None]
        # Of a dimension that the tensor lacks there is one entry, and one of a dimension that the source lacks.
        block = block.reshape([block.shape[axis] for axis in left])
        block = block.transpose(np.argsort([from_source[axis].dst for axis in left]))
        where = np.ix_(*(entries(link)[1] for link in into))
        made[where] = block.reshape([len(entries(link)[1]) for link in into])
        written[where] += 1
    assert (written == 1).all()
    return made


def _identity(shape: tuple[int, ...]) -> list[Link]:
    return [Link(dim, dim, (Run(0, 0, size),)) for dim, size in enumerate(shape)]


def entries(link: Link) -> tuple[list[int], list[int]]:
    """Return the entries that a link copies, in order: those of the source, and those of the tensor."""
    pairs = [
        (run.src + block * run.src_step + i, run.dst + block * run.dst_step + i)
        for run in link.runs
        for block in range(run.repeat)
        for i in range(run.length)
    ]
    return [src for src, _ in pairs], [dst for _, dst in pairs]
