"""The step on buffers that a module computes when it is built, which no checkpoint holds: cut as its features are."""

import torch

from loader.steps.site import Site, Step
from manifests.errors import LoadError
from manifests.layout import rank_runs
from manifests.placement import bound_axis
from manifests.runs import expand


def cut_buffers(site: Site) -> Step:
    """Return the step that gives the module, when it is installed, the rank's part of its buffers along the axis.

    Raises:
        LoadError: No buffer of the module has the axis.
    """
    axis = bound_axis(site.entry.axis)
    spans = expand(rank_runs(axis, site.mesh, site.rank))
    chosen = torch.cat([torch.arange(src, src + length) for src, _, length in spans])
    cut = {}
    for name in site.module._non_persistent_buffers_set:
        buffer = site.module.get_buffer(name)
        if axis.size in buffer.shape:
            cut[name] = buffer.index_select(buffer.shape.index(axis.size), chosen.to(buffer.device))
    if not cut:
        raise LoadError(f"{site.label}: has no buffer of {axis.size} entries, which its split expects")
    return Step(attributes=cut)
