"""Steps of a runtime: what serves them, what they return, what they refuse, what they report."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphrt import (
    BufferSpec,
    OutputSpec,
    Padding,
    Reason,
    RuntimeMode,
    break_point,
    get_forward_context,
    no_breaks,
)
from graphrt.errors import (
    BatchError,
    InputMismatchError,
    MissError,
    StaleOutputError,
    StreamRaceError,
)
from graphrt.events import RanEager, Replayed
from graphrt.runner import CaptureJob
from lab import (
    FULL,
    INPUTS,
    KEY,
    MAX_REQS,
    MAX_TOKENS,
    NONE,
    OUTPUTS,
    PIECEWISE,
    POLICIES,
    WIDTH,
    Lab,
    RuntimeLab,
    Tally,
    Toy,
    assert_equal,
    values,
)

# (tokens, requests, uniform) -> mode by policy; sizes 2, 4, 8; at most 4 requests.
SERVED_BY = {
    (3, 3, True): dict(zip(POLICIES, (NONE, PIECEWISE, FULL, FULL, FULL), strict=True)),
    (4, 4, True): dict(zip(POLICIES, (NONE, PIECEWISE, FULL, FULL, FULL), strict=True)),
    (5, 2, False): dict(zip(POLICIES, (NONE, PIECEWISE, FULL, NONE, PIECEWISE), strict=True)),
    (8, 1, False): dict(zip(POLICIES, (NONE, PIECEWISE, FULL, NONE, PIECEWISE), strict=True)),
    (9, 4, False): dict.fromkeys(POLICIES, NONE),
    (16, 4, False): dict.fromkeys(POLICIES, NONE),
}


@pytest.fixture(scope="module")
def labs():
    opened = {mode: RuntimeLab(mode) for mode in POLICIES}
    for lab in opened.values():
        lab.runtime.capture()
    yield opened
    for lab in opened.values():
        lab.runtime.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch", SERVED_BY)
def test_step_equals_eager_on_the_padded_batch(labs, policy, batch):
    lab = labs[policy]
    for seed in range(3):
        outputs = lab.step(*batch, seed=seed)
        assert lab.runtime.last_decision.mode is SERVED_BY[batch][policy]
        assert_equal(outputs, lab.eager(*batch[:2], seed=seed))


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    steps=st.lists(
        st.integers(1, MAX_TOKENS).flatmap(
            lambda n: st.tuples(
                st.just(n), st.integers(1, min(n, MAX_REQS)), st.booleans(), st.integers(0, 99)
            )
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_step_never_sees_rows_of_an_earlier_one(labs, policy, steps):
    """Stale rows of a longer batch would show in a shorter one's padding, and in the result."""
    lab = labs[policy]
    for num_tokens, num_reqs, uniform, seed in steps:
        num_reqs = num_tokens if uniform and num_tokens <= MAX_REQS else num_reqs
        outputs = lab.step(num_tokens, num_reqs, num_tokens == num_reqs, seed)
        assert_equal(outputs, lab.eager(num_tokens, num_reqs, seed))


def test_step_runs_no_python_but_eager_segments(labs):
    for policy, batch, num_eager in (("FULL", (3, 3, True), 0), ("PIECEWISE", (5, 2, False), 1)):
        model = labs[policy].model
        calls, eager_calls = model.num_calls, model.num_eager_calls
        for _ in range(4):
            labs[policy].step(*batch)
        assert model.num_calls == calls
        assert model.num_eager_calls == eager_calls + 4 * num_eager


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("num_tokens", [3, MAX_TOKENS])
def test_failing_step_leaves_the_callers_grad_mode(grad, num_tokens):
    def fail(key, step_info):
        if step_info is not None:
            raise ZeroDivisionError

    resource = SimpleNamespace(prepare=fail)
    with RuntimeLab("FULL", resources=[resource]) as lab, torch.set_grad_enabled(grad):
        lab.runtime.capture()
        for info in (None, 1):
            with pytest.raises(ZeroDivisionError) if info else nullcontext():
                lab.step(num_tokens, 2, step_info=info)
            assert torch.is_grad_enabled() is grad


@pytest.mark.parametrize("grad", [True, False])
def test_step_has_gradients_off_in_eager_and_replay(grad):
    seen = []

    class Asking(Toy):
        def middle(self, hidden):
            return ask(hidden)

    @break_point
    def ask(hidden):
        seen.append(torch.is_grad_enabled())
        return hidden + 1

    with RuntimeLab("PIECEWISE", model=Asking()) as lab, torch.set_grad_enabled(grad):
        lab.runtime.capture()
        lab.step(5, 2)
        lab.step(9, 2)
    assert set(seen) == {False}


def test_step_with_excluded_modes_takes_the_next_best(labs):
    lab = labs["FULL_AND_PIECEWISE"]
    lab.step(4, 4, True, exclude=frozenset({FULL}))
    assert lab.runtime.last_decision.mode is PIECEWISE
    outputs = lab.step(4, 4, True, exclude=frozenset({FULL, PIECEWISE}))
    assert lab.runtime.last_decision[::2] == (NONE, Reason.EXCLUDED)
    assert_equal(outputs, lab.eager(4, 4))


def test_step_emits_one_event_with_its_reason(labs):
    lab = labs["FULL_AND_PIECEWISE"]
    expected = [
        ((3, 3, True), {}, Replayed, FULL, Reason.PADDED, 4),
        ((4, 4, True), {}, Replayed, FULL, Reason.HIT, 4),
        ((5, 2, False), {}, Replayed, PIECEWISE, Reason.PADDED, 8),
        ((9, 2, False), {}, RanEager, NONE, Reason.ABOVE_MAX, 9),
        (
            (4, 1, False),
            {"exclude": frozenset(RuntimeMode)},
            RanEager,
            NONE,
            Reason.EXCLUDED,
            4,
        ),
    ]
    for batch, options, kind, mode, reason, padded in expected:
        lab.events.clear()
        lab.step(*batch, **options)
        (event,) = lab.events
        assert type(event) is kind
        assert (event.num_tokens, event.num_reqs, event.uniform) == batch
        assert event.reason is reason
        assert event.host_us > 0
        if kind is Replayed:
            assert (event.mode, event.num_padded_tokens) == (mode, padded)


@pytest.mark.parametrize(
    ("policy", "batch", "captured", "reason"),
    [
        ("NONE", (3, 3, True), True, Reason.MODE_NONE),
        ("FULL_DECODE_ONLY", (5, 2, False), True, Reason.MODE_NONE),
        ("FULL_AND_PIECEWISE", (9, 2, False), True, Reason.ABOVE_MAX),
        ("FULL_AND_PIECEWISE", (3, 3, True), False, Reason.NOT_CAPTURED_YET),
    ],
)
def test_step_missed_in_strict_mode_runs_nothing(policy, batch, captured, reason):
    prepared = Prepared()
    with RuntimeLab(policy, asked={"on_miss": "strict"}, resources=[prepared]) as lab:
        if captured:
            lab.runtime.capture()
        calls, keys, events = lab.model.num_calls, len(prepared.keys), len(lab.events)
        with pytest.raises(MissError) as raised:
            lab.step(*batch)
        assert raised.value.reason is reason
        assert lab.model.num_calls == calls
        assert len(prepared.keys) == keys
        assert len(lab.events) == events
        assert lab.runtime.last_decision.reason is reason


class Prepared:
    """A resource that remembers what it was prepared for."""

    def __init__(self):
        self.calls = []
        self.keys = []

    def reserve(self, max_key):
        self.calls.append("reserve")

    def prepare(self, key, step_info):
        self.calls.append("prepare")
        self.keys.append((key, step_info))

    def freeze(self):
        self.calls.append("freeze")


def test_resource_is_prepared_once_for_each_step():
    prepared = Prepared()
    with RuntimeLab(resources=[prepared], asked={"verify_every": 2}) as lab:
        report = lab.runtime.capture()
        # A warm-up, a capture and a first replay of each key; reserved first, frozen in between.
        # Then a padded batch of each: unpadded, padded, and with other rows as padding.
        num_keys = len(report.graphs)
        assert prepared.calls[0] == "reserve"
        assert prepared.calls.count("prepare") == 6 * num_keys
        assert prepared.calls.index("freeze") == 1 + num_keys
        for batch in ((4, 4, True), (3, 3, True), (5, 2, False), (9, 2, False)) * 2:
            prepared.keys.clear()
            lab.step(*batch, step_info=batch)
            # Half of the replays are compared with eager: one step all the same.
            assert prepared.keys == [(lab.runtime.last_decision.descriptor, batch)]


def test_resource_prepare_sees_the_inputs_of_its_step():
    static = {}

    class Watched(Toy):
        def forward(self, *, x, ids, lens):
            # Every key reads the same buffer, and the largest one reads most of it.
            static.setdefault("ids", ids)
            return super().forward(x=x, ids=ids, lens=lens)

    class Reading(Prepared):
        def prepare(self, key, step_info):
            super().prepare(key, step_info)
            if step_info is not None:
                self.seen = static["ids"].as_strided((step_info,), (1,)).clone()

    reading = Reading()
    with RuntimeLab(model=Watched(), resources=[reading], asked={"verify_every": 1}) as lab:
        lab.runtime.capture()
        for seed, num_tokens in enumerate((4, 5, 9)):
            lab.step(num_tokens, 2, seed=seed, step_info=num_tokens)
            assert torch.equal(reading.seen, values(num_tokens, 2, seed)["ids"])


def test_output_view_is_overwritten_and_a_clone_is_not():
    with RuntimeLab("FULL", policy="view") as lab:
        lab.runtime.capture()
        first = lab.step(8, 4, seed=1)
        before = first["rows"].clone()
        second = lab.step(8, 4, seed=2)
        assert first["rows"].data_ptr() == second["rows"].data_ptr()
        assert not torch.equal(first["rows"], before)
    with RuntimeLab("FULL", policy="clone") as lab:
        lab.runtime.capture()
        first = lab.step(8, 4, seed=1)
        before = first["rows"].clone()
        lab.step(8, 4, seed=2)
        assert torch.equal(first["rows"], before)


def passing_through(*, x, ids, lens):
    return {"rows": x, "lens": lens + 0}


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_output_clone_of_an_input_survives_the_next_step(num_tokens):
    with RuntimeLab("FULL", policy="clone", model=passing_through) as lab:
        lab.runtime.capture()
        first = lab.step(num_tokens, 4, seed=1)["rows"]
        lab.step(num_tokens, 4, seed=2)
        assert torch.equal(first, values(num_tokens, 4, 1)["x"])


@pytest.mark.parametrize("later", [(4, 4, True), (5, 2, False), (9, 2, False)])
def test_checked_view_expires_with_any_next_step(later):
    with RuntimeLab("FULL_AND_PIECEWISE", policy="checked_view") as lab:
        lab.runtime.capture()
        for batch in ((4, 4, True), (5, 2, False), (9, 2, False)):
            rows = lab.step(*batch)["rows"]
            rows.sum()
            lab.step(*later)
            with pytest.raises(StaleOutputError):
                rows.sum()


def test_checked_view_expires_with_failure_capture_and_close():
    armed = [False]

    class Failing(Toy):
        def middle(self, hidden):
            return fail(hidden)

    @break_point
    def fail(hidden):
        if armed[0]:
            raise OSError("eager segment")
        return hidden + 1

    with RuntimeLab("PIECEWISE", policy="checked_view", model=Failing()) as lab:
        lab.runtime.capture()
        rows = lab.step(5, 2)["rows"]
        armed[0] = True
        with pytest.raises(OSError, match="eager segment"):
            lab.step(5, 2)
        armed[0] = False
        with pytest.raises(StaleOutputError):
            rows.sum()
        rows = lab.step(5, 2)["rows"]
        lab.runtime.capture()
        with pytest.raises(StaleOutputError):
            rows.sum()
        rows = lab.step(5, 2)["rows"]
    with pytest.raises(StaleOutputError):
        rows.sum()


def test_output_length_by_callable_holds_in_all_steps():
    def model(*, x, ids, lens):
        return torch.cat([x * 2, x[:1]])

    outputs = {"": lambda sizes: sizes["tokens"] - 1}
    with RuntimeLab("FULL", model=model, outputs=outputs) as lab:
        lab.runtime.capture()
        for num_tokens in (3, 8, 9):
            rows = lab.step(num_tokens, 2)
            assert torch.equal(rows, values(num_tokens, 2)["x"][:-1] * 2)


def test_optional_input_absent_is_padding_again():
    inputs = (
        *INPUTS,
        BufferSpec("bias", ("tokens",), torch.float32, Padding.zero(), optional=True),
    )

    def model(*, x, ids, lens, bias):
        return x + bias[:, None]

    with RuntimeLab("FULL", model=model, inputs=inputs, outputs={"": "tokens"}) as lab:
        lab.runtime.capture()
        for num_tokens in (8, 9):
            batch = values(num_tokens, 2)
            sizes = {"num_tokens": num_tokens, "num_reqs": 2}
            with_bias = lab.runtime.step({**batch, "bias": torch.ones(num_tokens)}, **sizes).clone()
            assert torch.equal(with_bias, batch["x"] + 1)
            assert torch.equal(lab.runtime.step(batch, **sizes), batch["x"])


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "uniform", "error"),
    [
        (-1, 1, False, BatchError),
        (2.5, 1, False, BatchError),
        ("4", 1, False, BatchError),
        (4, 2, True, BatchError),
        (4, 5, False, BatchError),
        (4, -1, False, BatchError),
        (MAX_TOKENS + 1, 2, False, InputMismatchError),
    ],
)
def test_step_of_an_invalid_batch_is_refused(labs, num_tokens, num_reqs, uniform, error):
    for lab in labs.values():
        before = lab.model.num_calls
        with pytest.raises(error) as raised:
            lab.runtime.step(
                values(4, 2), num_tokens=num_tokens, num_reqs=num_reqs, uniform=uniform
            )
        assert raised.value.expected
        assert raised.value.found
        assert lab.model.num_calls == before


def test_step_of_values_that_do_not_fit_is_refused(labs):
    for lab in labs.values():
        for change, word in (
            ({"x": torch.zeros(3, WIDTH)}, "'x'"),
            ({"ids": torch.zeros(4)}, "'ids'"),
            ({"y": torch.zeros(4)}, "'y'"),
        ):
            with pytest.raises(InputMismatchError, match=word):
                lab.runtime.step({**values(4, 4), **change}, num_tokens=4, num_reqs=4, uniform=True)


def test_step_of_an_empty_batch_is_padded(labs):
    for lab in labs.values():
        outputs = lab.step(0, 0)
        assert outputs["rows"].shape == (0, WIDTH)


def test_no_breaks_captures_piecewise_as_one_piece():
    with RuntimeLab("PIECEWISE") as lab, no_breaks():
        report = lab.runtime.capture()
        assert {graph.num_eager for graph in report.graphs} == {0}


def test_step_in_inference_mode_gives_the_same(labs):
    for lab in labs.values():
        for batch in ((3, 3, True), (5, 2, False), (9, 2, False)):
            plain = {k: v.clone() for k, v in lab.step(*batch).items()}
            with torch.inference_mode():
                assert_equal(lab.step(*batch), plain)
            assert_equal(lab.step(*batch), plain)


def test_checked_views_of_a_shared_spec_expire_separately():
    spec = OutputSpec(OUTPUTS, "checked_view")
    with RuntimeLab("FULL", outputs=spec) as one, RuntimeLab("FULL", outputs=spec) as other:
        for lab in (one, other):
            lab.runtime.capture()
        rows = one.step(8, 4)["rows"]
        other.step(8, 4)
        assert torch.equal(rows, one.eager(8, 4)["rows"])


def test_step_on_another_stream_is_refused_where_pointers_are_checked():
    with RuntimeLab("FULL", asked={"stale_check": "pointer"}) as lab:
        lab.runtime.capture()
        expected = lab.step(8, 4)["rows"].clone()
        with lab.device.use(lab.device.stream("other")), pytest.raises(StreamRaceError):
            lab.step(8, 4)
        assert torch.equal(lab.step(8, 4)["rows"], expected)


def test_step_of_each_captured_size_hits_its_own_key(labs):
    for lab in labs.values():
        captured = lab.runtime.library.num_cudagraph_captured
        for mode, key in lab.runtime.plan.capture_order:
            num_reqs = key.num_reqs or 1
            exclude = frozenset({FULL}) if mode is PIECEWISE else frozenset()
            lab.step(key.num_tokens, num_reqs, key.uniform, exclude=exclude)
            decision = lab.runtime.last_decision
            assert decision.mode is mode
            assert decision.descriptor is key
            assert decision.reason is Reason.HIT
        # Nothing is captured while serving.
        assert lab.runtime.library.num_cudagraph_captured == captured


def test_step_with_speculation_and_loras_hits_its_key():
    asked = {
        "num_speculative_tokens": 2,
        "max_loras": 2,
        "compilation": {"cudagraph_capture_sizes": [3, 6, 12]},
    }
    with RuntimeLab("FULL_AND_PIECEWISE", asked=asked) as lab:
        report = lab.runtime.capture()
        assert len(report.graphs) == len(lab.runtime.plan.capture_order) == 2 * 3 * 3
        for num_loras in (0, 1, 2):
            for batch, mode, tokens in (
                ((9, 3, True), FULL, 12),
                ((6, 2, True), FULL, 6),
                ((5, 2, False), PIECEWISE, 6),
                ((13, 4, False), NONE, 13),
            ):
                outputs = lab.step(*batch, num_active_loras=num_loras)
                decision = lab.runtime.last_decision
                assert (decision.mode, decision.descriptor.num_tokens) == (mode, tokens)
                assert decision.descriptor.num_active_loras == num_loras
                assert_equal(outputs, lab.eager(*batch[:2]))
        with pytest.raises(BatchError, match="3"):
            lab.step(9, 3, True, num_active_loras=3)
        with pytest.raises(BatchError, match=r"num_reqs \* 3"):
            lab.step(9, 9, True)


@pytest.mark.parametrize("policy", ["FULL", "PIECEWISE"])
def test_capture_in_inference_mode_serves_steps_outside_it(policy):
    with torch.inference_mode():
        lab = RuntimeLab(policy)
        lab.runtime.capture()
        inside = {name: tensor.clone() for name, tensor in lab.step(5, 2).items()}
    with lab:
        for _ in range(2):
            outputs = lab.step(5, 2)
            assert_equal(outputs, inside)
            assert lab.runtime.last_decision.mode.name == policy


def test_nvtx_asked_for_puts_a_range_around_each_run() -> None:
    with RuntimeLab("FULL", asked={"nvtx": True}) as lab:
        lab.runtime.capture()
        lab.device.ranges.clear()
        lab.step(3, 1)
        lab.step(12, 1)
        full, eager = lab.device.ranges
        assert full == f"FULL {lab.runtime.runner.keys[1][1]}"
        assert eager.startswith("NONE BatchDescriptor(num_tokens=12")


def test_nvtx_not_asked_for_makes_no_range() -> None:
    with RuntimeLab("FULL") as lab:
        lab.runtime.capture()
        lab.step(3, 1)
        assert not lab.device.ranges


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_of_the_runtime_are_in_every_context(policy):
    layers = {"attention": object()}

    class Reads(Toy):
        @break_point
        def middle(self, hidden):
            self.eager_calls[0] += 1
            assert get_forward_context().layers is layers
            return hidden * 2

    asked = {"verify_every": 2}
    with RuntimeLab(policy, model=Reads(), layers=layers, asked=asked) as lab:
        lab.runtime.capture()
        for _ in range(4):
            lab.step(3, 3, True)
            lab.step(5, 2)
        assert lab.model.num_eager_calls > 4


def test_wrapper_compared_outside_a_step_finds_the_layers():
    layers, calls = {"attention": object()}, Tally(0)

    def model(x):
        calls[0] += 1
        assert get_forward_context().layers is layers
        return x + 1

    x = torch.zeros(2)
    with Lab() as lab:
        wrapper = lab.wrap(model, FULL)
        job = CaptureJob(wrapper, FULL, KEY, lambda seed: ((x.fill_(seed),), {}))
        lab.capture_all(job, layers=layers)
    assert calls[0] >= 3  # The warm-up, the capture, the eager side of the comparison.
