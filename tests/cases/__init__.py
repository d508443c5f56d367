"""Small checkpoints after real bug reports, each with what is right: the bytes of every rank, or a refusal.

One module a kind. The tensors count upwards, so that any wrong slice shows, and what a rank must hold is written down
as ranges of rows or columns, by hand.
"""

from tests.cases.case import Case
from tests.cases.experts import EXPERTS
from tests.cases.folders import FOLDERS
from tests.cases.formats import FORMATS
from tests.cases.kinds import KINDS
from tests.cases.slicing import SLICING

CASES: dict[str, Case] = {case.name: case for case in (*SLICING, *FORMATS, *FOLDERS, *EXPERTS, *KINDS)}

__all__ = ["CASES", "Case"]
