"""The command line with a fault: FAULT is what happens to process FAULT_RANK once it has written its files."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from manifests.errors import OutputError
from reshard import cli
from reshard.torchrun import meeting, together

meeting.START_LIMIT_S = float(os.environ.get("START_LIMIT_S", "30"))
meeting.FOLLOW_GRACE_S = 1.0
meeting.LEAD_GRACE_S = 0.5
write_files = together.write_files


def write_and_fail(planned: Any, program: Any, folder: Path, **how: Any) -> Any:
    hashes = write_files(planned, program, folder, **how)
    if os.environ.get("FAULT_RANK") == os.environ["RANK"]:
        fault = os.environ["FAULT"]
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "error":
            raise OutputError("the disk: is full\n  by 3 bytes")
        if fault == "bug":
            raise ZeroDivisionError("by 0")
        if fault == "os":
            raise OSError(28, "No space left on device", "the file")
        time.sleep(60)
    return hashes


if __name__ == "__main__":
    together.write_files = write_and_fail  # type: ignore[assignment]
    cli.main()
