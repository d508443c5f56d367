"""Run benchmarks one after the other, keep their results, and write the page."""

import argparse
import importlib
import importlib.util
import json
import os
import time

from tools.bench.common import RESULTS, Options, machine, write_page

NAMES = ("split", "load", "pipeline", "forward", "scale")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all that there are if none")
    parser.add_argument("--small", action="store_true", help="models of a few MB, and no page")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each number; 5 if not given")
    parser.add_argument("--page", action="store_true", help="only write the page from the results that are there")
    arguments = parser.parse_args()
    there = [name for name in NAMES if importlib.util.find_spec(f"tools.bench.{name}")]
    if unknown := set(arguments.names) - set(there):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    options = Options(small=arguments.small, rounds=arguments.rounds)
    RESULTS.mkdir(parents=True, exist_ok=True)
    # The peers were compiled when they were installed; ours is at its first start, which is not counted.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in [] if arguments.page else arguments.names or there:
        started = time.perf_counter()
        module = importlib.import_module(f"tools.bench.{name}")
        before = machine()
        result = {"machine": before, "rounds": options.rounds, **module.run(options)}
        result["seconds"] = round(time.perf_counter() - started)
        result["load_after"] = machine()["load"]
        (RESULTS / f"{name}{'-small' if options.small else ''}.json").write_text(json.dumps(result, indent=1) + "\n")
        print("\n".join(module.table(result)), flush=True)
    if not arguments.small:
        write_page([name for name in there if (RESULTS / f"{name}.json").exists()])


if __name__ == "__main__":
    main()
