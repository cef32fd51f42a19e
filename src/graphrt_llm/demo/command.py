"""``graphrt demo``: one traffic under several graph policies, and whether the tokens are the same.

Tables go to stdout, progress and errors to stderr. Exit status: 0; 1 if policies disagree on the
tokens, or a capture or replay failed; 2 for bad input; 130 for an interrupt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from graphrt import (
    CUDAGraphMode,
    Exchange,
    GraphrtError,
    RankVariables,
    TorchExchange,
    errors,
    launch_ranks,
    rank_variables,
)

if TYPE_CHECKING:
    from graphrt_llm.demo.compare import Outcome
    from graphrt_llm.demo.inputs import Inputs

DEFAULT_MODES = "NONE,PIECEWISE,FULL_DECODE_ONLY,FULL_AND_PIECEWISE"
DEFAULT_REPORT = Path("graphrt-report.html")
NO_REPORT = Path("none")

BAD_INPUT = (ValueError, OSError, ImportError)
"""Builtin bases of graphrt's errors for bad input; all other errors are failures of a run."""


# Typer takes choices from an enum; the values are those of ``graphrt_llm.config``.
class LoadFormat(StrEnum):
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class DeviceName(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    SIMULATED = "simulated"


class DTypeName(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Piecewise(StrEnum):
    BREAKS = "breaks"
    COMPILE = "compile"


def demo(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Traffic: an Azure LLM inference CSV or a Mooncake JSONL.",
            show_default="a seeded generator",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory with a HF config.json.", show_default="a built-in tiny model"),
    ] = None,
    load_format: Annotated[
        LoadFormat, typer.Option(help="Weights of --model: its files, or random ones.")
    ] = LoadFormat.SAFETENSORS,
    requests: Annotated[int, typer.Option(min=1, help="First rows of the traffic.")] = 500,
    modes: Annotated[str, typer.Option(help="Policies to compare.")] = DEFAULT_MODES,
    level: Annotated[
        int,
        typer.Option(
            min=0,
            max=3,
            help="Compile level: 0, 2 or 3; above 0 it also runs uncompiled to compare.",
        ),
    ] = 0,
    piecewise: Annotated[
        Piecewise | None,
        typer.Option(help="What cuts PIECEWISE graphs.", show_default="compile at level 3"),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="auto: CUDA if present, else simulated.")
    ] = DeviceName.AUTO,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(help="To compute in.", show_default="the model's, float64 for the tiny one"),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="Where the HTML report goes; none: no report.")
    ] = DEFAULT_REPORT,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes that share the traffic, on this machine.")
    ] = 1,
    ubatches: Annotated[
        int, typer.Option(min=1, max=8, help="Micro-batches of a step; also runs unsplit.")
    ] = 1,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="Ranks share the experts; without --model a tiny Qwen3-MoE."
        ),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel", help="Ranks share every layer, and all serve the same requests."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, prompts, generated traffic.")] = 0,
    loras: Annotated[
        int, typer.Option(min=0, help="Random adapters (LoRA) that requests use in turns.")
    ] = 0,
    speculate: Annotated[
        int, typer.Option(min=0, help="Tokens that are drafted for a request in each step.")
    ] = 0,
) -> None:
    """Serve one traffic under several graph policies; compare tokens, graphs and times.

    Also under torchrun, whose processes share the traffic; --ranks starts these by itself.
    """
    policies = parse_modes(modes)
    started = rank_variables()
    if started is not None and ranks not in (1, started.world):
        raise typer.BadParameter(
            f"{ranks}, and torchrun has started {started.world}", param_hint="--ranks"
        )
    if piecewise is not None and (piecewise is Piecewise.COMPILE) != (level == 3):
        raise typer.BadParameter(
            f"{piecewise} at level {level}: level 3 compiles and is cut at splitting ops, lower "
            "levels are cut at break points; choose --level 3 --piecewise compile, or neither.",
            param_hint="--piecewise",
        )
    if level == 1:
        raise typer.BadParameter("1; choose 0, 2 or 3.", param_hint="--level")
    if level == 3 and ubatches > 1:
        raise typer.BadParameter(
            f"{ubatches} at level 3; choose 1, or another --level.", param_hint="--ubatches"
        )
    try:
        _require_libraries()
        # Imported here, because without the extra the command line still lists its commands.
        from graphrt_llm.demo.inputs import Options, read_inputs

        options = Options(
            trace=trace,
            model=model,
            load_format=load_format.value,
            num_requests=requests,
            modes=policies,
            device=device.value,
            dtype=None if dtype is None else dtype.value,
            report=None if report == NO_REPORT else report,
            seed=seed,
            level=level,
            loras=loras,
            speculate=speculate,
            ubatches=ubatches,
            expert_parallel=expert_parallel,
            tensor_parallel=tensor_parallel,
            num_ranks=ranks if started is None else started.world,
        )
        inputs = read_inputs(options)
        if started is None and ranks > 1:
            raise typer.Exit(launch_ranks(ranks, ["-m", "graphrt", *sys.argv[1:]]))
        with _exchange(started) as exchange:
            agreed = run(inputs, as_json=as_json, ranks=exchange)
    except GraphrtError as error:
        Console(stderr=True).print(Text(f"{type(error).__name__}: {error}"))
        if as_json and (started is None or started.rank == 0):
            problem = {"type": type(error).__name__, "message": str(error)}
            typer.echo(json.dumps({"error": problem}))
        raise typer.Exit(2 if isinstance(error, BAD_INPUT) else 1) from error
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; no report was written")
        raise typer.Exit(130) from None
    if not agreed:
        raise typer.Exit(1)


def _require_libraries() -> None:
    """Errors: ``MissingExtraError`` without what the engine imports."""
    try:
        import numpy  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        raise errors.MissingExtraError("graphrt demo", extra="llm", found=str(error)) from error


def parse_modes(text: str) -> tuple[CUDAGraphMode, ...]:
    """Policies by name, in any case, separated by commas; each once, in the order given."""
    names = [name.strip() for name in text.split(",")]
    try:
        policies = tuple(CUDAGraphMode.parse(name) for name in names)
    except KeyError as error:
        known = ", ".join(mode.name for mode in CUDAGraphMode)
        raise typer.BadParameter(
            f"{error.args[0]!r} is no policy; known are {known}.", param_hint="--modes"
        ) from None
    if len(set(policies)) < len(policies):
        raise typer.BadParameter("each policy once, please.", param_hint="--modes")
    return policies


@contextmanager
def _exchange(started: RankVariables | None) -> Iterator[Exchange | None]:
    """The exchange with the other ranks that were started; None if this is the only one."""
    if started is None or started.world == 1:
        yield None
        return
    exchange = TorchExchange()
    try:
        yield exchange
    except BaseException:
        exchange.close(together=False)  # The others find out, wherever they are.
        raise
    exchange.close()


def run(inputs: Inputs, *, as_json: bool, ranks: Exchange | None = None) -> bool:
    """Compare, write the report if asked, print the results; True if the tokens are the same.

    Of several ranks the first one writes and prints, and has what the others found.
    """
    from graphrt.report import write_report
    from graphrt_llm.demo.compare import Bars, compare_policies
    from graphrt_llm.demo.ranks import all_identical, are_identical, gather, of_rank
    from graphrt_llm.demo.report import as_json as as_object, as_page
    from graphrt_llm.demo.setup import prepare

    prepared = prepare(inputs, ranks)
    is_first = ranks is None or ranks.rank == 0
    num_threads = 1 if inputs.options.model is None else None
    with Bars(Console(stderr=True, quiet=not is_first)) as bars, _threads(num_threads):
        outcomes = compare_policies(
            prepared.policies, prepared.load, tie_tolerance=prepared.tie_tolerance, phases=bars
        )
    parts = None if ranks is None else gather(ranks, of_rank(ranks.rank, outcomes))
    agreed = are_identical(outcomes) if parts is None else all_identical(parts)
    if not is_first:
        return agreed
    report = inputs.report and write_report(inputs.report, as_page(inputs, outcomes))
    if as_json:
        found = as_object(inputs, outcomes, report, parts)
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        _print(inputs, outcomes, report, parts)
    return agreed


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute on ``count`` CPU threads; None: as many as torch chose.

    The tiny model's operators are too small to split: a second thread would only add waiting.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _print(
    inputs: Inputs,
    outcomes: Sequence[Outcome],
    report: Path | None,
    parts: Sequence[Mapping[str, Any]] | None,
) -> None:
    from graphrt.report import capture_table, comparison_table, lora_table, miss_table
    from graphrt_llm.demo.ranks import in_words
    from graphrt_llm.demo.report import findings, lead, padding_table

    console = Console()
    runs = [outcome.run for outcome in outcomes]
    console.print(Text(lead(inputs, outcomes)))
    for sentence in findings(outcomes):
        console.print(Text(sentence))
    for sentence in () if parts is None else in_words(parts):
        console.print(Text(sentence))
    console.print()
    tables = [make(runs) for make in (comparison_table, miss_table, lora_table, capture_table)]
    plan = outcomes[0].runtime.resolved.plan
    if plan.max_loras or plan.query_len > 1:
        tables.insert(-1, padding_table(outcomes))
    for table in tables:
        if table.rows:
            console.print(table)
    if report is not None:
        console.print(Text(f"report: {report}"), soft_wrap=True)
