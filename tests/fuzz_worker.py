"""Atheris: ``python -m tests.fuzz_worker FOLDER SECONDS TARGET...``. The first byte of an input chooses its target."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["manifests", "reshard", "tests.fuzz_targets"]):
    from tests.bounds import SECONDS, attempt
    from tests.fuzz_targets import build_targets
    from tests.mutations import TEXTS


def main() -> None:
    folder, (seconds, *names) = Path(sys.argv[1]), sys.argv[2:]
    built = build_targets(folder)
    targets = [built[name] for name in names]
    (folder / "corpus").mkdir()
    for at, target in enumerate(targets):
        (folder / "corpus" / f"seed-{at}").write_bytes(bytes([at]) + target.seed)
    words = {text.encode("utf-8", "replace") for text in TEXTS if 1 < len(text) < 60}
    escaped = ("".join(map("\\x{:02x}".format, word)) for word in words)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in escaped))

    def run(content: bytes) -> None:
        target = targets[content[0] % len(targets)] if content else targets[0]
        cost = attempt(lambda: target.read(content[1:]))
        # Instrumented code is some ten times slower.
        if cost.seconds > 10 * SECONDS:
            raise RuntimeError(f"{cost.seconds} seconds for {len(content)} bytes")

    options = [
        f"-max_total_time={seconds}",
        "-timeout=60",
        "-rss_limit_mb=2048",
        f"-max_len={max(4096, *(2 * len(target.seed) for target in targets))}",
        "-seed=1",
        "-print_final_stats=1",
        f"-dict={folder / 'words'}",
        f"-artifact_prefix={folder}/",
        str(folder / "corpus"),
    ]
    atheris.Setup([sys.argv[0], *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
