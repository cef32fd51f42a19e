"""The fused kernels against PyTorch's operations in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from graphrt_llm.kernels import EAGER, Kernels, choose_kernels, few_rows
from graphrt_llm.kernels.few_rows import MAX_ROWS

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.float32).to(dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# No row, rows on both sides of the limits; widths and outputs that no tile divides; real shapes.
ROWS = [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1, few_rows.MAX_ADDED_ROWS, 70]
MATRICES = [(1024, 4096), (3072, 1024), (96, 40), (1536, 21)]


class Layer(NamedTuple):
    """The inputs of a product, and the same in float64."""

    x: torch.Tensor
    norm: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def exact(self) -> Layer:
        return Layer(*(None if part is None else part.double() for part in self))  # type: ignore[arg-type]


def layer(rows: int, width: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> Layer:
    return Layer(
        normal(rows, width, dtype=dtype),
        normal(width, dtype=dtype),
        (normal(outputs, width, dtype=dtype) / width**0.5).t(),
        normal(outputs, dtype=dtype) if has_bias else None,
    )


def norm_linear(kernels: Kernels, part: Layer) -> torch.Tensor:
    x, norm, weight, bias = part
    out = x.new_empty(x.shape[0], weight.shape[1])
    kernels.norm_linear(x, norm, 1e-6, weight, bias, torch.empty_like(x), out)
    return out


def norm_gate(kernels: Kernels, part: Layer) -> torch.Tensor:
    x, norm, weight, bias = part
    gate_up = x.new_empty(x.shape[0], weight.shape[1])
    gated = x.new_empty(x.shape[0], weight.shape[1] // 2)
    kernels.norm_gate(x, norm, 1e-6, weight, bias, torch.empty_like(x), gate_up, gated)
    return gated


def product_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the roundings of a norm, a product and a sum: with cuBLAS each of them rounds."""
    eps = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "outputs"), MATRICES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_fused_with_norm_gate_and_residual(dtype, has_bias, width, outputs, rows):
    kernels = choose_kernels(dtype, CUDA)
    assert kernels.name == "triton"
    x, _, weight, bias = part = layer(rows, width, outputs, has_bias, dtype)
    exact = part.exact()
    product_close(norm_linear(kernels, part), norm_linear(EAGER, exact))

    residual = normal(rows, outputs, dtype=dtype)
    expected = residual.double()
    kernels.add_linear(residual, x, weight, bias)
    EAGER.add_linear(expected, exact.x, exact.weight, exact.bias)
    product_close(residual, expected)

    part = layer(rows, width, 2 * outputs, has_bias, dtype)
    product_close(norm_gate(kernels, part), norm_gate(EAGER, part.exact()))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_matrix_of_another_layout_gives_the_same_result(rows):
    part = layer(rows, 96, 40, True, torch.bfloat16)
    assert few_rows.serves(part.x, part.weight)
    weight = part.weight.contiguous()  # As when a checkpoint's tensor replaces the parameter.
    assert not few_rows.serves(part.x, weight)
    found = norm_linear(choose_kernels(torch.bfloat16, CUDA), part._replace(weight=weight))
    product_close(found, norm_linear(EAGER, part.exact()))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_writes_only_its_own_rows(rows):
    weight = normal(40, 96, dtype=torch.bfloat16).t()
    wide = torch.full((rows + 2, 64), 7.0, device=CUDA, dtype=torch.bfloat16)
    out = wide[1 : rows + 1, :40]
    x = normal(rows, 200, dtype=torch.bfloat16)[:, :96]
    few_rows.product(x, weight, None, out)
    product_close(out, x.double() @ weight.double())
    wide[1 : rows + 1, :40] = 7.0
    assert wide.eq(7.0).all()


def test_a_rows_result_does_not_depend_on_padding():
    """Three rows in eager code and four in a graph, one of them padding: bit for bit the same."""
    part = layer(4, 1024, 512, False, torch.bfloat16)
    kernels = choose_kernels(torch.bfloat16, CUDA)
    padded = norm_linear(kernels, part)
    part.x[3] = float("nan")
    assert torch.equal(norm_linear(kernels, part._replace(x=part.x[:3])), padded[:3])
    assert torch.equal(norm_linear(kernels, part)[:3], padded[:3])


def test_an_added_rows_result_does_not_depend_on_padding():
    """On tensor cores: nine rows and sixteen."""
    x, _, weight, _ = layer(16, 3072, 1024, False, torch.bfloat16)
    residual = normal(16, 1024, dtype=torch.bfloat16)
    assert few_rows.adds(x[:9], weight)
    assert few_rows.adds(x, weight)
    few, padded = residual[:9].clone(), residual.clone()
    few_rows.add_product(few, x[:9], weight, None)
    x[9:] = float("nan")
    few_rows.add_product(padded, x, weight, None)
    assert torch.equal(few, padded[:9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (32, 8, 128), (3, 1, 24)])
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_rotate_and_store(dtype, has_norm, heads, kv_heads, width, tokens):
    x = normal(tokens, heads + 2 * kv_heads, width, dtype=dtype)
    rotation = normal(tokens, 2, 1, width, dtype=dtype)
    weight = normal(heads + kv_heads, width, dtype=dtype) if has_norm else None
    slots = normal(1100, 2, kv_heads, width, dtype=dtype)
    mapping = torch.randperm(1100, device=CUDA)[:tokens]
    expected, expected_slots = x.double(), slots.double()
    EAGER.rotate_and_store(
        expected,
        None if weight is None else weight.double(),
        1e-6,
        rotation.double(),
        expected_slots,
        mapping,
    )
    choose_kernels(dtype, CUDA).rotate_and_store(x, weight, 1e-6, rotation, slots, mapping)
    # A rotation adds two products: where they cancel, the rounding is that of the larger.
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), expected, rtol=eps, atol=eps)
    torch.testing.assert_close(slots.double(), expected_slots, rtol=eps, atol=eps)
    untouched = torch.ones(1100, dtype=torch.bool, device=CUDA)
    untouched[mapping] = False
    assert torch.equal(slots[untouched].double(), expected_slots[untouched])


@pytest.mark.parametrize("shape", [(3, 151936), (1, 40), (2, 3, 70000), (0, 50)])
def test_the_largest_logit_is_found_the_first_of_equals(shape):
    logits = normal(*shape, dtype=torch.bfloat16)
    logits[..., 7] = logits[..., -1] = 50
    found = choose_kernels(torch.bfloat16, CUDA).argmax(logits)
    assert torch.equal(found, torch.full(shape[:-1], 7, device=CUDA))
    logits[..., 7] = logits[..., -1] = float("-inf")
    found = choose_kernels(torch.bfloat16, CUDA).argmax(logits)
    assert torch.equal(logits.gather(-1, found[..., None])[..., 0], logits.amax(-1))
    logits[..., 3] = float("inf")
    logits[..., 30] = logits[..., -1] = float("nan")
    found = choose_kernels(torch.bfloat16, CUDA).argmax(logits)
    assert torch.equal(found, torch.full(shape[:-1], 30, device=CUDA)), "as by torch"
    logits[:] = float("nan")
    assert not choose_kernels(torch.bfloat16, CUDA).argmax(logits).any()


def test_other_dtypes_and_devices_use_eager_kernels():
    assert choose_kernels(torch.float64, CUDA) is EAGER
    assert choose_kernels(torch.float32, CUDA) is EAGER
    assert choose_kernels(torch.bfloat16, torch.device("cpu")) is EAGER


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_keys_and_values_not_finite_are_stored_as_zero(dtype, has_norm):
    """By both implementations: 0 times what stayed in a slot would be no number."""
    most = torch.finfo(dtype).max
    heads = normal(3, 4 + 2 * 2, 32, dtype=dtype)
    rotation = normal(3, 2, 1, 32, dtype=dtype)
    norm = normal(6, 32, dtype=dtype).mul_(4) if has_norm else None
    # Values as they come; keys also where turning or scaling them overflows.
    heads[0, 6, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    heads[1, 4, :] = float("nan")
    heads[2, 5, :] = most
    rotation[2] = 1.5
    found = {}
    for kernels in (EAGER, choose_kernels(dtype, CUDA)):
        slots = normal(5, 2, 2, 32, dtype=dtype)
        slots[:] = 7
        mapping = torch.tensor([4, 0, 2], device=CUDA)
        kernels.rotate_and_store(heads.clone(), norm, 1e-6, rotation, slots, mapping)
        assert slots.isfinite().all()
        assert slots[4, 1, 0, :3].eq(0).all()
        assert slots[0, 0, 0].eq(0).all()
        assert slots[[1, 3]].eq(7).all()
        found[kernels.name] = slots.double()
    eps = 8 * torch.finfo(dtype).eps
    rows = [0, 4]
    torch.testing.assert_close(found["triton"][rows], found["eager"][rows], rtol=eps, atol=eps)
    if not has_norm:
        assert found["triton"][2, 0, 1, 16:].eq(0).all(), "3 times the largest number"
