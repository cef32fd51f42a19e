"""What the simulated device replays is bit-equal and stride-equal to eager."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from hypothesis import HealthCheck, given, settings, strategies as st
from simulated_recording import leaves, record, same

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import RetiredProgramError

MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture(scope="module")
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


def in_place_through_a_view(x: torch.Tensor, i: torch.Tensor) -> Any:
    y = x * 2
    y[1:3, ::2].add_(1)
    y.t()[0].mul_(3)
    y[i[:2]] += 1
    return y


def unflattened(x: torch.Tensor, i: torch.Tensor) -> Any:
    return (x * 2).view(2, 4, 8).permute(2, 0, 1).reshape(8, 8).unflatten(1, (4, 2)).squeeze()


def written_by_out(x: torch.Tensor, i: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    torch.mul(x, 3, out=out)
    values, indices = x.new_empty(8, 2), i.new_empty(8, 2)
    torch.topk(x, 2, out=(values, indices))
    return out, values, indices


def state_updates(x: torch.Tensor, i: torch.Tensor) -> Any:
    cache = torch.zeros(8, 8, dtype=x.dtype)
    cache.index_copy_(0, i, x)
    cache.index_add_(0, i, x)
    cache.scatter_(1, i.view(-1, 1), x[:, :1])
    cache.index_put_((i[:3],), x[:3], accumulate=True)
    cache[2] = x[3]
    cache[4, 5:6] = 1.5
    cache[cache > 3] = 0.25
    return cache


LSTM_WEIGHTS = [torch.ones(32, 8) / 8, torch.ones(32, 8) / 9, torch.ones(32), torch.ones(32)]

# Whatever a model may do with a float matrix [8, 8] and a permutation of 0..7.
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "arithmetic": lambda x, i: (x + 1, 2 - x, x / 3, x**2, -x, x % 2, x * x.t(), x.addcmul(x, x)),
    "comparison": lambda x, i: (x > 0, x.eq(x.t()), (x > 0) & (x < 1), ~(x > 0)),
    "matmul": lambda x, i: (x @ x.t(), x[None] @ x, x @ x[0], torch.einsum("ij,kj->ik", x, x)),
    "linear": lambda x, i: (F.linear(x, x, x[0]), F.linear(x[None], x), F.linear(x[None], x, x[0])),
    "bmm": lambda x, i: torch.bmm(x.view(2, 4, 8), x.view(2, 8, 4)),
    "reductions": lambda x, i: (x.sum(), x.mean(1), x.sum(0, keepdim=True), x.amax(1), x.argmax(1)),
    "max with indices": lambda x, i: (x.max(1), x.min(0), x.median(1)),
    "var": lambda x, i: (x.var(1), x.std(), torch.var_mean(x, 0)),
    "norms": lambda x, i: (F.layer_norm(x, (8,)), F.rms_norm(x, (8,)), x.norm(dim=1)),
    "group_norm": lambda x, i: F.group_norm(x[None], 4),
    "batch_norm": lambda x, i: F.batch_norm(x, x[0] * 0, x[0] * 0 + 1),
    "activations": lambda x, i: (F.silu(x), F.gelu(x), F.relu(x), F.softplus(x), x.sigmoid()),
    "softmax": lambda x, i: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)),
    "trigonometry": lambda x, i: (x.sin(), x.cos(), x.tanh(), x.exp(), x.abs().sqrt(), x.rsqrt()),
    "casts": lambda x, i: (x.to(torch.bfloat16) * 2, x.double(), x.long(), x.bool(), i.float()),
    "views": lambda x, i: (
        x + 1,
        x.t(),
        x[1:3, ::2],
        x.view(4, 16),
        x[None],
        x.expand(2, 8, 8),
        x[..., 0],
    ),
    "views of results": lambda x, i: ((x * 2).t(), (x * 2)[1:3], (x * 2).view(-1)[3:9]),
    "reshapes": unflattened,
    "contiguous": lambda x, i: (
        x.t().contiguous(),
        x.contiguous(),
        x.t().reshape(64),
        x.t().clone(),
    ),
    "chunks": lambda x, i: (x.chunk(2, -1), (x * 2).split([3, 5], 1), (x + 1).unbind(0)),
    "cat": lambda x, i: (torch.cat([x, x * 2], 1), torch.stack([x, x], 1), torch.cat([x, x[:0]])),
    "rotate": lambda x, i: torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1),
    "roll": lambda x, i: (x.roll(1, 0), x.flip(1), x.tril(), x.triu(1), torch.tril(x > 0)),
    "in place": lambda x, i: (x * 1).add_(1).mul_(2).clamp_(-1, 1).neg_().relu_(),
    "in place through a view": in_place_through_a_view,
    "metadata in place": lambda x, i: (x * 2).unsqueeze_(0).transpose_(1, 2).squeeze_(0),
    "out arguments": written_by_out,
    "factories": lambda x, i: (
        torch.zeros(3, 4),
        torch.ones(2, dtype=torch.int32),
        torch.full((2, 2), 7.5),
        torch.arange(8),
        torch.arange(1, 4, 0.5),
        torch.linspace(0, 1, 5),
        torch.eye(3),
        x.new_zeros(3),
        x.new_full((2,), 3),
        torch.zeros_like(x.t()),
        torch.ones_like(x),
        torch.full_like(x, 2),
    ),
    "dirtied factory": lambda x, i: torch.zeros(8, 8, dtype=x.dtype).add_(x),
    "index": lambda x, i: (x[i], x[i, i], x[:, i[:2]], x.index_select(1, i)),
    "gather": lambda x, i: (x.gather(0, i.view(-1, 1)), x.take_along_dim(i.view(-1, 1), 1)),
    "state": state_updates,
    "index_put": lambda x, i: x.clone().index_put_((i,), x * 3),
    "scatter": lambda x, i: (x.scatter(1, i.view(-1, 1), 1.0), x.scatter_add(0, i[None], x)),
    "embedding": lambda x, i: (
        F.embedding(i, x),
        F.embedding(i.view(2, 4), x),
        F.embedding(i, x, 1),
    ),
    "embedding of a transposed table": lambda x, i: F.embedding(i.view(2, 4).t(), x.t()),
    "topk": lambda x, i: (torch.topk(x, 3), torch.sort(x, dim=1), x.argsort(1), torch.sort(i)),
    "cumsum": lambda x, i: (x.cumsum(1), x.cumprod(0), torch.cummax(x, 1)),
    "where": lambda x, i: (torch.where(x > 0, x, -x), torch.where(x > 0, x, 0.0)),
    "masks": lambda x, i: (x.masked_fill(x > 0, -1.0), (x * 1).masked_fill_(x > 0, 0.5)),
    "pad": lambda x, i: (F.pad(x, (1, 2)), F.pad(x, (1, -1, 0, 2), value=3.0)),
    "repeat": lambda x, i: (x.repeat(2, 1), x.repeat_interleave(2, 1), x.tile(1, 2)),
    "attention": lambda x, i: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), x.view(1, 2, 4, 8)
    ),
    "causal attention": lambda x, i: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), is_causal=True
    ),
    "masked attention": lambda x, i: F.scaled_dot_product_attention(
        x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), attn_mask=x[:4, :4] > 0
    ),
    "grouped attention": lambda x, i: F.scaled_dot_product_attention(
        x.view(1, 4, 2, 8), x.view(1, 4, 2, 8)[:, :2], x.view(1, 4, 2, 8)[:, 2:], enable_gqa=True
    ),
    "convolution": lambda x, i: F.conv1d(x[None, :, :], x.view(4, 8, 2), padding=1),
    "lstm": lambda x, i: torch.lstm(
        x[:, None], (x[:1, None], x[1:2, None]), LSTM_WEIGHTS, True, 1, 0.0, False, False, False
    ),
    "pooling": lambda x, i: (F.avg_pool1d(x, 2), F.max_pool1d(x, 2), F.interpolate(x[None], 16)),
    "interpolation": lambda x, i: F.interpolate(x[None], 5, mode="linear"),
    "loss": lambda x, i: (F.cross_entropy(x, i), F.mse_loss(x, x.t())),
    "foreach": lambda x, i: (torch._foreach_mul([x, x + 1], 2.0), torch._foreach_add([x], [x])),
    "foreach in place": lambda x, i: torch._foreach_add_([x * 1, x * 2], 1.0) or x * 3,
    "bucketize": lambda x, i: torch.searchsorted(x.sort(1).values, x),
    "outer": lambda x, i: (torch.outer(x[0], x[1]), torch.meshgrid(x[0], x[1], indexing="ij")),
    "argument returned": lambda x, i: (x, x[1:], x * 2, x.view_as(x)),
    "one result twice": lambda x, i: [(x * 2)] * 2,
    "empty": lambda x, i: (x[:0] * 2, torch.cat([x[:0], x[:1]]), x[:0].sum()),
    "scalars": lambda x, i: (x.sum() + 1, x[0, 0] * 2, x * torch.scalar_tensor(2.0)),
    "numbers of equal value": lambda x, i: (i * 2, i * 2.0, i + 1, i + True, i + 1.0),
    "integers": lambda x, i: (i + 1, i // 2, i * i, i.remainder(3), i << 1, i.sum(), i.cumsum(0)),
    "kernel without an out variant": lambda x, i: torch.nn.functional.fold(
        x.view(1, 4, 16), (5, 5), (2, 2)
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_replay_equals_eager(device: SimulatedDevice, name: str, mode: Any) -> None:
    operation = OPERATIONS[name]
    torch.manual_seed(1)
    x, i = torch.randn(8, 8), torch.randperm(8)
    pool = device.new_pool()
    before = x.clone()
    graph, result = record(device, pool, lambda: operation(x, i), mode)
    assert same(x, before)
    for _ in range(3):
        x.copy_(torch.randn(8, 8))
        i.copy_(torch.randperm(8))
        graph.replay()
        with mode():
            expected = leaves(operation(x, i))
        found = leaves(result)
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert same(left, right), (left.stride(), right.stride())
    graph.reset()
    pool.release()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["arithmetic", "matmul", "linear", "norms", "attention", "state", "casts", "softmax"]
)
def test_replay_equals_eager_in_every_dtype(
    device: SimulatedDevice, name: str, dtype: torch.dtype
) -> None:
    operation = OPERATIONS[name]
    x, i = torch.randn(8, 8, dtype=dtype), torch.randperm(8)
    pool = device.new_pool()
    for mode in MODES:
        graph, result = record(device, pool, lambda: operation(x, i), mode)
        x.copy_(torch.randn(8, 8))
        graph.replay()
        with mode():
            expected = leaves(operation(x, i))
        assert all(map(same, leaves(result), expected))
        graph.reset()
    pool.release()


@pytest.mark.parametrize("mode", MODES)
def test_complex_numbers_keep_their_conjugate_bit(device: SimulatedDevice, mode: Any) -> None:
    z = torch.randn(4, 4, dtype=torch.complex64)

    def conjugates() -> Any:
        return (
            (z + 1).conj() * 2,
            z.conj() * 2,
            (z.conj() + 1).abs(),
            z.conj().imag + 1,
            (z + 1).conj().imag * 2,
            torch.view_as_real(z) * 2,
        )

    graph, result = record(device, device.new_pool(), conjugates, mode)
    z.copy_(torch.randn(4, 4, dtype=torch.complex64))
    graph.replay()
    with mode():
        assert all(map(same, leaves(result), leaves(conjugates())))


@pytest.mark.parametrize("mode", MODES)
def test_replays_draw_what_eager_draws_and_capture_nothing(
    device: SimulatedDevice, mode: Any
) -> None:
    x, weights, generator = torch.ones(64), torch.rand(4, 8), torch.Generator()

    def draw() -> Any:
        return (
            F.dropout(x, 0.5),
            torch.rand(8),
            torch.randn(3, 3),
            torch.randn_like(x),
            torch.randint(0, 9, (5,)),
            torch.randperm(6),
            torch.multinomial(weights, 2, replacement=True),
            torch.bernoulli(x * 0.3),
            torch.empty(7).uniform_(2, 3),
            torch.empty(7).exponential_(),
            torch.normal(0.0, 1.0, (4,)),
            torch.rand(4, generator=generator),
        )

    torch.manual_seed(3)
    generator.manual_seed(4)
    states = torch.get_rng_state(), generator.get_state()
    with mode():
        eager = [leaves(draw()) for _ in range(3)]
    torch.set_rng_state(states[0])
    generator.set_state(states[1])
    graph, result = record(device, device.new_pool(), draw, mode, generators=(generator,))
    assert graph.uses_rng
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    for expected in eager:
        graph.replay()
        assert all(map(same, leaves(result), expected))


@torch.library.custom_op("graphrt_simulated_test::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphrt_simulated_test::write_cache", mutates_args=("cache",))
def write_cache(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
    cache[at] += row


@pytest.mark.parametrize("mode", MODES)
def test_custom_operator_with_a_fake_or_no_result_is_recorded(
    device: SimulatedDevice, mode: Any
) -> None:
    x, cache, at = torch.randn(4), torch.zeros(3, 4), torch.tensor([1])

    def use() -> torch.Tensor:
        scaled = scale(x, 2.0)
        write_cache(cache, scaled, at)
        return scaled + cache[1]

    graph, out = record(device, device.new_pool(), use, mode)
    assert not cache.any()
    x.fill_(3.0)
    for step in (1, 2, 3):
        graph.replay()
        assert cache.tolist() == [[0.0] * 4, [6.0 * step] * 4, [0.0] * 4]
        assert out.tolist() == [6.0 + 6.0 * step] * 4
    written = {use.tensor.data_ptr() for use in graph.externals if use.written}
    assert written == {cache.data_ptr()}


class Decoder(torch.nn.Module):
    """A layer of a decoder with a static cache, as language models have."""

    def __init__(self, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden)
        self.norm = torch.nn.RMSNorm(hidden)
        self.register_buffer("keys", torch.zeros(4, heads, length, self.width))
        self.register_buffer("values", torch.zeros(4, heads, length, self.width))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        q, k, v = (
            part.view(tokens, 1, self.heads, self.width).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (torch.arange(self.keys.shape[2]) <= position)[None, None, None]
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).reshape(tokens, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_decode_with_a_static_cache_replays_bit_equal(
    device: SimulatedDevice, mode: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[Decoder(16, 2, 8) for _ in range(2)]).to(dtype)
    eager = torch.nn.Sequential(*[Decoder(16, 2, 8) for _ in range(2)]).to(dtype)
    eager.load_state_dict(model.state_dict())
    x, position = torch.randn(4, 16, dtype=dtype), torch.tensor([0])

    def step(layers: torch.nn.Sequential) -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y, position)
        return y

    graph, out = record(device, device.new_pool(), lambda: step(model), mode)
    assert not model[0].keys.any()
    for at in range(3):
        x.copy_(torch.randn(4, 16))
        position.fill_(at)
        graph.replay()
        with mode():
            assert same(out, step(eager))
    assert all(map(same, model.state_dict().values(), eager.state_dict().values()))


def test_externals_are_the_users_objects_in_order_of_first_touch(device: SimulatedDevice) -> None:
    linear, x, cache = torch.nn.Linear(4, 4), torch.randn(2, 4), torch.zeros(2, 4)
    only_viewed, viewed = torch.ones(4), torch.ones(8)

    def body() -> None:
        cache.copy_(linear(x))
        only_viewed.view(2, 2)
        cache.add_(torch.ops.aten._unsafe_view(viewed, [2, 4]))  # Its schema shows no view.

    graph, _ = record(device, device.new_pool(), body)
    assert graph.num_nodes == 3
    uses = [(use.tensor, use.written) for use in graph.externals]
    expected = {id(x): False, id(linear.weight): False, id(linear.bias): False, id(cache): True}
    assert {id(tensor): written for tensor, written in uses} == expected | {id(viewed): False}
    assert [tensor is cache for tensor, _ in uses[-2:]] == [True, False]


def test_replay_ignores_the_modes_it_is_called_in(device: SimulatedDevice) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    a, b = torch.randn(64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)

    # Autocast would compute the loss in another precision.
    def compute() -> tuple[torch.Tensor, ...]:
        return x @ w, F.mse_loss(a, b)

    graph, out = record(device, device.new_pool(), compute)
    with torch.no_grad():
        expected = compute()
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad(), hooks:
        graph.replay()
    assert all(map(same, out, expected))
    assert saved == []
    assert not torch.is_inference_mode_enabled()


def test_recorded_autocast_is_replayed(device: SimulatedDevice) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def product() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    graph, out = record(device, device.new_pool(), product)
    x.copy_(torch.randn(4, 4))
    graph.replay()
    assert same(out, product())
    assert out.dtype is torch.bfloat16


def test_replay_kept_over_a_reset_raises_and_keeps_nothing(
    device: SimulatedDevice,
) -> None:
    pool = device.new_pool()
    big = torch.ones(1000)
    gone = torch.multiprocessing.reductions.StorageWeakRef(big.untyped_storage())

    def double(x: torch.Tensor = big) -> torch.Tensor:
        return x * 2

    graph, _ = record(device, pool, double)
    kept = graph.replay
    del big, double
    assert not gone.expired()
    graph.reset()
    assert gone.expired()
    with pytest.raises(RetiredProgramError):
        kept()
    with pytest.raises(RetiredProgramError):
        graph.replay()
    graph_gone = weakref.ref(graph)
    del graph, kept
    assert graph_gone() is None  # Without a collection.


UNARY = [torch.neg, torch.sin, torch.Tensor.t, torch.Tensor.contiguous, torch.relu, torch.clone]
BINARY = [torch.add, torch.mul, torch.matmul, torch.maximum]
IN_PLACE = [torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(UNARY), st.integers(0, 9)),
            st.tuples(st.sampled_from(BINARY), st.integers(0, 9), st.integers(0, 9)),
            st.tuples(st.sampled_from(IN_PLACE), st.integers(0, 9), st.integers(0, 9)),
        ),
        min_size=1,
        max_size=25,
    ),
    forget=st.integers(2, 5),
    mode=st.sampled_from(MODES),
)
def test_any_program_replays_as_eager(
    device: SimulatedDevice, steps: list[Any], forget: int, mode: Any
) -> None:
    """Random programs over the latest few values: blocks are freed and reused all along."""
    x = torch.randn(4, 4)

    def run() -> list[torch.Tensor]:
        values = [x * 0.5]
        for operation, *operands in steps:
            chosen = [values[at % len(values)] for at in operands]
            if operation in IN_PLACE and chosen[0] is not chosen[1]:
                # Distinct storage: an operand that overlaps what is written has no defined result.
                chosen[1] = chosen[1].clone()
            values = [*values, operation(*chosen)][-forget:]
        return values

    pool = device.new_pool()
    graph, result = record(device, pool, run, mode)
    for _ in range(2):
        x.copy_(torch.randn(4, 4).clamp(-1, 1))
        graph.replay()
        with mode():
            assert all(map(same, result, run()))
    graph.reset()
    pool.release()


@pytest.mark.parametrize("mode", MODES)
def test_inference_tensors_are_read_and_written_like_others(
    device: SimulatedDevice, mode: Any
) -> None:
    with torch.inference_mode():
        state, x = torch.zeros(4), torch.ones(4)

    def advance() -> torch.Tensor:
        with torch.inference_mode():
            return state.add_(x) * 2

    graph, out = record(device, device.new_pool(), advance, mode)
    assert not out.is_inference()
    for step in (1, 2):
        graph.replay()
        assert state.tolist() == [step] * 4
        assert out.tolist() == [2 * step] * 4
