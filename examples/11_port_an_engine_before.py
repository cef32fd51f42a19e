"""11: An engine's CUDA graphs by hand: what example 12 replaces.

The engine is in ``small_engine.py``; ``run_model`` is where its graphs come in. Decode batches are
padded to the next captured size, prefills stay eager. Without a GPU everything is eager.

Output::

    [7, 3, 9, 57, 54, 39, 61, 40, 29, 56, 52, 17]
    equal to eager: True
"""

import torch
from small_engine import LENGTHS, MAX_BLOCKS, PROMPTS, Engine

SIZES = [1, 2, 4, 8]


class HandWritten(Engine):
    def __init__(self):
        super().__init__()
        self.graphs, self.outputs, self.static = {}, {}, {}
        if torch.cuda.is_available():
            self.capture()

    @torch.no_grad()
    def capture(self):
        largest = SIZES[-1]
        self.static = {
            "input_ids": torch.zeros(largest, dtype=torch.int64, device="cuda"),
            "positions": torch.zeros(largest, dtype=torch.int64, device="cuda"),
            "slot_mapping": torch.zeros(largest, dtype=torch.int64, device="cuda"),
            "block_tables": torch.zeros(largest, MAX_BLOCKS, dtype=torch.int64, device="cuda"),
        }
        self.model.attention.query_lens = None
        pool = None
        for size in reversed(SIZES):  # the largest first: smaller graphs reuse its memory
            views = {name: buffer[:size] for name, buffer in self.static.items()}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.model(**views)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.outputs[size] = self.model(**views)
            pool = pool or graph.pool()
            self.graphs[size] = graph
        torch.cuda.synchronize()

    def run_model(self, values, query_lens):
        count = len(values["input_ids"])
        if query_lens is not None or not self.graphs or count > SIZES[-1]:
            return super().run_model(values, query_lens)
        size = next(size for size in SIZES if size >= count)
        for name, buffer in self.static.items():
            buffer[:count].copy_(values[name])
            buffer[count:size].zero_()  # or padding writes into whatever an older step named
        self.graphs[size].replay()
        return self.outputs[size][:count]


def main():
    tokens = HandWritten().generate(PROMPTS, LENGTHS)
    print(tokens[0])
    print("equal to eager:", tokens == Engine().generate(PROMPTS, LENGTHS))


if __name__ == "__main__":
    main()
