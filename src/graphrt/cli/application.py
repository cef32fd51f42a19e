"""The commands and their exit statuses.

What one command needs is imported inside it, and commands of other packages (entry-point group
``graphrt.commands``) are loaded when they are used, so that a command starts fast. Bad input: exit
status 2, the text on stderr, and with ``--json`` an error object alone on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from graphrt.errors import CommandError, GraphrtError

BAD_INPUT = 2
INTERRUPTED = 130
GROUP = "graphrt.commands"

Config = Annotated[Path, typer.Argument(metavar="CONFIG.json", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command named by ``arguments`` (None: those of the process), and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(_application(words))
        sys.exit(command(args=words, prog_name="graphrt"))
    except GraphrtError as error:
        kind = type(error).__name__
        print(f"{kind}: {error}", file=sys.stderr)
        if "--json" in words:
            print(json.dumps({"error": {"type": kind, "message": str(error)}}))
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def resolve(
    config: Config,
    as_json: AsJson = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="An explicit option that would be adjusted is an error."),
    ] = False,
) -> None:
    """Show the plan a config resolves to: mode, sizes, keys, and every adjustment."""
    from graphrt.cli.files import read_config
    from graphrt.config import resolve as resolve_config

    resolved = resolve_config(*read_config(config), strict=strict)
    if as_json:
        from graphrt.cli.json_output import of_resolved

        print(json.dumps(of_resolved(resolved)))
    else:
        from graphrt.cli.tables import show_resolved

        show_resolved(resolved)


def dispatch(
    config: Config,
    batches: Annotated[
        str, typer.Argument(metavar="BATCHES.jsonl", help="A file, or - for stdin.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say for each batch, one JSON object a line, which graph serves it and why."""
    from graphrt.cli.files import decide, read_batches, read_config
    from graphrt.config import resolve as resolve_config
    from graphrt.dispatch import CUDAGraphDispatcher

    dispatcher = CUDAGraphDispatcher(resolve_config(*read_config(config)).plan)
    # All lines are checked before the first is printed, so that a script never sees half of them.
    decided = [(batch, decide(dispatcher, batch)) for batch in read_batches(batches)]
    if as_json:
        from graphrt.cli.json_output import of_decision

        for _, decision in decided:
            print(json.dumps(of_decision(decision)))
    else:
        from graphrt.cli.tables import show_decisions

        show_decisions(decided)


BUILT_IN: dict[str, Callable[..., None]] = {"resolve": resolve, "dispatch": dispatch}


def _application(words: Sequence[str]) -> typer.Typer:
    application = typer.Typer(
        help="Plan, capture, dispatch and replay CUDA graphs for PyTorch inference.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    application.callback()(_options)
    for name, function in BUILT_IN.items():
        application.command(name)(function)
    # Asking the metadata of every installed package takes longer than resolving a config.
    if not words or words[0] not in BUILT_IN:
        for entry in entry_points(group=GROUP):
            if entry.name not in BUILT_IN:
                _register(application, entry)
    return application


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphrt {version('graphrt')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


def _register(application: typer.Typer, entry: EntryPoint) -> None:
    """Add a command that passes all its arguments, ``--help`` too, to the one of ``entry``."""

    def command(context: typer.Context) -> None:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(entry.name)(_load(entry))
        loaded = typer.main.get_command(single)
        loaded(args=context.args, prog_name=f"graphrt {entry.name}")

    package = entry.value.partition(".")[0].partition(":")[0]
    application.command(
        entry.name,
        help=f"From {package}; see graphrt {entry.name} --help.",
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
        },
    )(command)


def _load(entry: EntryPoint) -> Callable[..., object]:
    try:
        loaded: object = entry.load()
        if not callable(loaded):
            raise TypeError(f"a {type(loaded).__name__}, which cannot be called")
    except GraphrtError:
        raise
    except Exception as error:
        raise CommandError(
            f"graphrt {entry.name}",
            expected=f"a function at {entry.value}",
            found=f"{type(error).__name__}: {error}",
            do="repair or uninstall the package that registered it; other commands are unaffected",
        ) from error
    return loaded
