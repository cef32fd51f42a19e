"""One rank of C-agreement: ``python -m benchmarks.rank_agreement FILE``, as torchrun starts it.

All ranks run the same arms equally often in the same order; rank 0 writes the samples to FILE.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist

from graphrt import RuntimeMode, TorchExchange
from graphrt.parallel import Agreement, RankVote, Round, SplitRules, decide, make_tag, pack

BLOCKS, SLICES, REPEATS, WARM_UPS = 9, 5, 40, 50


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    exchanges = {wire: TorchExchange(wire=wire) for wire in ("auto", "reduce", "gather")}  # type: ignore[arg-type]
    rules = SplitRules(2)
    tokens = 40 + 24 * rank
    vote = RankVote(rank, tokens, 64, RuntimeMode.FULL, uniform=True)

    def agreed_by(exchange: TorchExchange) -> Callable[[], Agreement]:
        def agree() -> Agreement:
            tag = make_tag(Round.STEP, 0, exchange.num_rounds)
            return decide(exchange.start(pack(vote, tag)).result(), rules)

        return agree

    def by_hand() -> tuple[int, int, int, bool]:
        """A column for each rank, added up; then one read of the host for each answer."""
        told = torch.zeros(4, world, dtype=torch.int32)
        told[:, rank] = torch.tensor([tokens, 64, 1, int(RuntimeMode.FULL)], dtype=torch.int32)
        dist.all_reduce(told)
        fewest, padded = int(told[0].min().item()), int(told[1].max().item())
        return fewest, padded, int(told[3].min().item()), bool((told[2] == 1).all().item())

    arms: dict[str, Callable[[], object]] = {
        wire: agreed_by(exchange) for wire, exchange in exchanges.items()
    }
    arms["by hand"] = by_hand
    for wire in exchanges:
        found = arms[wire]()
        assert isinstance(found, Agreement)
        assert (found.min_num_tokens, found.num_tokens_padded, int(found.runtime_mode)) == (
            by_hand()[:3]
        )
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        for _ in range(WARM_UPS):
            arm()
    for block in range(BLOCKS):
        order = list(arms.items())
        for name, arm in order if block % 2 == 0 else reversed(order):
            # The fastest slice counts, for every arm alike: others use this machine too.
            slices = []
            for _ in range(SLICES):
                dist.barrier()
                started = perf_counter_ns()
                for _ in range(REPEATS):
                    arm()
                slices.append((perf_counter_ns() - started) / REPEATS)
            samples[name].append(min(slices))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(samples), encoding="utf-8")
    for exchange in exchanges.values():
        exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
