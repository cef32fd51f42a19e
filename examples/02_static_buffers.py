"""02: Static buffers: where a graph reads, and what its padded rows hold.

A graph reads fixed addresses, so a step copies its inputs into buffers that never move. A batch
of 3 in a graph of 4 leaves one padded row; what it holds is declared, because to a KV cache the
slot 0 of a zeroed row is somebody's memory.

Output::

    PaddingRequiredError: static buffer 'slots'
      expected: an explicit padding, because 0 is a live value of torch.int64
      found:    padding=None
      do:       declare Padding.zero() or .fill(v), or .keep() if no padding is read
    6 rows in the graph of 8:
      ids   [50, 51, 52, 53, 54, 55, 0, 0]
      slots [0, 1, 2, 3, 4, 5, -1, -1]
      bias  [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    then 3 rows in the graph of 4:
      ids   [7, 8, 9, 0]
      slots [4, 5, 6, -1]
      bias  [0.0, 0.0, 0.0, 0.0]
    same bytes: True
    beyond them: [-1, -1, -1, -1]
"""

import torch

from graphrt import BufferSet, BufferSpec, Padding, SimulatedDevice
from graphrt.errors import PaddingRequiredError


def main() -> None:
    try:
        BufferSpec("slots", ("tokens",), torch.int64)
    except PaddingRequiredError as error:
        print(f"{type(error).__name__}: {error}")

    specs = [
        BufferSpec("ids", ("tokens",), torch.int64, Padding.zero()),
        BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(-1)),
        BufferSpec("bias", ("tokens",), torch.float32, optional=True),
    ]
    buffers = BufferSet(specs, {"tokens": 8}, lambda key: {"tokens": key}, SimulatedDevice())
    four, eight = buffers.bind(4), buffers.bind(8)

    def show(title, bound):
        rows = {name: view.tolist() for name, view in bound.views.items()}
        print(title, *(f"  {name:<5} {row}" for name, row in rows.items()), sep="\n")

    six = torch.arange(6)
    eight.stage(6, {"ids": six + 50, "slots": six, "bias": torch.ones(6)})
    show("6 rows in the graph of 8:", eight)

    # Fewer rows: whatever the step before left beyond them is padding again. No bias: 0 rows.
    four.stage(3, {"ids": torch.tensor([7, 8, 9]), "slots": torch.tensor([4, 5, 6])})
    show("then 3 rows in the graph of 4:", four)
    print("same bytes:", four.views["ids"].data_ptr() == eight.views["ids"].data_ptr())
    print("beyond them:", buffers.tensors["slots"][4:].tolist())


if __name__ == "__main__":
    main()
