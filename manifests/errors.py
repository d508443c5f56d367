"""The one tree of errors, and the exit code of each.

    ReshardError              1  anything below
    ├── CheckpointError       3  the source: broken, incomplete, or of a kind that is not read
    ├── PlanError             4  the plan: unknown, malformed, or not for this model
    │   └── DegreeError       4  the plan is right, but this number of ranks does not divide the model
    ├── OutputError           5  the destination: exists, no space, no permission
    ├── ManifestError         6  a split that is not one, unfinished, or of another version
    │   └── DamageError       7  a split whose bytes are not those that were written
    ├── LoadError             8  a split that does not fit this process, group or model
    └── CheckError            9  a plan under which the ranks compute something else than one process

A message reads ``<thing>: <fact with numbers>; <what would do>``. Exit code 2 is the command line's, for usage.
"""


class ReshardError(Exception):
    """Root of every error that this project raises on purpose."""

    exit_code = 1


class CheckpointError(ReshardError):
    """The source checkpoint is broken, incomplete, or of a kind that is not read."""

    exit_code = 3


class PlanError(ReshardError):
    """The plan is unknown, malformed, or does not fit this model."""

    exit_code = 4


class DegreeError(PlanError):
    """The requested number of ranks does not divide the model.

    Attributes:
        misfits: One line for each kind of tensor that does not divide.
        allowed: The numbers of ranks, ascending, that the same plan allows.
    """

    def __init__(self, message: str, *, misfits: tuple[str, ...] = (), allowed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.misfits = misfits
        self.allowed = allowed


class OutputError(ReshardError):
    """The destination exists already, lacks space, or cannot be written."""

    exit_code = 5


class ManifestError(ReshardError):
    """The folder is no split, is unfinished, or has a format that this version does not read."""

    exit_code = 6


class DamageError(ManifestError):
    """The bytes of a split are not those that were written.

    Attributes:
        findings: One line for each damaged place: file, tensor, byte range.
    """

    exit_code = 7

    def __init__(self, message: str, *, findings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class LoadError(ReshardError):
    """The split does not fit this process, its group or its model."""

    exit_code = 8


class CheckError(ReshardError):
    """The ranks of a plan compute something else than one process.

    Attributes:
        module: The first module that parts; empty for the model itself.
    """

    exit_code = 9

    def __init__(self, message: str, *, module: str = "") -> None:
        super().__init__(message)
        self.module = module
