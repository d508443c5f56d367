"""``reshard cache``: what a cache holds, whether it is whole, and what may go."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from reshard.output import output_options, print_result, print_summary, progress_bar
from reshard.usage import byte_size, duration, options, whole_number

if TYPE_CHECKING:
    from reshard.cache.listing import Item
    from reshard.lines import Facts
    from reshard.planning import SplitPlan

VARIABLE = "RESHARD_CACHE"

cache_option = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    envvar=VARIABLE,
    help=f"Find or make it in this cache; {VARIABLE}.",
)
_folder = click.option(
    "--cache",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    envvar=VARIABLE,
    required=True,
    help=f"Folder of the cache; {VARIABLE} if not given.",
)
_limits = options(
    click.option(
        "--max-size", type=byte_size, metavar="SIZE", help="Remove what was unused for longest, down to SIZE."
    ),
    click.option("--max-age", type=duration, metavar="TIME", help="Remove what was made longer ago: 12h, 30d, 8w."),
    click.option("--unused", type=duration, metavar="TIME", help="Remove what was last wanted longer ago."),
    click.option(
        "--grace", type=duration, default="1h", metavar="TIME", help="Keep what was made or wanted since; 1h."
    ),
)


def chosen_cache(ctx: click.Context, *, named: bool, force: bool) -> Path | None:
    """Return the cache in which a split is to be found, if any: an output's name goes before the variable."""
    folder: Path | None = ctx.params["cache"]
    if folder is None or (named and ctx.get_parameter_source("cache") is ParameterSource.ENVIRONMENT):
        return None
    if named:
        raise click.UsageError("-o names an output, --cache a folder in which the name follows from the key; give one.")
    if force:
        raise click.UsageError("--force replaces an output of a given name; `reshard cache rm` removes from a cache.")
    return folder


def provide(
    planned: "SplitPlan",
    folder: Path,
    name: str,
    *,
    quiet: bool,
    **how: Any,  # noqa: ANN401 - what carry_out takes
) -> "Facts":
    """Find a split in a cache or make it there; return where it is, and whether it was there."""
    from reshard.cache.building import provide

    def notice(line: str) -> None:
        print_summary([f"reshard: {line}"], quiet=quiet)

    with progress_bar("split", quiet=quiet) as progress:
        path, found = provide(planned, folder, name, notice=notice, progress=progress, **how)
    return {"out": str(path), "found": found}


def format_found(facts: "Facts") -> Iterator[str]:
    """Yield the line on a split that was there."""
    yield f"{facts['source']}: found in the cache, nothing was made; tp {facts['world_size']}, key {facts['key']}"


@click.group(no_args_is_help=True)
def cache() -> None:
    """Show, verify and tidy up the splits of a cache."""


@cache.command("ls")
@_folder
@output_options
def list_items(folder: Path, quiet: bool, as_json: bool) -> None:
    """List splits and unfinished ones: size, age, last use, who uses them."""
    from reshard.cache import listing, reporting

    facts = reporting.build_listing(folder, listing.items_of(folder), time.time())
    print_result(facts, reporting.format_listing(facts), as_json=as_json)
    print_summary(reporting.format_total(facts), quiet=quiet or as_json)


@cache.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_folder
@click.option("--jobs", type=whole_number, metavar="N", default="2", help="Worker threads; 2 if not given.")
@output_options
def verify(names: Sequence[str], folder: Path, jobs: int, quiet: bool, as_json: bool) -> None:
    """Check sizes, hashes and coverage of every split, or of those that are named."""
    from manifests.errors import DamageError, ManifestError
    from reshard import lines, report, verifying

    found, problems = [], []
    for path in [item.path for item in _chosen(folder, names) if item.state in ("whole", "damaged", "unreadable")]:
        try:
            with progress_bar(path.name, quiet=quiet) as progress:
                found.append(report.build_verified(path.name, verifying.verify(path, jobs=jobs, progress=progress)))
        except ManifestError as error:
            problems.append(error)
            found.append({"out": path.name, "problem": str(error)})
    text = [line for one in found for line in ([one["problem"]] if "problem" in one else lines.format_verified(one))]
    print_result({"cache": str(folder), "items": found}, text, as_json=as_json)
    if problems:
        kind = DamageError if any(isinstance(error, DamageError) for error in problems) else ManifestError
        raise kind(f"{folder}: {len(problems)} of {len(found)} splits are not whole; `reshard cache rm` removes them")


@cache.command()
@_folder
@_limits
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@output_options
def prune(
    folder: Path,
    max_size: int | None,
    max_age: float | None,
    unused: float | None,
    grace: float,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Remove splits by size, age and use, and what is damaged or abandoned.

    What a process of this machine uses stays, and so does what is being made.
    """
    from manifests.errors import OutputError
    from reshard.cache import listing, pruning, reporting

    now = time.time()
    pruned = pruning.choose(listing.items_of(folder), pruning.Limits(max_size, max_age, unused, grace), now)
    going = [item for item, _ in pruned.going]
    gone, problems = (going, []) if dry_run else pruning.remove_items(going)
    facts = reporting.build_pruned(folder, pruned, gone, now, dry_run=dry_run)
    print_result(facts, [item.name for item in gone], as_json=as_json)
    print_summary(reporting.format_pruned(facts), quiet=quiet or as_json)
    if problems:
        raise OutputError("\n".join(problems))


@cache.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_folder
@output_options
def rm(names: Sequence[str], folder: Path, quiet: bool, as_json: bool) -> None:
    """Remove the splits that are named, unless a process of this machine uses them."""
    from manifests.errors import OutputError
    from reshard.cache import pruning

    chosen = _chosen(folder, names)
    if held := [f"{item.path}: {reason}" for item in chosen if (reason := pruning.reason_in_use(item))]:
        raise OutputError("\n".join([*held, "nothing was removed"]))
    gone, problems = pruning.remove_items(chosen)
    removed = [item.name for item in gone]
    print_result({"cache": str(folder), "removed": removed}, removed, as_json=as_json)
    if problems:
        raise OutputError("\n".join(problems))


def _chosen(folder: Path, names: Sequence[str]) -> "list[Item]":
    """Return the items of a cache that are named, by their names or paths; all of them if none is named."""
    from manifests.errors import OutputError
    from reshard.cache.listing import items_of

    items = {item.name: item for item in items_of(folder)}
    if not names:
        return [*items.values()]
    wanted = [
        path.name if path.parent.resolve() == folder.resolve() else name for name in names if (path := Path(name))
    ]
    if unknown := [name for name in wanted if name not in items]:
        raise OutputError(f"{folder}: holds no {', '.join(unknown)}; `reshard cache ls` lists what it holds")
    return [items[name] for name in dict.fromkeys(wanted)]
