"""The types of transformers without a built-in plan, as docs/coverage.md lists them: ``python -m tools.coverage``."""

import re
from pathlib import Path

import click

from reshard.catalogue import exported

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
LIST = re.compile(r"(?<=## Not planned\n)(.*?```text\n)(.*?)(?=```)", re.DOTALL)
WIDTH = 119


def unplanned_types() -> list[str]:
    """Return the types of the installed transformers that are not in the catalogue."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES.keys() - exported()["types"].keys())


def listed_types() -> list[str]:
    """Return the types that the page lists."""
    found = LIST.search(PAGE.read_text(encoding="utf-8"))
    return found[2].split() if found else []


def wrapped(names: list[str]) -> str:
    """Return names in lines."""
    lines = [""]
    for name in names:
        if len(lines[-1]) + 1 + len(name) > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {name}".lstrip()
    return "\n".join(lines) + "\n"


@click.command()
def main() -> None:
    """Write the list anew."""
    names = unplanned_types()
    text = LIST.sub(lambda found: found[1] + wrapped(names), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    click.echo(f"{PAGE}: {len(names)} types", err=True)


if __name__ == "__main__":
    main()
