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

from benchmarks.harness import CannotRunError, Case, Row, as_json, machine
from benchmarks.table import RESULTS, render, write_into_readme


def choose(cases: Sequence[Case], only: str | None, skip: str = "") -> list[Case]:
    """The cases of the numbers ``only``, without those of the numbers ``skip``.

    ``C-wrapper`` names ``C-wrapper-stale`` too: ``--only G5 --skip G5-cold`` runs G5 without it.
    """
    skipped = _numbered(cases, skip)
    chosen = list(cases) if only is None else _numbered(cases, only)
    return [case for case in chosen if case not in skipped]


def _numbered(cases: Sequence[Case], numbers: str) -> list[Case]:
    found: list[Case] = []
    for word in filter(None, map(str.strip, numbers.split(","))):
        named = [case for case in cases if f"{case.number}-".startswith(f"{word}-")]
        if not named:
            known = ", ".join(case.number for case in cases)
            raise SystemExit(f"no case {word!r}; there are {known}")
        found += [case for case in named if case not in found]
    return found


def describe(item: Row) -> str:
    verdict = "reached" if item.is_reached else "MISSED"
    bound = ">=" if item.higher_is_better else "<="
    low, high = item.spread
    told = "no target" if item.target is None else f"target {bound} {item.target:g}  {verdict}"
    return f"{item.metric:26} {item.value:10.4g} {item.unit:8} [{low:.4g}, {high:.4g}]  {told}"


def run(cases: Sequence[Case], files: Sequence[Path], commit: str | None) -> bool:
    """Run ``cases`` and write the rows to ``files`` as they come; False if one failed.

    As they come: whoever stops a long run keeps what it has measured.
    """
    rows: list[Row] = []
    where = machine(commit)
    succeeded = True
    for case in cases:
        try:
            for item in case.run():
                rows.append(item)
                print(describe(item), flush=True)
                for path in files:
                    path.write_text(as_json(rows, where), encoding="utf-8")
        except CannotRunError as why:
            print(f"{case.number}: cannot run here: {why}", file=sys.stderr)
        except Exception:  # noqa: BLE001 - one failing case must not take the others' results along
            succeeded = False
            print(f"{case.number}: FAILED", file=sys.stderr)
            traceback.print_exc()
    for path in files:
        if rows:
            print(f"wrote {path}", file=sys.stderr)
    return succeeded


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="case numbers, separated by commas")
    parser.add_argument("--skip", default="", help="case numbers that do not run, likewise")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--save", type=Path, help="write the rows to a dated file in this folder")
    parser.add_argument("--commit", help="record this commit: for a copy without its history")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--table", action="store_true", help="print the table of targets and stop")
    parser.add_argument(
        "--write-table", action="store_true", help="write that table into README.md and stop"
    )
    args = parser.parse_args()

    if args.write_table:
        write_into_readme()
        return 0
    if args.table:
        print(render(RESULTS), end="")
        return 0

    import torch

    from benchmarks.cases import all_cases

    cases = choose(all_cases(), args.only, args.skip)
    if args.list:
        for case in cases:
            print(f"{case.number:16} {case.title}")
        return 0

    # The CPU bars are stated for one thread; a GPU case does not notice.
    torch.set_num_threads(1)
    files = [args.json] if args.json else []
    if args.save:
        kind = "gpu" if torch.cuda.is_available() else "cpu"
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S")
        files.append(args.save / f"{stamp}-{kind}.json")
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:  # The file that was asked for exists even if no case could run here.
        args.json.write_text("[]\n", encoding="utf-8")
    succeeded = run(cases, files, args.commit)
    if args.save and args.save.resolve() == RESULTS:
        write_into_readme()  # Or the table would not be the one that the kept results make.
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
