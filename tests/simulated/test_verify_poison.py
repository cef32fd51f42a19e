"""Poison proves that outputs are written and padding is unread; addresses tell what moved."""

from __future__ import annotations

import pytest
import torch

from graphrt.errors import VerificationError
from graphrt.graphs.buffers import BoundBuffers, BufferSet
from graphrt.graphs.bufferspec import FILL_ONCE, KEEP, SENTINEL, BufferSpec
from graphrt.graphs.state import TensorStateGuard
from graphrt.verify.addresses import addresses_of, moved_inputs
from graphrt.verify.poison import check_padding_unread, find_unwritten, poison, poisoned_padding

SPECS = [
    BufferSpec("x", ("tokens", 2), torch.float32),
    BufferSpec("ids", ("tokens",), torch.int64, KEEP),
    BufferSpec("slots", ("tokens",), torch.int64, SENTINEL(-1)),
    BufferSpec("scale", ("tokens",), torch.float32, FILL_ONCE(2.0)),
]


def staged(n: int = 3) -> BoundBuffers:
    buffers = BufferSet(SPECS, {"tokens": 8}, lambda key: {"tokens": key}, torch.device("cpu"))
    bound = buffers.bind(4)
    bound.stage(n, {"x": torch.ones(n, 2), "ids": torch.arange(n), "slots": torch.arange(n)})
    return bound


def test_poison_is_nan_in_floats_and_minus_one_in_integers() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64):
        tensor = torch.zeros(3, dtype=dtype)
        poison(tensor)
        assert tensor.to(torch.complex128).isnan().all()
    for dtype in (torch.int8, torch.int32, torch.int64):
        tensor = torch.zeros(2, 2, dtype=dtype)
        poison(tensor.t())
        assert tensor.eq(-1).all()


def test_an_output_that_is_only_partly_written_is_found() -> None:
    outputs = {"full": torch.zeros(2, 3), "part": torch.zeros(4), "never": torch.zeros(2).bool()}
    handed = torch.arange(3)
    outputs["input"] = handed[1:]

    def run() -> None:
        outputs["full"].fill_(1)
        outputs["part"][[0, 3]] = 5.0

    found = {item.path: item for item in find_unwritten(run, outputs, inputs=[handed])}
    assert set(found) == {"['part']", "['never']"}
    assert found["['part']"].num_elements == 2
    assert found["['part']"].first_index == (1,)
    assert handed.tolist() == [0, 1, 2]


def test_a_written_value_that_looks_like_poison_is_not_taken_for_it() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    assert find_unwritten(lambda: out.fill_(-1), out) == ()
    nan = torch.zeros(2)
    assert find_unwritten(lambda: nan.fill_(float("nan")), nan) == ()


def test_padding_is_poisoned_where_it_must_not_matter_and_restored() -> None:
    bound = staged()
    before = {name: view.clone() for name, view in bound.views.items()}
    with poisoned_padding(bound, 3):
        assert bound.views["x"][3:].isnan().all()
        assert bound.views["ids"][3:].eq(-1).all()
        assert bound.views["slots"].tolist() == [0, 1, 2, -1]
        assert bound.views["scale"].eq(2).all()
        assert torch.equal(bound.views["x"][:3], before["x"][:3])
    assert all(torch.equal(view, before[name]) for name, view in bound.views.items())


def test_a_computation_of_separate_rows_does_not_read_the_padding() -> None:
    bound = staged()
    total = torch.zeros(2)
    state = TensorStateGuard([total])

    def run() -> torch.Tensor:
        rows = bound.views["x"][:3]
        total.add_(rows.sum(0))
        return rows * 2

    assert check_padding_unread(bound, 3, run, state=state) == ("x", "ids")
    assert total.eq(0).all()


def test_a_computation_that_mixes_rows_is_caught_and_the_buffer_named() -> None:
    bound = staged()
    with pytest.raises(VerificationError) as raised:
        check_padding_unread(bound, 3, lambda: bound.views["x"][:3] - bound.views["x"].mean())
    assert "poison in x " in raised.value.found
    total = torch.zeros(())
    with pytest.raises(VerificationError) as raised:
        check_padding_unread(
            bound,
            3,
            lambda: total.add_(bound.views["ids"].sum()).new_zeros(1),
            state=TensorStateGuard([total]),
        )
    assert "poison in ids " in raised.value.found


def test_moved_inputs_are_named_with_both_addresses() -> None:
    x, table = torch.zeros(4), torch.zeros(2, 2)
    before = addresses_of((x, [table]), {"meta": {"n": 3, "t": x}})
    assert set(before) == {"args[0]", "args[1][0]", "kwargs['meta']['t']"}
    x.add_(1)
    assert moved_inputs(before, addresses_of((x, [table]), {"meta": {"n": 4, "t": x}})) == ()
    moved = moved_inputs(before, addresses_of((x.clone(), [table.t()]), {}))
    assert [move.path for move in moved] == ["args[0]", "args[1][0]", "kwargs['meta']['t']"]
    assert "absent" in str(moved[2])
    assert moved[1].before is not None
    assert moved[1].after is not None
    assert moved[1].before.pointer == moved[1].after.pointer
