"""Usage: how arguments are read, which command they reach, and how a refusal is shown."""

import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from manifests import errors
from reshard.torchrun.processes import read_environment, speaking_as

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

EXIT_CODES = "\n".join(
    f"  {code}  {text}" for code, text in re.findall(r"[A-Z]\w+Error +([3-9])  (.+)", errors.__doc__ or "")
)
"""A line for each exit code of the error tree."""


def whole_number(text: object) -> int:
    """Return the whole number from 1 that a text is.

    >>> whole_number("4")
    4
    """
    if not re.fullmatch("0*[1-9][0-9]{0,17}", str(text)):
        raise click.BadParameter(f"{text!r} is not a whole number from 1.")
    return int(str(text))


def byte_size(text: object) -> int:
    """Return the bytes that a size is; 0 is no limit.

    >>> byte_size("1000"), byte_size("4GB"), byte_size("1.5 MiB")
    (1000, 4000000000, 1572864)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]I?|)B?", str(text).upper())
    nbytes = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < 1 and text != "0":
        raise click.BadParameter(f"{text!r} is not a size; 1000000, 4GB or 500MiB are.")
    return nbytes


def duration(text: object) -> float:
    """Return the seconds that a span of time is.

    >>> duration("90"), duration("45min"), duration("1.5 h"), duration("30d")
    (90.0, 2700.0, 5400.0, 2592000.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(s|min|h|d|w|)", str(text).lower())
    if not match:
        raise click.BadParameter(f"{text!r} is not a span of time; 90s, 45min, 1h, 30d or 2w are.")
    return float(match[1]) * _SECONDS[match[2]]


def options(*decorators: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return one decorator for several, in the order in which help shows them."""

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class ModelGroup(click.Group):
    """Takes a first argument that is no command as the MODEL of ``split``; options may stand before either."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse with the command in front; note whether errors are to be JSON."""
        ctx.obj = "--json" in args
        return super().parse_args(ctx, self._reorder(args))

    def _reorder(self, args: list[str]) -> list[str]:
        """Put the first argument that is no option in front, or ``split`` where it cannot be a command."""
        skip = False
        for at, arg in enumerate(args):
            if skip:
                skip = False
            elif arg == "--":
                return ["split", *args]
            elif arg == "-" or not arg.startswith("-"):
                return [arg, *args[:at], *args[at + 1 :]]
            else:
                skip = self._takes_next(arg)
        return ["--help"] if {"-h", "--help"} & {*args} else ["split", *args] if args else []

    def _takes_next(self, arg: str) -> bool:
        """Tell whether an option's value is the next argument, and not part of this one."""
        options = [param for command in self.commands.values() for param in command.params]
        valued = {name for param in options if not getattr(param, "is_flag", True) for name in param.opts}
        if arg.startswith("--"):
            return arg in valued
        return next((at for at, letter in enumerate(arg[1:], 2) if f"-{letter}" in valued), 0) == len(arg)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or ``split`` with all arguments."""
        word = args[0]
        if word in self.commands:
            return super().resolve_command(ctx, args)
        if "/" not in word and not Path(word).exists():
            from difflib import get_close_matches

            if close := get_close_matches(word, self.commands, n=1, cutoff=0.7):
                ctx.fail(f"{word!r} is no command and no folder; did you mean {close[0]!r}?")
        return "split", self.commands["split"], args

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as in click
        """Run the command; show what was raised on purpose and exit with its code."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            # A cancelled build cleans up as after Ctrl-C.
            signal.signal(number, signal.default_int_handler)
        try:
            with speaking_as(read_environment()):
                return super().invoke(ctx)
        except errors.ReshardError as error:
            _fail(ctx, type(error).__name__, str(error), error.exit_code, vars(error))
        except click.UsageError as error:
            if not ctx.obj:
                raise
            _fail(ctx, type(error).__name__, error.format_message(), error.exit_code, {})
        except KeyboardInterrupt as interruption:
            _fail(ctx, "KeyboardInterrupt", str(interruption) or "interrupted", 130, {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of ``split``, then the commands."""
        self.commands["split"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _fail(ctx: click.Context, kind: str, message: str, exit_code: int, context: Mapping[str, Any]) -> NoReturn:
    if ctx.obj:
        print_json({"error": {"kind": kind, "message": message, "exit_code": exit_code, **context}}, err=True)
    else:
        click.echo(f"reshard: {message}", err=True)
    raise click.exceptions.Exit(exit_code)


def print_json(facts: Mapping[str, Any], *, err: bool = False) -> None:
    """Print one JSON object on a line."""
    import json

    click.echo(json.dumps(facts, default=str), err=err)
