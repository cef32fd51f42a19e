"""06: What graphs cost, and how they go: in generations.

Graphs of one generation share one pool: captured largest first, smaller keys reuse its bytes and
it does not grow. They are retired together, because memory that one graph uses another may have
baked in. A rebuilt generation replaces the old one in one step.

Output::

     64 rows: 3 kernels, pool grew by 8192 bytes
     32 rows: 3 kernels, pool grew by 0 bytes
      8 rows: 3 kernels, pool grew by 0 bytes
    first: 3 graphs alive, generations [0]
    rebuilt: 2 graphs alive, generations [1]
    the old program: RetiredProgramError, generation 0 is retired
    the new one: [4.0, 4.0, 4.0]
    retired: 0 graphs alive, generations []
    5 captured in all, 2 generations gone,
    each gave its memory back: True
"""

from functools import partial

import torch

from graphrt import (
    BatchDescriptor,
    CaptureJob,
    CaptureOptions,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    capture_all,
)
from graphrt.errors import RetiredProgramError
from graphrt.events import Retired

FULL = RuntimeMode.FULL
INPUTS = torch.ones(64, 16)


def capture(library, wrapped, sizes, generation="current"):
    """Captures what reads ``INPUTS``, and compares each first replay with eager."""

    def inputs(seed, size):
        INPUTS.fill_(1 + seed)
        return (INPUTS[:size],), {}

    jobs = [
        CaptureJob(wrapped, FULL, BatchDescriptor(size), partial(inputs, size=size))
        for size in sizes
    ]
    capture_all(library, jobs, CaptureOptions(generation=generation))


def show(title, library):
    print(
        f"{title}: {library.num_graphs} graphs alive, generations "
        f"{[generation.index for generation in library.generations]}"
    )


def main() -> None:
    events = []
    with GraphLibrary("simulated", observer=events.append) as library, torch.inference_mode():
        weight = torch.eye(16)
        wrapped = CUDAGraphWrapper(lambda x: (x @ weight).relu() + x, library, FULL, name="layer")

        capture(library, wrapped, (64, 32, 8))
        for program in library.programs:
            memory = program.memory
            print(
                f"{program.key.num_tokens:>3} rows: {memory.num_nodes} kernels, "
                f"pool grew by {memory.pool_growth_bytes} bytes"
            )
        show("first", library)

        old = library.program(wrapped, FULL, BatchDescriptor(8))
        capture(library, wrapped, (64, 8), generation="new")
        show("rebuilt", library)
        try:
            old(INPUTS[:8])
        except RetiredProgramError as error:
            print(f"the old program: {type(error).__name__}, {error.found}")
        with ForwardContext(FULL, BatchDescriptor(8)):
            print("the new one:", wrapped(INPUTS[:8])[0, :3].tolist())

        library.retire()
        show("retired", library)
        retired = [event for event in events if isinstance(event, Retired)]
        gave_back = all(event.freed_bytes > 0 for event in retired)
        print(f"{library.num_cudagraph_captured} captured in all, {len(retired)} generations gone,")
        print(f"each gave its memory back: {gave_back}")


if __name__ == "__main__":
    main()
