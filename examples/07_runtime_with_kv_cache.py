"""07: A runtime over a model with a KV cache, counters, and metadata that the host prepares.

A capture runs the model several times, so what a run changes is declared, each thing by its kind:
a cache is written where the batch says (``may_overwrite``), counters are put back (``state``), and
the host's work for a step is done before every run (a resource's ``prepare``, which gets the
``step_info`` of the step). What is not declared is refused.

Output::

    without state=: StateAdvancedError of uses
    3 graphs; uses counted by the capture: 0
    length 1: FULL at 4, PADDED, tokens [31, 18, 18]
    length 2: FULL at 4, PADDED, tokens [14, 26, 24]
    length 3: FULL at 2, HIT, tokens [9, 15]
    length 4: FULL at 2, HIT, tokens [27, 14]
    equal to eager: True
"""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from graphrt import BufferSpec, Example, OutputSpec, Padding, Runtime, TensorStateGuard
from graphrt.errors import StateAdvancedError

VOCAB, WIDTH, MAX_LENGTH, MAX_SEQS = 32, 16, 8, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Lengths:
    """Metadata of attention: how many tokens each request has, in a tensor that graphs read."""

    def __init__(self):
        self.tensor = torch.ones(MAX_SEQS, dtype=torch.int64, device=DEVICE)

    def prepare(self, key, step_info):
        if step_info is not None:  # None in warm-ups and captures, where any lengths will do
            self.tensor[: len(step_info)].copy_(torch.tensor(step_info))


class Decoder(nn.Module):
    """The next token of each request: the best one, less one for each time it was chosen."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAX_LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        # MAX_LENGTH slots for each request. Those of request 0 are for padding.
        self.register_buffer("cache", torch.zeros((1 + MAX_SEQS) * MAX_LENGTH, 2, WIDTH))
        self.register_buffer("uses", torch.zeros(1 + MAX_SEQS, VOCAB))
        self.lengths = Lengths()

    def forward(self, ids, slots):
        """[tokens], int64, like ``ids`` and ``slots``, where the cache gets the new tokens."""
        last, request = self.lengths.tensor[: len(ids)] - 1, slots // MAX_LENGTH
        q, *kv = self.qkv(self.embed(ids) + self.place(last)).chunk(3, -1)
        self.cache[slots] = torch.stack(kv, 1)
        keys, values = self.cache.unflatten(0, (-1, MAX_LENGTH))[request].unbind(2)
        visible = torch.arange(MAX_LENGTH, device=ids.device) <= last[:, None]
        x = F.scaled_dot_product_attention(q[:, None], keys, values, visible[:, None])[:, 0]
        chosen = (self.head(x) - self.uses[request]).argmax(-1)
        is_real = (request > 0).float()  # padding counts nothing
        self.uses.index_put_((request, chosen), is_real, accumulate=True)
        return chosen


def batch_of(ids, length):
    """What a step is given for requests 1, 2, ... of ``length`` tokens, of which ``ids`` last."""
    slots = torch.arange(1, 1 + len(ids)) * MAX_LENGTH + length - 1
    return Example({"ids": ids, "slots": slots.to(DEVICE)}, step_info=[length] * len(ids))


def examples(sizes, seed):
    return batch_of(torch.full((sizes["tokens"],), seed, device=DEVICE), length=2 + seed)


def make_runtime(model, state):
    return Runtime(
        model,
        inputs=[
            BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(0, arbitrary=True)),
            BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(0)),
        ],
        outputs=OutputSpec({"": "tokens"}),
        examples=examples,
        mode="FULL_DECODE_ONLY",
        sizes=[1, 2, 4],
        max_num_seqs=MAX_SEQS,
        may_overwrite={model.cache: "slots"},
        state=state,
        resources=[model.lengths],
    )


def generate(step):
    """Tokens of three requests, of which the last one ends first."""
    ids, tokens = torch.arange(3, device=DEVICE), []
    for length in range(1, 5):
        ids = step(*batch_of(ids[: 3 if length < 3 else 2], length)[:2])
        tokens.append(ids.tolist())
    return tokens


def main():
    torch.manual_seed(0)
    model = Decoder().to(DEVICE).requires_grad_(False)
    try:
        with make_runtime(copy.deepcopy(model), state=None) as runtime:
            runtime.capture()
    except StateAdvancedError as error:
        print("without state=:", type(error).__name__, "of", error.subject)

    def on_graphs(values, lengths):
        chosen = runtime.step(values, step_info=lengths)
        mode, key, reason = runtime.last_decision
        print(f"length {lengths[0]}: {mode.name} at {key.num_tokens}, {reason.name}", end="")
        print(f", tokens {chosen.tolist()}")
        return chosen

    def eager(values, lengths):
        model.lengths.prepare(None, lengths)
        return model(**values)

    with make_runtime(model, state=TensorStateGuard([model.uses])) as runtime:
        runtime.capture()
        print("3 graphs; uses counted by the capture:", int(model.uses.sum()))
        tokens = generate(on_graphs)
    model.uses.zero_()
    print("equal to eager:", tokens == generate(eager))


if __name__ == "__main__":
    main()
