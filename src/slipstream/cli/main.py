"""The command tree. A verb's file is imported when the verb is asked for, never before.

`VERBS` is the static table that `slipstream --help` prints, so that help costs no import. Every
error a user can cause ends here as one message on standard error and exit status 2.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.errors import SlipstreamError, UnknownNameError

VERBS: dict[str, str] = {
    "demo": "The tour: one prompt, several methods, the same tokens, a page of draft trees.",
    "methods": "The catalogue of methods: paper, drafter, trees, training.",
    "generate": "Decode prompts; streams text for people, --json for programs.",
    "verify": "Is this setup lossless on this machine? Token by token.",
    "bench": "Methods x prompts under one ruler: accepted length, speed, identity.",
    "tune": "Which method, tree and budget is fastest here, and why not faster?",
    "serve": "An OpenAI-compatible server with a chat page; or a distributed engine's command.",
    "report": "Results and traces as one HTML page that opens offline.",
    "study": "One claim of the field as an experiment on your model, with a verdict.",
    "profile": "Where a target pass spends its time, against the machine's limit.",
    "train": "Train a drafter for a target.",
    "data": "Regenerate answers, extract features, inspect what a mask covers.",
    "convert": "A drafter's files from one project's dialect to another's, with proof.",
    "zoo": "The trained drafters that ship, with their cards.",
    "doctor": "Check the environment: versions, devices, default model, cache folder.",
}
INTERRUPTED = 130
BROKEN_PIPE = 141
# Typer raises Click's errors, and newer Typers carry Click inside: the class is found by name.
_USAGE_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class VerbGroup(TyperGroup):
    """Knows its verbs by name and loads one when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries the verb's one-line help, or None."""
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=VERBS[cmd_name], short_help=VERBS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the verb's file and hand over its command.

        Raises:
            UnknownNameError: there is no such verb.
        """
        name = args[0]
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name not in VERBS:
            raise UnknownNameError("command", name, VERBS)
        return name, load_verb(name), args[1:]

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, turn every outcome into an exit status, and exit."""
        options["standalone_mode"] = False
        sys.exit(exit_status(lambda: super(VerbGroup, self).main(*args, **options)))


def load_verb(name: str) -> Any:
    """The command of `cli/<name>.py`: a function (or a Typer app) called like the verb.

    Raises:
        SlipstreamError: this installation has no such file.
    """
    module_name = f"slipstream.cli.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise SlipstreamError(f"the command '{name}' is not part of this installation") from None
    found = getattr(module, name, None) or module.app
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name=name)(function)
    command = typer.main.get_command(found)
    command.name = name
    return command


def exit_status(run: Callable[[], Any]) -> int:
    """The exit status of a run, a script's as well; a user's mistake is told on standard error."""
    try:
        result = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_output()
        return BROKEN_PIPE
    except SystemExit as stopped:  # Typer turns a broken pipe into status 1, our "no"
        if not isinstance(stopped.__context__, BrokenPipeError):
            raise
        _silence_output()
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except SlipstreamError as error:
        tell_error(str(error), error.hint)
        return 2
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `slipstream data`: help, not a complaint
            typer.echo(error.format_message(), err=True)
            return 2
        tell_error(error.format_message(), _usage_hint(error))
        return 2
    except OSError as error:
        tell_error(f"{error.filename or 'input/output'}: {error.strerror or error}", None)
        return 2
    if result == INTERRUPTED:  # Typer may have turned the interrupt into this status already
        typer.echo("interrupted; what was done is kept", err=True)
    return result if isinstance(result, int) else 0


def _usage_hint(error: Any) -> str:
    """What to type after a mistake in a command line."""
    context, message = getattr(error, "ctx", None), error.format_message()
    if context is None:
        return "see slipstream --help"
    options = {name for param in context.command.params for name in param.opts}
    extra = re.search(r"extra argument\S* \((.*)\)", message)
    if extra and "--prompt" in options:
        return f'a prompt is an option: {context.command_path} --prompt "{extra[1]}"'
    return f"see {context.command_path} --help"


def tell_error(message: str, hint: str | None) -> None:
    """One clear error on standard error."""
    try:
        typer.echo(f"error: {message}", err=True)
        if hint:
            typer.echo(f"hint: {hint}", err=True)
    except BrokenPipeError:
        _silence_output()


def _silence_output() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):
            continue


app = typer.Typer(
    cls=VerbGroup,
    name="slipstream",
    help="Speculative decoding that never changes what the model says.",
    invoke_without_command=True,
    rich_markup_mode=None,
    add_completion=False,
)


def _show_version(is_asked: bool) -> None:
    """Print the version and stop."""
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"slipstream {version('slipstream')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Speculative decoding that never changes what the model says."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """Entry point of the console script."""
    typer.main.get_command(app).main(prog_name="slipstream")


if __name__ == "__main__":
    main()
