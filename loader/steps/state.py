"""The sequence: whether the ranks have a part of it each at this moment, shared by the steps of one model."""


class Sequence:
    """Decided anew by every forward of the module that scatters, and read by those that follow.

    Attributes:
        split: Whether hidden states between that module and the last that gathers are a rank's part of the sequence.
    """

    def __init__(self) -> None:
        self.split = False
