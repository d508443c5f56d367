"""What a caller may choose about a split."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manifests.errors import PlanError
from reshard.casting import DTYPES
from reshard.catalogue import PLAN_SOURCES

LAYOUTS = ("runtime", "checkpoint")
AUTO = "auto"
"""In place of a plan: one is proposed."""


class Options(NamedTuple):
    """What a caller may choose.

    Attributes:
        plan: A plan file, the content of one, "auto" for a proposed one, or None for the built-in plan.
        plan_source: Whose built-in plan: "reshard" or "transformers".
        layout: "runtime" for the names and layout of the running model, "checkpoint" for the stored ones.
        revision: Of a hub id.
        subfolder: Of a folder or a hub id.
        variant: Of the file names (``fp16``).
        self_contained: Whether every rank's file holds its own copy of the replicated tensors.
        max_file_nbytes: The most data bytes in one file; 0 for no limit.
        drop_unused: Whether tensors that the model does not use are left out.
        experts: Over how many of the ranks experts are divided; 1 leaves all experts on every rank.
        uneven: What becomes of what the ranks do not divide: "ceil" or "pad" (`reshard.uneven`); empty to refuse it.
        dtype: To which numbers of floating point are converted: "bfloat16", "float16" or "float32"; empty for none.
    """

    plan: Path | str | Mapping[str, Any] | None = None
    plan_source: str = "reshard"
    layout: str = "runtime"
    revision: str = ""
    subfolder: str = ""
    variant: str = ""
    self_contained: bool = False
    max_file_nbytes: int = 0
    drop_unused: bool = False
    experts: int = 1
    uneven: str = ""
    dtype: str = ""

    @property
    def proposes(self) -> bool:
        """Whether the plan is one that is proposed, which is for looking at and for checking, not for splitting."""
        return not isinstance(self.plan, Mapping) and str(self.plan) == AUTO


def refuse_unproved(options: Options, label: str) -> None:
    """Refuse to run a plan that is proposed and that nothing has proved.

    Raises:
        PlanError: The plan is one that is proposed.
    """
    if options.proposes:
        raise PlanError(
            f"{label}: a plan that is proposed is not run unproved; write it to a file "
            "(`reshard plan MODEL --tp N --plan auto`), check it (`reshard check`), and give the file"
        )


def check_options(options: Options) -> None:
    """Refuse an unknown choice.

    Raises:
        PlanError: The layout or the plan source is unknown; the message lists the known ones.
    """
    if options.layout not in LAYOUTS:
        raise PlanError(f"layout {options.layout!r}: unknown; known are {', '.join(LAYOUTS)}")
    if options.dtype and options.dtype not in DTYPES:
        raise PlanError(f"dtype {options.dtype!r}: unknown; known are {', '.join(DTYPES)}")
    if options.uneven == "pad" and options.layout == "checkpoint":
        raise PlanError("uneven 'pad': fills up what runs, and layout 'checkpoint' is not what runs; 'ceil' would do")
    if options.max_file_nbytes < 0:
        raise PlanError(f"max_file_nbytes: {options.max_file_nbytes} is no size; 0 is no limit")
    if options.plan_source not in PLAN_SOURCES:
        raise PlanError(f"plan source {options.plan_source!r}: unknown; known are {', '.join(PLAN_SOURCES)}")
