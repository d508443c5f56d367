"""Output: what commands print. Results go to stdout, progress and summaries to stderr."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from reshard.usage import options, print_json


def print_result(facts: Mapping[str, Any], text: Iterable[str], *, as_json: bool) -> None:
    """Print what a command is for: its facts as JSON, or as lines of text."""
    if as_json:
        print_json(facts)
    else:
        for line in text:
            click.echo(line)


def print_summary(text: Iterable[str], *, quiet: bool) -> None:
    """Print what a person may want to know besides."""
    if not quiet:
        for line in text:
            click.echo(line, err=True)


@contextmanager
def progress_bar(label: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Give what the library calls with the bytes done and their total: a bar, where stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def hush(ctx: click.Context, param: click.Parameter | None, quiet: bool) -> bool:
    """Keep the hub's library from showing progress, as the callback of an option or called by itself."""
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return quiet


output_options = options(
    click.option("-q", "--quiet", is_flag=True, callback=hush, help="No progress and no summary on stderr."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; errors too, on stderr."),
)
