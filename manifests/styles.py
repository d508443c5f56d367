"""The styles: what a person chooses for a module, as one table that both sides read.

The splitter reads the middle columns (which axis of the weight is cut, what becomes of the bias), the loader implements
the steps named in the last two. To add a style, add a row; a new step name is implemented in `loader.steps`. A style
that is one user's is a class instead (`manifests.strategy`).

    step                     before the forward                           after it
    slice_input              keep the rank's own features                 -
    gather_input             join the ranks' features                     -
    divide_input             divide by the number of ranks                -
    mask_ids                 make ids local, foreign ones 0               clear the rows of foreign ids
    route_local              keep the routes to the rank's own experts    -
    scatter_sequence         keep the rank's part of the sequence         -
    rms_norm                 note the mean square of all ranks' features  norm by it instead of the rank's own
    group_rms_norm           the same, of the features of a group         the same
    l2_norm                  the same, of the sum of squares              the same
    layer_norm               note the mean and variance of all ranks'     norm by them instead of the rank's own
    cut_buffers              - (what is computed, not stored, is cut once, when the step is installed)
    all_reduce               -                                            sum over the ranks
    all_gather               -                                            join the ranks' features
    reduce_scatter_sequence  -                                            sum, keep the rank's part of the sequence
    gather_sequence          -                                            join the ranks' parts of the sequence

Source: ``transformers/distributed/tensor_parallel.py`` and ``expert_parallel.py`` of transformers 5.24 for the names
and their meaning; ``colwise_gather_input``, ``sequence_scatter``, ``rowwise_reduce_scatter``, ``rowwise_once``,
``partial``, ``cut_buffers``, ``all_gather`` as a style and the norms are ours, and ``sequence_parallel``, which does
nothing there, divides the sequence here.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from manifests.errors import PlanError
from manifests.strategy import Strategy, find_strategy, writes

LogicalAxis = Literal["out", "in", "vocab", "hidden", "expert"]
Bias = Literal["cut", "partial", "whole"]
Before = Literal[
    "",
    "slice_input",
    "gather_input",
    "divide_input",
    "mask_ids",
    "route_local",
    "scatter_sequence",
    "rms_norm",
    "group_rms_norm",
    "l2_norm",
    "layer_norm",
    "cut_buffers",
    "own",
]
After = Literal["", "all_reduce", "all_gather", "reduce_scatter_sequence", "gather_sequence", "own"]


class Style(NamedTuple):
    """One row of the table.

    Attributes:
        name: The style's name in plans.
        cuts: The logical axis of the module's weight that is divided, or "" for none.
        bias: Whether the bias is cut like the output, held by rank 0 alone, or whole on every rank.
        before: The step on the module's inputs; "own" if it is the strategy's, or on its forward.
        after: The step on the module's output; "own" if it is the strategy's.
        contiguous: Whether the ranks' parts are one contiguous run each, whatever heads or blocks the axis has.
        packed: Whether the axis is blocks, each divided by itself.
        once: Whether, of the ranks that have copies of a part, the first alone counts in the sum.
        own: The user's class that the row was made from.
    """

    name: str
    cuts: LogicalAxis | Literal[""]
    bias: Bias = "whole"
    before: Before = ""
    after: After = ""
    contiguous: bool = False
    packed: bool = False
    once: bool = False
    own: type[Strategy] | None = None


STYLES: Mapping[str, Style] = {
    style.name: style
    for style in (
        #     name                    cuts      bias       before         after
        Style("colwise", "out", "cut", "", ""),
        Style("colwise_gather_output", "out", "cut", "", "all_gather", contiguous=True),
        Style("colwise_rep", "out", "cut", "", "all_gather", contiguous=True),
        Style("colwise_gather_input", "out", "cut", "gather_input", ""),
        Style("rowwise", "in", "partial", "", "all_reduce"),
        Style("rowwise_once", "in", "partial", "", "all_reduce", once=True),
        Style("rowwise_split_input", "in", "partial", "slice_input", "all_reduce", contiguous=True),
        Style("rowwise_rep", "in", "partial", "slice_input", "all_reduce", contiguous=True),
        Style("rowwise_reduce_scatter", "in", "partial", "", "reduce_scatter_sequence"),
        Style("packed_colwise", "out", "cut", "", "", packed=True),
        Style("packed_rowwise", "in", "partial", "", "all_reduce", packed=True),
        Style("embedding_rowwise", "vocab", "whole", "mask_ids", "all_reduce", contiguous=True),
        Style("embedding_colwise", "hidden", "whole", "", "all_gather", contiguous=True),
        Style("grouped_gemm", "expert", "cut", "", "", contiguous=True),
        Style("ep_dispatch_experts", "", "whole", "route_local", "all_reduce"),
        Style("moe_tp_experts", "", "whole", "", "all_reduce"),
        Style("moe_identity_expert", "", "whole", "divide_input", ""),
        Style("all_reduce", "", "whole", "", "all_reduce"),
        Style("all_gather", "", "whole", "", "all_gather"),
        Style("sequence_scatter", "", "whole", "scatter_sequence", ""),
        Style("sequence_parallel", "", "whole", "", "gather_sequence"),
        Style("rms_norm", "out", "cut", "rms_norm", ""),
        Style("group_rms_norm", "out", "cut", "group_rms_norm", ""),
        Style("l2_norm", "", "whole", "l2_norm", ""),
        Style("layer_norm", "out", "cut", "layer_norm", ""),
        Style("cut_buffers", "", "whole", "cut_buffers", ""),
        Style("partial", "", "partial", "", ""),
        Style("replicate", "", "whole", "", ""),
        # Three that differ from `replicate` only where gradients flow or parameters are DTensors: never here.
        Style("replicated_with_grad_allreduce", "", "whole", "", ""),
        Style("mla_kv_a_proj", "", "whole", "", ""),
        Style("local_params", "", "whole", "", ""),
    )
}

_INSTEAD = {
    "ep_router": "was removed from transformers; give the experts ep_dispatch_experts and leave the router whole",
    "deepgemm_megamoe": (
        "is one kernel that exchanges tokens itself; "
        "give the experts ep_dispatch_experts and their parameters grouped_gemm"
    ),
    "gather": "is of older versions of transformers; give the experts moe_tp_experts",
    "local": "is of older versions of transformers; give the experts' parameters colwise, packed_colwise or rowwise",
    "local_colwise": "is of older versions of transformers; use colwise",
    "local_rowwise": "is of older versions of transformers; use rowwise, and moe_tp_experts on the experts",
    "local_packed_rowwise": "is of older versions of transformers; use packed_rowwise, moe_tp_experts on the experts",
}
"""What to use in place of names that transformers removed, or keeps for one kernel."""


def resolve_style(name: str) -> Style:
    """Return the style that a name in a plan means: a row of the table, or one made from a strategy of a user's own.

    Raises:
        PlanError: There is none; the message says what to use instead, or lists those that there are. Or a strategy
            cannot be imported, or is not one.

    >>> resolve_style("rowwise").after
    'all_reduce'
    """
    if name in STYLES:
        return STYLES[name]
    strategy = find_strategy(name)
    if strategy is not None:
        return _row(name, strategy)
    if advice := _INSTEAD.get("deepgemm_megamoe" if "megamoe" in name else name):
        raise PlanError(f"style {name!r} {advice}")
    raise PlanError(
        f"unknown style {name!r}; known are {', '.join(STYLES)}, "
        "or a strategy of your own: its package.module:Name, or the name under which it was registered"
    )


def _row(name: str, strategy: type[Strategy]) -> Style:
    for attribute, known in (
        ("cuts", ("", *get_args(LogicalAxis))),
        ("bias", get_args(Bias)),
        ("before", get_args(Before)),
        ("after", get_args(After)),
    ):
        value = getattr(strategy, attribute)
        if not writes(strategy, attribute) and (value not in known or value == "own"):
            shown = ", ".join(repr(choice) for choice in known if choice != "own")
            raise PlanError(f"strategy {name}: {attribute} is {value!r}; known are {shown}")
    row: Any = strategy
    hooks = [method for method in ("before", "around", "forward") if writes(strategy, method)]
    return Style(
        name=name,
        cuts=row.cuts,
        bias=row.bias,
        before=row.before if row.before and "before" not in hooks else "own" if hooks else "",
        after="own" if writes(strategy, "after") else strategy.after,
        contiguous=strategy.contiguous,
        packed=strategy.packed,
        own=strategy,
    )


def axis_dim(axis: LogicalAxis, ndim: int) -> int:
    """Return the stored dimension that a logical axis has in a weight of ``ndim`` dimensions.

    A linear weight is (out, in), an embedding (vocab, hidden), stacked experts (expert, out, in).

    >>> axis_dim("out", 2), axis_dim("out", 3), axis_dim("in", 2), axis_dim("out", 1), axis_dim("expert", 3)
    (0, 1, 1, 0, 0)
    """
    if axis in ("vocab", "expert"):
        return 0
    return max(ndim - 2, 0) if axis == "out" else max(ndim - 1, 0)
