"""The demo's report of its outcomes: sentences, tables of the plan, the JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphrt import RuntimeMode
from graphrt.report import ReportPage, TextRow, TextTable, summarize_runs
from graphrt_llm.demo.compare import Outcome
from graphrt_llm.demo.inputs import STEP_SECONDS, Inputs
from graphrt_llm.demo.ranks import all_identical, are_identical, of_rank, tokens_digest

DEVICES = {"simulated": "the simulated device (CPU replay)", "cuda": "a CUDA device"}


def as_json(
    inputs: Inputs,
    outcomes: Sequence[Outcome],
    report: Path | None,
    ranks: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The object that ``--json`` prints: a public contract, to which fields may be added.

    ``ranks``: what each rank found, where several share the traffic; all else is of the first.
    """
    summaries = summarize_runs([outcome.run for outcome in outcomes])
    parts = [of_rank(0, outcomes)] if ranks is None else ranks
    return {
        "device": outcomes[0].runtime.device,
        "trace": inputs.trace,
        "num_requests": len(inputs.requests),
        "tokens_identical": all_identical(parts),
        "tokens_digest": tokens_digest(parts),
        "ranks": [{k: v for k, v in part.items() if k != "tokens"} for part in ranks or ()],
        "ties": _ties(outcomes),
        "report": None if report is None else str(report),
        "modes": {name: summary.as_dict() for name, summary in summaries.items()},
        "speculation": {o.run.name: _speculation(o) for o in outcomes if o.drafts.places},
        "padding_by_axis": {o.run.name: _padding(o) for o in outcomes},
        "compiled": _compiled(outcomes),
        "unwatched": {o.run.name: list(map(str, o.runtime.unwatched)) for o in outcomes},
    }


def as_page(inputs: Inputs, outcomes: Sequence[Outcome]) -> ReportPage:
    """The HTML report."""
    return ReportPage(
        title="One traffic, several graph policies",
        lead=lead(inputs, outcomes),
        findings=findings(outcomes),
        runs=[outcome.run for outcome in outcomes],
        tables=[
            _plans(outcomes),
            padding_table(outcomes),
            _pieces(outcomes),
            _adjustments(outcomes),
            _failures(outcomes),
            _settings(inputs),
        ],
    )


def lead(inputs: Inputs, outcomes: Sequence[Outcome]) -> str:
    """One sentence: what ran where."""
    return (
        f"{len(inputs.requests)} requests from {inputs.trace}, served by {inputs.model} in "
        f"{inputs.config.dtype} on {DEVICES[outcomes[0].runtime.device]}."
    )


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """The results, one sentence each."""
    first = outcomes[0]
    sentences = [_same_tokens(outcomes)]
    for outcome in outcomes:
        for difference in outcome.comparison.differences[:3]:
            sentences.append(
                f"{outcome.run.name}: request {difference.request_id} differs from "
                f"{first.run.name} at output token {difference.position}, where the two largest "
                f"logits differ by {difference.margin:.3g}."
            )
    if first.scale < 1:
        sentences.append(
            f"Prompt and output lengths were multiplied by {first.scale:.3g} to fit a context of "
            f"{first.max_request_tokens} tokens; {first.num_cut} requests were cut beyond that."
        )
    for name, found in [*_compiled(outcomes).items()][:1]:
        sentences.append(
            f"The model was traced once and cut into {found['pieces']} pieces, of which "
            f"{found['compiled_pieces']} are compiled and {found['unique_pieces']} differ; this "
            f"took {found['compile_seconds']:.2f} s under {name}."
        )
    num_drafts = first.runtime.resolved.plan.query_len - 1
    if num_drafts:
        _, drafted, accepted = first.drafts
        rate = first.drafts.acceptance_rate or 0.0
        sentences.append(
            f"With up to {num_drafts} drafts a step, {accepted:,} of {drafted:,} drafts were "
            f"accepted ({rate:.1%}): so many steps of single requests were saved. Preparing steps "
            "ahead is off, because drafts depend on the tokens before them."
        )
    max_loras = first.runtime.resolved.plan.max_loras
    if max_loras:
        sentences.append(
            f"{max_loras} random adapters, which requests use in turns; one of {max_loras + 1} "
            "requests has none."
        )
    if first.runtime.device == "simulated":
        sentences.append(
            "A graph of the simulated device is a CPU replay: it serves the same steps as on a "
            "GPU, but its times say nothing about a GPU."
        )
    return sentences


def _same_tokens(outcomes: Sequence[Outcome]) -> str:
    num_tokens = sum(map(len, outcomes[0].tokens.values()))
    ties = _ties(outcomes)
    tied = f", except for {ties} ties between equally likely tokens" if ties else ""
    if len(outcomes) == 1:
        return f"{num_tokens:,} tokens; there is no other policy to compare them with."
    if are_identical(outcomes):
        return f"All {len(outcomes)} policies produced the same {num_tokens:,} tokens{tied}."
    different = [o.run.name for o in outcomes if not o.comparison.identical]
    return f"The tokens of {', '.join(different)} DIFFER from those of {outcomes[0].run.name}."


def _ties(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.comparison.ties for outcome in outcomes)


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    note: str = "",
    is_numeric: bool = True,
) -> TextTable:
    """``rows``: a name, then a cell for each column."""
    made = tuple(TextRow(row[0], row[1:]) for row in rows)
    return TextTable(title=title, columns=columns, rows=made, note=note, is_numeric=is_numeric)


def _plans(outcomes: Sequence[Outcome]) -> TextTable:
    rows = []
    for outcome in outcomes:
        plan = outcome.runtime.resolved.plan
        sizes = _sizes(plan.capture_sizes), _sizes(plan.decode_capture_sizes)
        counts = [str(len(plan.keys[m])) for m in (RuntimeMode.PIECEWISE, RuntimeMode.FULL)]
        rows.append((outcome.run.name, plan.cudagraph_mode.name, *sizes, *counts))
    return _table(
        "Plan",
        ("effective", "sizes", "decode sizes", "PIECEWISE keys", "FULL keys"),
        rows,
        "Sizes are tokens of a step. A batch is padded to the next size that has a graph.",
        is_numeric=False,
    )


def _compiled(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By name of the run: what it compiled, where it did."""
    return {
        outcome.run.name: {
            "pieces": len(report.pieces),
            "compiled_pieces": report.num_compiled,
            "unique_pieces": report.num_unique,
            "compile_seconds": report.compilation_time,
            "backend": report.backend,
            "compiles": report.num_compiles,
            "cache_hits": report.num_loaded,
            "trace_from_cache": report.is_trace_kept,
        }
        for outcome in outcomes
        if (report := outcome.runtime.compile) is not None
    }


def _pieces(outcomes: Sequence[Outcome]) -> TextTable:
    names = ("pieces", "compiled_pieces", "unique_pieces", "compiles", "cache_hits")
    return _table(
        "Compiled pieces",
        ("pieces", "compiled", "unique", "compiles", "cache hits", "compile time"),
        (
            (run, *(str(found[name]) for name in names), f"{found['compile_seconds']:.2f} s")
            for run, found in _compiled(outcomes).items()
        ),
        "One trace serves every size. Pieces that are not compiled run eagerly: attention.",
    )


def _speculation(outcome: Outcome) -> dict[str, Any]:
    drafts = outcome.drafts
    return {
        "drafted": drafts.drafted,
        "accepted": drafts.accepted,
        "acceptance_rate": drafts.acceptance_rate,
        "request_steps_saved": drafts.accepted,
        "padded_places": drafts.places - drafts.drafted,
    }


def _padding(outcome: Outcome) -> dict[str, float | None]:
    """How much of what graphs computed was padding, in percent, for each axis that is padded."""
    loras = outcome.run.metrics.by_lora_count()
    captured = sum((served or 0) * counts.steps for (_, served), counts in loras.items())
    live = sum(n * counts.steps for (n, served), counts in loras.items() if served is not None)
    drafts = outcome.drafts
    return {
        "tokens": outcome.run.metrics.total().padding_percent,
        "adapters": 100 * (captured - live) / captured if captured else None,
        "drafts": 100 * (drafts.places - drafts.drafted) / drafts.places if drafts.places else None,
    }


def padding_table(outcomes: Sequence[Outcome]) -> TextTable:
    """Padding of tokens, adapters and drafts, a row for each policy."""
    return _table(
        "Padding by axis",
        ("tokens", "adapters", "drafts"),
        (
            (
                outcome.run.name,
                *("-" if x is None else f"{x:.1f} %" for x in _padding(outcome).values()),
            )
            for outcome in outcomes
        ),
        "Tokens: beside the batch's. Adapters: of the captured counts that served. Drafts: places "
        "of decoding requests for which there was none.",
    )


def _adjustments(outcomes: Sequence[Outcome]) -> TextTable:
    return _table(
        "Adjustments",
        ("field", "asked", "effective", "because"),
        (
            (o.run.name, change.field, str(change.asked), str(change.effective), change.reason)
            for o in outcomes
            for change in o.runtime.resolved.adjustments
        ),
        "Options that could not be used as asked.",
        is_numeric=False,
    )


def _failures(outcomes: Sequence[Outcome]) -> TextTable:
    return _table(
        "Failed captures",
        ("mode", "key", "error"),
        (
            (outcome.run.name, mode.name, f"{key.num_tokens} tokens", message)
            for outcome in outcomes
            for (mode, key), message in outcome.runtime.failures.items()
        ),
        is_numeric=False,
    )


def _settings(inputs: Inputs) -> TextTable:
    return _table(
        "Configuration",
        ("",),
        (
            ("trace", inputs.trace),
            ("requests", f"{len(inputs.requests):,}"),
            ("model", inputs.model),
            ("dtype", str(inputs.config.dtype)),
            ("seed", str(inputs.options.seed)),
            ("virtual time of a step", f"{1000 * STEP_SECONDS:g} ms"),
        ),
        "Arrivals drive a virtual clock: every step takes the same virtual time, so every policy "
        "gets the same batches and nothing waits.",
        is_numeric=False,
    )


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "-"
