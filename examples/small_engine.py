"""The engine that examples 11 to 13 put on graphs: paged KV cache, prefill, batched decode.

It is of the shape of nano-vllm: ``Engine.run_model`` is the only place that a graph can replace.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

VOCAB, WIDTH, LAYERS = 64, 32, 2
BLOCK, MAX_BLOCKS = 4, 8  # tokens in a block, blocks of a sequence
MAX_SEQS, MAX_TOKENS = 8, 64  # of one step
NUM_BLOCKS = 1 + MAX_SEQS * MAX_BLOCKS  # no request has block 0: padding is written there


@dataclass
class Sequence:
    tokens: list[int]
    length: int
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Attention:
    """Stands for an attention library, which wants the lengths of a prefill on the host."""

    query_lens: list[int] | None = None  # new tokens of each sequence; None: one each

    def __call__(self, q, cache, positions, block_tables):
        if self.query_lens is None:
            return self.attend(q, cache, positions, block_tables)
        out, start = torch.zeros_like(q), 0
        for count in self.query_lens:
            rows = slice(start, start + count)
            out[rows] = self.attend(q[rows], cache, positions[rows], block_tables[rows])
            start += count
        return out

    def attend(self, q, cache, positions, block_tables):
        """[tokens, WIDTH]: each token over its sequence's blocks, up to its own position."""
        in_block = torch.arange(BLOCK, device=q.device)
        slots = (block_tables[:, :, None] * BLOCK + in_block).flatten(1)
        keys, values = cache[slots].unbind(2)
        visible = torch.arange(slots.shape[1], device=q.device) <= positions[:, None]
        return F.scaled_dot_product_attention(q[:, None], keys, values, visible[:, None])[:, 0]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache, attention, positions, slot_mapping, block_tables):
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).chunk(3, -1)
        cache[slot_mapping] = torch.stack((k, v), 1)
        return x + self.out(attention(q, cache, positions, block_tables))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(MAX_BLOCKS * BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.attention = Attention()
        slots = torch.zeros(NUM_BLOCKS * BLOCK, LAYERS, 2, WIDTH)
        self.register_buffer("cache", slots)

    def forward(self, input_ids, positions, slot_mapping, block_tables):
        """[tokens, WIDTH]. ``block_tables`` [tokens, MAX_BLOCKS], the others [tokens]: int64."""
        x = self.embed(input_ids) + self.place(positions)
        for index, layer in enumerate(self.layers):
            cache = self.cache[:, index]
            x = layer(x, cache, self.attention, positions, slot_mapping, block_tables)
        return x


class Engine:
    """Greedy. Without graphs; a subclass may run the model otherwise."""

    def __init__(self):
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = Model().double().to(self.device).eval()
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))

    def run_model(self, values, query_lens):
        """``query_lens``: new tokens of each sequence in a prefill; None: each decodes one."""
        self.model.attention.query_lens = query_lens
        return self.model(**values)

    @torch.no_grad()
    def generate(self, prompts, lengths):
        """``lengths``: tokens of each sequence at its end, prompt included."""
        seqs = [Sequence(list(p), n) for p, n in zip(prompts, lengths, strict=True)]
        for seq in seqs:
            seq.blocks = [self.free.pop() for _ in range(MAX_BLOCKS)]
        running = seqs
        while running:
            is_prefill = not running[0].num_cached
            self.step(running, is_prefill)
            running = [seq for seq in running if len(seq.tokens) < seq.length]
        for seq in seqs:
            self.free += seq.blocks
        return [seq.tokens for seq in seqs]

    def step(self, seqs, is_prefill):
        new = [(s, range(s.num_cached, len(s.tokens))) for s in seqs]
        values = self.values([(seq, place) for seq, places in new for place in places])
        counts = [len(places) for _, places in new]
        hidden = self.run_model(values, counts if is_prefill else None)
        last = torch.tensor(counts).cumsum(0).to(self.device) - 1
        tokens = self.model.head(hidden[last]).argmax(-1).tolist()
        for seq, token in zip(seqs, tokens, strict=True):
            seq.num_cached = len(seq.tokens)
            seq.tokens.append(token)

    def values(self, rows):
        """What the model reads, for new tokens given as (sequence, position)."""
        columns = {
            "input_ids": [seq.tokens[place] for seq, place in rows],
            "positions": [place for _, place in rows],
            "slot_mapping": [s.blocks[p // BLOCK] * BLOCK + p % BLOCK for s, p in rows],
            "block_tables": [seq.blocks for seq, _ in rows],
        }
        return {name: torch.tensor(column).to(self.device) for name, column in columns.items()}


PROMPTS = [[7, 3, 9], [1, 2, 3, 4, 5, 6], [40, 41], [11] * 5, [60, 0, 21, 33]]
LENGTHS = [12, 9, 15, 7, 20]
