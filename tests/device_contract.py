"""The device contract: each case is written once, and each device runs it in its own lane.

``DeviceContract`` holds on both devices. ``StricterThanCUDA`` is for operations that only the
simulated device forbids: CUDA records them without an error, and the result is silently wrong.

A lane collects a class by inheriting from it and giving a ``device`` fixture. Where CUDA behaves
otherwise than a case says, the case is wrong, and so is the simulation.
"""

from __future__ import annotations

import contextvars
import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.nn import functional

from graphrt.device.base import Device, DeviceGraph, Pool, Recording, TensorUse
from graphrt.errors import (
    CaptureError,
    CaptureInProgressError,
    ConfigError,
    EmptyCaptureError,
    ForbiddenOperationError,
    GraphrtError,
    UnjoinedStreamError,
)

# Large enough that every allocator gives such a tensor blocks of their own: 4 MiB of float32.
LARGE = 1 << 20


@dataclass
class Bench:
    """Records functions on one device, into one pool."""

    device: Device
    pool: Pool
    graphs: list[DeviceGraph] = field(default_factory=list)

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device.torch_device)

    def full(self, size: Any, value: float = 0.0) -> torch.Tensor:
        return torch.full(size, value, device=self.device.torch_device)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size).to(self.device.torch_device)

    def record(
        self, fn: Callable[..., Any], *args: Any, pool: Pool | None = None, **options: Any
    ) -> tuple[DeviceGraph, Any]:
        """Record ``fn(*args)`` on the stream "capture", as the program builder does."""
        return self.record_with(lambda recording: fn(*args), pool=pool, **options)

    def record_with(
        self, body: Callable[[Recording], Any], *, pool: Pool | None = None, **options: Any
    ) -> tuple[DeviceGraph, Any]:
        """As ``record``, for a body that needs the recording itself."""
        stream = self.device.stream("capture")
        self.device.order(stream, self.device.current_stream())
        with self.device.use(stream):
            recording = self.device.begin(pool or self.pool, stream, "case", **options)
            try:
                result = body(recording)
            except Exception as error:  # noqa: BLE001  Raised again, translated.
                # No local variable: with the traceback it would be a cycle that holds tensors.
                raise recording.abort(error)  # noqa: B904  It has its cause.
            graph = recording.end()
        self.graphs.append(graph)
        return graph, result

    def replay(self, graph: DeviceGraph) -> None:
        graph.replay()
        assert self.device.ends_within(60)

    def check_usable(self) -> None:
        """The device records and replays as if nothing had happened."""
        assert not self.device.is_capturing()
        value = self.tensor([1.0, 2.0, 3.0])
        graph, result = self.record(lambda: value * 2 + 1)
        value.fill_(5.0)
        self.replay(graph)
        assert result.tolist() == [11.0, 11.0, 11.0]

    def retire(self) -> None:
        self.device.synchronize()
        for graph in reversed(self.graphs):
            graph.reset()
        self.graphs.clear()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit-equal values (NaN too), shape, stride and dtype."""
    if (left.shape, left.stride(), left.dtype) != (right.shape, right.stride(), right.dtype):
        return False
    return bool(
        torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


# One row per kind of kernel: what the replay computes is what eager computes, bit by bit.
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, i: x + 1,
    "matmul": lambda x, i: x @ x.t(),
    "linear": lambda x, i: torch.nn.functional.linear(x, x, x[:, 0]),
    "cast": lambda x, i: x.to(torch.bfloat16) * 2,
    "view": lambda x, i: (x * 2).t().reshape(4, 16)[1:3],
    "in-place through a view": lambda x, i: x.clone().index_fill_(0, i[:2], 0.5),
    "cat": lambda x, i: torch.cat([x, x * 2], 1),
    "cat with no values": lambda x, i: torch.cat([torch.tensor([], device=x.device), x[0]]),
    "gather": lambda x, i: x.gather(0, i.view(-1, 1)),
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.clone().index_put_((i,), x * 3),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "topk": lambda x, i: torch.topk(x, 3),
    "sort": lambda x, i: torch.sort(x, dim=1),
    "softmax": lambda x, i: x.softmax(-1),
    "layer_norm": lambda x, i: torch.nn.functional.layer_norm(x, (8,)),
    "where": lambda x, i: torch.where(x > 0, x, -x),
    "factories": lambda x, i: torch.zeros_like(x).add_(torch.arange(8, device=x.device)),
    "foreach": lambda x, i: torch._foreach_mul([x, x + 1], 2.0),
    "cumsum": lambda x, i: x.cumsum(1),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 2, 4, 8), x.view(1, 2, 4, 8), x.view(1, 2, 4, 8)
    ),
    "argument returned": lambda x, i: (x, x * 2),
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def read_item(x: torch.Tensor) -> Any:
    return x.sum().item()


def read_bool(x: torch.Tensor) -> Any:
    return bool(x.sum() > 0)


def read_int(x: torch.Tensor) -> Any:
    return int(x.sum())


def format_value(x: torch.Tensor) -> Any:
    return f"{x.sum()}"


def print_tensor(x: torch.Tensor) -> Any:
    return repr(x * 2)


def find_nonzero(x: torch.Tensor) -> Any:
    return (x * 2).nonzero()


def index_by_mask(x: torch.Tensor) -> Any:
    return x[x > 0]


def compare_whole(x: torch.Tensor) -> Any:
    return torch.equal(x, x * 2)


def list_values(x: torch.Tensor) -> Any:
    return (x * 2).tolist()


FORBIDDEN = [
    read_item,
    read_bool,
    read_int,
    format_value,
    print_tensor,
    find_nonzero,
    index_by_mask,
    compare_whole,
    list_values,
]


class Operands(NamedTuple):
    """What a row of ``OUTCOMES`` works on. Rows write into copies only."""

    x: torch.Tensor
    """float32 [4, 4]."""
    i: torch.Tensor
    """int64 [4], a permutation."""
    end: torch.Tensor
    """float32, one number on the device."""


def positive(x: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix with eigenvalues of at least 4."""
    return x @ x.t() + 4 * torch.eye(4, device=x.device)


def written(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    y = x.clone()
    write(y)
    return y


def set_item(index: Callable[[torch.Tensor], Any], value: Any) -> Callable[[Operands], Any]:
    """``y[index(y)] = value`` on a copy; ``value`` may be a function of ``y``."""

    def assign(t: Operands) -> torch.Tensor:
        y = t.x.clone()
        y[index(y)] = value(y) if callable(value) else value
        return y

    return assign


def branch_on_device(t: Operands) -> Any:
    return torch.cond(t.x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (t.x,))


def loop_on_device(t: Operands) -> Any:
    step = torch.ops.higher_order.while_loop
    return step(lambda v: v.sum() < 9, lambda v: (v.abs() + 1,), (t.x,), ())


# ok: recorded, and the replay equals eager on other inputs.
# refused: ``ForbiddenOperationError``, and the device stays usable.
# error: the same on the simulated device; on CUDA torch says it in words of its own.
OUTCOMES: dict[str, tuple[str, Callable[[Operands], Any]]] = {
    # Indexing and masks.
    "number under a mask": ("ok", set_item(lambda y: y > 0, 0)),
    "number under a mask of rows": ("ok", set_item(lambda y: y[:, 0] > 0, 0.5)),
    "number under a mask of columns": ("ok", set_item(lambda y: (slice(None), y[0] > 0), -1.0)),
    "number under a mask in a view": (
        "ok",
        lambda t: written(t.x, lambda y: y[1:].t().__setitem__(y[1:].t() > 0, 2.0)),
    ),
    "index_put_ of a number under a mask": (
        "ok",
        lambda t: t.x.clone().index_put_((t.x > 0,), torch.tensor(0.25)),
    ),
    "index_put of a number under a mask": (
        "ok",
        lambda t: torch.index_put(t.x, (t.x > 0,), torch.tensor(0.25)),
    ),
    "device value under a mask": (
        "refused",
        lambda t: written(t.x, lambda y: y.__setitem__(y > 0, t.end)),
    ),
    "device values under a mask": ("refused", set_item(lambda y: y > 9, lambda y: y[0, :0])),
    "number under a mask and an index": (
        "refused",
        lambda t: written(t.x, lambda y: y.__setitem__((t.i < 2, t.i[:2]), 0.0)),
    ),
    "accumulated under a mask": (
        "refused",
        lambda t: t.x.clone().index_put_((t.x > 0,), torch.tensor(1.0), accumulate=True),
    ),
    "read by a mask": ("refused", lambda t: t.x[t.x > 0]),
    "increment under a mask": (
        "refused",
        lambda t: written(t.x, lambda y: y.__setitem__(y > 0, y[y > 0] + 1)),
    ),
    "number at a slice": ("ok", set_item(lambda y: (1, slice(2, 3)), 2.0)),
    "number at a row": ("ok", set_item(lambda y: 1, 2.0)),
    "number at one element": ("refused", set_item(lambda y: (1, 2), 2.0)),
    "number at an index": ("refused", lambda t: written(t.x, lambda y: y.__setitem__(t.i, 1.0))),
    "values at an index": ("ok", lambda t: written(t.x, lambda y: y.__setitem__(t.i, y * 2))),
    "read by a list": ("refused", lambda t: t.x[[0, 2]]),
    "read by an array": ("refused", lambda t: t.x[numpy.array([0, 2])]),
    "number at a list": ("refused", set_item(lambda y: [0, 2], 1.0)),
    "read by a range": ("ok", lambda t: t.x[torch.arange(2, device=t.x.device)]),
    "masked_fill": ("ok", lambda t: t.x.masked_fill(t.x > 0, 0.5)),
    "masked_fill by a number in a tensor": (
        "ok",
        lambda t: t.x.masked_fill(t.x > 0, torch.tensor(0.5)),
    ),
    "masked_fill by a device value": ("refused", lambda t: t.x.masked_fill(t.x > 0, t.end)),
    "masked_fill_ by a device value": (
        "refused",
        lambda t: t.x.clone().masked_fill_(t.x > 0, t.end),
    ),
    "masked_scatter": ("ok", lambda t: t.x.masked_scatter(t.x > 0, t.x * 2)),
    "index_fill": ("ok", lambda t: t.x.index_fill(0, t.i[:2], 0.5)),
    "index_fill by a device value": ("refused", lambda t: t.x.index_fill(0, t.i[:2], t.end)),
    "index_add": ("ok", lambda t: t.x.index_add(0, t.i, t.x)),
    "scatter_reduce": (
        "ok",
        lambda t: t.x.scatter_reduce(0, t.i.view(4, 1).expand(4, 4), t.x, "amax"),
    ),
    "take_along_dim": ("ok", lambda t: t.x.take_along_dim(t.i.view(4, 1), 1)),
    # Sizes.
    "nonzero_static": ("ok", lambda t: torch.nonzero_static(t.x > 0, size=20)),
    "argwhere": ("refused", lambda t: torch.argwhere(t.x > 0)),
    "masked_select": ("refused", lambda t: t.x.masked_select(t.x > 0)),
    "unique": ("refused", lambda t: torch.unique(t.x)),
    "unique_consecutive": ("refused", lambda t: torch.unique_consecutive(t.i)),
    "bincount": ("refused", lambda t: torch.bincount(t.i)),
    "one_hot of so many classes": ("ok", lambda t: functional.one_hot(t.i, 6)),
    "one_hot of a matrix": ("ok", lambda t: functional.one_hot(t.i.view(2, 2), num_classes=4)),
    "one_hot of any classes": ("refused", lambda t: functional.one_hot(t.i)),
    "repeat_interleave by a tensor": ("refused", lambda t: t.x.repeat_interleave(t.i, 0)),
    "repeat_interleave of known size": (
        "ok",
        lambda t: t.x.repeat_interleave(t.i, 0, output_size=6),
    ),
    "isin of few": ("ok", lambda t: torch.isin(t.i, t.i[:2])),
    "isin of many": ("refused", lambda t: torch.isin(t.i, t.i.repeat(20))),
    "tensor_split by numbers": ("ok", lambda t: torch.tensor_split(t.x + 1, 3)),
    "resize_ to its own size": ("ok", lambda t: t.x.clone().resize_(4, 4) + 1),
    "resize_ to a smaller size": ("ok", lambda t: t.x.clone().resize_(2, 4) + 1),
    "resize_as_ itself": ("ok", lambda t: t.x.clone().resize_as_(t.x) + 1),
    "set_ to itself": ("ok", lambda t: written(t.x, lambda y: y.set_(y).add_(1))),
    "out into an empty tensor": (
        "ok",
        lambda t: torch.add(t.x, 1, out=torch.empty(0, device=t.x.device)),
    ),
    "matmul into an empty tensor": (
        "ok",
        lambda t: torch.mm(t.x, t.x, out=torch.empty(0, device=t.x.device)) * 2,
    ),
    "out into a tensor of the right size": (
        "ok",
        lambda t: torch.add(t.x, 1, out=torch.empty_like(t.x)),
    ),
    # Linear algebra.
    "inv": ("refused", lambda t: torch.linalg.inv(positive(t.x))),
    "inverse": ("refused", lambda t: torch.inverse(positive(t.x))),
    "inv_ex": ("ok", lambda t: torch.linalg.inv_ex(positive(t.x))),
    "inv_ex that checks": (
        "refused",
        lambda t: torch.linalg.inv_ex(positive(t.x), check_errors=True),
    ),
    "negative power": ("refused", lambda t: torch.linalg.matrix_power(positive(t.x), -1)),
    "power": ("ok", lambda t: torch.linalg.matrix_power(t.x, 3)),
    "cholesky": ("refused", lambda t: torch.linalg.cholesky(positive(t.x))),
    "cholesky by its old name": ("refused", lambda t: torch.cholesky(positive(t.x))),
    "cholesky_ex": ("ok", lambda t: torch.linalg.cholesky_ex(positive(t.x))),
    "cholesky_inverse": ("ok", lambda t: torch.cholesky_inverse(positive(t.x).tril())),
    "cholesky_inverse of several": (
        "refused",
        lambda t: torch.cholesky_inverse(positive(t.x).tril().expand(2, 4, 4)),
    ),
    "cholesky_solve": ("ok", lambda t: torch.cholesky_solve(t.x, positive(t.x).tril())),
    "cholesky_solve of several": (
        "refused",
        lambda t: torch.cholesky_solve(t.x.expand(2, 4, 4), positive(t.x).tril().expand(2, 4, 4)),
    ),
    "solve": ("refused", lambda t: torch.linalg.solve(positive(t.x), t.x)),
    "solve_ex": ("ok", lambda t: torch.linalg.solve_ex(positive(t.x), t.x)),
    "solve_triangular": (
        "ok",
        lambda t: torch.linalg.solve_triangular(positive(t.x), t.x, upper=True),
    ),
    "lu_factor": ("refused", lambda t: torch.linalg.lu_factor(positive(t.x))),
    "lu_factor_ex": ("ok", lambda t: torch.linalg.lu_factor_ex(positive(t.x))),
    "lu_factor_ex of few rows": ("refused", lambda t: torch.linalg.lu_factor_ex(t.x[:3])),
    "lu": ("ok", lambda t: torch.linalg.lu(positive(t.x))),
    "lu of few columns": ("refused", lambda t: torch.linalg.lu(t.x[:, :3])),
    "ldl_factor_ex": ("refused", lambda t: torch.linalg.ldl_factor_ex(positive(t.x))),
    "ldl_solve": ("refused", lambda t: torch.linalg.ldl_solve(positive(t.x), t.i.int() + 1, t.x)),
    "qr": ("ok", lambda t: torch.linalg.qr(t.x)),
    "det": ("ok", lambda t: torch.linalg.det(positive(t.x))),
    "slogdet": ("ok", lambda t: torch.linalg.slogdet(positive(t.x))),
    "eigh": ("refused", lambda t: torch.linalg.eigh(positive(t.x))),
    "eigvalsh": ("refused", lambda t: torch.linalg.eigvalsh(positive(t.x))),
    "eig": ("refused", lambda t: torch.linalg.eig(t.x)),
    "eigvals": ("refused", lambda t: torch.linalg.eigvals(t.x)),
    "svd": ("refused", lambda t: torch.linalg.svd(t.x)),
    "svdvals": ("refused", lambda t: torch.linalg.svdvals(t.x)),
    "pinv": ("refused", lambda t: torch.linalg.pinv(t.x)),
    "matrix_rank": ("refused", lambda t: torch.linalg.matrix_rank(t.x)),
    "spectral norm": ("refused", lambda t: torch.linalg.matrix_norm(t.x, 2)),
    "Frobenius norm": ("ok", lambda t: torch.linalg.matrix_norm(t.x)),
    "lstsq": ("refused", lambda t: torch.linalg.lstsq(positive(t.x), t.x).solution),
    "matrix_exp": ("refused", lambda t: torch.linalg.matrix_exp(t.x)),
    # Values that the host needs.
    "linspace to a device value": ("refused", lambda t: torch.linspace(0.0, t.end, 4)),
    "logspace from a device value": ("refused", lambda t: torch.logspace(t.end, 2.0, 4)),
    "arange to a device value": ("refused", lambda t: torch.arange(t.end)),
    "full of a device value": ("refused", lambda t: torch.full((2,), t.end)),
    "linspace of numbers": ("ok", lambda t: t.x + torch.linspace(0, 1, 4, device=t.x.device)),
    "add scaled by a device value": ("refused", lambda t: torch.add(t.x, t.x, alpha=t.end)),
    "clamp to a device value": ("ok", lambda t: torch.clamp(t.x, max=t.end)),
    "fill_ by a device value": ("ok", lambda t: torch.empty_like(t.x).fill_(t.end)),
    "histc without a range": ("refused", lambda t: torch.histc(t.x, 4)),
    "histc with a range": ("ok", lambda t: torch.histc(t.x, 4, -1, 1)),
    "histogram": ("error", lambda t: torch.histogram(t.x, 4)),
    "quantile": ("ok", lambda t: torch.quantile(t.x, 0.25, dim=1)),
    "mode": ("ok", lambda t: torch.mode(t.x)),
    "mode of many": ("refused", lambda t: torch.mode(t.x.view(1, 16).repeat(1, 200))),
    "searchsorted": ("ok", lambda t: torch.searchsorted(t.x.sort(1).values, t.x)),
    "searchsorted by a sorter": (
        "refused",
        lambda t: torch.searchsorted(t.x, t.x, sorter=t.x.argsort(1)),
    ),
    "median without NaN": ("ok", lambda t: torch.nanmedian(t.x)),
    "median without NaN of rows": ("ok", lambda t: torch.nanmedian(t.x, 1)),
    "segments of lengths": (
        "refused",
        lambda t: torch.segment_reduce(t.x, "sum", lengths=torch.ones_like(t.i)),
    ),
    "segments of lengths that nobody checks": (
        "ok",
        lambda t: torch.segment_reduce(t.x, "sum", lengths=torch.ones_like(t.i), unsafe=True),
    ),
    "a Python function of elements": ("error", lambda t: t.x.clone().apply_(lambda v: v + 1)),
    "a Python function of pairs": ("error", lambda t: t.x.clone().map_(t.x, max)),
    "normal around device values": ("refused", lambda t: torch.normal(t.x, t.x.abs())),
    "equal": ("refused", lambda t: torch.equal(t.x, t.x + 1)),
    "allclose": ("refused", lambda t: torch.allclose(t.x, t.x)),
    "same size": ("ok", lambda t: t.x + 1 if t.x.is_same_size(t.x) else None),
    "to the host": ("refused", lambda t: t.x.to("cpu")),
    "to the host by name": ("refused", lambda t: t.x.to(device="cpu", dtype=torch.float64)),
    "cpu": ("refused", lambda t: t.x.cpu()),
    "tolist": ("refused", lambda t: t.x.tolist()),
    "numpy": ("error", lambda t: t.x.numpy()),
    "numpy by its protocol": ("error", lambda t: numpy.asarray(t.x)),
    "numpy by dlpack": ("error", lambda t: numpy.from_dlpack(t.x)),
    "torch by dlpack": ("ok", lambda t: torch.from_dlpack(t.x) + 1),
    "torch by dlpack of a result": ("ok", lambda t: torch.from_dlpack(t.x * 2) + 1),
    "torch.cond": ("error", branch_on_device),
    "while_loop": ("error", loop_on_device),
    # Values that the host gives.
    "number in a tensor": ("ok", lambda t: t.x * torch.tensor(2.0)),
    "number of numpy": ("ok", lambda t: t.x * torch.from_numpy(numpy.array(2.0, "float32"))),
    "maximum with a number in a tensor": ("ok", lambda t: torch.maximum(t.x, torch.tensor(0.5))),
    "clamp to a number in a tensor": ("error", lambda t: t.x.clamp_min(torch.tensor(0.5))),
    "clamp between numbers in tensors": (
        "error",
        lambda t: t.x.clamp(torch.tensor(0.0), torch.tensor(0.5)),
    ),
    "lerp by a number in a tensor": ("ok", lambda t: t.x.lerp(t.x * 2, torch.tensor(0.5))),
    "addcmul by a number in a tensor": ("ok", lambda t: t.x.addcmul(t.x, torch.tensor(0.5))),
    "stack with a number in a tensor": (
        "error",
        lambda t: torch.stack([t.end, torch.tensor(0.5)]),
    ),
    "zeros like a number in a tensor": (
        "ok",
        lambda t: t.x + torch.zeros_like(torch.tensor(0.5), device=t.x.device),
    ),
    "where with numbers": ("ok", lambda t: torch.where(t.x > 0, 0.5, t.x)),
    "where with a number in a tensor": (
        "refused",
        lambda t: torch.where(t.x > 0, torch.tensor(0.5), t.x),
    ),
    "number on the device": (
        "refused",
        lambda t: t.x * torch.tensor(2.0, device=t.x.device),
    ),
    "list on the device": ("refused", lambda t: torch.tensor([2.0], device=t.x.device)),
    "as_tensor on the device": ("refused", lambda t: torch.as_tensor([2.0], device=t.x.device)),
    "asarray on the device": ("refused", lambda t: torch.asarray([2.0], device=t.x.device)),
    "list of device values": ("refused", lambda t: torch.tensor([t.x[0, 0], t.x[0, 1]])),
    "new_tensor": ("refused", lambda t: t.x.new_tensor([1.0, 2.0])),
    "new": ("refused", lambda t: t.x.new([1.0, 2.0])),
    "new_zeros": ("ok", lambda t: t.x + t.x.new_zeros(4)),
    "copy_ from a list": ("refused", lambda t: t.x[0].clone().copy_(torch.tensor([1.0] * 4))),
    "copy_ from an array": (
        "refused",
        lambda t: t.x[0].clone().copy_(torch.from_numpy(numpy.ones(4, "float32"))),
    ),
    "array to the device": (
        "refused",
        lambda t: torch.from_numpy(numpy.ones(4, "float32")).to(t.x.device),
    ),
    "list to the device": ("refused", lambda t: torch.Tensor([1.0, 2.0]).to(t.x.device)),
    "list like a device tensor": ("refused", lambda t: torch.tensor([1.0, 2.0]).to(t.x)),
    "sum with a list": ("error", lambda t: t.x + torch.tensor([1.0] * 4)),
    "sum with a list of the old kind": ("error", lambda t: t.x + torch.Tensor([1.0] * 4)),
    "sum with an array": ("error", lambda t: t.x + torch.from_numpy(numpy.ones(4, "float32"))),
    "sum with asarray": ("error", lambda t: t.x + torch.asarray([1.0] * 4)),
    "sum with as_tensor of an array": (
        "error",
        lambda t: t.x + torch.as_tensor(numpy.ones(4, "float32")),
    ),
    "sum with a buffer": (
        "error",
        lambda t: t.x + torch.frombuffer(bytearray(16), dtype=torch.float32),
    ),
    "sum with an array by dlpack": (
        "error",
        lambda t: t.x + torch.from_dlpack(numpy.ones(4, "float32")),
    ),
    "host values read on the host": (
        "ok",
        lambda t: t.x * (torch.tensor([1.0, 2.0]) + 1).tolist()[1],
    ),
    "as_tensor of a tensor": ("ok", lambda t: torch.as_tensor(t.x) + 1),
    "to its own device": ("ok", lambda t: t.x.to(t.x.device) + 1),
    "another seed": ("error", lambda t: (torch.manual_seed(987654321), torch.rand_like(t.x))[1]),
    # Others that models use.
    "fft": ("ok", lambda t: torch.fft.rfft(t.x).abs()),
    "cdist": ("ok", lambda t: torch.cdist(t.x, t.x)),
    "embedding_bag": ("ok", lambda t: functional.embedding_bag(t.i.view(2, 2), t.x)),
    "cross_entropy": ("ok", lambda t: functional.cross_entropy(t.x, t.i)),
    "median": ("ok", lambda t: t.x.median(1)),
    "logcumsumexp": ("ok", lambda t: t.x.logcumsumexp(1)),
    "embedding with max_norm": (
        "ok",
        lambda t: functional.embedding(t.i, t.x.clone(), max_norm=1.0),
    ),
    "interpolate": ("ok", lambda t: functional.interpolate(t.x.view(1, 4, 4), scale_factor=2)),
}

# A capture of these breaks cuSOLVER for the whole process: eager calls fail afterwards with
# CUSOLVER_STATUS_EXECUTION_FAILED. So the refusal is asked of the simulated device only.
BREAKS_CUSOLVER = frozenset({"eigh", "eigvalsh", "ldl_factor_ex"})

# Recorded too. Each replay draws anew, so that there is nothing to compare it with.
RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "multinomial, one": lambda x: torch.multinomial(x.abs() + 1, 1),
    "multinomial, two": lambda x: torch.multinomial(x.abs() + 1, 2),
    "multinomial, one, replaced": lambda x: torch.multinomial(x.abs() + 1, 1, True),
    "multinomial, two, replaced": lambda x: torch.multinomial(x.abs() + 1, 2, True),
    "multinomial of a vector": lambda x: torch.multinomial(x.view(-1).abs() + 1, 9),
}


class DeviceContract:
    """Cases that hold on both devices."""

    @pytest.fixture
    def bench(self, device: Device) -> Iterator[Bench]:
        bench = Bench(device, device.new_pool())
        yield bench
        bench.retire()
        bench.pool.release()

    def test_device_has_the_whole_protocol(self, device: Device) -> None:
        assert isinstance(device, Device)
        assert device.limits.num_sms >= 1
        assert torch.empty(0, device=device.torch_device).device.type == device.torch_device.type

    # -- capture and replay ------------------------------------------------------------------

    def test_replay_reads_the_inputs_of_now(self, bench: Bench) -> None:
        x = bench.tensor([1.0, 2.0])
        graph, out = bench.record(lambda: x * 2 + 7)
        for value in (1.0, -3.5, 100.0):
            x.fill_(value)
            bench.replay(graph)
            assert out.tolist() == [value * 2 + 7] * 2

    def test_output_before_the_first_replay_is_undefined(self, bench: Bench) -> None:
        x = bench.random(64)
        graph, out = bench.record(lambda: torch.sin(x) * 3)
        before = out.clone()
        bench.replay(graph)
        assert not torch.equal(before, out)
        assert same(out, torch.sin(x) * 3)

    def test_state_advances_with_each_replay_not_with_the_capture(self, bench: Bench) -> None:
        cache, slot, x = bench.full((4, 2)), bench.tensor([2], torch.int64), bench.full((1, 2), 3.0)

        def write() -> None:
            cache[slot] += x

        graph, _ = bench.record(write)
        assert cache.tolist() == [[0.0, 0.0]] * 4
        bench.replay(graph)
        bench.replay(graph)
        slot.fill_(0)
        bench.replay(graph)
        assert cache[:, 0].tolist() == [3.0, 0.0, 6.0, 0.0]

    @pytest.mark.parametrize("name", OPERATIONS)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_replay_is_bit_equal_to_eager(self, bench: Bench, name: str, mode: Any) -> None:
        operation = OPERATIONS[name]
        x, i = bench.random(8, 8), bench.tensor([3, 1, 4, 0, 5, 2, 6, 7], torch.int64)
        with mode():
            operation(x, i)  # Lazy initialisation must not happen in a recording.
            graph, result = bench.record(operation, x, i)
            for _ in range(3):
                x.copy_(torch.randn(8, 8))
                bench.replay(graph)
                expected = leaves(operation(x, i))
                assert len(expected) == len(leaves(result))
                assert all(
                    same(left, right) for left, right in zip(leaves(result), expected, strict=True)
                )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
    def test_every_dtype_replays(self, bench: Bench, dtype: torch.dtype) -> None:
        x = bench.tensor([1, 2, 3], dtype)
        graph, out = bench.record(lambda: x * 2 + x)
        x.fill_(4)
        bench.replay(graph)
        assert out.dtype is dtype
        assert out.tolist() == [12, 12, 12]

    def test_replay_overwrites_the_output_in_place(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        graph, out = bench.record(lambda: x + 1)
        bench.replay(graph)
        address, held = out.data_ptr(), out
        x.fill_(9.0)
        bench.replay(graph)
        assert out.data_ptr() == address
        assert held.tolist() == [10.0] * 4

    def test_replay_does_not_wait_for_the_device(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = bench.full((4,), 1.0)
        graph, out = bench.record(lambda: x + 1)
        bench.replay(graph)

        def forbid(stream: Any = None) -> None:
            raise AssertionError("a replay waited for the device")

        with monkeypatch.context() as patch:
            patch.setattr(bench.device, "synchronize", forbid)
            x.fill_(2.0)
            graph.replay()
        assert out.tolist() == [3.0] * 4

    def test_reset_graph_raises_at_replay_and_may_be_reset_again(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        graph, _ = bench.record(lambda: x + 1)
        bench.replay(graph)
        graph.reset()
        graph.reset()
        with pytest.raises(GraphrtError):
            graph.replay()
        bench.check_usable()

    # -- recordings --------------------------------------------------------------------------

    def test_recording_is_open_for_its_own_thread_only(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        seen: list[bool] = []

        def body() -> torch.Tensor:
            seen.append(bench.device.is_capturing())
            other = threading.Thread(target=lambda: seen.append(bench.device.is_capturing()))
            other.start()
            other.join()
            return x + 1

        assert not bench.device.is_capturing()
        bench.record(body)
        assert seen == [True, False]
        assert not bench.device.is_capturing()

    def test_copied_context_does_not_keep_a_recording_open(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        copies: list[contextvars.Context] = []

        def body() -> torch.Tensor:
            copies.append(contextvars.copy_context())
            return x + 1

        bench.record(body)
        assert copies[0].run(bench.device.is_capturing) is False

    def test_second_recording_raises_and_the_first_goes_on(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)

        def body() -> torch.Tensor:
            doubled = x * 2
            with pytest.raises(CaptureInProgressError):
                bench.device.begin(bench.pool, bench.device.stream("capture"), "inner")
            assert bench.device.is_capturing()
            return doubled + 1

        graph, out = bench.record(body)
        x.fill_(4.0)
        bench.replay(graph)
        assert out.tolist() == [9.0] * 4

    def test_recording_begins_on_the_current_stream_only(self, bench: Bench) -> None:
        stream = bench.device.stream("capture")
        assert bench.device.current_stream() is not stream
        with pytest.raises(CaptureError):
            bench.device.begin(bench.pool, stream, "elsewhere")
        bench.check_usable()

    def test_recording_of_no_kernel_is_an_error(self, bench: Bench) -> None:
        x = bench.full((4, 4), 1.0)
        with pytest.raises(EmptyCaptureError):
            bench.record(lambda: x.t()[1:])
        bench.check_usable()

    def test_recording_of_no_kernel_may_be_allowed(self, bench: Bench) -> None:
        stream = bench.device.stream("capture")
        with bench.device.use(stream):
            graph = bench.device.begin(bench.pool, stream, "case").end(allow_empty=True)
        assert graph.num_nodes == 0
        graph.reset()
        bench.check_usable()

    def test_graph_counts_its_kernels(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        graph, _ = bench.record(lambda: (x + 1).neg())
        assert graph.num_nodes == 2

    # -- failures ----------------------------------------------------------------------------

    @pytest.mark.parametrize("after", range(5))
    def test_callers_error_anywhere_leaves_the_device_usable(
        self, bench: Bench, after: int
    ) -> None:
        x, mistake = bench.full((8, 8), 1.0), ValueError("the caller's own")

        def body() -> torch.Tensor:
            y = x
            for step in range(5):
                if step == after:
                    raise mistake
                y = torch.relu(y @ x + step)
            return y

        with pytest.raises(ValueError, match="the caller's own") as caught:
            bench.record(body)
        assert caught.value is mistake
        assert x.eq(1).all()
        bench.check_usable()

    def test_abort_returns_the_first_error_and_never_raises(self, bench: Bench) -> None:
        stream, mistake = bench.device.stream("capture"), KeyError("first")
        with bench.device.use(stream):
            recording = bench.device.begin(bench.pool, stream, "case")
            assert recording.abort(mistake) is mistake
            assert recording.abort(mistake) is mistake
        bench.check_usable()

    @pytest.mark.parametrize("operation", FORBIDDEN, ids=lambda operation: operation.__name__)
    @pytest.mark.parametrize("observe", [True, False])
    def test_operation_that_waits_raises_with_its_source_line(
        self, bench: Bench, operation: Callable[[torch.Tensor], Any], observe: bool
    ) -> None:
        x = bench.random(4)
        with pytest.raises(ForbiddenOperationError) as caught:
            bench.record(operation, x, observe=observe)
        error = caught.value
        assert error.operation
        line = operation.__code__.co_firstlineno + 1
        assert error.source.startswith(f"{__file__}:{line} in {operation.__name__}: return ")
        assert error.source in str(error)
        assert "is not permitted while capturing" in str(error)
        assert error.do
        bench.check_usable()

    def test_swallowed_forbidden_operation_fails_the_capture(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)

        def body() -> torch.Tensor:
            try:
                read_item(x)
            except RuntimeError:
                return x + 1
            return x + 2

        with pytest.raises(ForbiddenOperationError):
            bench.record(body)
        bench.check_usable()

    def test_many_failed_captures_leave_the_pool_as_it_was(self, bench: Bench) -> None:
        x = bench.full((64,), 1.0)
        held = []

        def body() -> None:
            y = x * 2 + 1
            y.sum().item()

        for _ in range(10):
            with pytest.raises(ForbiddenOperationError):
                bench.record(body)
            held.append(bench.pool.bytes())
        assert held == held[:1] * 10
        assert list(bench.pool.live_blocks()) == []
        bench.check_usable()

    @pytest.mark.parametrize("name", OUTCOMES)
    def test_operator_is_recorded_right_or_refused(self, bench: Bench, name: str) -> None:
        outcome, operation = OUTCOMES[name]
        if name in BREAKS_CUSOLVER and bench.device.name == "cuda":
            pytest.skip("needs a process of its own: its capture breaks cuSOLVER for the process")
        t = Operands(
            bench.random(4, 4), bench.tensor([2, 0, 3, 1], torch.int64), bench.full((), 3.0)
        )
        with warnings.catch_warnings(), torch.no_grad():
            # Host values that a recording reads once are warned of: here they never change.
            warnings.simplefilter("ignore")
            if outcome != "error":
                operation(t)  # Lazy initialisation must not happen in a recording.
            if outcome == "ok":
                self.check_replays(bench, operation, t)
                return
            is_stated_by_torch = outcome == "error" and bench.device.name == "cuda"
            kinds = (RuntimeError, TypeError, BufferError)
            with pytest.raises(kinds if is_stated_by_torch else ForbiddenOperationError) as caught:
                bench.record(operation, t)
            if not is_stated_by_torch:
                assert caught.value.operation
                assert caught.value.source.startswith(f"{__file__}:")
        bench.check_usable()

    def check_replays(
        self, bench: Bench, operation: Callable[[Operands], Any], t: Operands
    ) -> None:
        graph, result = bench.record(operation, t)
        for order in ([3, 1, 0, 2], [0, 1, 2, 3]):
            t.x.copy_(torch.randn(4, 4))
            t.i.copy_(torch.tensor(order))
            t.end.fill_(0.5 + order[0])
            bench.replay(graph)
            pairs = zip(leaves(result), leaves(operation(t)), strict=True)
            assert all(same(left, right) for left, right in pairs)

    @pytest.mark.parametrize("name", RANDOM)
    def test_random_operator_draws_anew_in_each_replay(self, bench: Bench, name: str) -> None:
        draw, x = RANDOM[name], bench.random(64, 64)
        with torch.no_grad():
            expected = draw(x)
            graph, out = bench.record(draw, x)
        draws = []
        for _ in range(2):
            bench.replay(graph)
            draws.append(out.clone())
            assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
            assert bool((out.isfinite() & (out.abs() <= x.numel())).all())
        assert not torch.equal(*draws)

    # -- pools -------------------------------------------------------------------------------

    def test_pool_owns_what_a_recording_allocates_and_no_more(self, bench: Bench) -> None:
        x = bench.full((4, 4), 1.0)
        _, out = bench.record(lambda: (x + 1, x))
        assert bench.pool.owns(out[0])
        assert bench.pool.owns(out[0].t()[1:])
        assert bench.device.owns(out[0])
        assert not bench.pool.owns(x)
        assert not bench.device.owns(out[1])

    def test_temporaries_are_reused_within_a_capture(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)

        def chain() -> torch.Tensor:
            y = x
            for _ in range(20):
                y = y + 1
            return y

        graph, out = bench.record(chain)
        bench.replay(graph)
        assert out[0].item() == 21.0
        assert bench.pool.bytes() < 10 * x.nbytes

    def test_released_outputs_are_reused_by_the_next_capture(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)
        first, out = bench.record(lambda: x + 1)
        alias = bench.device.weak_alias(out)
        del out
        held = bench.pool.bytes()
        second, other = bench.record(lambda: x * 5)
        assert bench.pool.bytes() == held
        assert other.data_ptr() == alias.data_ptr()
        bench.replay(first)
        assert alias[0].item() == 2.0
        bench.replay(second)
        assert alias[0].item() == 5.0  # Valid until the next replay of any program, as promised.

    def test_held_output_is_not_overwritten_by_another_graph(self, bench: Bench) -> None:
        x = bench.full((16,), 1.0)
        first, one = bench.record(lambda: x + 1)
        second, two = bench.record(lambda: x * 5)
        bench.replay(first)
        bench.replay(second)
        assert one.data_ptr() != two.data_ptr()
        assert (one[0].item(), two[0].item()) == (2.0, 5.0)

    def test_live_blocks_are_those_a_tensor_holds(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)
        _, out = bench.record(lambda: x + 1)
        blocks = bench.pool.live_blocks()
        assert [block.address for block in blocks] == [out.data_ptr()]
        assert blocks[0].num_bytes >= out.nbytes
        alias = bench.device.weak_alias(out)
        del out
        assert list(bench.pool.live_blocks()) == []
        assert bench.pool.owns(alias)

    def test_weak_alias_is_the_same_bytes(self, bench: Bench) -> None:
        x = bench.random(4, 6)
        graph, out = bench.record(lambda: (x * 2).t()[1:])
        alias = bench.device.weak_alias(out)
        assert alias is not out
        assert (alias.data_ptr(), alias.shape, alias.stride(), alias.storage_offset()) == (
            out.data_ptr(),
            out.shape,
            out.stride(),
            out.storage_offset(),
        )
        bench.replay(graph)
        assert same(alias, out)
        assert same(alias, (x * 2).t()[1:])

    def test_weak_alias_keeps_conj_and_neg_bits(self, bench: Bench) -> None:
        values = torch.tensor([1 + 2j, 3 - 1j])
        tensor = bench.device.alloc(bench.pool, (2,), (1,), torch.complex64)
        tensor.copy_(values)
        for view in (tensor.conj(), tensor._neg_view(), tensor.conj().imag):
            alias = bench.device.weak_alias(view)
            assert alias.data_ptr() == view.data_ptr()
            assert torch.equal(alias.cpu(), view.cpu())

    def test_weak_alias_outside_the_pool_is_the_tensor_itself(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        assert bench.device.weak_alias(x) is x

    def test_sparse_tensor_lies_in_no_pool(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0).to_sparse()
        assert not bench.device.owns(x)
        assert bench.device.weak_alias(x) is x

    def test_temporary_freed_in_a_recording_is_reused_there(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)

        def body() -> tuple[int, torch.Tensor]:
            first = x + 1
            address = first.data_ptr()
            del first
            return address, x + 2

        _, (address, second) = bench.record(body)
        assert second.data_ptr() == address

    def test_static_output_made_before_a_recording_is_read_in_it(self, bench: Bench) -> None:
        device, stream = bench.device, bench.device.stream("capture")
        with device.use(stream):
            static_output = device.alloc(bench.pool, (3, 2), (1, 3), torch.float32)
        assert (static_output.shape, static_output.stride(), static_output.dtype) == (
            (3, 2),
            (1, 3),
            torch.float32,
        )
        assert device.owns(static_output)
        assert not static_output.is_inference()
        graph, out = bench.record(lambda: static_output * 2)
        static_output.copy_(bench.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        bench.replay(graph)
        assert out.tolist() == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]

    def test_static_output_is_owned_by_all_views_of_its_pool(self, bench: Bench) -> None:
        """Whether it lies in memory that the pool had, or made the pool take more."""
        device, views = bench.device, [bench.device.new_pool(bench.pool.handle)]
        static_outputs = []
        with device.use(device.stream("capture")):
            for number, size in enumerate((8, 8, LARGE, 8, 8 * LARGE, LARGE)):
                static_outputs.append(device.alloc(bench.pool, (size,), (1,), torch.float32))
                if number == 2:
                    views.append(device.new_pool(bench.pool.handle))
                for pool in (bench.pool, *views):
                    assert all(pool.owns(static_output) for static_output in static_outputs)
                    assert all(pool.owns(static_output[-1:]) for static_output in static_outputs)
        static_outputs.clear()
        for view in views:
            view.release()

    def test_pool_tensors_of_inference_mode_are_writable_outside(self, bench: Bench) -> None:
        device, x = bench.device, bench.full((4,), 1.0)
        with torch.inference_mode():
            _, out = bench.record(lambda: x + 1)
            alias = device.weak_alias(out)
            with device.use(device.stream("capture")):
                static_output = device.alloc(bench.pool, (4,), (1,), torch.float32)
        for tensor in (alias, static_output):
            assert not tensor.is_inference()
            assert tensor.fill_(3.0).tolist() == [3.0] * 4

    def test_pool_may_be_viewed_by_its_handle(self, bench: Bench) -> None:
        view = bench.device.new_pool(bench.pool.handle)
        assert view.handle == bench.pool.handle
        x = bench.full((4,), 1.0)
        graph, out = bench.record(lambda: x + 1, pool=view)
        assert bench.pool.owns(out)
        assert view.owns(out)
        bench.replay(graph)
        assert out.tolist() == [2.0] * 4
        del out
        bench.retire()
        view.release()
        bench.check_usable()

    def test_released_pool_is_empty_and_may_be_released_again(self, bench: Bench) -> None:
        for _ in range(3):
            pool = bench.device.new_pool()
            x = bench.full((LARGE,), 1.0)
            graph, out = bench.record(lambda x=x: x + 1, pool=pool)
            bench.replay(graph)
            assert out[0].item() == 2.0
            assert pool.bytes() >= out.nbytes
            del out
            bench.retire()
            pool.release()
            pool.release()
            assert pool.bytes() == 0
            assert list(pool.live_blocks()) == []
        bench.check_usable()

    def test_memory_readings_agree_with_each_other(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)
        _, _out = bench.record(lambda: x + 1)
        reading = bench.device.memory(bench.pool)
        assert 0 < reading.free_bytes <= reading.total_bytes
        assert x.nbytes <= reading.pool_bytes == bench.pool.bytes() <= reading.reserved_bytes
        assert bench.device.memory().pool_bytes == 0
        live = sum(block.num_bytes for block in bench.pool.live_blocks())
        assert live <= reading.tensor_bytes <= reading.reserved_bytes
        del _out
        assert bench.device.memory().tensor_bytes <= reading.tensor_bytes - x.nbytes

    def test_trim_takes_nothing_from_a_graph(self, bench: Bench) -> None:
        x = bench.random(8, 8)
        graph, out = bench.record(lambda: torch.relu(x @ x))
        bench.device.trim()
        x.copy_(torch.randn(8, 8))
        bench.replay(graph)
        assert same(out, torch.relu(x @ x))

    # -- streams -----------------------------------------------------------------------------

    def test_stream_of_a_name_is_always_the_same_object(self, bench: Bench) -> None:
        device = bench.device
        one, other = device.stream("one"), device.stream("other")
        assert one is device.stream("one")
        assert one is not other
        outside = device.current_stream()
        with device.use(one):
            assert device.current_stream() is one
            with device.use(other):
                assert device.current_stream() is other
            assert device.current_stream() is one
        assert device.current_stream() is outside
        assert outside not in (one, other)

    def test_adopted_stream_is_the_one_that_records(self, bench: Bench) -> None:
        """An engine's own stream: the same object as when it is current."""
        device = bench.device
        given = device.stream("engine's")
        adopted = device.adopt_stream(given)
        with device.use(adopted):
            assert device.current_stream() is adopted
            recording = device.begin(bench.pool, adopted, "on a given stream")
            y = bench.full((4,), 1.0) + 1
            graph = recording.end()
        bench.graphs.append(graph)
        device.order(device.current_stream(), adopted)
        graph.replay()
        assert y.eq(2).all()
        assert device.adopt_stream(device.adopt_stream(given)) is adopted

    def test_adopted_stream_of_another_kind_is_refused(self, bench: Bench) -> None:
        device = bench.device
        for wrong in (device.current_stream(), "engine's", None, object()):
            with pytest.raises(ConfigError, match="stream"):
                device.adopt_stream(wrong)

    def test_range_and_modes_leave_results_and_errors_alone(self, bench: Bench) -> None:
        device = bench.device
        x = torch.ones(4, device=device.torch_device)
        for around in (lambda: device.range("FULL {0}"), device.modes_of_recording):
            with around():
                assert torch.nn.functional.relu(x * 2).eq(2).all()
            with pytest.raises(ZeroDivisionError), around():
                raise ZeroDivisionError

    def test_forgotten_stream_frees_its_place(self, bench: Bench) -> None:
        """Libraries that are made and closed on one device, each with a stream, never run out."""
        device, kept = bench.device, bench.device.stream("kept")
        for number in range(100):
            stream = device.stream(f"number {number}")
            assert stream is not kept
            with device.use(stream):
                assert device.current_stream() is stream
            device.forget_stream(stream)
            device.forget_stream(stream)
        assert device.stream("kept") is kept
        again = device.stream("number 0")
        device.forget_stream(stream)
        assert device.stream("number 0") is again

    def test_side_stream_that_forks_and_joins_is_replayed(self, bench: Bench) -> None:
        device, v = bench.device, bench.full((16,), 2.0)
        capture, side = device.stream("capture"), device.stream("side")

        def body() -> torch.Tensor:
            device.order(side, capture)
            with device.use(side):
                scaled = v * 7
            device.order(capture, side)
            return scaled + 3

        graph, out = bench.record(body)
        v.fill_(5.0)
        bench.replay(graph)
        assert out.tolist() == [38.0] * 16

    def test_memory_freed_on_a_stream_stays_that_streams(self, bench: Bench) -> None:
        device, x = bench.device, bench.full((LARGE,), 1.0)
        capture, side = device.stream("capture"), device.stream("side")

        def on_side() -> int:
            device.order(side, capture)
            with device.use(side):
                address = (x + 1).data_ptr()
            device.order(capture, side)
            return address

        _, freed = bench.record(on_side)
        _, others = bench.record(lambda: [x + 1, x + 2, x + 3])
        assert freed not in [other.data_ptr() for other in others]
        _, again = bench.record(on_side)
        assert again == freed

    def test_wait_for_a_mark_covers_what_was_issued_before_it(self, bench: Bench) -> None:
        device, v = bench.device, bench.full((16,), 2.0)
        capture, side = device.stream("capture"), device.stream("side")

        def body() -> tuple[torch.Tensor, torch.Tensor]:
            first = v + 1
            mark = device.mark(capture)
            second = v * 10  # Issued after the mark: the side stream need not wait for it.
            device.wait(side, mark)
            with device.use(side):
                third = first * 2
            device.order(capture, side)
            return second + 1, third + 1

        graph, (second, third) = bench.record(body)
        v.fill_(5.0)
        bench.replay(graph)
        assert second.tolist() == [51.0] * 16
        assert third.tolist() == [13.0] * 16

    def test_unjoined_side_stream_is_an_error(self, bench: Bench) -> None:
        device, v = bench.device, bench.full((16,), 2.0)
        capture, side = device.stream("capture"), device.stream("side")

        def body() -> torch.Tensor:
            device.order(side, capture)
            with device.use(side):
                return v * 7

        with pytest.raises(UnjoinedStreamError):
            bench.record(body)
        bench.check_usable()
        # The side stream is free again as well.
        with device.use(side):
            eager = v * 7
        device.synchronize()
        assert eager.tolist() == [14.0] * 16

    def test_recording_that_waits_for_other_work_is_an_error(self, bench: Bench) -> None:
        device, v = bench.device, bench.full((16,), 2.0)
        capture, side = device.stream("capture"), device.stream("side")
        with device.use(side):
            before = v * 7

        def body() -> torch.Tensor:
            device.order(capture, side)
            return before + 1

        with pytest.raises(UnjoinedStreamError):
            bench.record(body)
        bench.check_usable()

    # -- what a recording learns -------------------------------------------------------------

    def test_externals_come_in_order_of_use_with_their_writes(self, bench: Bench) -> None:
        x, weight, cache = bench.random(4, 4), bench.random(4, 4), bench.full((4, 4))
        rows = bench.tensor([1], torch.int64)

        def body() -> torch.Tensor:
            y = x @ weight
            cache[0].add_(y[0])
            cache.index_copy_(0, rows, y[1:2])
            return y + cache

        graph, _ = bench.record(body)
        found = described(graph.externals, x=x, weight=weight, cache=cache, rows=rows)
        assert found == [("x", False), ("weight", False), ("cache", True), ("rows", False)]

    def test_pool_tensors_of_earlier_graphs_are_not_external(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        _, first = bench.record(lambda: x + 1)
        graph, _ = bench.record(lambda: first.mul_(2) + x)
        assert described(graph.externals, x=x) == [("x", False)]

    def test_out_arguments_and_lists_count_as_written(self, bench: Bench) -> None:
        x, total, one, two = (bench.full((4,), value) for value in (1.0, 0.0, 1.0, 2.0))

        def body() -> None:
            torch.add(x, 1, out=total)
            torch._foreach_add_([one, two], 1.0)

        graph, _ = bench.record(body)
        found = dict(described(graph.externals, x=x, total=total, one=one, two=two))
        assert found == {"x": False, "total": True, "one": True, "two": True}

    def test_recording_without_observe_has_no_externals(self, bench: Bench) -> None:
        x = bench.full((4,), 1.0)
        graph, out = bench.record(lambda: x + 1, observe=False)
        assert list(graph.externals) == []
        bench.replay(graph)
        assert out.tolist() == [2.0] * 4

    def test_observed_temporaries_are_still_reused(self, bench: Bench) -> None:
        x = bench.full((LARGE,), 1.0)

        def chain() -> torch.Tensor:
            return (((x + 1) * 2 + 3) * 4 + 5) * 6

        bench.record(chain, observe=True)
        observed = bench.pool.bytes()
        bare = bench.device.new_pool()
        bench.record(chain, observe=False, pool=bare)
        assert observed == bare.bytes()
        bench.retire()
        bare.release()

    def test_callers_mode_outlives_the_recording(self, bench: Bench) -> None:
        seen: list[str] = []

        class Counting(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        x = bench.full((4,), 1.0)
        device, stream = bench.device, bench.device.stream("capture")
        with device.use(stream):
            recording = device.begin(bench.pool, stream, "case")
            with Counting():
                _out = x + 1
                graph = recording.end()
                seen.clear()
                torch.neg(x)
                assert len(seen) == 1
        bench.graphs.append(graph)
        assert described(graph.externals, x=x) == [("x", False)]
        bench.check_usable()

    # -- random numbers ----------------------------------------------------------------------

    def test_replays_draw_what_eager_draws_from_the_same_seed(self, bench: Bench) -> None:
        x = bench.full((32,), 1.0)

        def draw() -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

        torch.manual_seed(11)
        eager = [draw() for _ in range(3)]
        torch.manual_seed(11)
        graph, out = bench.record(draw)
        for expected in eager:
            bench.replay(graph)
            assert same(out, expected)
        torch.manual_seed(11)
        bench.replay(graph)
        assert same(out, eager[0])

    def test_declared_generator_is_replayed_with_the_default_one(self, bench: Bench) -> None:
        torch_device = bench.device.torch_device
        generator = torch.Generator(torch_device)

        def draw() -> torch.Tensor:
            own = torch.rand(8, generator=generator, device=torch_device)
            return own + torch.rand(8, device=torch_device)

        generator.manual_seed(3)
        torch.manual_seed(4)
        eager = [draw() for _ in range(3)]
        generator.manual_seed(3)
        torch.manual_seed(4)
        graph, out = bench.record(draw, generators=(generator,))
        for expected in eager:
            bench.replay(graph)
            assert same(out, expected)

    def test_graph_knows_whether_it_draws_random_numbers(self, bench: Bench) -> None:
        x = bench.full((32,), 1.0)
        plain, _ = bench.record(lambda: x + 1)
        drawing, _ = bench.record(lambda: torch.rand_like(x))
        bench.replay(plain)
        bench.replay(drawing)
        assert not plain.uses_rng
        assert drawing.uses_rng

    def test_random_numbers_work_after_a_failed_capture(self, bench: Bench) -> None:
        x = bench.full((8,), 1.0)
        torch.manual_seed(5)
        expected = torch.rand_like(x)
        torch.manual_seed(5)
        with pytest.raises(ForbiddenOperationError):
            bench.record(lambda: torch.rand_like(x).sum().item())
        assert same(torch.rand_like(x), expected)

    # -- libraries, threads, instances -------------------------------------------------------

    def test_torch_says_it_captures_during_a_recording(self, bench: Bench) -> None:
        x, asked = bench.full((4,), 1.0), torch.cuda.is_current_stream_capturing

        def body() -> torch.Tensor:
            assert torch.cuda.is_current_stream_capturing()
            return x + 1

        bench.record(body)
        assert torch.cuda.is_current_stream_capturing is asked

    def test_torch_says_it_captures_in_report_capturing(self, bench: Bench) -> None:
        asked = torch.cuda.is_current_stream_capturing
        with bench.device.report_capturing():
            assert torch.cuda.is_current_stream_capturing()
            assert not bench.device.is_capturing()
        assert torch.cuda.is_current_stream_capturing is asked
        with pytest.raises(ValueError, match="warm-up"), bench.device.report_capturing():
            raise ValueError("warm-up")
        assert torch.cuda.is_current_stream_capturing is asked

    @pytest.mark.parametrize("observe", [True, False])
    def test_thread_that_joins_is_recorded(self, bench: Bench, observe: bool) -> None:
        x, weight = bench.full((8,), 1.0), bench.full((8,), 3.0)
        stream = bench.device.stream("capture")
        results: list[torch.Tensor] = []
        joined: list[bool] = []

        def body(recording: Recording) -> torch.Tensor:
            first = x + 1

            def work() -> None:
                with recording.join_thread(), bench.device.use(stream), torch.no_grad():
                    joined.append(bench.device.is_capturing())
                    results.append(first * weight)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
            return results.pop() + 1

        graph, out = bench.record_with(body, observe=observe)
        assert joined == [True]
        x.fill_(4.0)
        bench.replay(graph)
        assert out.tolist() == [16.0] * 8
        if observe:
            assert described(graph.externals, x=x, weight=weight) == [
                ("x", False),
                ("weight", False),
            ]

    def test_prepared_threads_record_in_turns_on_two_streams(self, bench: Bench) -> None:
        """As micro-batches do: each its own thread, all on the capture stream and a forked one."""
        device, x = bench.device, bench.full((8, 8), 1.0)
        compute, side = device.stream("capture"), device.stream("comm")
        threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        for thread in threads:
            thread.submit(device.prepare_thread, (compute, side)).result()

        def body(recording: Recording) -> torch.Tensor:
            def work(index: int) -> torch.Tensor:
                with recording.join_thread(), torch.no_grad(), device.use(compute):
                    part = x[4 * index : 4 * index + 4]
                    product = part @ x
                    received = torch.empty_like(product)
                    device.order(side, compute)
                    with device.use(side):
                        received.copy_(product @ x)
                    device.order(compute, side)
                    return received + product

            device.order(side, compute)
            parts = [thread.submit(work, at).result() for at, thread in enumerate(threads)]
            device.order(compute, side)
            return torch.cat(parts)

        graph, out = bench.record_with(body)
        for thread in threads:
            thread.shutdown()
        x.fill_(2.0)
        bench.replay(graph)
        product = x @ x
        assert torch.equal(out, product @ x + product)

    def test_memory_used_on_another_stream_is_not_reused(self, bench: Bench) -> None:
        device, x, side = bench.device, bench.full((LARGE,), 1.0), bench.device.stream("side")
        addresses: list[int] = []

        def body() -> torch.Tensor:
            compute = device.current_stream()
            device.order(side, compute)
            with device.use(side):
                born = x + 1
                addresses.append(born.data_ptr())
                device.record_use(born, compute)
            device.order(compute, side)
            total = born * 2
            del born
            with device.use(side):  # Before compute has read what it reads.
                other = x + 3
                addresses.append(other.data_ptr())
            device.order(compute, side)
            return total + other

        graph, out = bench.record(body)
        bench.replay(graph)
        assert addresses[0] != addresses[1]
        assert out[0].item() == 8.0

    def test_unordered_eager_work_races_where_it_is_watched(self, bench: Bench) -> None:
        device, x, side = bench.device, bench.full((8,), 1.0), bench.device.stream("side")
        with device.watch_races():
            device.order(side, device.current_stream())
            with device.use(side):
                y = x + 1
            device.order(device.current_stream(), side)
            assert (y * 2).tolist() == [4.0] * 8

    def test_opaque_call_is_replayed(self, bench: Bench) -> None:
        x = bench.full((4, 2), 1.0)

        def body(recording: Recording) -> torch.Tensor:
            meta = torch.empty((4, 2), device="meta")
            (doubled,) = recording.opaque(lambda v: (v * 2,), (x + 1,), (meta,))
            return doubled + 1

        graph, out = bench.record_with(body)
        x.fill_(5.0)
        bench.replay(graph)
        assert out.tolist() == [[13.0, 13.0]] * 4

    def test_device_may_be_closed_twice(self, device: Device) -> None:
        bench = Bench(device, device.new_pool())
        x = bench.full((4,), 1.0)
        graph, _out = bench.record(lambda: x + 1)
        bench.replay(graph)
        del _out
        device.close()
        device.close()
        with pytest.raises(GraphrtError):
            graph.replay()

    def test_two_devices_share_nothing(self, device: Device) -> None:
        # The same kind of device twice: two runtimes in one process.
        other = type(device)()
        one, two = Bench(device, device.new_pool()), Bench(other, other.new_pool())
        x = one.full((4,), 1.0)
        first, out = one.record(lambda: x + 1)
        second, foreign = two.record(lambda: x * 3)
        assert device.owns(out)
        assert not device.owns(foreign)
        assert not other.owns(out)
        two.replay(second)
        del foreign
        other.close()
        one.replay(first)
        assert out.tolist() == [2.0] * 4
        one.check_usable()
        one.retire()
        one.pool.release()

    def test_recording_of_another_device_object_is_seen(self, device: Device) -> None:
        other = type(device)()
        one, two = Bench(device, device.new_pool()), Bench(other, other.new_pool())
        x = one.full((4,), 1.0)

        def greedy() -> torch.Tensor:
            assert device.is_capturing()
            assert other.is_capturing()
            return x + 1

        graph, out = one.record(greedy)
        assert not other.is_capturing()
        one.replay(graph)
        assert out.tolist() == [2.0] * 4
        two.check_usable()
        other.close()
        del out
        one.retire()
        one.pool.release()


def described(uses: Any, **named: torch.Tensor) -> list[tuple[str, bool]]:
    """Name and written flag of each external, in order; an unknown one is called by its shape."""
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in named.items()}
    found = []
    for use in uses:
        assert isinstance(use, TensorUse)
        address = use.tensor.untyped_storage().data_ptr()
        found.append((names.get(address, f"unknown {tuple(use.tensor.shape)}"), use.written))
    return found


def resize(x: torch.Tensor) -> Any:
    return (x * 2).resize_(1000)


def rebind(x: torch.Tensor) -> Any:
    return x.set_(x.clone())


def assign_data(x: torch.Tensor) -> Any:
    x.data = x.clone()


def copy_deeply(x: torch.Tensor) -> Any:
    return copy.deepcopy(x)


def view_in_numpy(x: torch.Tensor) -> Any:
    return x.numpy()


def list_unique(x: torch.Tensor) -> Any:
    return torch.unique(x)


def slice_by_tensor(x: torch.Tensor) -> Any:
    return x[: torch.ones((), dtype=torch.int64)]


class StricterThanCUDA:
    """What the simulated device forbids, although CUDA records it, or fails at another place."""

    @pytest.mark.parametrize(
        "operation",
        [resize, rebind, assign_data, copy_deeply, view_in_numpy, list_unique, slice_by_tensor],
        ids=lambda operation: operation.__name__,
    )
    def test_operation_that_moves_or_reads_storage_raises(
        self, device: Device, operation: Callable[[torch.Tensor], Any]
    ) -> None:
        bench = Bench(device, device.new_pool())
        x = bench.random(4)
        with pytest.raises(ForbiddenOperationError) as caught:
            bench.record(operation, x)
        assert f"in {operation.__name__}:" in caught.value.source
        bench.check_usable()

    def test_outputs_before_the_first_replay_are_poison(self, device: Device) -> None:
        bench = Bench(device, device.new_pool())
        x = bench.full((4,), 1.0)
        _, (floats, ints) = bench.record(lambda: (x + 1, (x > 0).to(torch.int64)))
        assert floats.isnan().all()
        assert ints.eq(-1).all()
