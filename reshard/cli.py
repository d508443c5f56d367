"""The command line: parses, makes one call of the library, prints.

Results go to stdout, progress, summaries and errors to stderr. ``reshard MODEL`` is the command; the others have names.
Little is imported here, so that ``--help`` is quick; a command imports what it needs.
"""

from pathlib import Path
from time import perf_counter
from typing import Any

import click

from reshard import __version__, cache_cli
from reshard.output import hush, output_options, print_result, print_summary, progress_bar
from reshard.torchrun.processes import read_environment
from reshard.usage import EXIT_CODES, ModelGroup, byte_size, options, whole_number

_EPILOG = f"""\b
Examples:
  reshard meta-llama/Llama-3.1-8B --tp 4 -o llama-tp4
  reshard ./mixtral --tp 8 --dry-run
  reshard verify llama-tp4 && reshard merge llama-tp4 llama-again

\b
Exit codes:
  0  done; 1 a fault of reshard; 2 wrong usage; 130 interrupted
{EXIT_CODES}"""


_PATH = click.Path(path_type=Path)
_tp = click.option("--tp", type=whole_number, metavar="N", required=True, help="Number of ranks.")
_force = click.option("--force", is_flag=True, help="Replace an older output of that name.")
_resume = click.option(
    "--no-resume",
    "resume",
    flag_value=False,
    default=True,
    help="Start over; do not go on with what a killed run made.",
)
_jobs = click.option("--jobs", type=whole_number, metavar="N", default="2", help="Worker threads; 2 if not given.")
_memory = click.option(
    "--memory", type=byte_size, default="256MiB", metavar="SIZE", help="Memory to stay within; 256MiB if not given."
)
_hub_options = options(
    click.option("--revision", metavar="REV", default="", help="Branch, tag or commit of a hub id."),
    click.option("--subfolder", metavar="NAME", default="", help="Folder in MODEL that holds the weights."),
    click.option("--variant", metavar="NAME", default="", help="Variant in the files' names, such as fp16."),
)
_plan_options = options(
    click.option("--plan", type=_PATH, metavar="FILE", help="Plan of your own, TOML or JSON; auto proposes one."),
    click.option(
        "--plan-source",
        type=click.Choice(["reshard", "transformers"]),
        metavar="NAME",
        default="reshard",
        help="Built-in plan: reshard's, or that of transformers.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["runtime", "checkpoint"]),
        metavar="NAME",
        default="runtime",
        help="Names and layout: runtime, or checkpoint as stored.",
    ),
    click.option(
        "--ep", "experts", type=whole_number, metavar="N", default="1", help="Divide experts over N of the ranks."
    ),
    click.option(
        "--uneven",
        type=click.Choice(["ceil", "pad"]),
        metavar="NAME",
        callback=lambda _ctx, _param, name: name or "",
        help="What N does not divide: ceil cuts shorter parts, pad fills them up.",
    ),
    click.option("--self-contained", is_flag=True, help="Give every rank its own copy of whole tensors."),
    click.option(
        "--max-file-size",
        "max_file_nbytes",
        type=byte_size,
        default="0",
        metavar="SIZE",
        help="Most data in one file: bytes, 4GB, 500MiB.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        metavar="NAME",
        callback=lambda _ctx, _param, name: name or "",
        help="Convert to bfloat16, float16 or float32.",
    ),
    click.option("--drop-unused", is_flag=True, help="Leave out what the model does not use."),
    _hub_options,
)


@click.group(
    cls=ModelGroup,
    epilog=_EPILOG,
    options_metavar="MODEL --tp N [-o OUT] [OPTIONS]",
    subcommand_metavar="| COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Split the safetensors of MODEL, a folder or a hub id, into files for ranks."""
    # Under torchrun all processes share a split; every other command is left to process 0.
    ctx, processes = click.get_current_context(), read_environment()
    if processes.follows and ctx.invoked_subcommand != "split":
        click.echo(f"reshard: process {processes.rank}: leaves {ctx.invoked_subcommand} to process 0", err=True)
        ctx.exit()


main.add_command(cache_cli.cache)


@main.command(hidden=True, options_metavar="--tp N [-o OUT] [OPTIONS]")
@click.argument("model")
@_tp
@click.option("-o", "--out", type=_PATH, metavar="OUT", help="Folder to make; MODEL-tpN if not given.")
@cache_cli.cache_option
@click.option("--dry-run", is_flag=True, help="Only tell what each rank will hold.")
@click.option("--whole", multiple=True, metavar="NAME", help="Part of a pipeline that stays whole; may be repeated.")
@click.option("--write-plan", type=_PATH, metavar="FILE", help="Where --plan auto writes; OUT-plan.toml if not given.")
@_force
@_resume
@_plan_options
@_jobs
@_memory
@output_options
@click.version_option(__version__, prog_name="reshard")
def split(
    model: str,
    tp: int,
    out: Path | None,
    cache: Path | None,
    dry_run: bool,
    whole: tuple[str, ...],
    write_plan: Path | None,
    force: bool,
    resume: bool,
    jobs: int,
    memory: int,
    quiet: bool,
    as_json: bool,
    **chosen: Any,  # noqa: ANN401 - the fields of Options
) -> None:
    """Split the checkpoint MODEL, a folder or a hub id, for tensor parallelism."""
    started = perf_counter()
    from reshard import lines, report, splitting
    from reshard.cache.entries import entry_name
    from reshard.options import Options
    from reshard.pipelines.finding import is_pipeline
    from reshard.planning import default_output
    from reshard.torchrun import together

    processes, ctx = read_environment(), click.get_current_context()
    cache = cache_cli.chosen_cache(ctx, named=out is not None, force=force)
    if processes.follows:
        if dry_run or cache is not None:
            return
        quiet = hush(ctx, None, True)
    how: dict[str, Any] = {"jobs": jobs, "memory": memory}
    if is_pipeline(model, Options(**chosen)):
        from reshard.pipelines import commands

        if cache is not None:
            raise click.UsageError("a pipeline has no cache; its parts do (--subfolder NAME).")
        if not processes.follows:
            how |= {"force": force, "quiet": quiet, "as_json": as_json}
            commands.split(model, tp, out, whole, chosen, dry_run=dry_run, **how)
        return
    if whole:
        raise click.UsageError("--whole names parts of a pipeline; MODEL is none.")
    planned = splitting.plan(model, tp=tp, **chosen)
    name = entry_name(model, planned)
    out = out or (cache / name if cache is not None else default_output(model, tp, chosen["subfolder"]))
    if planned.options.proposes and not dry_run and not processes.follows:
        from reshard.proposing.offering import leave_plan

        beside = default_output(model, tp, chosen["subfolder"])
        leave_plan(model, tp, write_plan or beside.with_name(f"{beside.name}-plan.toml"), force=force, **chosen)
    facts = {"out": str(out), **report.build_split(planned)}
    if dry_run:
        print_result(facts, lines.format_split(facts), as_json=as_json)
        return
    if cache is not None:
        facts |= cache_cli.provide(planned, cache, name, quiet=quiet or as_json, resume=resume, **how)
    else:
        with progress_bar("split", quiet=quiet) as progress:
            how |= {"force": force, "progress": progress}
            if processes.size > 1:
                together.carry_out(planned, out, processes, **how)
            else:
                splitting.carry_out(planned, out, resume=resume, **how)
    if processes.follows:
        return
    facts["seconds"] = round(perf_counter() - started, 3)
    print_result(facts, [facts["out"]], as_json=as_json)
    text = cache_cli.format_found(facts) if facts.get("found") else lines.format_split(facts)
    print_summary(text, quiet=quiet or as_json)


@main.command()
@click.argument("model")
@_tp
@_plan_options
@click.option("--program", is_flag=True, help="Print every strided copy instead.")
@output_options
def plan(model: str, tp: int, program: bool, quiet: bool, as_json: bool, **chosen: Any) -> None:  # noqa: ANN401
    """Print every tensor's rule, placement and local shape."""
    from reshard import lines, report, splitting

    planned = splitting.plan(model, tp=tp, **chosen)
    if planned.options.proposes and not program:
        from reshard.proposing.offering import build_facts, propose
        from reshard.proposing.writing import format_plan

        proposal = propose(model, tp=tp, **chosen)
        print_result(build_facts(proposal), [format_plan(proposal, model).rstrip()], as_json=as_json)
        return
    facts = report.build_plan(planned)
    if program:
        facts["copies"] = [*report.build_copies(planned)]
    text = lines.format_copies(facts["copies"]) if program else lines.format_plan(facts)
    print_result(facts, text, as_json=as_json)
    print_summary(lines.format_notes(facts), quiet=quiet or as_json)


@main.command()
@click.argument("model")
@_tp
@click.option("--tiny", is_flag=True, help="Run a tiny random model of the same class; config.json is enough.")
@click.option("--tokens", type=whole_number, metavar="N", default="12", help="Ids in the prompt; 12 if not given.")
@_plan_options
@output_options
def check(model: str, tp: int, tiny: bool, tokens: int, quiet: bool, as_json: bool, **chosen: Any) -> None:  # noqa: ANN401
    """Run MODEL in one process and in N, and name the first module that differs."""
    from manifests.errors import CheckError
    from reshard.checks import checking
    from reshard.checks.verdict import format_check
    from reshard.lines import human_bytes

    with progress_bar("split", quiet=quiet) as progress:
        facts = checking.check(model, tp=tp, tiny=tiny, tokens=tokens, progress=progress, **chosen)
    print_result(facts, format_check(facts), as_json=as_json)
    if not tiny:
        nbytes = human_bytes(facts["nbytes_temporary"])
        print_summary([f"split into {nbytes} of temporary files, removed again"], quiet=quiet or as_json)
    if not facts["right"]:
        where = facts["finding"]["module"]
        raise CheckError(f"{facts['plan']}: the ranks part at {where or 'the model'}", module=where)


@main.command()
@click.argument("model", required=False)
@_hub_options
@output_options
def plans(model: str | None, quiet: bool, as_json: bool, **chosen: Any) -> None:  # noqa: ANN401
    """Print the model types and classes of diffusers with a plan, or the class of MODEL."""
    if model is None:
        from reshard.catalogue import model_types
        from reshard.catalogue.diffusers import class_names

        known = {"model_types": model_types(), "diffusers": class_names()}
        print_result(known, [*known["model_types"], *known["diffusers"]], as_json=as_json)
        return
    from reshard import splitting

    # One rank needs nothing divided, so whatever is refused here is refused at any number of ranks.
    planned = splitting.plan(model, tp=1, **chosen)
    facts = {"type": planned.model.type, "architecture": planned.model.architecture, "plan": planned.plan.label}
    kind = facts["type"] or planned.model.library
    print_result(facts, [f"{kind}: {facts['architecture']}: {facts['plan']}"], as_json=as_json)


@main.command()
@click.argument("out", type=_PATH)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@output_options
def show(out: Path, tensors: bool, quiet: bool, as_json: bool) -> None:
    """Print what the split OUT holds."""
    from manifests.manifest import read_manifest
    from manifests.pipeline import holds_pipeline
    from reshard import lines, report

    if holds_pipeline(out):
        from reshard.pipelines import commands

        commands.show(out, as_json=as_json)
        return
    facts = report.build_show(str(out), read_manifest(out), every_tensor=tensors)
    print_result(facts, lines.format_show(facts), as_json=as_json)


@main.command()
@click.argument("out", type=_PATH)
@_jobs
@output_options
def verify(out: Path, jobs: int, quiet: bool, as_json: bool) -> None:
    """Check sizes, hashes and coverage of the split OUT."""
    from manifests.pipeline import holds_pipeline
    from reshard import lines, report, verifying

    if holds_pipeline(out):
        from reshard.pipelines import commands

        commands.verify(out, jobs, quiet=quiet, as_json=as_json)
        return
    with progress_bar("verify", quiet=quiet) as progress:
        found = verifying.verify(out, jobs=jobs, progress=progress)
    facts = report.build_verified(str(out), found)
    print_result(facts, [], as_json=as_json)
    print_summary(lines.format_verified(facts), quiet=quiet or as_json)


@main.command()
@click.argument("out", type=_PATH)
@click.argument("dest", type=_PATH)
@click.option("--converted", is_flag=True, help="Give back converted numbers as they are: not the source's.")
@_resume
@_jobs
@_memory
@output_options
def merge(out: Path, dest: Path, quiet: bool, as_json: bool, **how: Any) -> None:  # noqa: ANN401 - as merging's
    """Give back the source of the split OUT, in the folder DEST."""
    from manifests.pipeline import holds_pipeline
    from reshard import lines, merging, report

    if holds_pipeline(out):
        from reshard.pipelines import commands

        del how["resume"]
        commands.merge(out, dest, quiet=quiet, as_json=as_json, **how)
        return
    with progress_bar("merge", quiet=quiet) as progress:
        merged = merging.merge(out, dest, progress=progress, **how)
    facts = report.build_merged(str(dest), merged)
    print_result(facts, [str(dest)], as_json=as_json)
    print_summary(lines.format_merged(facts), quiet=quiet or as_json)
