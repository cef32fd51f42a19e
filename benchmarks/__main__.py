"""``python -m benchmarks --only G1,G2 --json FILE``: run cases by their number.

A case that cannot run here says why on stderr and writes no row. A missed target is a result (exit
status 0); the status is 1 only when a case fails.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import all_cases
from benchmarks.harness import CannotRunError, Case, Row, as_json


def choose(cases: Sequence[Case], only: str | None) -> list[Case]:
    if only is None:
        return list(cases)
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    by_number = {case.number: case for case in cases}
    unknown = [word for word in wanted if word not in by_number]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are {', '.join(by_number)}")
    return [by_number[word] for word in wanted]


def describe(item: Row) -> str:
    verdict = "reached" if item.is_reached else "MISSED"
    bound = ">=" if item.higher_is_better else "<="
    low, high = item.spread
    return (
        f"{item.metric:26} {item.value:10.4g} {item.unit:8} [{low:.4g}, {high:.4g}]"
        f"  target {bound} {item.target:g}  {verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="case numbers, separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--save", type=Path, help="write the rows to a dated file in this folder")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    args = parser.parse_args()

    cases = choose(all_cases(), args.only)
    if args.list:
        for case in cases:
            print(f"{case.number:16} {case.title}")
        return 0

    # The CPU bars are stated for one thread; a GPU case does not notice.
    torch.set_num_threads(1)
    rows: list[Row] = []
    failed = False
    for case in cases:
        try:
            new = case.run()
        except CannotRunError as why:
            print(f"{case.number}: cannot run here: {why}", file=sys.stderr)
            continue
        except Exception:  # noqa: BLE001 - one failing case must not take the others' results along
            failed = True
            print(f"{case.number}: FAILED", file=sys.stderr)
            traceback.print_exc()
            continue
        rows += new
        for item in new:
            print(describe(item), flush=True)

    targets = [args.json] if args.json else []
    if args.save and rows:
        kind = "gpu" if torch.cuda.is_available() else "cpu"
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S")
        targets.append(args.save / f"{stamp}-{kind}.json")
    for path in targets:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(rows), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
