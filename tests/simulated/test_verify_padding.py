"""Other padded rows show whether padding is read."""

from __future__ import annotations

import pytest
import torch

from graphrt import BufferSet, BufferSpec, Padding, TensorStateGuard
from graphrt.errors import VerificationError
from graphrt.graphs import BoundBuffers
from graphrt.verify import check_padding_unread, varied_padding

SPECS = [
    BufferSpec("x", ("tokens", 2), torch.float32),
    BufferSpec("ids", ("tokens",), torch.int64, Padding.keep()),
    BufferSpec("slots", ("tokens",), torch.int64, Padding.fill(-1)),
    BufferSpec("scale", ("tokens",), torch.float32, Padding.fill_once(2.0)),
]


def staged(n: int = 3) -> BoundBuffers:
    buffers = BufferSet(SPECS, {"tokens": 8}, lambda key: {"tokens": key}, torch.device("cpu"))
    bound = buffers.bind(4)
    bound.stage(n, {"x": torch.ones(n, 2), "ids": torch.arange(n), "slots": torch.arange(n)})
    return bound


def test_varied_padding_is_valid_and_put_back() -> None:
    bound = staged()
    bound.stage(
        3, {"x": torch.ones(3, 2), "ids": torch.tensor([5, 6, 7]), "slots": torch.arange(3)}
    )
    before = {name: view.clone() for name, view in bound.views.items()}
    with varied_padding(bound, 3):
        assert (bound.views["x"][3:].abs() >= 8).all()
        assert bound.views["x"][3:].isfinite().all()
        assert bound.views["ids"][3:].tolist() == [7]
        assert bound.views["slots"].tolist() == [0, 1, 2, -1]
        assert bound.views["scale"].eq(2).all()
        assert torch.equal(bound.views["x"][:3], before["x"][:3])
    assert all(torch.equal(view, before[name]) for name, view in bound.views.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.complex64, torch.bool])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_varied_padding_of_any_dtype_is_finite(dtype: torch.dtype, n: int) -> None:
    specs = [BufferSpec("x", ("tokens", 2, "tokens"), dtype, Padding.keep())]
    buffers = BufferSet(specs, {"tokens": 4}, lambda key: {"tokens": key}, torch.device("cpu"))
    bound = buffers.bind(4)
    bound.stage(n, {"x": torch.full((n, 2, n), 6e4).to(dtype)})
    with varied_padding(bound, n):
        assert bound.views["x"].to(torch.complex128).isfinite().all()


def test_padding_check_of_separate_rows_passes() -> None:
    bound = staged()
    total = torch.zeros(2)
    state = TensorStateGuard([total])

    def run() -> torch.Tensor:
        rows = bound.views["x"][:3]
        total.add_(rows.sum(0))
        return rows * 2

    assert check_padding_unread(bound, 3, run, state=state) == ("x", "ids")
    assert total.eq(0).all()


def test_padding_check_of_mixed_rows_names_the_buffer() -> None:
    bound = staged()
    out = torch.zeros(3, 2)  # as a replay does, each run overwrites it
    with pytest.raises(VerificationError) as raised:
        check_padding_unread(
            bound, 3, lambda: out.copy_(bound.views["x"][:3] - bound.views["x"].mean())
        )
    assert "other padded rows in x " in raised.value.found
    total = torch.zeros(())
    with pytest.raises(VerificationError) as raised:
        check_padding_unread(
            bound,
            3,
            lambda: total.add_(bound.views["ids"].sum()).new_zeros(1),
            state=TensorStateGuard([total]),
        )
    assert "other padded rows in ids " in raised.value.found
