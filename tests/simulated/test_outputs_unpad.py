"""Cutting padded outputs to the real size, by each policy; declared and inferred axes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphrt import OutputSpec
from graphrt.errors import ConfigError, InputMismatchError, StaleOutputError
from graphrt.verify import compare


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    extra: dict[str, Any]


def rows(n: int, width: int = 2, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n * width, dtype=torch.float32).view(n, width)


STRUCTURES = {
    "tensor": (rows(8), "", lambda out: out),
    "tuple": ((rows(8), 3), "0", lambda out: out[0]),
    "list": ([None, rows(8)], "1", lambda out: out[1]),
    "dict": ({"logits": rows(8), "n": "x"}, "logits", lambda out: out["logits"]),
    "named tuple": (Pair(rows(8), rows(8)), "logits", lambda out: out.logits),
    "dataclass": (Answer(rows(8), {"a": [rows(8)]}), "extra.a.0", lambda out: out.extra["a"][0]),
}


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
def test_unpad_of_every_structure_cuts_its_rows(kind: str, policy: Any) -> None:
    outputs, path, pick = STRUCTURES[kind]
    bound = OutputSpec({path: "tokens"}, policy).bind(outputs)
    for n in (3, 8, 0, 3, {"tokens": 5}):
        taken = bound.unpad(n)
        assert type(taken) is type(outputs) or policy == "checked_view"
        count = n if isinstance(n, int) else n["tokens"]
        assert torch.equal(pick(taken).as_subclass(torch.Tensor), rows(8)[:count])
    assert pick(outputs).shape == (8, 2)


def test_unpad_of_one_size_gives_one_view() -> None:
    outputs = rows(8)
    bound = OutputSpec({"": "tokens"}, "view").bind(outputs)
    first = bound.unpad(3)
    assert bound.unpad(3) is first
    assert first.data_ptr() == outputs.data_ptr()
    outputs.add_(1)  # the next replay
    assert first[0, 0] == 1


@pytest.mark.parametrize(
    "outputs",
    [
        {"a": rows(8), "b": 1},
        {"a": rows(8), "b": [rows(8)]},
        {"a": rows(8), "b": ([1],)},
        (rows(8), [1]),
    ],
)
def test_unpad_gives_containers_of_the_callers_own(outputs: Any) -> None:
    def empty(value: Any) -> None:
        for child in value.values() if isinstance(value, dict) else value:
            if isinstance(child, list | tuple):
                empty(child)
        if not isinstance(value, tuple):
            value.clear()

    bound = OutputSpec({"a" if isinstance(outputs, dict) else "0": "tokens"}).bind(outputs)
    expected = copy.deepcopy(bound.unpad(3))
    empty(bound.unpad(3))
    assert compare(bound.unpad(3), expected).is_equal


def test_clones_outlive_the_next_replay() -> None:
    outputs = {"logits": rows(8), "loss": torch.tensor(1.0)}
    bound = OutputSpec({"logits": "tokens"}, "clone").bind(outputs)
    held = bound.unpad(3)
    for tensor in outputs.values():
        tensor.fill_(-1)  # the next replay
    assert torch.equal(held["logits"], rows(3))
    assert held["loss"] == 1
    assert bound.unpad(2)["loss"] == -1


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.sum().item(),
        lambda t: t[0],
        lambda t: t.tolist(),
        lambda t: torch.stack([torch.zeros(2), t[0]]),
        lambda t: t.data_ptr(),
        repr,
    ],
)
def test_checked_view_after_the_next_replay_raises(use: Any) -> None:
    spec = OutputSpec({"": "tokens"}, "checked_view")
    bound = spec.bind(rows(8))
    held = bound.unpad(3)
    use(held)
    bound.unpad(3)
    with pytest.raises(StaleOutputError) as raised:
        use(held)
    assert raised.value.do


def test_checked_view_covers_keys_and_aliases_not_results() -> None:
    spec = OutputSpec({"": "tokens"}, "checked_view")
    small, large = spec.bind(rows(4)), spec.bind(rows(8))
    held = small.unpad(3)
    view, (left, _), result = held.view(-1)[1:], held.chunk(2), held * 2
    large.unpad(8)
    for alias in (held, view, left):
        with pytest.raises(StaleOutputError):
            alias.sum()
    assert result.sum() == 30
    assert type(result) is torch.Tensor
    held = small.unpad(3)
    spec.expire()
    with pytest.raises(StaleOutputError):
        held.sum()


def test_length_may_be_a_function_of_the_sizes() -> None:
    # A vocoder makes 4 samples a token: cutting at n would lose three quarters.
    audio = torch.arange(64.0).view(2, 32)
    sizes = {"tokens": 5, "requests": 1}
    axes = {"audio": {1: lambda n: n["tokens"] * 4, 0: "requests"}}
    bound = OutputSpec(axes).bind({"audio": audio})
    assert bound.unpad(sizes)["audio"].shape == (1, 20)
    single = OutputSpec({"": lambda n: 4 * n}).bind(torch.zeros(32))
    assert single.unpad(5).shape == (20,)


def test_unpad_without_axis_or_beyond_padding_is_refused() -> None:
    with pytest.raises(InputMismatchError) as raised:
        OutputSpec({"": "tokens"}).bind(rows(8)).unpad(9)
    assert raised.value.found == "9"
    with pytest.raises(InputMismatchError) as raised:
        OutputSpec({"": "tokens"}).bind(rows(8)).unpad({"requests": 1})
    assert "tokens" in raised.value.expected


def test_unpad_caches_by_the_axes_that_a_length_reads() -> None:
    def total(n: dict[str, int]) -> int:
        return n["tokens"] + n["requests"]

    by_name = OutputSpec({"": "tokens"}, "view").bind(rows(8))
    by_function = OutputSpec({"": total}, "view").bind(rows(8))
    by_nothing = OutputSpec({}, "view").bind(rows(8))
    for requests in (1, 2):
        sizes = {"requests": requests, "tokens": 3}
        assert by_name.unpad(sizes) is by_name.unpad({"tokens": 3}) is by_name.unpad(3)
        assert len(by_function.unpad(sizes)) == 3 + requests
        assert len(by_nothing.unpad(sizes)) == 8


def test_output_over_an_input_follows_the_policy() -> None:
    buffer = rows(8)
    outputs = (buffer[:4], buffer[1:5])
    viewed = OutputSpec({"0": "tokens"}, "view").bind(outputs).unpad(2)
    assert viewed[0].data_ptr() == buffer.data_ptr()
    cloned = OutputSpec({"0": "tokens", "1": "tokens"}, "clone").bind(outputs).unpad(2)
    buffer.zero_()  # the next step is staged
    assert viewed[0].eq(0).all()
    assert torch.equal(cloned[1], rows(8)[1:3])


def test_opaque_output_is_passed_on() -> None:
    cache = object()
    bound = OutputSpec({"0": "tokens"}, "clone").bind((rows(4), cache))
    assert bound.unpad(2)[1] is cache


@pytest.mark.parametrize("axes", [{"logit": "tokens"}, {"logits": {2: "tokens"}}])
def test_path_of_no_dimension_is_refused(axes: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        OutputSpec(axes).bind({"logits": rows(8)})
    assert "logits" in raised.value.found


def test_ambiguous_path_or_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError):
        OutputSpec({}).bind({"a.b": rows(1), "a": {"b": rows(1)}})
    with pytest.raises(ConfigError):
        OutputSpec({}, "borrow")  # type: ignore[arg-type]


# --- inference


def test_infer_from_two_keys_finds_the_axes() -> None:
    def outputs(tokens: int, requests: int) -> dict[str, Any]:
        return {
            "logits": torch.zeros(requests, 8),  # 8 is also the padded number of tokens
            "hidden": [torch.zeros(2, tokens, 8)],
            "loss": torch.tensor(0.0),
        }

    spec = OutputSpec.infer(
        (outputs(8, 2), {"tokens": 8, "requests": 2}), (outputs(4, 1), {"tokens": 4, "requests": 1})
    )
    assert spec.axes == {"logits": {0: "requests"}, "hidden.0": {1: "tokens"}}
    taken = spec.bind(outputs(8, 2)).unpad({"tokens": 3, "requests": 1})
    assert taken["logits"].shape == (1, 8)
    assert taken["hidden"][0].shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((torch.zeros(8), {"tokens": 8}), (torch.zeros(8), {"tokens": 8})),  # one key, twice
        (
            (torch.zeros(8), {"tokens": 8, "requests": 4}),
            (torch.zeros(4), {"tokens": 4, "requests": 4}),
        ),
        ((torch.zeros(8), {"tokens": 8}), (torch.zeros(4), {"rows": 4})),
        ((torch.zeros(32), {"tokens": 8}), (torch.zeros(16), {"tokens": 4})),  # 4 n
        ((torch.zeros(8), {"a": 8, "b": 8}), (torch.zeros(4), {"a": 4, "b": 4})),  # a or b
        (((torch.zeros(8),), {"tokens": 8}), (torch.zeros(4), {"tokens": 4})),
        ((torch.zeros(8, 1), {"tokens": 8}), (torch.zeros(4), {"tokens": 4})),
    ],
)
def test_infer_from_ambiguous_keys_is_refused(first: Any, second: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        OutputSpec.infer(first, second)
    assert raised.value.expected
    assert "declare" in raised.value.do


@pytest.mark.parametrize("axes", [None, "tokens", ["tokens"]])
def test_output_spec_without_axes_by_path_is_refused(axes) -> None:
    with pytest.raises(ConfigError, match="axes") as raised:
        OutputSpec(axes)
    assert raised.value.found == repr(axes)


@settings(deadline=None, max_examples=50)
@given(
    n=st.integers(0, 8),
    policy=st.sampled_from(["view", "clone", "checked_view"]),
    later=st.lists(st.integers(0, 8), max_size=3),
)
def test_unpad_of_inferred_or_declared_axes_is_the_prefix(
    n: int, policy: Any, later: list[int]
) -> None:
    def outputs(padded: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return rows(padded), {"t": rows(padded, 3).t().contiguous()}

    inferred = OutputSpec.infer(
        (outputs(8), {"tokens": 8}), (outputs(4), {"tokens": 4}), policy
    ).bind(outputs(8))
    declared = OutputSpec({"0": "tokens", "1.t": {1: "tokens"}}, policy).bind(outputs(8))
    for size in (n, *later):
        for bound in (inferred, declared):
            first, second = bound.unpad(size)
            assert first.tolist() == rows(8)[:size].tolist()
            assert second["t"].tolist() == rows(8, 3).t()[:, :size].tolist()
