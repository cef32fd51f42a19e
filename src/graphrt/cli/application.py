"""The commands and their exit statuses.

What one command needs is imported inside it, and commands of other packages (entry-point group
``graphrt.commands``) are loaded when they are used, so that a command starts fast. Bad input: exit
status 2, the text on stderr, and with ``--json`` an error object alone on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points, version
from inspect import getdoc
from math import isnan
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from graphrt.errors import CommandError, ConfigError, GraphrtError

BAD_INPUT = 2
INTERRUPTED = 130
GROUP = "graphrt.commands"

Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG.json", help="A file, or - for stdin.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command named by ``arguments`` (None: those of the process), and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(_application(words))
        sys.exit(command(args=words, prog_name="graphrt"))
    except GraphrtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if "--json" in words:
            _print_error(type(error).__name__, str(error))
        sys.exit(BAD_INPUT)
    except SystemExit as end:
        # Of wrong words on the command line, which typer has told on stderr.
        told = getattr(end.__context__, "format_message", None)
        if "--json" in words and end.code == BAD_INPUT and told is not None:
            _print_error("UsageError", told())
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _print_error(kind: str, message: str) -> None:
    print(json.dumps({"error": {"type": kind, "message": message}}))


def resolve(
    config: Config = "",
    as_json: AsJson = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="An explicit option that would be adjusted is an error."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print a commented sample config, and nothing else.")
    ] = False,
) -> None:
    """Show the plan a config resolves to: mode, sizes, keys, and every adjustment."""
    from graphrt.cli.files import parse_config, read_config, sample
    from graphrt.config import resolve as resolve_config

    if bool(config) is schema:
        raise ConfigError(
            "graphrt resolve",
            expected="a config file, - for stdin, or --schema",
            found=f"{config} and --schema" if schema else "none of them",
            do="graphrt resolve --schema > config.json, then graphrt resolve config.json",
        )
    if schema:
        print(json.dumps(parse_config(sample())[0]) if as_json else sample(), end="")
        return
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
    from graphrt.cli.files import STDIN, decide, read_batches, read_config
    from graphrt.config import resolve as resolve_config
    from graphrt.dispatch import CUDAGraphDispatcher

    if config == batches == STDIN:
        raise ConfigError(
            "graphrt dispatch",
            expected="stdin once",
            found="- for both config and batches",
            do="name a file for one of them",
        )
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


def env(as_json: AsJson = False) -> None:
    """Show versions, devices and installed extras, for bug reports."""
    from graphrt.cli.environment import describe, lines

    found = describe()
    print(json.dumps(found) if as_json else "\n".join(lines(found)))


class CacheAction(StrEnum):
    """What ``graphrt cache`` does."""

    LIST = "list"
    SIZE = "size"
    VERIFY = "verify"
    PRUNE = "prune"


def cache(
    action: Annotated[CacheAction, typer.Argument(help="What to do.")],
    folder: Annotated[
        str | None,
        typer.Option("--dir", help="Default: GRAPHRT_CACHE_DIR, else the user's cache folder."),
    ] = None,
    older_than_days: Annotated[
        float | None, typer.Option(min=0.0, help="prune: entries written longer ago.")
    ] = None,
    max_mib: Annotated[
        float | None, typer.Option(min=0.0, help="prune: the oldest, until the rest is smaller.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List, measure, verify or prune the cache of compiled code."""
    from graphrt.cli.cache import run_cache

    days = None if older_than_days is None else older_than_days * 86_400
    max_bytes = None if max_mib is None else max_mib * 2**20
    found = run_cache(action.value, folder, days, max_bytes)
    if as_json:
        print(json.dumps(found))
    else:
        from graphrt.cli.tables import show_cache

        show_cache(found)
    if found.get("bad"):
        raise typer.Exit(1)


def simulate_ranks(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Azure CSV or Mooncake JSON lines.")],
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Data-parallel ranks.")],
    config: Annotated[
        str | None, typer.Option(metavar="CONFIG.json", help="Default: the default config.")
    ] = None,
    step_ms: Annotated[float, typer.Option(min=0.1, max=10_000, help="Of one step.")] = 25.0,
    speed: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1_000_000,
            help="Arrivals per second, as a multiple of the trace's. Default: the number of ranks.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what ranks that serve a trace together would agree on, and what that costs."""
    from graphrt.cli.files import read_config
    from graphrt.cli.simulate import simulate_ranks as simulate
    from graphrt.config import RuntimeConfig, resolve as resolve_config
    from graphrt.planner import read_trace

    if isnan(step_ms) or isnan(speed or 0):
        raise typer.BadParameter("--step-ms and --speed are numbers")
    asked = (RuntimeConfig(),) if config is None else read_config(config)
    plan = resolve_config(*asked).plan
    requests = read_trace(trace)
    found = simulate(requests, plan, ranks, step_ms / 1000, speed or float(ranks))
    if as_json:
        print(json.dumps(found))
    else:
        from graphrt.cli.tables import show_ranks

        show_ranks(found)


BUILT_IN: dict[str, Callable[..., None]] = {
    "resolve": resolve,
    "dispatch": dispatch,
    "simulate-ranks": simulate_ranks,
    "cache": cache,
    "env": env,
}


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
                _register(application, entry, is_listed=not words or words[0].startswith("-"))
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


def _register(application: typer.Typer, entry: EntryPoint, is_listed: bool) -> None:
    """Add a command that passes all its arguments, ``--help`` too, to the one of ``entry``.

    It is loaded when it is used, or listed.
    """

    def command(context: typer.Context) -> None:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(entry.name)(_load(entry))
        loaded = typer.main.get_command(single)
        loaded(args=context.args, prog_name=f"graphrt {entry.name}")

    application.command(
        entry.name,
        help=_summary(entry) if is_listed else None,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
        },
    )(command)


def _summary(entry: EntryPoint) -> str:
    try:
        return (getdoc(_load(entry)) or "").partition("\n\n")[0]
    except GraphrtError as error:
        # A broken package must not hide the commands that work.
        return f"Cannot be loaded from {entry.value}: {error.found}"


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
