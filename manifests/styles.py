"""The styles: what a person chooses for a module, as one table that both sides read.

The splitter reads the middle columns (which axis of the weight is cut, what becomes of the bias), the loader implements
the steps named in the last two. To add a style, add a row; a new step name is implemented in `loader.steps`.

    step         before the forward              after it
    slice_input  keep the rank's own features    -
    mask_ids     make ids local, foreign ones 0  -
    all_reduce   -                               sum over the ranks
    all_gather   -                               join the ranks' features

Source: ``transformers/distributed/tensor_parallel.py`` of transformers 5.24 for the names and their meaning.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from manifests.errors import PlanError

LogicalAxis = Literal["out", "in", "vocab", "hidden"]
Bias = Literal["cut", "partial", "whole"]
Before = Literal["", "slice_input", "mask_ids"]
After = Literal["", "all_reduce", "all_gather"]


class Style(NamedTuple):
    """One row of the table.

    Attributes:
        name: The style's name in plans.
        cuts: The logical axis of the module's weight that is divided, or "" for none.
        bias: Whether the bias is cut like the output, held by rank 0 alone, or whole on every rank.
        before: The step on the module's inputs.
        after: The step on the module's output.
        contiguous: Whether the ranks' parts are one contiguous run each, whatever heads or blocks the axis has.
        packed: Whether the axis is blocks, each divided by itself.
    """

    name: str
    cuts: LogicalAxis | Literal[""]
    bias: Bias = "whole"
    before: Before = ""
    after: After = ""
    contiguous: bool = False
    packed: bool = False


STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        #     name                    cuts      bias       before         after
        Style("colwise", "out", "cut", "", ""),
        Style("colwise_gather_output", "out", "cut", "", "all_gather", contiguous=True),
        Style("rowwise", "in", "partial", "", "all_reduce"),
        Style("rowwise_split_input", "in", "partial", "slice_input", "all_reduce", contiguous=True),
        Style("packed_colwise", "out", "cut", "", "", packed=True),
        Style("packed_rowwise", "in", "partial", "", "all_reduce", packed=True),
        Style("embedding_rowwise", "vocab", "whole", "mask_ids", "all_reduce", contiguous=True),
        Style("embedding_colwise", "hidden", "whole", "", "all_gather", contiguous=True),
        Style("moe_tp_experts", "", "whole", "", "all_reduce"),
        Style("all_reduce", "", "whole", "", "all_reduce"),
        Style("replicate", "", "whole", "", ""),
        # Differ from `replicate` only where gradients flow, which they never do here.
        Style("replicated_with_grad_allreduce", "", "whole", "", ""),
    )
}


def style_named(name: str) -> Style:
    """Return a style by its name.

    Raises:
        PlanError: No style has the name; the message lists those that there are.

    >>> style_named("rowwise").after
    'all_reduce'
    """
    if name not in STYLES:
        raise PlanError(f"unknown style {name!r}; known are {', '.join(STYLES)}")
    return STYLES[name]


def axis_dim(axis: LogicalAxis, ndim: int) -> int:
    """Return the stored dimension that a logical axis has in a weight of ``ndim`` dimensions.

    A linear weight is (out, in), an embedding (vocab, hidden), stacked experts (expert, out, in).

    >>> axis_dim("out", 2), axis_dim("out", 3), axis_dim("in", 2), axis_dim("out", 1)
    (0, 1, 1, 0)
    """
    if axis == "vocab":
        return 0
    return max(ndim - 2, 0) if axis == "out" else max(ndim - 1, 0)
