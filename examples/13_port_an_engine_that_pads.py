"""13: The seam of an engine that pads its batches by itself.

Such engines (mini-sglang, SGLang) ask a graph runner whether it can serve a batch, let it say to
which size, pad the batch themselves, and replay. Values of a graph's size with the real count
beside them are taken as they are: the step is counted as padded, and its result is cut to the real
rows. An attention backend that sets something up once for each size does so in
``prepare_for_capture``.

Output::

    prepared for sizes [8, 4, 2, 1]
    steps: 15, of which padded: 7
    equal to eager: True
"""

import torch
from small_engine import (
    LENGTHS,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_TOKENS,
    PROMPTS,
    Engine,
    Sequence,
)

from graphrt import BufferSpec, OutputSpec, Padding, Reason, Runtime
from graphrt.events import Replayed


class GraphRunner:
    """Graphs of decode batches, with the methods that the engine calls."""

    def __init__(self, model, backend, like, observer=None):
        null = Padding.fill(0)
        self.runtime = Runtime(
            model,
            inputs=[
                BufferSpec("input_ids", ("tokens",), torch.int64, null),
                BufferSpec("positions", ("tokens",), torch.int64, null),
                BufferSpec("slot_mapping", ("tokens",), torch.int64, null),
                BufferSpec("block_tables", ("tokens", MAX_BLOCKS), torch.int64, null),
            ],
            outputs=OutputSpec({"": "tokens"}, "view"),
            mode="FULL_DECODE_ONLY",
            sizes=[1, 2, 4, 8],
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            may_overwrite={model.cache: "slot_mapping"},
            resources=[backend],
            observer=observer,
        )
        self.runtime.capture(like=like)

    def can_use_cuda_graph(self, num_seqs, is_decode):
        return is_decode and self.runtime.key_for(num_seqs, uniform=True) is not None

    def padded_size(self, num_seqs):
        _, key = self.runtime.key_for(num_seqs, uniform=True)
        return key.num_tokens

    def replay(self, padded, num_seqs):
        return self.runtime.step(padded, num_tokens=num_seqs, num_reqs=num_seqs)

    def destroy_cuda_graphs(self):
        self.runtime.close()


class Backend:
    """What an attention backend prepares: once for each size, and before each step."""

    def __init__(self):
        self.sizes, self.num_steps = [], 0

    def prepare_for_capture(self, key):
        self.sizes.append(key.num_tokens)

    def prepare(self, key, step_info):
        self.num_steps += 1


class PadsByItself(Engine):
    def __init__(self, observer):
        super().__init__()
        rows = [(Sequence([i] * 8, 8, blocks=[1 + i] * MAX_BLOCKS), i) for i in range(MAX_SEQS)]
        self.backend = Backend()
        self.graphs = GraphRunner(self.model, self.backend, self.values(rows), observer)

    def run_model(self, values, query_lens):
        count = len(values["input_ids"])
        if not self.graphs.can_use_cuda_graph(count, is_decode=query_lens is None):
            return super().run_model(values, query_lens)
        self.model.attention.query_lens = None
        size = self.graphs.padded_size(count)
        padded = {
            name: torch.cat((value, value.new_zeros(size - count, *value.shape[1:])))
            for name, value in values.items()
        }
        return self.graphs.replay(padded, count)


def main():
    events = []
    engine = PadsByItself(events.append)
    tokens = engine.generate(PROMPTS, LENGTHS)
    steps = [event for event in events if isinstance(event, Replayed)]
    num_padded = sum(event.reason is Reason.PADDED for event in steps)
    print("prepared for sizes", engine.backend.sizes)
    print(f"steps: {len(steps)}, of which padded: {num_padded}")
    print("equal to eager:", tokens == Engine().generate(PROMPTS, LENGTHS))
    engine.graphs.destroy_cuda_graphs()


if __name__ == "__main__":
    main()
