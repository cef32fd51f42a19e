"""Tables for people. Imported only where one is printed: rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from graphrt.batch import Decision, RuntimeMode
from graphrt.cli.files import Batch
from graphrt.cli.json_output import plain
from graphrt.cli.simulate import RULES
from graphrt.config import Resolved
from graphrt.report import TextRow, TextTable


def show_resolved(resolved: Resolved) -> None:
    """Print the plan and its adjustments."""
    plan = resolved.plan
    keys = ", ".join(f"{len(keys)} {mode.name}" for mode, keys in plan.keys.items())
    num_split = sum(key.num_ubatches > 1 for _, key in plan.capture_order)
    keys += f", {num_split} of them split" if num_split else ""
    rows = [
        ("mode", plan.cudagraph_mode.name),
        ("keys", keys),
        ("capture sizes (tokens)", _ranges(plan.capture_sizes)),
        (f"decode sizes (q = {plan.query_len})", _ranges(plan.decode_capture_sizes)),
        ("adapter counts", _ranges(plan.lora_counts)),
        ("limits", f"{plan.max_num_seqs} requests, {plan.max_num_batched_tokens} tokens a step"),
    ]
    if plan.level:
        compiled = resolved.compile
        told = f"level {int(plan.level)}, backend {compiled.backend}"
        told += f", cut at {', '.join(compiled.splitting_ops)}" if compiled.splitting_ops else ""
        rows.append(("compiled", told))
    _show("Plan", ("",), rows, is_numeric=False)
    console = Console()
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
    for name in ("entries", "removed", "bad"):
        rows = []
        for entry in found.get(name, ()):
            written = datetime.fromtimestamp(entry["modified"]).isoformat(" ", "minutes")
            told = entry["piece"] or "-", entry["sizes"] or "-", f"{entry['bytes'] / 2**10:,.0f}"
            rows.append((entry["key"][:12], *told, written))
        if name in found:
            _show(name.capitalize(), ("piece", "sizes", "KiB", "written"), rows)
    Console().print(
        Text(
            f"{found['folder']}: {found['num_entries']} entries, "
            f"{found['entry_bytes'] / 2**20:,.1f} MiB; beside them "
            f"{found['inductor_bytes'] / 2**20:,.1f} MiB of Inductor's."
        )
    )


def show_decisions(decided: Sequence[tuple[Batch, Decision]]) -> None:
    """Print one row for each batch."""
    rows = []
    for number, (batch, decision) in enumerate(decided, start=1):
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
        rows.append((str(number), asked, decision.mode.name, graph, decision.reason.name))
    _show("Decisions", ("batch", "mode", "graph", "reason"), rows, is_numeric=False)


def show_ranks(found: Mapping[str, Any]) -> None:
    """Print what ``simulate_ranks`` counted."""
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
    _show(f"{found['ranks']} ranks, {found['requests']} requests", ("",), rows)
    rules = [
        (
            RULES[name],
            *(f"{100 * count / busy:.1f} %" for count in rule["modes"].values()),
            f"{100 * rule['padding'] / real:.1f} %",
        )
        for name, rule in found["rules"].items()
    ]
    _show("Rank steps by rule", (*(mode.name for mode in RuntimeMode), "padding"), rules)


def _show(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], is_numeric: bool = True
) -> None:
    made = tuple(TextRow(name, tuple(cells)) for name, *cells in rows)
    Console().print(TextTable(title, tuple(columns), made, is_numeric=is_numeric))


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
