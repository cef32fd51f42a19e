"""12: The same engine on ``Runtime``: its graphs in fewer lines, for prefills too.

What example 11 writes by hand is declared here. The static buffers, their padding, the order of
captures and the choice of a graph are the runtime's, and every graph is compared with eager before
it serves. PIECEWISE cuts the graphs of a prefill at attention, which reads host lengths there.

Output::

    FULL_DECODE_ONLY: 4 graphs
      steps: 1 NONE MODE_NONE, 7 FULL PADDED, 8 FULL HIT
      equal to eager: True
    FULL_AND_PIECEWISE: 10 graphs
      steps: 1 PIECEWISE PADDED, 7 FULL PADDED, 8 FULL HIT
      equal to eager: True
"""

from collections import Counter

import torch
from small_engine import (
    LENGTHS,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_TOKENS,
    PROMPTS,
    Attention,
    Engine,
    Sequence,
)

from graphrt import BufferSpec, OutputSpec, Padding, Runtime, RuntimeMode, break_point
from graphrt.events import RanEager, Replayed


class CutAttention(Attention):
    """Where a PIECEWISE graph ends and the next one begins; a FULL one records it."""

    __call__ = break_point(name="attention")(Attention.__call__)


class OnGraphs(Engine):
    def __init__(self, mode, sizes, observer):
        super().__init__()
        self.model.attention = CutAttention()
        any_token, null = Padding.fill(0, arbitrary=True), Padding.fill(0)
        self.runtime = Runtime(
            self.model,
            inputs=[
                BufferSpec("input_ids", ("tokens",), torch.int64, any_token),
                BufferSpec("positions", ("tokens",), torch.int64, any_token),
                BufferSpec("slot_mapping", ("tokens",), torch.int64, null),
                BufferSpec("block_tables", ("tokens", MAX_BLOCKS), torch.int64, null),
            ],
            outputs=OutputSpec({"": "tokens"}, "view"),
            mode=mode,
            sizes=sizes,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            may_overwrite={self.model.cache: "slot_mapping"},
            resources=[self],
            observer=observer,
        )
        # One decode batch to capture on: a token of each sequence, in blocks that nobody has yet.
        rows = [(Sequence([i] * 8, 8, blocks=[1 + i] * MAX_BLOCKS), i) for i in range(MAX_SEQS)]
        self.runtime.capture(like=self.values(rows))

    def prepare(self, key, query_lens):
        """The runtime calls it before every step, with what ``step_info`` says of the batch."""
        self.model.attention.query_lens = query_lens

    def run_model(self, values, query_lens):
        num_seqs = len(query_lens or values["input_ids"])
        return self.runtime.step(values, num_reqs=num_seqs, step_info=query_lens)


def count_steps(events):
    """How many steps ran in which mode, and why."""
    steps = [
        (RuntimeMode.NONE if isinstance(event, RanEager) else event.mode, event.reason)
        for event in events
        if isinstance(event, RanEager | Replayed)
    ]
    return ", ".join(
        f"{count} {mode.name} {reason.name}" for (mode, reason), count in Counter(steps).items()
    )


def main():
    expected = Engine().generate(PROMPTS, LENGTHS)
    for mode, sizes in (
        ("FULL_DECODE_ONLY", [1, 2, 4, 8]),
        ("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 32]),
    ):
        events = []
        engine = OnGraphs(mode, sizes, events.append)
        tokens = engine.generate(PROMPTS, LENGTHS)
        print(f"{mode}: {len(engine.runtime.report().graphs)} graphs")
        print("  steps:", count_steps(events))
        print("  equal to eager:", tokens == expected)
        engine.runtime.close()


if __name__ == "__main__":
    main()
