"""04: Break points: PIECEWISE graphs of plain Python, without a compiler.

What a graph cannot hold (here: attention that looks at the length on the host) stands behind a
break point. The capture ends one graph there, notes the call, and opens the next; a replay runs
that list, not the model. In a FULL capture the same function would be recorded with the rest.

Output::

    4 live rows: [6.0, 20.0, 46.0, 88.0], eager [6.0, 20.0, 46.0, 88.0]
    2 live rows: [6.0, 20.0, 0.0, 0.0], eager [6.0, 20.0, 0.0, 0.0]
    state: ready: its first replay was compared with eager execution, and equal
    captured: 3 device graphs, 4 kernels
      0. graph, 1 kernel
      1. eager: segment 1: attention
      2. graph, 2 kernels
      3. eager: segment 3: attention
"""

import torch

from graphrt import CUDAGraphRunner, break_point, explain

LENGTHS = {"live": 4}


@break_point(name="attention", out="out")
def attention(x, out=None):
    out = torch.empty_like(x) if out is None else out
    live = LENGTHS["live"]  # read at every step: this is eager
    out[:live] = x[:live].cumsum(0)
    out[live:] = 0
    return out


def model(x):
    for _ in range(2):
        x = attention(x + 1) * 2
    return x


def main() -> None:
    with CUDAGraphRunner(
        model,
        examples=lambda sizes, seed: {"x": torch.arange(4.0) + seed},
        modes=["PIECEWISE"],
        device="simulated",
    ) as runner:
        runner.capture()
        x = torch.arange(4.0)
        for live in (4, 2):
            LENGTHS["live"] = live
            print(f"{live} live rows: {runner.run({'x': x}).tolist()}, eager {model(x).tolist()}")

        for line in explain(runner.library.programs[0]).splitlines()[1:7]:
            print(line.split(" (")[0])  # without file and line


if __name__ == "__main__":
    main()
