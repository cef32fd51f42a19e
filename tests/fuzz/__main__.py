"""``python -m tests.fuzz``: many random cases, one line of counts, 0 if nothing was found."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from .common import Counts
from .search import FAMILIES, run_one, run_share


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first case; others follow from it")
    parser.add_argument("--engine-steps", type=int, default=50_000)
    parser.add_argument("--runner-steps", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--case", type=int, metavar="SEED", help="run this case alone, verbosely")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    parser.add_argument(
        "--wrong",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also, in every third case, a model that reads its padding or remembers a value",
    )
    asked = parser.parse_args(arguments)
    if asked.case is not None:
        counts, seed = run_one(asked), asked.case
    else:
        counts, seed = Counts(), asked.seed
        for found in run_in_processes(asked):
            counts += found
    print(counts.line(seed))
    return 0 if counts.is_clean else 1


def run_in_processes(asked: argparse.Namespace) -> Iterator[Counts]:
    """Run the cases of a seed, each process its share of them."""
    if asked.processes == 1:
        yield run_share(asked, 0)
        return
    fresh = multiprocessing.get_context("spawn")  # Threads of torch do not survive a fork.
    with ProcessPoolExecutor(asked.processes, fresh, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(partial(run_share, asked), range(asked.processes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
