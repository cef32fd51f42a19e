"""``CUDAGraphRunner`` captures, checks, invalidates and shares a library with another runner."""

from __future__ import annotations

from contextlib import suppress
from queue import SimpleQueue

import pytest
import torch
from test_runner_run import batch, encoder, make, tokens_runner

from graphrt import (
    BufferSpec,
    CUDAGraphRunner,
    GraphLibrary,
    OutputSpec,
    Padding,
    Reason,
    RuntimeMode,
    SimulatedDevice,
    TensorStateGuard,
    break_point,
)
from graphrt.errors import (
    CaptureInProgressError,
    ConfigError,
    ForbiddenOperationError,
    InputMismatchError,
    StateAdvancedError,
    StaticBufferError,
    VerificationError,
)
from graphrt.events import (
    Captured,
    CaptureFailed,
    Invalidated,
    KeysChanged,
    RanEager,
    Replayed,
    Verified,
)
from lab import rows_runner

FULL = RuntimeMode.FULL


@pytest.fixture
def model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, *, x, mask):
            return encoder(x=x * self.weight, mask=mask)

    return Model()


def equal(runner, model, n=2, m=3, seed=0):
    values = batch(n, m, seed)
    with torch.no_grad():
        return torch.equal(runner.run(values)["rows"], model(**values)["rows"])


# -- the first replay


def memoised():
    """A model that keeps what it computed from its first inputs: eager is right, a graph is not."""
    memo = []

    def fn(*, x, mask):
        memo.append(None)
        return encoder(x=x * len(memo), mask=mask)

    return fn


def test_first_replay_that_differs_serves_no_run():
    with make(memoised(), on_capture_error="skip", sizes={"batch": [2], "length": [3]}) as runner:
        report = runner.capture()
        item = (FULL, runner.key(batch=2, length=3))
        assert report.missing == {item: Reason.CAPTURE_FAILED}
        assert "rows" in report.failures[item]
        assert [graph.state for graph in report.graphs] == ["invalid"]
        runner.run(batch(2, 3))
        assert runner.last_decision.reason is Reason.CAPTURE_FAILED
        assert "rows" in runner.explain()


def test_first_replay_that_differs_raises():
    with make(memoised()) as runner:
        with pytest.raises(VerificationError):
            runner.capture()
        assert set(runner.missing().values()) == {Reason.CAPTURE_FAILED}


def test_verify_off_admits_what_differs():
    with make(memoised(), verify="off") as runner:
        assert not runner.capture().missing


def test_verify_every_compares_one_run_in_so_many():
    events = []
    with make(verify_every=3, observer=events.append) as runner:
        runner.capture()
        events.clear()
        for _ in range(7):
            assert equal(runner, encoder)
        assert sum(isinstance(event, Verified) for event in events) == 2


def test_compared_run_that_differs_is_withdrawn():
    factor = [1.0]

    def fn(*, x, mask):
        return encoder(x=x * factor[0], mask=mask)

    with make(fn, verify_every=1, watch="off") as runner:
        runner.capture()
        factor[0] = 2.0
        with pytest.raises(VerificationError):
            runner.run(batch(2, 3))
        assert equal(runner, fn)
        assert runner.last_decision.reason is Reason.CAPTURE_FAILED
        assert equal(runner, fn, 2, 3)
        runner.capture()
        assert equal(runner, fn)
        assert runner.last_decision.mode is FULL


def test_examples_of_wrong_sizes_fail_the_capture():
    with make(examples=lambda sizes, seed: batch(1, 1)) as runner:
        with pytest.raises(InputMismatchError):
            runner.capture()
        assert not runner.report().graphs


def test_capture_takes_the_example_of_its_warm_up():
    made = []

    def examples(sizes, seed):
        made.append((sizes["tokens"], seed))
        return {"x": torch.arange(sizes["tokens"]) + float(seed)}

    with tokens_runner(examples=examples, sizes={"tokens": [2, 4]}, capacity=None) as runner:
        runner.capture()
        assert [made.count((size, seed)) for size in (4, 2) for seed in (0, 1)] == [1, 1, 1, 1]


def test_capture_after_a_failed_one_asks_for_an_example_again():
    made, fails = [], [True]

    def examples(sizes, seed):
        made.append(seed)
        return {"x": torch.arange(sizes["tokens"]) + 10.0 * len(made)}

    def fn(*, x):
        if fails[0]:
            float(x.sum())  # Which no capture permits.
        return x * 2

    with tokens_runner(fn=fn, examples=examples, sizes={"tokens": [2]}, capacity=None) as runner:
        with pytest.raises(ForbiddenOperationError):
            runner.capture()
        fails[0] = False
        made.clear()
        runner.capture()
        assert made[:2] == [0, 1]  # What the first example pointed at may be another's by now.


def test_capture_without_examples_raises_and_marks_nothing():
    events = []
    with make(examples=None, on_capture_error="skip", observer=events.append) as runner:
        for use in (runner.capture, runner.capture_next):
            with pytest.raises(ConfigError, match="examples"):
                use()
        assert set(runner.missing().values()) == {Reason.NOT_CAPTURED_YET}
        assert [type(event) for event in events] == [KeysChanged]  # Of the new runner.
        assert equal(runner, encoder)


def test_capture_in_an_open_scope_raises():
    with make() as runner:
        with runner.library.capture_scope(), pytest.raises(CaptureInProgressError):
            runner.capture()
        assert not runner.capture().missing


# -- what is captured next


def test_capture_of_no_keys_forgets_no_failure():
    with make(memoised(), on_capture_error="skip") as runner:
        before = dict(runner.capture().failures)
        assert dict(runner.capture(keys=[]).failures) == before


def test_capture_next_takes_what_runs_missed_most():
    with make() as runner:
        missed, once = runner.key(batch=1, length=3), runner.key(batch=2, length=3)
        for n in (1, 1, 2):
            runner.run(batch(n, 2))
        assert runner.capture_next() == 5
        assert set(dict(runner.keys)) == {FULL}
        assert (FULL, missed) not in runner.missing()
        assert runner.capture_next(2) == 3
        assert (FULL, once) not in runner.missing()
        first = (FULL, runner.key(batch=1, length=6))
        assert runner.capture_next(first=first, allow=lambda key: key == first[1]) == 2
        assert first not in runner.missing()
        assert runner.capture_next(9) == 0
        for wrong in (0, 1.5, True):
            with pytest.raises(ConfigError):
                runner.capture_next(wrong)


def test_capture_next_takes_missed_keys_of_the_caller():
    with tokens_runner() as runner:
        small, large = runner.key(tokens=2), runner.key(tokens=8)
        runner.capture_next(first=(FULL, large), allow=lambda key: False)
        runner.capture_next(first=(FULL, small), allow=lambda key: False)
        runner.run({"x": torch.ones(2)}, key=small)
        assert runner.last_decision.reason is Reason.NOT_CAPTURED_YET
        assert runner.capture_next() == 1
        assert list(runner.missing()) == [(FULL, large)]


def test_three_failures_in_a_row_stop_capture_next():
    def fn(*, x, mask):
        raise OSError("no")

    with make(fn, on_capture_error="skip") as runner:
        assert runner.capture_next(3) == 0
        errors = runner.report().failures.values()
        assert sum("not attempted" in text for text in errors) == 3


class FailsAt(torch.nn.Module):
    """Counts its calls on the host; one of them fails."""

    def __init__(self, call):
        super().__init__()
        self.num_calls = 0
        self.fails = SimpleQueue()  # Where nothing is put back.
        for number in range(call + 1):
            self.fails.put(number == call)

    def forward(self, x):
        self.num_calls += 1
        if not self.fails.empty() and self.fails.get():
            raise ValueError("injected")
        return x * 2


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("warmups", [0, 1, 2])
def test_runs_between_a_failed_capture_and_the_next_stay_counted(call, warmups):
    model = FailsAt(call)
    with rows_runner(model, (2, 4), warmups=warmups) as runner:
        with suppress(ValueError):
            runner.capture()
        assert model.num_calls == 0
        while not model.fails.empty():
            model.fails.get()
        for number in range(1, 4):
            runner.run({"x": torch.ones(5, 4)})  # Eager: no key is as large.
            assert model.num_calls == number
        while runner.missing():
            runner.capture_next()
            assert model.num_calls == 3
            runner.capture()
            assert model.num_calls == 3


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("warmups", [0, 1, 2])
def test_calls_of_a_capture_that_failed_beside_a_graph_are_put_back(call, warmups):
    model = FailsAt(99)
    with rows_runner(model, (2, 4), warmups=warmups) as runner:
        runner.capture()
        runner.withdraw([runner.key(n=2)], "another kernel")
        runner.run({"x": torch.ones(5, 4)})
        before = model.num_calls
        while not model.fails.empty():
            model.fails.get()
        for number in range(call + 1):
            model.fails.put(number == call)
        with suppress(ValueError):
            runner.capture_next()
        assert model.num_calls == before


class FailsToPrepare:
    def __init__(self, at):
        self.left = at

    def prepare(self, key, step_info):
        self.left -= 1
        if self.left == 0:
            raise OSError("injected")


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("warmups", [0, 1, 2])
def test_calls_are_put_back_wherever_a_preparation_fails(at, warmups):
    model = FailsAt(99)
    options = {
        "warmups": warmups,
        "on_capture_error": "skip",
        "resources": [FailsToPrepare(4 + at)],
    }
    with rows_runner(model, (2, 4), **options) as runner:
        for _ in range(4):
            runner.run({"x": torch.ones(5, 4)})
        runner.capture()
        assert model.num_calls == 4


def test_events_tell_a_life(model):
    events = []
    with make(model, observer=events.append, sizes={"batch": [2], "length": [3]}) as runner:
        runner.run(batch(1, 1))
        runner.capture()
        runner.run(batch(1, 1))
        model.weight.data = torch.ones(3)
        runner.check_externals()
        runner.run(batch(1, 1))
    kinds = (RanEager, Captured, Verified, Replayed, Invalidated, CaptureFailed)
    assert [type(event) for event in events if isinstance(event, kinds)] == [
        RanEager,
        Captured,
        Verified,
        Replayed,
        Invalidated,
        RanEager,
    ]


def test_progress_counts_captures_and_checks():
    told = []
    with make() as runner:
        runner.capture(progress=lambda done, total, key: told.append((done, total, key)))
        assert [done for done, *_ in told] == list(range(1, 13))
        assert {total for _, total, _ in told} == {12}
        assert [key for *_, key in told[:6]] == [key for _, key in runner.keys]


def test_report_says_what_is_captured_and_what_it_costs():
    with make() as runner:
        runner.capture([runner.key(batch=4, length=6)])
        report = runner.report()
        assert report.device == "simulated"
        [graph] = report.graphs
        assert (graph.mode, graph.key) == (FULL, runner.key(batch=4, length=6))
        assert (graph.state, graph.num_graphs, graph.num_eager) == ("ready", 1, 0)
        assert graph.is_observed
        assert 0 < graph.seconds < report.capture_seconds
        assert len(report.missing) == 5
        assert not report.failures
        assert report.graph_bytes > 0


def test_explain_before_a_run_says_so():
    with make() as runner:
        assert runner.explain() == "Nothing has run yet."
        assert "NOT_CAPTURED_YET" in runner.explain(runner.decide({"batch": 1, "length": 1}))


# -- replaced weights


def test_replaced_weight_runs_eager_until_it_is_captured(model):
    with make(model) as runner:
        runner.capture()
        first = runner.library.generations
        with torch.no_grad():
            model.weight.mul_(2)
        assert not runner.check_externals().moved
        assert equal(runner, model)
        model.weight.data = torch.tensor([5.0, 6.0, 7.0])
        assert runner.check_externals().moved
        assert equal(runner, model)
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert not runner.capture().missing
        assert equal(runner, model)
        assert runner.last_decision.mode is FULL
        assert len(runner.library.generations) == 1
        assert runner.library.generations != first


def test_recapture_of_some_keys_uses_a_new_generation():
    other = torch.ones(3)

    def fn(*, x, mask):
        return encoder(x=x * other if x.shape[0] == 1 else x, mask=mask)

    with make(fn) as runner:
        runner.capture()
        [old] = runner.library.generations
        other.data = torch.full((3,), 2.0)
        runner.check_externals()
        stale = [key for _, key in runner.missing()]
        assert {key.num_tokens for key in stale} == {1}
        runner.capture()
        [new] = runner.library.generations
        assert new.index != old.index
        assert len(runner.report().graphs) == 6
        assert equal(runner, fn, 1)
        assert equal(runner, fn, 4)


# -- state


def test_state_guard_keeps_captures_from_advancing_state():
    count = torch.zeros(1)

    def fn(*, x, mask):
        count.add_(1)
        return encoder(x=x + count, mask=mask)

    with make(fn) as runner, pytest.raises(StateAdvancedError):
        runner.capture()
    count.zero_()
    with make(fn, state=TensorStateGuard([count]), verify_every=2) as runner:
        runner.capture()
        assert count.item() == 0
        for number in range(1, 5):
            rows = runner.run(batch(2, 3))["rows"]
            assert count.item() == number
            expected = encoder(x=batch(2, 3)["x"] + number, mask=batch(2, 3)["mask"])["rows"]
            assert torch.equal(rows, expected)


def test_may_overwrite_names_what_checks_may_write():
    cache = torch.zeros(16)

    def fn(x):
        cache[: x.shape[0]] = x
        return x + 1

    with tokens_runner(fn, may_overwrite=[cache]) as runner:
        key = runner.key(tokens=4)
        runner.capture([key])
        x = torch.arange(4.0)
        runner.run({"x": x}, key=key)
        assert torch.equal(cache[:4], x)
    with tokens_runner(fn) as runner, pytest.raises(StateAdvancedError):
        runner.capture([runner.key(tokens=4)])


# -- two runners, one library


@pytest.fixture
def library():
    device = SimulatedDevice()
    with GraphLibrary(device) as library:
        yield library
    device.close()


def test_two_runners_of_one_library_have_two_names(library):
    one, other = (make(device="auto", library=library) for _ in range(2))
    assert (one.name, other.name) == ("encoder", "encoder#2")
    one.capture()
    assert len(other.missing()) == 6
    other.capture([other.key(batch=1, length=3)])
    assert len(library.programs) == 7
    assert len(one.report().graphs) == 6
    with pytest.raises(ConfigError, match="encoder"):
        make(device="auto", library=library, name="encoder")
    with pytest.raises(ConfigError, match="device"):
        make(device="simulated", library=library)


def test_close_leaves_a_given_library_open(library):
    one, other = (make(device="auto", library=library) for _ in range(2))
    one.capture()
    other.capture()
    one.close()
    assert equal(other, encoder)
    assert other.last_decision.mode is FULL
    assert len(library.programs) == 12


def test_recapture_leaves_the_other_runner_its_programs(library, model):
    one, other = (make(fn, device="auto", library=library) for fn in (model, encoder))
    one.capture()
    other.capture()
    model.weight.data = torch.full((3,), 4.0)
    one.check_externals()
    one.capture()
    for runner, fn in [(one, model), (other, encoder)]:
        assert equal(runner, fn)
        assert runner.last_decision.mode is FULL
    assert not other.missing()


def test_partial_recapture_leaves_the_other_runner_alone(library):
    scale = torch.ones(3)

    def fn(*, x, mask):
        return encoder(x=x * scale if x.shape[0] == 1 else x, mask=mask)

    one, other = (make(each, device="auto", library=library) for each in (fn, encoder))
    one.capture()
    other.capture()
    scale.data = torch.full((3,), 2.0)
    one.capture()
    for runner, each in [(one, fn), (other, encoder)]:
        assert equal(runner, each, 1)
        assert runner.last_decision.mode is FULL


def test_invalidation_by_another_runner_runs_eager(library, model):
    one, other = (make(model, device="auto", library=library) for _ in range(2))
    one.capture()
    other.capture()
    model.weight.data = torch.full((3,), 4.0)
    one.check_externals()
    assert equal(other, model)
    assert other.last_decision.reason is Reason.INVALIDATED
    other.capture()
    assert equal(other, model)
    assert other.last_decision.mode is FULL
    assert equal(one, model)
    assert one.last_decision.reason is Reason.INVALIDATED
    library.retire()
    assert equal(other, model)
    assert other.last_decision.reason is Reason.NOT_CAPTURED_YET


def test_runner_that_fails_leaves_nothing_in_the_library(library):
    spec = BufferSpec("x", ("rows",), torch.float32)
    with pytest.raises(StaticBufferError):
        make(inputs=[spec], device="auto", library=library, name="taken")
    with make(device="auto", library=library, name="taken") as runner:
        assert runner.name == "taken"
        with pytest.raises(ConfigError):
            make(device="auto", library=library, name="taken")
    assert not library.static_buffers


def test_written_buffer_is_declared_to_the_library(library):
    def fn(x):
        x.add_(1)
        return x * 2

    for written in (True, False):
        runner = CUDAGraphRunner(
            fn,
            inputs=[BufferSpec("x", ("tokens",), torch.float32, written=written)],
            outputs=OutputSpec({"": "tokens"}),
            sizes={"tokens": [4]},
            examples=lambda sizes, seed: {"x": torch.full((sizes["tokens"],), float(seed))},
            library=library,
            on_capture_error="skip",
        )
        assert bool(runner.capture().failures) is not written
        if written:
            assert torch.equal(runner.run({"x": torch.ones(3)}), torch.full((3,), 4.0))


def test_runner_without_inputs_takes_shapes_of_examples():
    def examples(sizes, seed):
        return {"x": torch.arange(6.0).reshape(2, 3) + seed, "index": torch.tensor([seed, 1])}

    def pick(x, index):
        return x[:, index], x.sum()

    with CUDAGraphRunner(pick, examples=examples, device="simulated") as runner:
        assert len(runner.capture().graphs) == 1
        values = {"x": torch.randn(2, 3), "index": torch.tensor([2, 0])}
        for got, wanted in zip(runner.run(values), pick(**values), strict=True):
            assert torch.equal(got, wanted)
        assert runner.last_decision.reason is Reason.HIT
        # An index that is missing must not be the one of the step before.
        with pytest.raises(InputMismatchError, match="'index', dimension 0"):
            runner.run({**values, "index": torch.tensor([2])})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "neither inputs nor examples"),
        ({"sizes": {"rows": [1]}, "examples": lambda sizes, seed: {}}, "sizes, capacity"),
        ({"examples": lambda sizes, seed: [torch.ones(2)]}, "return {name: tensor}"),
    ],
)
def test_runner_without_inputs_needs_examples_of_one_size(options, word):
    with pytest.raises(ConfigError, match=word):
        CUDAGraphRunner(torch.tanh, device="simulated", **options)


def test_runner_of_several_sizes_needs_outputs():
    with pytest.raises(ConfigError, match="outputs"):
        CUDAGraphRunner(
            torch.tanh,
            inputs=[BufferSpec("input", ("rows",), torch.float32)],
            sizes={"rows": [1]},
            device="simulated",
        )


def test_rows_that_keep_a_history_are_named_as_a_cause():
    cache = torch.zeros(4, 2)

    def history(x, rows):
        cache[rows, 0] = x
        return cache[rows].sum(-1)

    with (
        CUDAGraphRunner(
            history,
            examples=lambda sizes, seed: {"x": torch.ones(2), "rows": torch.tensor([seed, 2])},
            may_overwrite={cache: "rows"},
            device="simulated",
        ) as runner,
        pytest.raises(VerificationError) as raised,
    ):
        runner.capture()
    assert "keeps a history" in raised.value.do


@pytest.mark.parametrize("is_cut", [False, True])
def test_encoder_of_torch_takes_one_path_in_eager_and_graph(is_cut):
    """Its fast path is not taken while a mode is active, as in a simulated recording."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    encoder.requires_grad_(False)
    keep = break_point(lambda x: x + 0) if is_cut else torch.clone

    with CUDAGraphRunner(
        lambda x: encoder(keep(x)),
        inputs=[BufferSpec("x", ("batch", 3, 8), torch.float32, Padding.zero())],
        outputs=OutputSpec({"": "batch"}),
        sizes={"batch": [2, 4]},
        modes=("PIECEWISE",) if is_cut else ("FULL",),
        examples=lambda sizes, seed: {"x": torch.rand(sizes["batch"], 3, 8) + seed},
        device="simulated",
    ) as runner:
        assert len(runner.capture().graphs) == 2
