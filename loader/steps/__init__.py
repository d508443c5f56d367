"""The steps that the styles name (`manifests.styles`): what happens to a module's inputs and to its output.

Everything that can be known before the first call is computed when a step is made. Steps act on plain local tensors.
"""

from collections.abc import Callable, Mapping

from loader.steps.arguments import take_inputs
from loader.steps.buffers import cut_buffers
from loader.steps.features import all_gather, all_reduce, divide_input, gather_input, slice_input
from loader.steps.ids import mask_ids
from loader.steps.norms import group_rms_norm, l2_norm, layer_norm, rms_norm
from loader.steps.parts import gather_sequence, reduce_scatter_sequence, scatter_sequence
from loader.steps.routes import route_local
from loader.steps.site import Site, Step
from loader.steps.state import Sequence
from manifests.errors import LoadError

STEPS: Mapping[str, Callable[[Site], Step]] = {
    "take_inputs": take_inputs,
    "slice_input": slice_input,
    "gather_input": gather_input,
    "divide_input": divide_input,
    "mask_ids": mask_ids,
    "route_local": route_local,
    "scatter_sequence": scatter_sequence,
    "rms_norm": rms_norm,
    "group_rms_norm": group_rms_norm,
    "l2_norm": l2_norm,
    "layer_norm": layer_norm,
    "cut_buffers": cut_buffers,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter_sequence": reduce_scatter_sequence,
    "gather_sequence": gather_sequence,
}


def make_step(name: str, site: Site) -> Step:
    """Return a step for the module of a site.

    Raises:
        LoadError: There is no such step, or the module is not of a kind that it is for.
    """
    if name not in STEPS:
        raise LoadError(f"the split names a step {name!r}, which this loader does not have; it has {', '.join(STEPS)}")
    return STEPS[name](site)


__all__ = ["STEPS", "Sequence", "Site", "Step", "make_step"]
