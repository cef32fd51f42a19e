"""08: A text encoder over two axes, batch and length: one graph for each pair of sizes.

Every text has its own length; ``mask`` says which tokens are real, so 0 is its padding along both
axes. Sizes are read off the values, and results are cut to them. Before a graph serves, a batch
that fills it was compared with eager, and batches that are padded to it with the same unpadded.

Output::

    12 graphs
    (3, 11): FULL at 4 x 16, PADDED
    (4, 32): FULL at 4 x 32, HIT
    (1, 50): FULL at 1 x 64, PADDED
    (2, 90): NONE at 2 x 90, ABOVE_MAX
    equal to eager up to rounding, which the number of rows may change: True
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec, Padding

WIDTH = 32


class Encoder(nn.Module):
    """A vector for each text. Of the shape of a sentence transformer, but small."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(1000, WIDTH), nn.Embedding(128, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, mask):
        """[batch, WIDTH]. ``ids``, ``mask`` (True: a real token): [batch, length]."""
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask[:, None]))
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def batch_of(lengths):
    """Random texts of these lengths."""
    is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"ids": torch.randint(1000, is_real.shape) * is_real, "mask": is_real}


def encoder_on_graphs(model):
    shape = ("batch", "length")
    runner = CUDAGraphRunner(
        model,
        inputs=[
            BufferSpec("ids", shape, torch.int64, Padding.zero(arbitrary=True)),
            BufferSpec("mask", shape, torch.bool, Padding.zero()),
        ],
        outputs=OutputSpec({"": "batch"}),
        sizes={"batch": [1, 2, 4], "length": [8, 16, 32, 64]},
    )
    runner.capture(like=batch_of([5, 3, 8]))
    return runner


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Encoder().to(device).requires_grad_(False)
    is_equal = True
    with encoder_on_graphs(model) as runner:
        print(len(runner.report().graphs), "graphs")
        for lengths in ([11, 4, 6], [32, 32, 8, 1], [50], [90, 3]):
            batch = batch_of(lengths)
            vectors = runner.run(batch)
            mode, key, reason = runner.last_decision
            at = " x ".join(map(str, key.variant.sizes))
            print(f"{tuple(batch['ids'].shape)}: {mode.name} at {at}, {reason.name}")
            eager = model(**{name: value.to(device) for name, value in batch.items()})
            is_equal &= torch.allclose(vectors, eager, atol=1e-5)
    print("equal to eager up to rounding, which the number of rows may change:", is_equal)


if __name__ == "__main__":
    main()
