"""Runs a command and prints what it took, as JSON: the last line of what is printed.

A process's peak counts what it had before it became the command: the memory of whoever started it. So this is a process
of its own (`tools.bench.commands`), started as ``python -I -S``, and imports so little that what it has is less than
any command needs.
"""

import json
import os
import sys
import time


def main() -> None:
    """Run what the command line says, its results thrown away."""
    command = sys.argv[1:]
    nowhere = (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)
    started = time.perf_counter()
    process = os.posix_spawnp(command[0], command, os.environ, file_actions=[nowhere])
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    seconds = time.perf_counter() - started
    # It has ended, and is still there to be asked.
    with open(f"/proc/{process}/io") as counts:  # noqa: PTH123 - pathlib is large
        moved = {name: int(count) for name, count in (line.split(":") for line in counts)}
    _, status, usage = os.wait4(process, 0)
    took = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_nbytes": usage.ru_maxrss << 10,
    }
    print(json.dumps({**took, **moved}))


if __name__ == "__main__":
    main()
