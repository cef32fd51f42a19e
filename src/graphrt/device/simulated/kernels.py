"""How a recorded operator is called at replay: the cheapest call with the same result bits.

A functional operator is called through its out variant, into the block that its result got at
capture; without one it is called as it is and the result is copied. Where torch has a direct
Python binding, that is called instead of the operator object: it parses its arguments faster. A
binding is taken only after a probe showed that exactly the same operator arrives behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Operator = torch._ops.OpOverload


class Call(NamedTuple):
    """One call at replay.

    ``copy_to``: the tensors that take the results where the call makes new ones, None for a result
    that nobody reads. ``is_single``: the call returns one tensor, not a sequence.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copy_to: tuple[torch.Tensor | None, ...] = ()
    is_single: bool = False

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        if self.copy_to:
            copy_results(self.copy_to, result)


def copy_results(targets: Sequence[torch.Tensor | None], result: Any) -> None:
    """Copy ``result``, a tensor or a sequence of them, to ``targets``; None: not wanted."""
    results = (result,) if isinstance(result, torch.Tensor) else result
    for target, value in zip(targets, results, strict=True):
        if target is not None:
            target.copy_(value)


class OutVariant(NamedTuple):
    """An overload that writes its results to arguments."""

    func: Operator
    outs: tuple[str, ...]
    takes: frozenset[str]
    """The other arguments."""
    fills_list: bool
    """Its results are one list of tensors."""


class _Arrived(BaseException):
    """Stops a probed call at the dispatcher. Not an Exception: nothing on the way may catch it."""

    def __init__(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args_seen = args
        self.kwargs_seen = kwargs


class _Probe(TorchDispatchMode):
    """Executes nothing: says which operator arrived."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise _Arrived(func, args, kwargs or {})


def _probing() -> _Probe:
    return _Probe()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _arrival(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Arrived | None:
    # As at replay: in inference mode and without function modes.
    try:
        with torch._C._InferenceMode(True), torch._C.DisableTorchFunction(), _probing():
            function(*args, **kwargs)
    except _Arrived as arrived:
        # Its frames lead back to ours, and would keep the tensors of the user's call alive.
        return arrived.with_traceback(None)
    except (TypeError, RuntimeError, NotImplementedError):
        return None  # The binding takes other arguments: it is not the one.
    return None


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right or left is right)


def _kind(value: Any) -> Any:
    """What the argument parsers of the bindings look at."""
    if isinstance(value, (list, tuple)):
        return tuple([_kind(one) for one in value])
    return "tensor" if isinstance(value, torch.Tensor) else type(value)


# Operators whose out variant computes the same bits as the functional one and leaves the out
# tensor's size alone. Others are called as they are and copied: some out variants resize their
# result on the way (losses), or take another algorithm (linalg).
_KEEPS_BITS_NAMES = """
    abs acos add addcdiv addcmul addmm addmv amax amin any all arange argmax argmin argsort asin
    atan atan2 baddbmm bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor bmm cat ceil clamp clamp_max clamp_min copysign cos cosh cummax cummin cumprod
    cumsum div elu eq erf exp exp2 expm1 floor floor_divide fmod gather ge gelu gt hardsigmoid
    hardswish hypot index index_select isinf isnan le leaky_relu lerp log log10 log1p log2
    logical_and logical_not logical_or logical_xor logit _log_softmax logaddexp logsumexp lt max
    maximum mean min minimum mish mm mul ne neg polar pow prod reciprocal remainder round rsqrt
    rsub scatter scatter_add sigmoid sign silu sin sinh _softmax softplus sort sqrt square sub sum
    tan tanh topk tril triu trunc where xlogy
"""
_KEEPS_BITS = frozenset([f"aten::{name}" for name in _KEEPS_BITS_NAMES.split()])

_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


class KernelBinder:
    """Chooses calls and remembers the choices. One per device."""

    def __init__(self) -> None:
        self._out: dict[Operator, OutVariant | None] = {}
        self._bound: dict[Any, Callable[..., Any]] = {}

    def functional(
        self,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[torch.Tensor | None],
    ) -> Call:
        """The call that leaves the results of ``func`` in ``outs``."""
        lowered = _LOWERED.get(func._schema.name)
        if lowered is not None and len(outs) == 1 and outs[0] is not None:
            call = lowered(args, outs[0])
            if call is not None:
                return call
        variant = self._out_variant(func)
        if variant is None or any(out is None for out in outs):
            is_single = len(outs) == 1 and func._schema.returns[0].type.kind() != "ListType"
            bound = self._bind(func, args, kwargs)
            return Call(bound, args, kwargs, tuple(outs), is_single)
        with_out = {name: value for name, value in kwargs.items() if name in variant.takes}
        if variant.fills_list:
            targets: dict[str, Any] = {variant.outs[0]: list(outs)}
        else:
            targets = dict(zip(variant.outs, outs, strict=True))
        return self._bind_out(variant.func, args, with_out, targets)

    def mutating(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call for an operator that writes its arguments and returns nothing new."""
        outs = [one.name for one in func._schema.arguments if one.is_out and one.name in kwargs]
        if outs:
            rest = {name: value for name, value in kwargs.items() if name not in outs}
            return self._bind_out(func, args, rest, {name: kwargs[name] for name in outs})
        return Call(self._bind(func, args, kwargs), args, kwargs)

    def _bind(
        self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        key = (func, _kind(args), tuple([(name, _kind(one)) for name, one in kwargs.items()]))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._search(func, args, kwargs, kwargs)
        return bound

    def _bind_out(
        self,
        func: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: dict[str, Any],
    ) -> Call:
        """The bindings call every out argument ``out``, several as a tuple."""
        operator_kwargs = kwargs | targets
        values = tuple(targets.values())
        binding_kwargs = kwargs | {"out": values[0] if len(values) == 1 else values}
        key = (func, _kind(args), tuple([(name, _kind(one)) for name, one in kwargs.items()]))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._search(func, args, operator_kwargs, binding_kwargs)
            self._bound[key] = bound
        is_operator = bound is _direct(func)
        return Call(bound, args, operator_kwargs if is_operator else binding_kwargs)

    def _search(
        self,
        func: Operator,
        args: tuple[Any, ...],
        operator_kwargs: dict[str, Any],
        binding_kwargs: dict[str, Any],
    ) -> Callable[..., Any]:
        direct = _direct(func)
        if func.namespace != "aten":
            return direct
        expected = _arrival(direct, args, operator_kwargs)
        name = func._schema.name.removeprefix("aten::")
        homes: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
        for home in homes:
            binding = getattr(home, name, None)
            if binding is None or expected is None:
                continue
            seen = _arrival(binding, args, binding_kwargs)
            if (
                seen is not None
                and seen.func is func
                and expected.func is func
                and _same(seen.args_seen, expected.args_seen)
                and seen.kwargs_seen.keys() == expected.kwargs_seen.keys()
                and all(
                    _same(value, expected.kwargs_seen[key])
                    for key, value in seen.kwargs_seen.items()
                )
            ):
                return binding  # type: ignore[no-any-return]  # a builtin found by name
        return direct

    def _out_variant(self, func: Operator) -> OutVariant | None:
        if func not in self._out:
            keeps = func._schema.name in _KEEPS_BITS
            self._out[func] = _find_out_variant(func) if keeps else None
        return self._out[func]


def _direct(func: Operator) -> Callable[..., Any]:
    """The operator without its Python frame, where torch still names it so."""
    return getattr(func, "_op", func)


def _find_out_variant(func: Operator) -> OutVariant | None:
    """The overload that takes the arguments of ``func`` and its results as out arguments."""
    schema = func._schema
    given = {one.name: str(one.type) for one in schema.arguments}
    takes_tensors = any("Tensor" in kind for kind in given.values())
    packet = func.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        outs = tuple(one.name for one in arguments if one.is_out)
        rest = {one.name: one for one in arguments if not one.is_out}
        # Options such as dtype may be missing where the out tensor carries them; with tensor
        # arguments they may choose the arithmetic, so there the variant has to take them.
        missing = given.keys() - rest.keys()
        if (
            outs
            and len(outs) == len(schema.returns)
            and (not missing or (missing <= _OPTIONS and not takes_tensors))
            and all(str(one.type) == given[name] for name, one in rest.items() if name in given)
            and all(one.has_default_value() for name, one in rest.items() if name not in given)
        ):
            fills_list = len(outs) == 1 and schema.returns[0].type.kind() == "ListType"
            return OutVariant(candidate, outs, frozenset(rest), fills_list)
    return None


def _copied(args: tuple[Any, ...], out: torch.Tensor) -> Call:
    return Call(torch.Tensor.copy_, (out, args[0]), {})


def _zeroed(args: tuple[Any, ...], out: torch.Tensor) -> Call:
    return Call(torch.Tensor.zero_, (out,), {})


def _ones(args: tuple[Any, ...], out: torch.Tensor) -> Call:
    return Call(torch.Tensor.fill_, (out, 1), {})


def _filled(at: int) -> Callable[[tuple[Any, ...], torch.Tensor], Call]:
    return lambda args, out: Call(torch.Tensor.fill_, (out, args[at]), {})


def _looked_up(args: tuple[Any, ...], out: torch.Tensor) -> Call | None:
    """Embedding is index_select over the flattened indices, and that has an out variant."""
    weight, indices = args[:2]
    if not indices.is_contiguous() or not out.is_contiguous() or not out.numel():
        return None
    rows = out.view(-1, weight.shape[1])
    kwargs = {"out": rows}
    return Call(torch._C._VariableFunctions.index_select, (weight, 0, indices.view(-1)), kwargs)


_LOWERED: Mapping[str, Callable[[tuple[Any, ...], torch.Tensor], Call | None]] = MappingProxyType(
    {
        "aten::_to_copy": _copied,
        "aten::clone": _copied,
        "aten::zeros": _zeroed,
        "aten::zeros_like": _zeroed,
        "aten::new_zeros": _zeroed,
        "aten::ones": _ones,
        "aten::ones_like": _ones,
        "aten::new_ones": _ones,
        "aten::full": _filled(1),
        "aten::full_like": _filled(1),
        "aten::new_full": _filled(2),
        "aten::scalar_tensor": _filled(0),
        "aten::embedding": _looked_up,
    }
)
