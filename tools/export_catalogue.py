"""Export what the splitter must know about each model type from the installed transformers, as JSON.

The output is data for ``reshard.catalogue``: plans, where the base model and the sub-models sit in each class, ties,
default sizes, and how stored names become those of the running model. Nothing here decides how a tensor is cut. The
work is done in ``tools/catalogue``; every class's plan is checked against the one that transformers makes.
"""

import json
import os
from pathlib import Path
from typing import Any

import click

OUT = Path(__file__).parent.parent / "reshard" / "catalogue" / "transformers.json"
WIDTH = 150


def dump(content: Any, indent: int = 0) -> str:
    """Return JSON with sorted keys, in which whatever fits into a line is one.

    >>> print(dump({"b": [1, 2], "a": {}}))
    {"a": {}, "b": [1, 2]}
    """
    line = json.dumps(content, sort_keys=True, ensure_ascii=False)
    if len(line) + indent <= WIDTH or not isinstance(content, dict | list):
        return line
    inner = " " * (indent + 1)
    if isinstance(content, dict):
        items = [f"{json.dumps(key)}: {dump(content[key], indent + 1)}" for key in sorted(content)]
    else:
        items = [dump(item, indent + 1) for item in content]
    opening, closing = "{}" if isinstance(content, dict) else "[]"
    return f"{opening}\n" + ",\n".join(inner + item for item in items) + f"\n{' ' * indent}{closing}"


@click.command()
@click.option("--out", default=OUT, show_default=True, type=click.Path(dir_okay=False, path_type=Path), help="File.")
def main(out: Path) -> None:
    """Write the catalogue of the installed transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from tools.catalogue.entries import export_catalogue

    transformers.logging.set_verbosity_error()
    catalogue = export_catalogue()
    out.write_text(dump(catalogue) + "\n", encoding="utf-8")
    click.echo(f"{out}: {len(catalogue['types'])} types of {catalogue['source']}", err=True)


if __name__ == "__main__":
    main()
