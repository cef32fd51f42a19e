"""Tables for people. Imported only where one is printed: rich is slow to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphrt.batch import Decision, RuntimeMode
from graphrt.cli.files import Batch
from graphrt.cli.json_output import plain
from graphrt.cli.simulate import RULES
from graphrt.config import Resolved


def show_resolved(resolved: Resolved) -> None:
    """Print the plan and its adjustments."""
    plan = resolved.plan
    table = Table(title="Plan", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    keys = ", ".join(f"{len(keys)} {mode.name}" for mode, keys in plan.keys.items())
    num_split = sum(key.num_ubatches > 1 for _, key in plan.capture_order)
    keys += f", {num_split} of them split" if num_split else ""
    for name, value in (
        ("mode", plan.cudagraph_mode.name),
        ("keys", keys),
        ("capture sizes (tokens)", _ranges(plan.capture_sizes)),
        (f"decode sizes (q = {plan.query_len})", _ranges(plan.decode_capture_sizes)),
        ("adapter counts", _ranges(plan.lora_counts)),
        ("limits", f"{plan.max_num_seqs} requests, {plan.max_num_batched_tokens} tokens a step"),
    ):
        table.add_row(name, Text(value))
    if plan.level:
        compiled = resolved.compile
        told = f"level {int(plan.level)}, backend {compiled.backend}"
        told += f", cut at {', '.join(compiled.splitting_ops)}" if compiled.splitting_ops else ""
        table.add_row("compiled", Text(told))
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


def show_cache(found: Mapping[str, Any]) -> None:
    """Print what ``graphrt cache`` found, and the entries it is about."""
    console = Console()
    listed = [(name, found[name]) for name in ("entries", "removed", "bad") if name in found]
    for name, entries in listed:
        table = Table(title=name.capitalize())
        for column in ("key", "piece", "sizes", "KiB", "written"):
            table.add_column(column, justify="right" if column == "KiB" else "left")
        for entry in entries:
            written = datetime.fromtimestamp(entry["modified"]).isoformat(" ", "minutes")
            told = (entry["key"][:12], entry["piece"] or "-", entry["sizes"] or "-")
            table.add_row(*map(Text, told), f"{entry['bytes'] / 2**10:,.0f}", written)
        console.print(table)
    console.print(
        Text(
            f"{found['folder']}: {found['num_entries']} entries, "
            f"{found['entry_bytes'] / 2**20:,.1f} MiB; beside them "
            f"{found['inductor_bytes'] / 2**20:,.1f} MiB of Inductor's."
        )
    )


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


def show_ranks(found: Mapping[str, Any]) -> None:
    """Print what ``simulate_ranks`` counted."""
    console = Console()
    table = Table(title=f"{found['ranks']} ranks, {found['requests']} requests", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    steps, busy, real = found["steps"], found["busy_rank_steps"], found["real_tokens"]
    rows = [("steps", f"{steps}")]
    rows += [(f"  {name}", _share(count, steps)) for name, count in found["modes"].items()]
    rows += [("  split", _share(found["split_steps"], steps))]
    rows += [("eager because of one rank alone", _share(found["eager_by_one_rank"], steps))]
    for title, name in (("eager", "eager_reasons"), ("not split", "unsplit_reasons")):
        rows += [(f"{title}: {why}", _share(n, steps)) for why, n in found[name].items()]
    rows += [
        ("rank steps with work", f"{busy}"),
        ("  eager for another rank's sake", _share(found["eager_rank_steps_lowered"], busy)),
        ("real tokens", f"{real}"),
        ("  padding for the slowest rank", _share(found["padding_by_slowest_rank"], real)),
        ("  padding of ranks without work", _share(found["padding_of_idle_ranks"], real)),
        ("rank steps that differ from rank 0's", f"{found['divergent_rank_steps']}"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    rules = Table(
        "rule", *(mode.name for mode in RuntimeMode), "padding", title="Rank steps by rule"
    )
    for name, rule in found["rules"].items():
        shares = [f"{100 * count / busy:.1f} %" for count in rule["modes"].values()]
        rules.add_row(RULES[name], *shares, f"{100 * rule['padding'] / real:.1f} %")
    console.print(rules)


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)"


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
