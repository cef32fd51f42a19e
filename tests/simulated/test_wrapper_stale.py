"""The stale check: everything at the first replay, then by level."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from graphrt import CUDAGraphOptions, StaleCheck
from graphrt.errors import StaleInputError, UnkeyedValueError
from graphrt.graphs.signature import Signature, generate_checker
from lab import FULL, KEY, PIECEWISE, Lab


@dataclass
class Meta:
    table: list[torch.Tensor]
    scale: float = 1.0


class Pair(NamedTuple):
    left: Any
    right: Any


def double(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x * 2


def checker_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The generated checker, with the full check behind it, as a program has them."""
    signature = Signature.of(args, kwargs)
    return generate_checker(
        StaleCheck.IDENTITY,
        args,
        kwargs,
        by_address=lambda tensor: False,
        full_check=lambda a, k: signature.compare(a, k, "program"),
    )


@pytest.mark.parametrize("level", StaleCheck)
def test_stale_check_first_replay_checks_all_at_any_level(level: StaleCheck) -> None:
    with Lab(stale_check=level) as lab:
        wrapper = lab.wrap(double)
        lab.capture(wrapper, torch.ones(4), meta=Meta([torch.ones(2)]))
        with pytest.raises(StaleInputError) as caught:
            lab.step(wrapper, torch.ones(4), meta=Meta([torch.ones(2)]))
        assert "8): x\n" in str(caught.value)


def test_stale_input_error_names_path_addresses_and_shapes(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(4)
    meta = Meta([torch.ones(2), torch.ones(2), torch.ones(3)])
    lab.capture(wrapper, x, meta=meta)
    lab.step(wrapper, x, meta=meta)
    captured, other = meta.table[2], torch.ones(5)
    meta.table[2] = other
    with pytest.raises(StaleInputError) as caught:
        lab.step(wrapper, x, meta=meta)
    message = str(caught.value)
    for part in (": meta.table[2]\n", hex(captured.data_ptr()), hex(other.data_ptr())):
        assert part in message
    assert "(3,)" in message
    assert "(5,)" in message


def test_stale_check_accepts_another_view_of_the_same_bytes(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(4)
    lab.capture(wrapper, x)
    for _ in range(3):
        lab.step(wrapper, x.view(4))
    with pytest.raises(StaleInputError):
        lab.step(wrapper, x.view(2, 2))


def test_stale_check_compares_pool_tensors_by_address(lab: Lab) -> None:
    strong = CUDAGraphOptions(weak_ref_output=False)
    first = lab.wrap(double, PIECEWISE, cudagraph_options=strong)
    last = lab.wrap(double, PIECEWISE)
    x = torch.ones(4)
    with lab.library.capture_scope() as scope, scope.step(PIECEWISE, KEY):
        last(first(x))
    for value in (3.0, 4.0):
        x.fill_(value)
        assert torch.equal(lab.step(lambda x: last(first(x)), x, mode=PIECEWISE), x * 4)
    [generation] = lab.library.generations
    assert len(generation.pool.live_blocks()) == 1
    lab.library.drop(list(first.concrete_cudagraph_entries.values()))
    assert not generation.pool.live_blocks()


def test_stale_check_never_refreshes_the_first_identity(lab: Lab) -> None:
    seen = []
    x = torch.ones(4)
    check = generate_checker(
        StaleCheck.IDENTITY,
        (x,),
        {},
        by_address=lambda tensor: False,
        full_check=lambda args, kwargs: seen.append(args),
    )
    for same in (x, x.view(4)):
        check((same,), {})
    assert not seen
    other = torch.ones(4)
    for expected in (1, 2):
        check((other,), {})
        assert len(seen) == expected


def test_stale_check_off_compares_only_at_first_replay() -> None:
    with Lab(stale_check=StaleCheck.OFF) as lab:
        wrapper, x = lab.wrap(double), torch.ones(4)
        program = lab.capture(wrapper, x)
        lab.step(wrapper, x)
        assert lab.step(wrapper, torch.zeros(9)) is program.outputs


def test_stale_check_pointer_alone_sees_rebound_storage() -> None:
    for level, sees in ((StaleCheck.IDENTITY, False), (StaleCheck.POINTER, True)):
        with Lab(stale_check=level) as lab:
            wrapper, x = lab.wrap(double), torch.ones(4)
            lab.capture(wrapper, x)
            lab.step(wrapper, x)
            x.data = torch.zeros(4)
            if sees:
                with pytest.raises(StaleInputError):
                    lab.step(wrapper, x)
            else:
                lab.step(wrapper, x)
            assert lab.library.check_externals().moved == ("x",)


def test_stale_check_lists_opaque_leaves_as_unchecked(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(4)
    with pytest.warns(UserWarning, match="registry"):
        program = lab.capture(wrapper, x, registry=object())
    assert program.unchecked == ("registry",)
    for _ in range(2):
        lab.step(wrapper, x, registry=object())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2), {}), ((1,), {"n": 1}), (([1, 2],), {}), (({"a": 1},), {})],
)
def test_stale_check_of_more_or_fewer_arguments_raises(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for other_args, other_kwargs in (
        ((*args, None), kwargs),
        (args[:-1], kwargs) if args else ((0,), kwargs),
        (args, {**kwargs, "more": None}),
    ):
        with pytest.raises((StaleInputError, UnkeyedValueError)):
            checker_for(args, kwargs)(other_args, other_kwargs)


def test_stale_check_of_an_attribute_in_place_of_another_names_it() -> None:
    captured, now = Meta([]), Meta([])
    captured.mask, now.bias = torch.ones(2), torch.ones(2)
    check = checker_for((captured,), {})
    with pytest.raises(StaleInputError, match=r"args\[0\]\.mask") as caught:
        check((now,), {})
    assert caught.value.found == "nothing"


def test_stale_check_of_a_grown_list_raises() -> None:
    items = [torch.ones(1), torch.ones(1)]
    check = checker_for((items,), {})
    check((items,), {})
    items.append(torch.ones(1))
    with pytest.raises(StaleInputError):
        check((items,), {})


def test_stale_check_walks_a_recursive_container_once() -> None:
    items: list[Any] = [torch.ones(1)]
    items.append(items)
    check = checker_for((items,), {})
    check((items,), {})
    items[0] = torch.ones(1)
    with pytest.raises(StaleInputError):
        check((items,), {})


hosts = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=True),
    st.sampled_from([0.0, -0.0, math.nan, math.inf]),
    st.text(max_size=3),
    st.sampled_from([torch.float16, torch.float32, torch.int64]),
    st.sampled_from([torch.device("cpu"), torch.Size([2, 3]), slice(0, 2)]),
)
values = st.recursive(
    hosts,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Meta, st.lists(inner, max_size=2), inner),
    ),
    max_leaves=6,
)


def same(left: Any, right: Any) -> bool:
    """Would a program that baked ``left`` in do the same for ``right``? Written the slow way."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Meta):
        return same(left.table, right.table) and same(left.scale, right.scale)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and not isinstance(left, torch.Size):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left.hex() == right.hex()
    return bool(left == right)


@settings(max_examples=150, deadline=None)
@given(captured=values, given_now=values)
@example(captured=[], given_now={})
@example(captured=[1], given_now=(1,))
@example(captured=0.0, given_now=-0.0)
@example(captured=1, given_now=True)
def test_stale_check_host_value_changed_anywhere_raises(captured: Any, given_now: Any) -> None:
    check = checker_for((captured,), {"n": captured})
    check((captured,), {"n": captured})
    check((copy.deepcopy(captured),), {"n": captured})
    for args, kwargs in (((given_now,), {"n": captured}), ((captured,), {"n": given_now})):
        if same(captured, given_now):
            check(args, kwargs)
        else:
            with pytest.raises((UnkeyedValueError, StaleInputError)):
                check(args, kwargs)


def test_unkeyed_value_error_says_what_to_do(lab: Lab) -> None:
    wrapper, x = lab.wrap(double), torch.ones(4)
    lab.capture(wrapper, x, n=4)
    lab.step(wrapper, x, n=4)
    with pytest.raises(UnkeyedValueError) as caught:
        lab.step(wrapper, x, n=7)
    assert "4" in caught.value.expected
    assert caught.value.found == "7"
    assert "variant" in caught.value.do
    assert lab.library.program(wrapper, FULL, KEY).state == "ready"
