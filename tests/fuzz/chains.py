"""Models made of a few operators each: rows stay apart, or their padding is masked.

So every size must be admitted, and a padded run must give what the unpadded one gives: bit for bit
unless an operator's kernel depends on the number of rows (``INEXACT``). ``WRONG`` are operators
that read their padding, or remember: a model with one of them is refused, or right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphrt import break_point

from .common import Case, touch

NUM_ROWS = 64
"""Rows of the cache that steps write, after row 0, which padding writes."""

REAL = ("float64", "float32", "float16", "bfloat16")
Given = Mapping[str, Tensor]


@break_point
def eager_tensor(h: Tensor) -> Tensor:
    touch("eager_segment")
    return h * 2 - 1


@break_point
def eager_tuple(h: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
    touch("eager_segment")
    return h + 1, (h * 0.5, None)


@break_point
def eager_dict(h: Tensor) -> dict[str, Tensor]:
    touch("eager_segment")
    return {"minus": -h, "same": h}


@break_point
def eager_host(h: Tensor) -> tuple[Tensor, int]:
    touch("eager_segment")
    return h + 3, 2


@break_point(out="out")
def eager_out(h: Tensor, out: Tensor | None = None) -> Tensor:
    touch("eager_segment")
    if out is None:
        return h - 2
    return torch.sub(h, 2, out=out)


def _tuple(model: Chain, h: Tensor, given: Given) -> Tensor:
    first, (second, _) = eager_tuple(h)
    return first + second


def _dict(model: Chain, h: Tensor, given: Given) -> Tensor:
    parts = eager_dict(h)
    return parts["minus"] + parts["same"] * 2


def _host(model: Chain, h: Tensor, given: Given) -> Tensor:
    result, factor = eager_host(h)
    return result * factor


def _in_place(model: Chain, h: Tensor, given: Given) -> Tensor:
    own = h.clone()
    own.mul_(0.5).add_(1)
    own[..., 0] = 0
    return own


def _scatter(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Store rows where ``slots`` says and read them back, as a cache of keys and values does."""
    slots = given["slots"].reshape(-1)
    model.cache.index_copy_(0, slots, h.reshape(-1, h.shape[-1]).to(model.cache.dtype))
    return model.cache.index_select(0, slots).reshape(h.shape)


def _recall(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Read rows that earlier steps wrote."""
    return h + model.cache[given["index"]]


def _written(model: Chain, h: Tensor, given: Given) -> Tensor:
    given["x"].mul_(0.5)
    return h + given["x"]


def _pooled(model: Chain, h: Tensor, given: Given, dim: int = 1) -> Tensor:
    mask = given["flag"][..., None]
    count = mask.sum(dim, keepdim=True).clamp(min=1)
    return h + torch.where(mask, h, 0).sum(dim, keepdim=True) / count.to(h.dtype)


def _largest(model: Chain, h: Tensor, given: Given) -> Tensor:
    masked = h.masked_fill(~given["flag"][..., None], -3)
    return h - masked.amax(0, keepdim=True).clamp(min=-3)


def _row_attention(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Softmax over the rows, of which the padding is masked."""
    mask = given["flag"][..., None]
    scores = h.mean(-1, keepdim=True).masked_fill(~mask, -1e4).softmax(0)
    return h + (scores * torch.where(mask, h, 0)).sum(0, keepdim=True)


def _attention(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Softmax over the length, of which the padding is masked."""
    scores = h.mean(-1).masked_fill(~given["flag"], -1e4).softmax(1)
    masked = torch.where(given["flag"][..., None], h, 0)
    return h + (scores[..., None] * masked).sum(1, keepdim=True)


def _norm(model: Chain, h: Tensor, given: Given) -> Tensor:
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 0.1)


def _complex(model: Chain, h: Tensor, given: Given) -> Tensor:
    turned = torch.complex(h, h * 0.5) * (0.6 + 0.8j)
    return turned.real + turned.conj().imag


def _cast(model: Chain, h: Tensor, given: Given, name: str) -> Tensor:
    return h.to(getattr(torch, name)).to(h.dtype)


ANY: dict[str, Callable[..., Tensor]] = {
    "double": lambda model, h, given: h * 2 + 1,
    "negate": lambda model, h, given: -h,
    "where": lambda model, h, given: torch.where(given["flag"][..., None], h, h * 3),
    "table": lambda model, h, given: h + model.table[given["index"]],
    "roll": lambda model, h, given: h.roll(1, -1) + h.flip(-1),
    "turn": lambda model, h, given: h.unflatten(-1, (2, h.shape[-1] // 2)).mT.reshape(h.shape),
    "in_place_ops": lambda model, h, given: h.clone().add_(1).mul_(2),
    "scatter": _scatter,
    "recall": _recall,
    "index": lambda model, h, given: h + given["index"][..., None],
    "scaled": lambda model, h, given: h * model.scale,
    "shifted": lambda model, h, given: h + model.settings["shift"],
    "helped": lambda model, h, given: h + model.helper.bias,
    "made": lambda model, h, given: Made(model, h).rows,
    "gained": lambda model, h, given: h * model.inner.gain,
    "stacked": lambda model, h, given: h + model.stack[0],
}
FLOAT: dict[str, Callable[..., Tensor]] = {
    "relu": lambda model, h, given: h.relu() - 0.25,
    "clamp": lambda model, h, given: h.clamp(-2, 2),
    "dropout": lambda model, h, given: model.dropout(h),
    "noise": lambda model, h, given: h + torch.rand(h.shape[-1]).to(h.dtype),
    "in_place": _in_place,
    "written": _written,
    "cast": _cast,
    "eager_tensor": lambda model, h, given: eager_tensor(h),
    "eager_tuple": _tuple,
    "eager_dict": _dict,
    "eager_host": _host,
    "eager_out": lambda model, h, given: eager_out(h),
}
INEXACT: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda model, h, given: h @ model.weight,
    "linear": lambda model, h, given: nn.functional.linear(h, model.weight, model.table[0]),
    "tanh": lambda model, h, given: h.tanh(),
    "softmax": lambda model, h, given: h.softmax(-1) + h,
    "norm": _norm,
    "cumulate": lambda model, h, given: h.cumsum(-1),
}
COMPLEX_INSIDE = {"complex": _complex}
OVER_LENGTH = {"pooled": _pooled, "attention": _attention}
OVER_ROWS: dict[str, Callable[..., Tensor]] = {
    "pooled_rows": lambda model, h, given: _pooled(model, h, given, 0),
    "largest_row": _largest,
    "row_attention": _row_attention,
}
"""What looks at all rows, and masks the padding among them."""


def _memo(model: Chain, h: Tensor, given: Given) -> Tensor:
    if model.memo is None:
        model.memo = h.reshape(-1, h.shape[-1])[0].clone()
    return h + model.memo


def _counter(model: Chain, h: Tensor, given: Given) -> Tensor:
    model.num_calls += 1
    return h * model.num_calls


def _parity(model: Chain, h: Tensor, given: Given) -> Tensor:
    model.num_calls += 1
    return h * (1 + model.num_calls % 2)


def _wrong_rows(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Write the row that the first batch named."""
    if model.memo is None:
        model.memo = given["slots"].reshape(-1)[:1].clone()
    row = h.reshape(-1, h.shape[-1])[:1].to(model.cache.dtype)
    model.cache.index_copy_(0, model.memo, row)
    return h * 2


def _beside_guard(model: Chain, h: Tensor, given: Given) -> Tensor:
    """Advance state that nobody has declared."""
    model.hidden.add_(1)
    return h + model.hidden


WRONG: dict[str, Callable[..., Tensor]] = {
    "mean_over_rows": lambda model, h, given: h - h.mean(0, keepdim=True),
    "softmax_over_rows": lambda model, h, given: h.softmax(0),
    "divided_by_rows": lambda model, h, given: h / h.shape[0],
    "times_rows": lambda model, h, given: h * (1 + h.shape[0]),
    "sum_over_rows": lambda model, h, given: h + h.sum(0, keepdim=True),
    "last_row": lambda model, h, given: h + h[-1:],
    "turned_rows": lambda model, h, given: h + h.flip(0),
    "item": lambda model, h, given: h * (1 + given["index"].reshape(-1)[0].item()),
    "memo": _memo,
    "counter": _counter,
    "wrong_rows": _wrong_rows,
    "beside_guard": _beside_guard,
}
SOMETIMES_WRONG: dict[str, Callable[..., Tensor]] = {
    "branch_on_size": lambda model, h, given: h * 2 if h.shape[0] > 2 else -h,
    "branch_on_one_size": lambda model, h, given: h * 2 if h.shape[0] != 3 else -h,
    "largest_of_all": lambda model, h, given: h / h.abs().max().clamp(min=1),
    "parity": _parity,
}
"""Wrong for some sizes, values or calls only: only the comparison of such a run can find them."""
ALL_WRONG = {**WRONG, **SOMETIMES_WRONG}
NEEDS_REAL = {"mean_over_rows", "softmax_over_rows", "divided_by_rows", "largest_of_all"}
HARMLESS = ("double", "negate", "roll", "turn", "in_place_ops", "table", "index")
"""They leave a difference visible, so that a wrong operator before them is wrong for good."""
OPERATORS = {**ANY, **FLOAT, **INEXACT, **COMPLEX_INSIDE, **OVER_LENGTH, **OVER_ROWS, **ALL_WRONG}


class Helper:
    """An object that is no module."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias


class Made:
    """An object that each run makes: what its constructor alone reads belongs to the run."""

    def __init__(self, model: Chain, h: Tensor) -> None:
        self.rows = h * model.factor


class Inner(nn.Module):
    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain", gain)


class Chain(nn.Module):
    """The operators of a case, one after the other, on ``x`` [*axes, width]."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case["seed"])
        dtype, width = getattr(torch, case["dtype"]), case["width"]
        self.ops = tuple((name, tuple(rest)) for name, *rest in case["ops"])
        self.kind, self.also = case["outputs"], case["also"]
        self.memo: Tensor | None = None
        self.num_calls = 0

        def random(*shape: int) -> Tensor:
            if dtype == torch.int64:
                return torch.randint(-3, 4, shape, generator=generator)
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
            return values.to(dtype)

        self.weight = nn.Parameter(random(width, width), requires_grad=False)
        self.table = nn.Parameter(random(NUM_ROWS + 1, width), requires_grad=False)
        self.cache = random(NUM_ROWS + 1, width)
        self.scale = self.factor = 2
        self.settings = {"shift": 1}
        self.helper = Helper(random(width))
        self.inner = Inner(random(width))
        self.stack = [random(width)]
        self.dropout = nn.Dropout(0.5).eval()
        self.hidden = torch.zeros(width, dtype=dtype)

    def forward(self, **given: Tensor) -> Any:
        touch("forward")
        if "lens" in given:
            return {"out": self.outputs(given), "lens": given["lens"] * 2}
        return self.outputs(given)

    def outputs(self, given: Given) -> Any:
        h = given["x"] + 0
        for name, arguments in self.ops:
            h = OPERATORS[name](self, h, given, *arguments)
        h = h + 1
        if self.also:
            also = {name: ALSO[name](self, h, given) for name in self.also}
            return {"base": self.own_outputs(h, given), "also": also}
        return self.own_outputs(h, given)

    def own_outputs(self, h: Tensor, given: Given) -> Any:
        if self.kind == "single":
            return h
        ids, is_set = given["index"] * 2 + 1, ~given["flag"]
        if self.kind == "tuple":
            return h, ids
        if self.kind == "dict":
            return {"h": h, "ids": ids, "is_set": is_set}
        return {"deep": (h, {"is_set": is_set}), "ids": ids, "none": None}


PATHS = {
    "single": ("",),
    "tuple": ("0", "1"),
    "dict": ("h", "ids", "is_set"),
    "nested": ("deep.0", "deep.1.is_set", "ids"),
}
"""The tensors among the outputs, by kind; first what the operators made."""

ALSO: dict[str, Callable[[Chain, Tensor, Given], Any]] = {
    "x": lambda model, h, given: given["x"],
    "index": lambda model, h, given: given["index"],
    "flag": lambda model, h, given: given["flag"].view_as(given["flag"]),
    "part_of_x": lambda model, h, given: given["x"][..., 1:],
    "again": lambda model, h, given: h,
    "part": lambda model, h, given: h[..., ::2],
    "conjugate": lambda model, h, given: h.conj(),
    "nothing_of_h": lambda model, h, given: h[..., :0],
    "none": lambda model, h, given: None,
    "number": lambda model, h, given: 3,
    "weight": lambda model, h, given: model.table[:1],
    "state": lambda model, h, given: model.cache[1:3],
}
"""What a model may return beside its results: inputs, its own tensors, the same thing twice."""
WHOLE = ("none", "number", "weight", "state")
"""Of these: what has no axis of the batch."""


def paths_of(case: Case) -> tuple[str, ...]:
    """The outputs along the axes of the batch; first what the operators made."""
    own = PATHS[case["outputs"]]
    if not case["also"]:
        return own
    also = [f"also.{name}" for name in case["also"] if name not in WHOLE]
    return (*(f"base.{path}".rstrip(".") for path in own), *also)
