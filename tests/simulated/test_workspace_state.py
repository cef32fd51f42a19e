"""Scratch memory that freezes, state that is restored, and what counts as a resource."""

from __future__ import annotations

import pytest
import torch

from graphrt import Resource, StateGuard, TensorStateGuard, Workspace
from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.errors import FrozenBufferError


def test_workspace_before_freeze_grows_and_shares_its_bytes() -> None:
    workspace = Workspace("scratch")
    assert workspace.num_bytes == 0
    first = workspace.get((4, 2), torch.float32)
    assert first.shape == (4, 2)
    assert workspace.num_bytes == 32
    assert workspace.get((3,), torch.int64).data_ptr() == first.data_ptr()
    assert workspace.get((), torch.float64).shape == ()
    larger = workspace.get((16,), torch.float32)
    assert workspace.num_bytes == 64
    larger.fill_(1)
    first.fill_(2)  # the bytes of before the growth
    assert larger.eq(1).all()


def test_workspace_growth_when_frozen_is_refused() -> None:
    workspace = Workspace("attention")
    workspace.get((8,), torch.uint8)
    workspace.freeze()
    address = workspace.get((8,), torch.uint8).data_ptr()
    key = BatchDescriptor(16)
    with ForwardContext(RuntimeMode.FULL, key), pytest.raises(FrozenBufferError) as raised:
        workspace.get((9,), torch.uint8)
    assert "attention" in raised.value.subject
    assert str(key) in raised.value.subject
    assert "8 bytes" in raised.value.expected
    assert "9 bytes" in raised.value.found
    assert workspace.get((2,), torch.float32).data_ptr() == address


def test_workspace_thaws_with_its_last_generation() -> None:
    workspace = Workspace("scratch")
    workspace.freeze(1)
    workspace.freeze(1)
    workspace.freeze(2)
    workspace.thaw(1)
    assert workspace.is_frozen
    with pytest.raises(FrozenBufferError):
        workspace.get((1,), torch.uint8)
    workspace.thaw(2)
    workspace.thaw(2)
    assert not workspace.is_frozen
    assert workspace.get((1,), torch.uint8).shape == (1,)


def test_workspace_of_inference_mode_is_written_outside_it() -> None:
    workspace = Workspace("scratch")
    with torch.inference_mode():
        scratch = workspace.get((4,), torch.float32)
    scratch.fill_(1)
    assert scratch.tolist() == [1.0] * 4


def test_state_guard_restores_in_place() -> None:
    cache, counter = torch.ones(3, 4), torch.tensor(5)
    guard = TensorStateGuard({"cache": cache[1:], "counter": counter})
    assert isinstance(guard, StateGuard)
    address = cache.data_ptr()
    token = guard.save()
    cache.fill_(7)
    counter.add_(1)
    guard.restore(token)
    assert cache.tolist() == [[7] * 4, [1] * 4, [1] * 4]
    assert counter == 5
    assert cache.data_ptr() == address
    counter.add_(9)
    guard.restore(token)  # a token serves more than once
    assert counter == 5


def test_state_guard_of_inference_tensors_or_none_works() -> None:
    with torch.inference_mode():
        state = torch.zeros(2)
    guard = TensorStateGuard([state])
    token = guard.save()
    with torch.inference_mode():
        state.add_(1)
    guard.restore(token)
    assert state.eq(0).all()
    nothing = TensorStateGuard([])
    nothing.restore(nothing.save())


def test_resource_is_known_by_its_three_methods() -> None:
    class Plan:
        def reserve(self, max_key: object) -> None: ...

        def prepare(self, key: object, step_info: object) -> None: ...

        def freeze(self) -> None: ...

    assert isinstance(Plan(), Resource)
    assert not isinstance(Workspace("scratch"), Resource)
