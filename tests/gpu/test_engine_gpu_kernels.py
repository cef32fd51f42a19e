"""The fused kernels against PyTorch's operations in float64."""

from __future__ import annotations

import pytest
import torch

from graphrt_llm.kernels import EAGER, choose_kernels

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To one rounding of the dtype at the size of each element."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.float32).to(dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (200, 1024), (3, 4096), (5, 96)])
def test_rms_norm(dtype, rows, width):
    kernels = choose_kernels(dtype, CUDA)
    assert kernels.name == "triton"
    x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype)
    expected = EAGER.rms_norm(x.double(), weight.double(), 1e-6)
    close(kernels.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (200, 3072), (2, 14336), (5, 96)])
def test_silu_mul(dtype, rows, width):
    gate_up = normal(rows, 2 * width, dtype=dtype)
    found = choose_kernels(dtype, CUDA).silu_mul(gate_up)
    close(found, EAGER.silu_mul(gate_up.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(16, 8, 128), (32, 8, 128), (3, 1, 24)])
@pytest.mark.parametrize("tokens", [1, 17])
def test_turn_and_store(dtype, has_norm, heads, kv_heads, width, tokens):
    x = normal(tokens, heads + 2 * kv_heads, width, dtype=dtype)
    rotation = normal(tokens, 2, 1, width, dtype=dtype)
    weight = normal(heads + kv_heads, width, dtype=dtype) if has_norm else None
    slots = normal(64, 2, kv_heads, width, dtype=dtype)
    mapping = torch.randperm(64, device=CUDA)[:tokens]
    expected, expected_slots = x.double(), slots.double()
    EAGER.turn_and_store(
        expected,
        None if weight is None else weight.double(),
        1e-6,
        rotation.double(),
        expected_slots,
        mapping,
    )
    choose_kernels(dtype, CUDA).turn_and_store(x, weight, 1e-6, rotation, slots, mapping)
    # A turn adds two products: where they cancel, the rounding is that of the larger.
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), expected, rtol=eps, atol=eps)
    torch.testing.assert_close(slots.double(), expected_slots, rtol=eps, atol=eps)
    untouched = torch.ones(64, dtype=torch.bool, device=CUDA)
    untouched[mapping] = False
    assert torch.equal(slots[untouched].double(), expected_slots[untouched])


def test_other_dtypes_and_devices_keep_pytorch_s_operations():
    assert choose_kernels(torch.float64, CUDA) is EAGER
    assert choose_kernels(torch.float32, CUDA) is EAGER
    assert choose_kernels(torch.bfloat16, torch.device("cpu")) is EAGER
