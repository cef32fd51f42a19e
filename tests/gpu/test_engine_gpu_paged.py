"""The kernel for decoding requests: against the formula in float64, and inside graphs."""

from __future__ import annotations

import math

import pytest
import torch
from engines import LLAMA, QWEN, make_engine

from graphrt_llm.attention import paged
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kernels import paged_decode
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig

CUDA = torch.device("cuda")
NUM_BLOCKS, BLOCK_SIZE = 600, 16
LENGTHS = [1, 16, 31, 32, 33, 200, 512, 513, 2000, 0, 17, 100]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random_cache(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    cache = KVCache(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CUDA)
    cache.tensor.normal_()
    return cache


def random_tables(lengths: list[int]) -> torch.Tensor:
    """Blocks of each row, all different, in random order; rows end with the null block."""
    blocks = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    most = max(-(-length // BLOCK_SIZE) for length in lengths)
    tables = torch.zeros(len(lengths), most + 1, dtype=torch.int64)
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int64)
    return tables.to(CUDA)


def expected(
    q: torch.Tensor, layer: torch.Tensor, tables: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    group = q.shape[1] // layer.shape[3]
    rows = []
    for row, length in enumerate(lengths):
        keys, values = layer[tables[row]].flatten(0, 1)[:length].double().unbind(1)
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[row].double(), keys) / math.sqrt(q.shape[-1])
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def queries(config: ModelConfig, rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As the model passes them: a slice of every token's heads, so rows are strided."""
    heads = config.num_heads + 2 * config.num_kv_heads
    drawn = torch.randn(rows, heads, config.head_dim, device=CUDA, dtype=torch.float32)
    return drawn.to(dtype)[:, : config.num_heads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["group of 2", "group of 4"])
def test_every_length_gives_the_result_of_the_formula(config, dtype):
    cache, tables = random_cache(config, dtype), random_tables(LENGTHS)
    decode = paged.triton_decode(cache)
    q = queries(config, len(LENGTHS), dtype)
    lengths = torch.tensor(LENGTHS, device=CUDA)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=CUDA)
    for layer in cache.layers[:2]:
        decode(q, layer, tables, lengths, out)
        wanted = expected(q, layer, tables, LENGTHS)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=1e-2)
        assert out[LENGTHS.index(0)].eq(0).all()


@pytest.mark.parametrize("query_len", [2, 3, 5])
@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["group of 2", "group of 4"])
def test_drafts_see_what_is_before_each_of_them(config, query_len):
    # Splits that begin within the new tokens, of which the first see nothing.
    found = [query_len, 31, 32, 33, 34, 0, 512, 513, 514, 516, 1025, 2000]
    cache, tables = random_cache(config), random_tables(found)
    decode = paged.triton_decode(cache, query_len)
    q = queries(config, len(found) * query_len)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=CUDA)
    decode(q, cache.layers[0], tables, torch.tensor(found, device=CUDA), out)
    for place in range(query_len):
        lengths = [max(0, length - query_len + 1 + place) for length in found]
        rows = slice(place, None, query_len)
        wanted = expected(q[rows], cache.layers[0], tables, lengths)
        torch.testing.assert_close(out[rows].double(), wanted, rtol=2e-2, atol=1e-2)
        assert out[rows][found.index(0)].eq(0).all()


def test_a_row_has_the_same_bits_in_like_batches_and_calls():
    """Batches of few rows, and batches of many: the context is split in two ways."""
    cache, tables = random_cache(QWEN), random_tables(LENGTHS)
    decode = paged.triton_decode(cache)
    q, lengths = queries(QWEN, len(LENGTHS)), torch.tensor(LENGTHS, device=CUDA)
    together = torch.empty(q.shape, dtype=q.dtype, device=CUDA)
    decode(q, cache.layers[0], tables, lengths, together)
    for _ in range(200):
        again = torch.empty_like(together)
        decode(q, cache.layers[0], tables, lengths, again)
        assert torch.equal(again, together)
    few = paged_decode.FEW_REQUESTS
    assert len(LENGTHS) > few

    def some(first: int, count: int) -> torch.Tensor:
        out, rows = torch.empty_like(together[:count]), slice(first, first + count)
        decode(q[rows], cache.layers[0], tables[rows], lengths[rows], out)
        return out

    for row in range(len(LENGTHS) - few):
        assert torch.equal(some(row, few + 1), together[row : row + few + 1])
        assert torch.equal(some(row, 1), some(row, few)[:1])


def test_a_graph_follows_lengths_that_grow():
    cache, tables = random_cache(QWEN), random_tables([600] * 3)
    decode = paged.triton_decode(cache)
    q, lengths = queries(QWEN, 3), torch.tensor([1, 30, 250], device=CUDA)
    out = torch.empty(q.shape, dtype=q.dtype, device=CUDA)
    decode(q, cache.layers[0], tables, lengths, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(q, cache.layers[0], tables, lengths, out)
    for _ in range(60):
        lengths.add_(5)
        graph.replay()
        eager = torch.empty_like(out)
        decode(q, cache.layers[0], tables, lengths, eager)
        assert torch.equal(out, eager)
    wanted = expected(q, cache.layers[0], tables, lengths.tolist())
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=1e-2)


def test_scores_far_apart_stay_finite():
    cache, tables = random_cache(QWEN), random_tables([200])
    cache.tensor.mul_(50)
    q, lengths = queries(QWEN, 1) * 50, torch.tensor([200], device=CUDA)
    out = torch.empty(q.shape, dtype=q.dtype, device=CUDA)
    paged.triton_decode(cache)(q, cache.layers[0], tables, lengths, out)
    wanted = expected(q, cache.layers[0], tables, [200])
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("rows", [4, 16, 17, 40])
def test_scratch_memory_suffices_for_the_largest_batch(rows):
    decode = paged.triton_decode(random_cache(QWEN), most_requests=rows)
    lengths = [600] * rows
    cache = KVCache(QWEN, num_blocks=1700, block_size=16, dtype=torch.bfloat16, device=CUDA)
    cache.tensor.normal_()
    tables = torch.arange(rows * 38, device=CUDA).view(rows, 38) + 1
    q = queries(QWEN, rows)
    out = torch.empty(q.shape, dtype=q.dtype, device=CUDA)
    decode(q, cache.layers[0], tables, torch.tensor(lengths, device=CUDA), out)
    wanted = expected(q, cache.layers[0], tables, lengths)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=1e-2)


def test_every_graph_keeps_scratch_memory_and_cache_alive():
    """Torch does not see their use: the kernels receive addresses."""
    with make_engine(QWEN, "FULL_AND_PIECEWISE", backend="paged", sizes=(1, 8)) as engine:
        attention = engine.attention_backend
        held = (attention.cache.tensor, *attention.keep_alive)
        assert len(held) >= 4
        for program in engine.runtime.library.programs:
            kept = {id(item.storage) for item in program.externals}
            assert kept >= {id(tensor.untyped_storage()) for tensor in held}


def test_a_cache_in_another_dtype_is_refused():
    with pytest.raises(AttentionBackendError, match="float32"):
        paged.triton_decode(random_cache(QWEN, torch.float32))
