"""``CUDAGraphRunner`` runs calls of any named axes as eager execution would, or says why not."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CUDAGraphRunner,
    Decision,
    Example,
    OutputSpec,
    Padding,
    Reason,
    RuntimeMode,
    TensorStateGuard,
    break_point,
)
from graphrt.errors import (
    BatchError,
    ConfigError,
    InputMismatchError,
    LibraryClosedError,
    MissError,
    StaleOutputError,
    StaticBufferError,
)
from graphrt.events import RanEager, Replayed
from lab import Tally, random_rows, rows_runner

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
WIDTH = 3
BATCHES, LENGTHS = (1, 2, 4), (3, 6)
SPECS = (
    BufferSpec("x", ("batch", "length", WIDTH), torch.float32, Padding.zero()),
    BufferSpec("mask", ("batch", "length"), torch.float32, Padding.fill(-1)),
)
AXES = {"rows": {0: "batch", 1: "length"}, "sums": "batch"}


def encoder(*, x, mask):
    """Row-wise but for ``sums``, to which the padding of the length adds nothing."""
    return {"rows": torch.tanh(x) * 2 + mask[..., None], "sums": mask.clamp(min=0).sum(1)}


def batch(batch, length, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + 10 * batch + length)
    return {
        "x": torch.randn(batch, length, WIDTH, generator=generator),
        "mask": torch.rand(batch, length, generator=generator),
    }


def examples(sizes, seed):
    return batch(**sizes, seed=50 + seed)


def padded(values, sizes):
    rows, columns = sizes["batch"], sizes["length"]
    x, mask = torch.zeros(rows, columns, WIDTH), torch.full((rows, columns), -1.0)
    n, m = values["mask"].shape
    x[:n, :m], mask[:n, :m] = values["x"], values["mask"]
    return {"x": x, "mask": mask}


def make(fn=encoder, **changes):
    options = {
        "inputs": SPECS,
        "outputs": OutputSpec(AXES, changes.pop("policy", "view")),
        "sizes": {"batch": BATCHES, "length": LENGTHS},
        "examples": examples,
        "device": "simulated",
    }
    return CUDAGraphRunner(fn, **{**options, **changes})


def tokens_runner(fn=lambda x: x + 1, **changes):
    """One axis; the keys are the caller's."""
    return CUDAGraphRunner(
        fn,
        **{
            "inputs": [BufferSpec("x", ("tokens",), torch.float32, Padding.fill(-1))],
            "outputs": OutputSpec({"": "tokens"}),
            "capacity": {"tokens": 16},
            "examples": lambda sizes, seed: {"x": torch.arange(sizes["tokens"]) + float(seed)},
            "device": "simulated",
            **changes,
        },
    )


def padded_size(listed, size):
    return min(n for n in listed if n >= size)


# -- two axes


def by_key(key):
    """The same specs, asked for key by key."""
    assert key.num_tokens == key.variant.sizes[0]
    return SPECS


@pytest.mark.parametrize("inputs", [SPECS, by_key])
@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
def test_run_every_size_equals_eager(inputs, policy):
    with make(inputs=inputs, policy=policy) as runner:
        assert not runner.capture().missing
        # From large to small: what a larger batch left in the padding must not be seen.
        for n, m in sorted(product(range(1, 5), range(1, 7)), reverse=True):
            values = batch(n, m)
            outputs = runner.run(values)
            mode, key, reason = runner.last_decision
            sizes = {"batch": padded_size(BATCHES, n), "length": padded_size(LENGTHS, m)}
            assert (mode, key) == (FULL, runner.key(**sizes))
            assert reason is (Reason.HIT if sizes == {"batch": n, "length": m} else Reason.PADDED)
            on_padded, alone = encoder(**padded(values, sizes)), encoder(**values)
            assert torch.equal(outputs["rows"], on_padded["rows"][:n, :m])
            assert torch.equal(outputs["rows"], alone["rows"])
            assert torch.equal(outputs["sums"], on_padded["sums"][:n])
            assert outputs["rows"].shape == (n, m, WIDTH)


def test_inputs_of_an_inner_axis_are_contiguous():
    addresses = Tally()

    def model(*, x, mask):
        assert x.is_contiguous()
        addresses.append(x.data_ptr())
        return encoder(x=x, mask=mask)

    with make(model, verify="off") as runner:
        runner.capture()
        assert len(set(addresses)) == len(BATCHES) * len(LENGTHS)


@pytest.mark.parametrize("inputs", [SPECS, by_key])
def test_batch_above_the_largest_key_runs_eager(inputs):
    with make(inputs=inputs) as runner:
        runner.capture()
        for n, m in [(5, 3), (1, 7), (9, 9)]:
            values = batch(n, m)
            outputs = runner.run(values)
            assert runner.last_decision.reason is Reason.ABOVE_MAX
            assert torch.equal(outputs["sums"], encoder(**values)["sums"])
        assert "largest" in runner.explain()


@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
def test_key_not_captured_runs_eager(policy):
    events = []
    with make(policy=policy, observer=events.append) as runner:
        runner.capture([runner.key(batch=4, length=6)])
        outputs = runner.run(batch(2, 2))
        assert torch.equal(outputs["sums"], encoder(**batch(2, 2))["sums"])
        assert runner.last_decision.reason is Reason.NOT_CAPTURED_YET
        assert isinstance(events[-1], RanEager)
        assert events[-1].reason is Reason.NOT_CAPTURED_YET
        runner.run(batch(3, 5))
        assert isinstance(events[-1], Replayed)
        event = events[-1]
        assert (event.mode, event.reason, event.num_tokens) == (FULL, Reason.PADDED, 3)


def test_strict_miss_raises_before_fn_runs():
    calls = []

    def model(*, x, mask):
        calls.append(x.shape)
        return encoder(x=x, mask=mask)

    with make(model, on_miss="strict") as runner:
        for values, reason in [
            (batch(1, 1), Reason.NOT_CAPTURED_YET),
            (batch(5, 1), Reason.ABOVE_MAX),
        ]:
            with pytest.raises(MissError, match=reason.name) as error:
                runner.run(values)
            assert error.value.reason is reason
        assert not calls
        runner.capture()
        runner.run(batch(1, 1))


def test_view_outputs_lie_in_graph_storage_and_clones_do_not():
    for policy, is_same in [("view", True), ("clone", False)]:
        with make(policy=policy) as runner:
            runner.capture()
            first, second = runner.run(batch(2, 3)), runner.run(batch(2, 3, seed=1))
            assert (first["rows"].data_ptr() == second["rows"].data_ptr()) is is_same


def test_checked_view_used_after_the_next_run_raises():
    with make(policy="checked_view") as runner:
        runner.capture()
        rows = runner.run(batch(2, 3))["rows"]
        rows.sum()
        runner.run(batch(4, 3))
        with pytest.raises(StaleOutputError):
            rows.sum()
        rows = runner.run(batch(4, 3))["rows"]
    with pytest.raises(StaleOutputError):
        rows.sum()


@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("rows", [slice(0, 3), slice(4, 8), slice(2, 6), slice(6, 8), slice(1, 8)])
def test_rows_of_an_output_are_values_of_the_next_run(rows, is_written, is_captured, policy):
    def model(x):
        return {"new": x.add(1), "given": x.mul_(2) if is_written else x}

    with rows_runner(
        model,
        (2, 4, 8),
        inputs=[BufferSpec("x", ("n", 4), torch.float32, written=is_written)],
        outputs=OutputSpec({"new": "n", "given": "n"}, policy),
    ) as runner:
        if is_captured:
            runner.capture()
        for name in ("given", "new"):
            outputs = runner.run(random_rows({"n": 8}, seed=3))
            given = outputs[name][rows].clone().as_subclass(torch.Tensor)
            found = runner.run({"x": outputs[name][rows]})
            assert runner.last_decision.mode is (FULL if is_captured else NONE)
            expected = model(given.clone())
            assert all(torch.equal(found[one], expected[one]) for one in expected)


@pytest.mark.parametrize("policy", ["view", "clone", "checked_view"])
@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.fft.fft(x).conj(),
        lambda x: torch.fft.fft(x).conj().imag,
        lambda x: {"rows": x + 1, "none": x[:, :0] + 1},
    ],
)
def test_outputs_with_bits_or_without_elements_are_served(model, policy):
    axes = {"rows": "n", "none": "n"} if isinstance(model(torch.ones(1, 4)), dict) else {"": "n"}
    with rows_runner(model, (2, 4), outputs=OutputSpec(axes, policy), verify_every=1) as runner:
        runner.capture()
        for n in (4, 3, 2, 1, 5):
            values = random_rows({"n": n}, seed=n)
            found, expected = runner.run(values), model(**values)
            assert runner.last_decision.mode is (FULL if n < 5 else NONE)
            if isinstance(expected, dict):
                assert found["none"].shape == (n, 0)
                found, expected = found["rows"], expected["rows"]
            assert torch.equal(found, expected)


# -- sizes read off values


@pytest.mark.parametrize("inputs", [SPECS, by_key])
@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"x": torch.ones(2, 3, WIDTH), "mask": torch.ones(2, 2)}, "length"),
        ({"x": torch.ones(2, 3, WIDTH), "mask": torch.ones(3, 3)}, "batch"),
        ({"x": torch.ones(2, 3, 4), "mask": torch.ones(2, 3)}, "dimension 2"),
        ({"x": torch.ones(2, 3, WIDTH), "msk": torch.ones(2, 3)}, "msk"),
        ({"x": torch.ones(2, 3, WIDTH)}, "mask"),
        ({"x": [[1.0]], "mask": torch.ones(2, 3)}, "tensor"),
        ({}, "axis"),
    ],
)
def test_run_values_that_disagree_raises(inputs, values, match):
    with make(inputs=inputs) as runner:
        runner.capture()
        with pytest.raises(InputMismatchError, match=match):
            runner.run(values)
        assert torch.equal(runner.run(batch(2, 3))["sums"], encoder(**batch(2, 3))["sums"])


def test_run_sizes_given_are_checked():
    with make() as runner:
        runner.capture()
        values = batch(2, 3)
        runner.run(values, sizes={"length": 3, "batch": 2})
        for sizes in [{"batch": 2}, {"batch": 2, "length": 3, "depth": 1}]:
            with pytest.raises(BatchError):
                runner.run(values, sizes=sizes)
        with pytest.raises(InputMismatchError):
            runner.run(values, sizes={"batch": 3, "length": 3})


def test_run_of_inputs_without_axes_has_one_exact_key():
    x, t = torch.randn(2, 3, 4), torch.tensor(0.5)
    with CUDAGraphRunner(
        lambda x, t: {"x": torch.tanh(x) * t, "n": 3},
        inputs=[BufferSpec("x", (2, 3, 4), torch.float32), BufferSpec("t", (), torch.float32)],
        outputs=OutputSpec({}),
        verify_every=2,
        device="simulated",
    ) as runner:
        [graph] = runner.capture(like={"x": x, "t": t}).graphs
        for _ in range(4):
            outputs = runner.run({"x": x, "t": t})
            assert runner.last_decision == Decision(FULL, graph.key, Reason.HIT)
            x = outputs["x"]
        assert torch.equal(runner.run({"x": x, "t": t})["x"], torch.tanh(x) * t)
        assert outputs["n"] == 3
        with pytest.raises(InputMismatchError, match="'x'"):
            runner.run({"x": x[:1], "t": t})
        runner.library.invalidate()
        runner.check_externals()
        assert torch.equal(runner.run({"x": x, "t": t})["x"], torch.tanh(x) * t)
        assert runner.last_decision.reason is Reason.INVALIDATED


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_run_of_values_padded_to_the_chosen_key_cuts_them(by_key, captured):
    real, size = {"batch": 3, "length": 2}, {"batch": 4, "length": 3}
    alone = batch(**real)
    with make(inputs=(lambda key: SPECS) if by_key else SPECS) as runner:
        if captured:
            runner.capture()
        for given in (padded(alone, size), alone, padded(alone, size)):
            outputs = runner.run(given, sizes={"length": 2, "batch": 3})
            mode, _, reason = runner.last_decision
            assert mode is (FULL if captured else NONE)
            assert reason is (Reason.PADDED if captured else Reason.NOT_CAPTURED_YET)
            for name, expected in encoder(**alone).items():
                assert torch.equal(outputs[name], expected)
        with pytest.raises(InputMismatchError):
            runner.run(padded(alone, {"batch": 4, "length": 5}), sizes=real)


@pytest.mark.parametrize("pads", [False, True])
def test_eager_output_of_another_length_than_its_axis_raises(pads):
    """A graph of it is refused when it is bound; an eager run would return half of the rows."""
    twice = OutputSpec({"": "n"})
    rows = 8 if pads else 3
    with (
        rows_runner(lambda x: torch.cat((x, x)), (8,), outputs=twice) as runner,
        pytest.raises(ConfigError, match=f"expected: {rows}, the size of axis 'n'") as raised,
    ):
        runner.run({"x": torch.ones(rows, 4)}, sizes={"n": 3} if pads else None)
    assert f"found:    {2 * rows}" in str(raised.value)


def test_decide_says_the_key_of_real_sizes():
    with make() as runner:
        assert runner.decide({"batch": 1, "length": 1}).reason is Reason.NOT_CAPTURED_YET
        runner.capture()
        assert runner.decide({"batch": 3, "length": 2}) == Decision(
            FULL, runner.key(batch=4, length=3), Reason.PADDED
        )
        assert runner.decide({"batch": 1, "length": 3}, frozenset({FULL})).reason is Reason.EXCLUDED
        with pytest.raises(BatchError):
            runner.decide({"batch": 1})


# -- one axis, keys of the caller's


def test_caller_pads_and_names_the_key():
    with tokens_runner() as runner:
        key = runner.key(tokens=8)
        runner.capture([key])
        assert runner.keys == ((FULL, key),)
        x = torch.arange(8.0)
        assert torch.equal(runner.run({"x": x}, key=key), x + 1)
        assert runner.last_decision == Decision(FULL, key, Reason.HIT)
        outputs = runner.run({"x": x}, key=runner.key(tokens=8), sizes={"tokens": 5})
        assert torch.equal(outputs, x[:5] + 1)
        assert runner.last_decision == Decision(FULL, key, Reason.PADDED)


def test_caller_key_without_a_graph_runs_eager():
    with tokens_runner() as runner:
        runner.capture([runner.key(tokens=8)])
        x = torch.arange(4.0)
        outputs = runner.run({"x": x}, key=runner.key(tokens=4), sizes={"tokens": 3})
        assert torch.equal(outputs, x[:3] + 1)
        assert runner.last_decision.reason is Reason.NO_KEY


def test_caller_variants_have_graphs_of_their_own():
    calls = []

    def model(x):
        calls.append(1)
        return x + len(calls)

    with tokens_runner(model, verify="off", warmups=0) as runner:
        keys = [runner.key(tokens=4, variant=name) for name in ("a", "b")]
        runner.capture(keys)
        x = torch.zeros(4)
        one, other = (runner.run({"x": x}, key=key).clone() for key in keys)
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": 9}, {"tokens": -1}, {"tokens": 1.5}, {"rows": 3}, {}, {"tokens": 3, "rows": 3}],
)
def test_run_real_sizes_beyond_the_key_raise(sizes):
    with tokens_runner() as runner:
        key = runner.key(tokens=8)
        runner.capture([key])
        with pytest.raises(BatchError):
            runner.run({"x": torch.ones(8)}, key=key, sizes=sizes)


def test_run_key_and_decision_raises():
    with tokens_runner() as runner:
        key = runner.key(tokens=8)
        with pytest.raises(BatchError, match="both"):
            runner.run({"x": torch.ones(8)}, key=key, decision=Decision(FULL, key, Reason.HIT))


def test_caller_keys_cannot_be_decided_by_sizes():
    with tokens_runner() as runner, pytest.raises(ConfigError, match="key="):
        runner.run({"x": torch.ones(3)})


@pytest.mark.parametrize("sizes", [{}, {"tokens": 17}, {"tokens": -1}, {"tokens": 1, "rows": 1}])
def test_key_of_wrong_sizes_raises(sizes):
    with tokens_runner() as runner, pytest.raises(BatchError):
        runner.key(**sizes)


@pytest.mark.parametrize("is_pair", [True, False])
def test_capture_of_a_foreign_key_leaves_no_key(is_pair):
    with tokens_runner() as runner:
        key = BatchDescriptor(8)
        with pytest.raises(BatchError):
            runner.capture([(FULL, key) if is_pair else key])
        with pytest.raises(ConfigError):
            runner.capture([(PIECEWISE, runner.key(tokens=8))])
        with tokens_runner(capacity={"tokens": 99}) as larger, pytest.raises(BatchError):
            runner.capture([larger.key(tokens=99)])
        assert not runner.keys
        assert not runner.capture().graphs


# -- decisions of the caller's


def test_decision_handed_in_is_run():
    with make() as runner:
        runner.capture()
        values = batch(2, 2)
        eager = runner.decide({"batch": 2, "length": 2}, frozenset({FULL}))
        runner.run(values, decision=eager)
        assert runner.last_decision is eager
        larger = Decision(FULL, runner.key(batch=4, length=6), Reason.PADDED)
        outputs = runner.run(values, decision=larger)
        assert torch.equal(
            outputs["sums"], encoder(**padded(values, {"batch": 4, "length": 6}))["sums"][:2]
        )


def test_decision_that_is_out_of_date_raises():
    with make() as runner:
        key = runner.key(batch=1, length=3)
        with pytest.raises(BatchError, match="NOT_CAPTURED_YET"):
            runner.run(batch(1, 3), decision=Decision(FULL, key, Reason.HIT))
        with pytest.raises(BatchError, match="no such key"):
            runner.run(batch(1, 3), decision=Decision(FULL, BatchDescriptor(1), Reason.HIT))
        with pytest.raises(StaticBufferError, match="length"):
            runner.execute(Decision(NONE, key, Reason.NO_KEY), {"batch": 1}, batch(1, 3))


# -- modes and break points


@break_point
def middle(x):
    return x * 2


def broken(*, x, mask):
    return encoder(x=middle(x), mask=mask)


def test_full_serves_first_and_piecewise_when_it_is_excluded():
    with make(broken, modes=("PIECEWISE", "FULL")) as runner:
        report = runner.capture()
        assert [mode for mode, _ in runner.keys] == [PIECEWISE] * 6 + [FULL] * 6
        assert {graph.mode for graph in report.graphs} == {FULL, PIECEWISE}
        assert {g.num_eager for g in report.graphs if g.mode is PIECEWISE} == {1}
        values, sizes = batch(3, 3), {"batch": 3, "length": 3}
        for exclude, mode in [
            (frozenset(), FULL),
            (frozenset({FULL}), PIECEWISE),
            (frozenset({FULL, PIECEWISE}), NONE),
        ]:
            decision = runner.decide(sizes, exclude)
            assert decision.mode is mode
            outputs = runner.run(values, decision=decision)
            assert torch.equal(outputs["rows"], broken(**values)["rows"])
        assert decision.reason is Reason.EXCLUDED


def test_reason_names_the_mode_that_is_not_excluded():
    with make(broken, modes=("FULL", "PIECEWISE")) as runner:
        runner.capture([(FULL, runner.key(batch=1, length=3))])
        sizes = {"batch": 1, "length": 3}
        assert runner.decide(sizes).mode is FULL
        assert runner.decide(sizes, frozenset({FULL})).reason is Reason.NOT_CAPTURED_YET


def test_eager_segment_makes_no_autograd_graph():
    weight = torch.ones(WIDTH, requires_grad=True)

    @break_point
    def scaled(x):
        return x * weight

    def model(*, x, mask):
        return encoder(x=scaled(x), mask=mask)

    with make(model, modes=("PIECEWISE",)) as runner, torch.enable_grad():
        runner.capture()
        assert not runner.run(batch(2, 3))["rows"].requires_grad


# -- step_info, resources


class Log:
    def __init__(self):
        self.prepared = []

    def reserve(self, largest):
        self.largest = largest

    def prepare(self, key, step_info):
        self.prepared.append((key, step_info))

    def freeze(self):
        pass


@pytest.mark.parametrize("every", [None, 1])
def test_resource_is_prepared_once_per_run(every):
    log = Log()
    with make(resources=[log], verify_every=every) as runner:
        runner.capture()
        assert log.largest == runner.key(batch=4, length=6)
        for n, key in [(3, runner.key(batch=4, length=3)), (5, None)]:
            log.prepared.clear()
            runner.run(batch(n, 3), step_info="now")
            assert [info for _, info in log.prepared] == ["now"]
            assert key in (None, log.prepared[0][0])


def test_example_carries_step_info_to_the_check():
    log = Log()

    def examples_with_info(sizes, seed):
        return Example(examples(sizes, seed), step_info=("seed", seed))

    with make(resources=[log], examples=examples_with_info) as runner:
        runner.capture()
        assert (runner.key(batch=1, length=3), ("seed", 1)) in log.prepared


# -- construction and end


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"outputs": None}, ConfigError),
        ({"sizes": {}}, ConfigError),
        ({"sizes": None}, ConfigError),
        ({"sizes": {"batch": [], "length": [3]}}, ConfigError),
        ({"sizes": {"batch": [4]}}, ConfigError),
        ({"capacity": {"batch": 2, "length": 6}}, ConfigError),
        ({"capacity": {"batch": 9}}, ConfigError),
        ({"capacity": {"batch": 9, "length": 9, "depth": 9}}, ConfigError),
        ({"modes": ()}, ConfigError),
        ({"modes": ("NONE",)}, ConfigError),
        ({"verify": "always"}, ConfigError),
        ({"verify_every": 0}, ConfigError),
        ({"verify_every": True}, ConfigError),
        ({"on_miss": "raise"}, ConfigError),
        ({"on_capture_error": "ignore"}, ConfigError),
        ({"warmups": -1}, ConfigError),
        ({"observe": "sometimes"}, ConfigError),
        ({"fn": None}, ConfigError),
        ({"inputs": None}, ConfigError),
        ({"inputs": ["x"]}, ConfigError),
        ({"examples": {"x": torch.ones(1)}}, ConfigError),
        ({"observer": 3}, ConfigError),
        ({"state": 3}, ConfigError),
        ({"may_overwrite": torch.ones(2, 2)}, ConfigError),
        ({"may_overwrite": [3]}, ConfigError),
        ({"keep_alive": [None]}, ConfigError),
    ],
)
def test_runner_that_cannot_be_honoured_raises(changes, error):
    with pytest.raises(error):
        make(**changes)


@pytest.mark.parametrize("sizes", [3, [3], "batch"])
def test_sizes_that_are_no_mapping_raise(sizes):
    with make() as runner, pytest.raises(BatchError, match="axis -> real size"):
        runner.run(batch(1, 3), sizes=sizes)


def test_capacity_in_another_order_keeps_the_axes():
    with make(capacity={"length": 8, "batch": 6}) as runner:
        assert runner.capacity == {"batch": 6, "length": 8}
        runner.capture()
        values = batch(4, 3)
        assert torch.equal(runner.run(values)["rows"], encoder(**values)["rows"])
        assert runner.last_decision[1] == runner.key(batch=4, length=3)


def test_closed_runner_raises_on_every_use():
    runner = make()
    key = runner.key(batch=1, length=3)
    runner.capture([key])
    hit = runner.decide({"batch": 1, "length": 3})
    miss = runner.decide({"batch": 9, "length": 3})
    runner.close()
    runner.close()
    values = batch(1, 3)
    for use in (
        lambda: runner.run(values),
        lambda: runner.run(values, key=key),
        lambda: runner.run(values, decision=hit),
        lambda: runner.run(batch(9, 3), decision=miss),
        lambda: runner.execute(hit, {"batch": 1, "length": 3}, values),
        lambda: runner.execute(miss, {"batch": 9, "length": 3}, batch(9, 3)),
        lambda: runner.decide({"batch": 1, "length": 3}),
        lambda: runner.key_for({"batch": 1, "length": 3}),
        lambda: runner.time_replays([hit[:2]]),
        runner.capture,
        runner.capture_next,
        runner.check_externals,
    ):
        with pytest.raises(LibraryClosedError):
            use()


def test_time_of_what_is_no_ready_key_is_refused():
    with make() as runner:
        ready, late = runner.keys[:2]
        runner.capture([ready])
        assert all(each > 0 for each in runner.time_replays([ready, ready]))
        with pytest.raises(BatchError, match="NOT_CAPTURED_YET"):
            runner.time_replays([late])
        for wrong in (None, 3, [None], ["a"], [()], [(1, 2, 3)], [ready[1]], [(ready[0], None)]):
            with pytest.raises(ConfigError):
                runner.time_replays(wrong)


def test_time_of_replays_leaves_state_as_it_was():
    cell = torch.zeros(1)

    def model(x):
        return x + cell.add_(1)

    with rows_runner(model, (2, 4), state=TensorStateGuard([cell])) as runner:
        runner.capture()
        assert all(each > 0 for each in runner.time_replays(runner.keys))
        assert cell.item() == 0
        assert runner.run({"x": torch.zeros(2, 4)}).tolist() == [[1] * 4] * 2


@pytest.mark.parametrize("policy", ["view", "checked_view"])
@pytest.mark.parametrize("first", [1, 3, 5])
def test_input_that_an_eager_step_returned_is_a_value_of_a_graph(policy, first):
    outputs = OutputSpec({"0": "n", "1": "n"}, policy)
    with rows_runner(lambda x: (x, x + 1), (4, 8), outputs=outputs) as runner:
        small = next(key for key in runner.keys if key[1].num_tokens == 4)
        runner.capture([small])
        x = torch.arange(32.0).reshape(8, 4)
        same, _ = runner.run({"x": x})
        assert runner.last_decision.reason is Reason.NOT_CAPTURED_YET
        _, more = runner.run({"x": same[first : first + 3]})
        assert runner.last_decision.reason is Reason.PADDED
        assert torch.equal(more, x[first : first + 3] + 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # What torch makes them of.
def test_derivatives_in_forward_mode_run_as_graphs() -> None:
    """Their zeros are tensors without a storage."""
    layer = torch.nn.Linear(4, 4)

    def tangent(x: torch.Tensor) -> torch.Tensor:
        outputs, tangents = torch.func.jvp(layer, (x,), (x + 1,))
        return outputs + tangents

    with rows_runner(tangent, modes=("FULL", "PIECEWISE")) as runner:
        runner.capture()
        x = torch.randn(1, 4)
        found = runner.run({"x": x})
        assert runner.last_decision is not None
        assert runner.last_decision.mode is RuntimeMode.FULL
        torch.testing.assert_close(found, tangent(x).detach())
