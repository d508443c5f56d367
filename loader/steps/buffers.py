"""The step on buffers that a module computes when it is built, which no checkpoint holds: cut as its features are."""

from loader.filling import taken
from loader.steps.site import Site, Step
from manifests.errors import LoadError
from manifests.placement import bound_axis


def cut_buffers(site: Site) -> Step:
    """Return the step that gives the module, when it is installed, the rank's part of its buffers along the axis.

    Raises:
        LoadError: No buffer of the module has the axis.
    """
    axis = bound_axis(site.entry.axis)
    cut = {}
    for name in site.module._non_persistent_buffers_set:
        buffer = site.module.get_buffer(name)
        if axis.size in buffer.shape:
            cut[name] = taken(buffer, buffer.shape.index(axis.size), axis, site.mesh, site.rank)
    if not cut:
        raise LoadError(f"{site.label}: has no buffer of {axis.size} entries, which its split expects")
    return Step(attributes=cut)
