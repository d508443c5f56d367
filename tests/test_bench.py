"""What the benchmarks measure of a command: its own memory, its bytes, and the calls that move them."""

import sys
from pathlib import Path

import pytest

from tools.bench import scale
from tools.bench.commands import count_calls, measure, parse_calls

MIB = 1 << 20
PYTHON = [sys.executable, "-I", "-S", "-c"]


def test_a_peak_is_the_commands_own() -> None:
    mine = bytearray(b"x") * (256 * MIB)
    held = measure([*PYTHON, "held = bytearray(b'x') * (64 << 20)"])
    assert 64 * MIB < held["peak_nbytes"] < 128 * MIB < len(mine)
    assert 0 < held["cpu_seconds"] <= held["seconds"] * 1.5


def test_the_bytes_of_a_command_and_of_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8 * MIB))
    took = measure(["sh", "-c", f"cat {tmp_path}/a > {tmp_path}/b"])
    assert 8 * MIB <= took["rchar"] < 9 * MIB
    assert 8 * MIB <= took["wchar"] < 9 * MIB


def test_a_command_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="exit code 7"):
        measure(["sh", "-c", "exit 7"])


LINES = """\
11 read(3</usr/lib/python.py>, ""..., 100) = 100
11 pread64(4</m/a.safetensors>, ""..., 1048576, 8) = 1000
12 preadv(5</m/b.safetensors>, [{iov_base=""..., iov_len=64}], 1, 8 <unfinished ...>
11 pwrite64(7</w/.out.partial-1/a>, ""..., 1000, 0) = 900
12 <... preadv resumed>) = 64
12 pread64(5</m/b.safetensors>, "", 64, 72) = 0
12 pread64(9</m/b.safetensors>, 0x1, 64, 72) = -1 EBADF (Bad file descriptor)
11 mmap(NULL, 4096, PROT_READ, MAP_SHARED, 4</m/a.safetensors>, 0) = 0x7f0000000000
11 mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f0000001000
13 copy_file_range(4</m/a.safetensors>, NULL, 7</w/.out.partial-1/a>, NULL, 4096, 0) = 50
13 +++ exited with 0 +++
"""


def test_the_calls_that_strace_tells_of() -> None:
    found = parse_calls(LINES.splitlines(), {"source": Path("/m"), "output": Path("/w")})
    assert found == {
        "source": {"pread64": 1000, "preadv": 64, "mmap": 4096, "copy_file_range": 50},
        "output": {"pwrite64": 900, "copy_file_range": 50},
    }


def test_the_calls_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * MIB))
    found = count_calls(["dd", f"if={tmp_path}/a", f"of={tmp_path}/b", "bs=1M"], {"all": tmp_path})
    if isinstance(found, str):
        pytest.skip(found)
    assert found == {"all": {"read": 3 * MIB, "write": 3 * MIB}}


def test_without_strace_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_calls(["true"], {}) == "no strace here"
    (tmp_path / "strace").write_text("#!/bin/sh\necho 'strace: not permitted' >&2\nexit 1\n")
    (tmp_path / "strace").chmod(0o755)
    assert count_calls(["true"], {}) == "strace: not permitted"


def test_the_line_of_times_over_sizes() -> None:
    taken = {1.0: {"seconds": [1.5, 9.0, 1.5]}, 2.0: {"seconds": [2.5]}, 4.0: {"seconds": [4.5]}}
    assert scale._line("Time", taken, "seconds") == "Time is 0.50 s and 1.00 s a GiB, within 0 %."
