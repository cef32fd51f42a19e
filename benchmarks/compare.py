"""``python benchmarks/compare.py OLD.json NEW.json``: two results side by side.

A metric is called better or worse only if the spreads of the two do not overlap. Stands alone: it
needs neither torch nor the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
COLUMNS = ("metric", "old", "new", "unit", "new/old", "spreads", "flags")


def read(path: Path) -> dict[str, Result]:
    """The rows of a result file by metric. Errors: ``SystemExit`` for a file of another form."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {row["metric"]: row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: expected a list of rows, found {error!r}") from error


def is_reached(row: Result) -> bool:
    """Also where a row has no target to miss."""
    value, target = row["value"], row["target"]
    return target is None or bool(value >= target if row["higher_is_better"] else value <= target)


def overlap(old: Result, new: Result) -> bool:
    """Whether some value lies in both spreads: then the runs do not tell the two apart."""
    return bool(old["spread"][0] <= new["spread"][1] and new["spread"][0] <= old["spread"][1])


def flags(old: Result, new: Result) -> list[str]:
    """What a reader should notice about one metric."""
    found = []
    if not overlap(old, new):
        is_better = (new["value"] > old["value"]) is bool(new["higher_is_better"])
        found.append("better" if is_better else "WORSE")
    if is_reached(old) != is_reached(new):
        found.append("target now reached" if is_reached(new) else "target now MISSED")
    elif not is_reached(new):
        found.append("target missed")
    if (old["target"], old["unit"]) != (new["target"], new["unit"]):
        found.append("another target or unit")
    if old.get("device") != new.get("device"):
        found.append("ANOTHER DEVICE")
    return found


def compare(old: Mapping[str, Result], new: Mapping[str, Result]) -> list[tuple[str, ...]]:
    """One line a metric, in the order of the old file, then what only the new one has."""
    lines = []
    for metric in dict.fromkeys([*old, *new]):
        before, after = old.get(metric), new.get(metric)
        if before is None or after is None:
            row = before or after
            assert row is not None, "a metric comes from one of the files"
            value = f"{row['value']:.4g}"
            where = ("", value, "only in new") if before is None else (value, "", "only in old")
            lines.append((metric, where[0], where[1], row["unit"], "", "", where[2]))
            continue
        quotient = f"{after['value'] / before['value']:.3f}" if before["value"] else "-"
        lines.append(
            (
                metric,
                f"{before['value']:.4g}",
                f"{after['value']:.4g}",
                after["unit"],
                quotient,
                "overlap" if overlap(before, after) else "apart",
                ", ".join(flags(before, after)),
            )
        )
    return lines


def as_text(lines: Sequence[tuple[str, ...]]) -> str:
    table = [COLUMNS, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def describe(name: str, rows: Mapping[str, Result]) -> str:
    """Where a result comes from: every pair of device, torch and commit in it."""
    words = ("device", "torch", "commit")
    places = dict.fromkeys(", ".join(str(row.get(w, "?")) for w in words) for row in rows.values())
    return f"{name}: {'; '.join(places) or 'no rows'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = read(args.old), read(args.new)
    print(describe("old", old))
    print(describe("new", new))
    print(as_text(compare(old, new)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
