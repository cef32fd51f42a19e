"""Tables for people. Imported only where one is printed: rich is slow to import."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphrt.batch import Decision, RuntimeMode
from graphrt.cli.files import Batch
from graphrt.cli.json_output import plain
from graphrt.config import Resolved


def show_resolved(resolved: Resolved) -> None:
    """Print the plan and its adjustments."""
    plan = resolved.plan
    table = Table(title="Plan", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    keys = ", ".join(f"{len(keys)} {mode.name}" for mode, keys in plan.keys.items())
    for name, value in (
        ("mode", plan.cudagraph_mode.name),
        ("keys", keys),
        ("capture sizes (tokens)", _ranges(plan.capture_sizes)),
        (f"decode sizes (q = {plan.query_len})", _ranges(plan.decode_capture_sizes)),
        ("adapter counts", _ranges(plan.lora_counts)),
        ("limits", f"{plan.max_num_seqs} requests, {plan.max_num_batched_tokens} tokens a step"),
    ):
        table.add_row(name, Text(value))
    console = Console()
    console.print(table)
    if not resolved.adjustments:
        console.print("Every option is used as asked.")
        return
    # Lines, because four columns of a narrow terminal would break the names of options.
    console.print("Adjustments:")
    for item in resolved.adjustments:
        change = f"{plain(item.asked)} -> {plain(item.effective)}"
        console.print(Text(f"  {item.field}: {change}"))
        console.print(Padding(Text(item.reason), (0, 0, 0, 4)))


def show_decisions(decided: Sequence[tuple[Batch, Decision]]) -> None:
    """Print one row for each batch."""
    table = Table(title="Decisions")
    for name in ("batch", "mode", "graph", "reason"):
        table.add_column(name, no_wrap=name in ("mode", "reason"), overflow="fold")
    for batch, decision in decided:
        key = decision.descriptor
        asked = f"{batch.num_tokens} {'uniform' if batch.uniform else 'mixed'}"
        asked += f", LoRA {batch.num_active_loras}" if batch.num_active_loras else ""
        excluded = " or ".join(sorted(mode.name for mode in batch.exclude))
        asked += f", not {excluded}" if excluded else ""
        graph = ""
        if decision.mode is not RuntimeMode.NONE:
            graph = f"{key.num_tokens} tokens"
            graph += "" if key.num_reqs is None else f", {key.num_reqs} requests"
            graph += f", LoRA {key.num_active_loras}" if key.has_lora else ""
        table.add_row(asked, decision.mode.name, graph, decision.reason.name)
    Console().print(table)


def _ranges(values: Sequence[int]) -> str:
    """Runs of equal steps in short: 1, 2, 4, 8..248 by 8."""
    parts: list[str] = []
    rest = list(values)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        end = 1
        while end < len(rest) and rest[end] - rest[end - 1] == step:
            end += 1
        if end > 3:
            by = "" if step == 1 else f" by {step}"
            parts.append(f"{rest[0]}..{rest[end - 1]}{by}")
            rest = rest[end:]
        else:
            parts.append(str(rest[0]))
            rest = rest[1:]
    return ", ".join(parts) or "none"
