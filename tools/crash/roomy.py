"""The command line, for which every disk has room until it is written to."""

import os
from types import SimpleNamespace

from reshard import cli
from reshard.publishing import destination


class _Roomy:
    """The module ``os``, with another answer to one question."""

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def statvfs(self, _path: object) -> SimpleNamespace:
        """Return that there is room."""
        return SimpleNamespace(f_bavail=1 << 40, f_frsize=4096, f_flag=0)


if __name__ == "__main__":
    destination.os = _Roomy()  # type: ignore[assignment]
    cli.main()
