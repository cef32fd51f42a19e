"""Aliases and ownership of the CUDA device, over CPU memory: the caller's modes matter there too.

What needs the allocator itself is in the device contract, on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device.cuda import CUDADevice, CUDAPool, PoolTable, storage_address


class BarePool(CUDAPool):
    """A pool of given ranges."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]


class BareDevice(CUDADevice):
    """A device without a GPU."""

    def __init__(self, *pools: CUDAPool) -> None:
        self.pools = PoolTable(pools)

    def owns(self, tensor: torch.Tensor) -> bool:
        address = storage_address(tensor)
        return address is not None and self.pools.holds(address)


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen")


def pool_of(*tensors: torch.Tensor) -> BarePool:
    starts = sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return BarePool(*((start, start + sizes[start]) for start in starts))


MODES: list[tuple[Any, ...]] = [
    (),
    (torch.no_grad,),
    (torch.enable_grad,),
    (torch.inference_mode,),
    (torch.inference_mode, torch.enable_grad),
    (torch.no_grad, Refusing),
    (torch.inference_mode, Refusing),
]


@pytest.mark.parametrize("modes", MODES, ids=lambda modes: "+".join(m.__name__ for m in modes))
@pytest.mark.parametrize("born_in_inference", [False, True])
def test_alias_is_plain_and_writable_in_any_mode(
    modes: tuple[Any, ...], born_in_inference: bool
) -> None:
    with torch.inference_mode(born_in_inference):
        pooled = torch.arange(12.0).view(3, 4).t()[1:]
    device = BareDevice(pool_of(pooled))
    with ExitStack() as stack:
        for mode in modes:
            entered: AbstractContextManager[Any] = mode()
            stack.enter_context(entered)
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        alias = device.weak_alias(pooled)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert alias is not pooled
    assert not alias.is_inference()
    assert not alias.requires_grad
    assert (alias.data_ptr(), alias.shape, alias.stride(), alias.storage_offset()) == (
        pooled.data_ptr(),
        pooled.shape,
        pooled.stride(),
        pooled.storage_offset(),
    )
    assert alias.untyped_storage().nbytes() == pooled.untyped_storage().nbytes()
    alias.fill_(3.0)
    assert (pooled == 3.0).all()


@pytest.mark.parametrize("modes", [(), (torch.no_grad,), (torch.inference_mode,)])
def test_alias_keeps_the_conjugate_and_negative_bits(modes: Any) -> None:
    pooled = torch.tensor([1 + 2j, 3 - 4j])
    device = BareDevice(pool_of(pooled))
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        for tensor in (pooled.conj(), pooled.conj().imag, pooled.imag):
            alias = device.weak_alias(tensor)
            assert (alias.is_conj(), alias.is_neg()) == (tensor.is_conj(), tensor.is_neg())
            assert torch.equal(alias, tensor)


def test_tensor_is_owned_by_the_pool_its_storage_is_in() -> None:
    one, two, other = torch.ones(64), torch.ones(64), torch.ones(64)
    device = BareDevice(BarePool(), pool_of(one), pool_of(two))
    assert device.owns(one)
    assert device.owns(two[5:].view(-1, 1).expand(59, 3))
    assert not device.owns(other)
    assert not device.owns(torch.empty(0))
    assert not device.owns(torch.empty(2, device="meta"))
    assert not device.owns(torch.ones(2, 2).to_sparse())
    assert device.weak_alias(other) is other
    end = one.data_ptr() + one.untyped_storage().nbytes()
    assert device.pools.holds(end - 1)
    assert BareDevice(pool_of(one)).pools.holds(one.data_ptr())
    assert not BareDevice(pool_of(one)).pools.holds(end)
    assert not BareDevice().pools.holds(one.data_ptr())
