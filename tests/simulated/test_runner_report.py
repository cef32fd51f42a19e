"""What ``print(report)`` and ``explain`` say of a runner: times, bytes, hits, misses, failures."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.lab import FULL, MAX_TOKENS, RuntimeLab, Toy, rows_runner

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CUDAGraphRunner,
    OutputSpec,
    Reason,
    SimulatedDevice,
    StepMetrics,
    explain,
    get_forward_context,
)
from graphrt.errors import ConfigError, MissError
from graphrt.events import MemoryTaken
from graphrt.runner.report import DeviceMemory

LINES = (
    "pools of graphs",
    "executable graphs",
    "tensors outside the pools",
    "kept by the allocator",
    "kernels and libraries, in warm-ups",
    "kernels and libraries, in captures",
    "kernels and libraries, in checks",
    "the rest: other processes, for one",
)


class FailsAt4(Toy):
    def forward(self, *, x, ids, lens):
        if x.shape[0] == 4:
            raise ValueError("no four")
        return super().forward(x=x, ids=ids, lens=lens)


def test_report_printed_has_a_row_for_each_key() -> None:
    with RuntimeLab() as lab:
        report = lab.runtime.capture()
        text = str(report)
        for graph in report.graphs:
            assert any(
                line.startswith(graph.mode.name) and f" {graph.sizes['tokens']} " in line
                for line in text.splitlines()
            )
        assert "Policy FULL_AND_PIECEWISE" in text
        assert all(line in text for line in LINES[:2])
        assert "BatchDescriptor" not in text


def test_report_counts_shared_weights_once() -> None:
    with RuntimeLab() as lab:
        report = lab.runtime.capture()
        storages = {
            held.storage.data_ptr(): held.storage.nbytes()
            for program in lab.runtime.library.programs
            for held in program.externals
        }
        assert report.held_bytes == sum(storages.values())
        assert report.held_bytes < sum(graph.memory.external_bytes for graph in report.graphs)


@pytest.mark.parametrize("at_most", [1, 3, 100])
def test_report_accounts_for_all_memory_taken(at_most) -> None:
    metrics = StepMetrics()
    with RuntimeLab() as lab:
        while lab.runtime.capture_next(at_most):
            pass
        for event in lab.events:
            metrics(event)
        report = lab.runtime.report()
        before, after = report.memory
        taken = report.memory_taken
        assert taken.total == before.free - after.free > 0
        assert taken.pools == sum(g.pool.bytes() for g in lab.runtime.library.generations)
        assert taken.pools + taken.executables == report.graph_bytes == taken.total
        assert metrics.snapshot().memory_taken == taken


class LoadsKernels(SimulatedDevice):
    """Its driver loads kernels in one phase of a capture, and says so of free memory."""

    def __init__(self) -> None:
        super().__init__()
        # What a capture cannot put back, as it puts other host values back.
        self.loaded = memoryview(mmap.mmap(-1, 8)).cast("q")

    def load(self, num_bytes) -> None:
        self.loaded[0] = num_bytes

    def memory(self, pool=None):
        reading = super().memory(pool)
        return reading._replace(free_bytes=reading.free_bytes - self.loaded[0])


@pytest.mark.parametrize("phase", ["warmup", "capture", "check"])
def test_memory_past_the_allocator_is_of_its_phase(phase) -> None:
    device = LoadsKernels()

    def fn(input):
        in_scope = get_forward_context().capture_scope is not None
        now = "capture" if device.is_capturing() else "warmup" if in_scope else "check"
        if now == phase:
            device.load(12345)
        return torch.relu(input)

    with runner_of(fn, device=device) as runner:
        taken = runner.capture().memory_taken
        # An executable is what free memory fell by while it was recorded.
        assert (taken.executables > 12345) is (phase == "capture")
        expected = dict.fromkeys(("warmup", "capture", "check", "rest", "tensors", "cached"), 0)
        expected |= {} if phase == "capture" else {phase: 12345}
        assert {name: taken._asdict()[name] for name in expected} == expected
        device.load(777)
        assert runner.capture().memory_taken == taken, "nothing more was captured"
    device.close()


class KeepsFreedMemory(SimulatedDevice):
    """Each reading finds 1,000 bytes more kept by the allocator, until it is trimmed."""

    kept = 0

    def memory(self, pool=None):
        reading = super().memory(pool)
        self.kept += 1000
        return reading._replace(
            free_bytes=reading.free_bytes - self.kept,
            reserved_bytes=reading.reserved_bytes + self.kept,
        )

    def trim(self) -> None:
        self.kept = 0


def test_capture_gives_back_what_comparisons_took() -> None:
    device = KeepsFreedMemory()
    with runner_of(torch.relu, device=device) as runner:
        assert runner.capture_next() == 1
        assert runner.report().memory_taken.cached > 1000, "more keys will use it"
        before = runner.report().memory_taken
        runner.capture_next()
        # Of the last reading, after it was trimmed, less the first.
        assert runner.report().memory_taken.cached - before.cached <= 0
    device.close()


def test_memory_taken_between_phases_is_the_rest(monkeypatch) -> None:
    device = LoadsKernels()
    with runner_of(torch.relu, device=device) as runner:
        # Called when all is checked.
        monkeypatch.setattr(runner.library, "settle", lambda _: device.load(99))
        taken = runner.capture().memory_taken
        assert taken.rest == 99 == taken.total - taken.pools - taken.executables
    device.close()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, MAX_TOKENS), st.booleans()), max_size=12))
def test_report_hits_are_the_steps_that_graphs_served(batches) -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture()
        for num_tokens, is_decode in batches:
            uniform = is_decode and num_tokens <= 4
            lab.step(num_tokens, num_tokens if uniform else 1, uniform)
        report = lab.runtime.report()
        served = [event for event in lab.step_events if hasattr(event, "num_padded_tokens")]
        assert sum(graph.hits for graph in report.graphs) == len(served)
        assert sum(misses.runs for misses in report.misses.values()) == len(batches) - len(served)
        above = [num_tokens for num_tokens, _ in batches if num_tokens > 8]
        if above:
            misses = report.misses[Reason.ABOVE_MAX]
            assert (misses.smallest["tokens"], misses.largest["tokens"]) == (min(above), max(above))


def test_padding_is_counted_by_a_step_metrics_alone() -> None:
    for observer, told in ((StepMetrics(), "25.0 %"), (None, "not counted")):
        with runner_of(torch.relu, observer) as runner:
            runner.capture()
            runner.run({"input": torch.ones(3)})
            assert told in str(runner.report())


def test_padding_counted_for_two_runners_together_is_not_told() -> None:
    both = StepMetrics()
    with runner_of(torch.relu, both) as one, runner_of(torch.relu, both) as other:
        for runner in (one, other):
            runner.capture()
            runner.run({"input": torch.ones(3)})
        assert {graph.padding_percent for graph in one.report().graphs} == {None}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-(1 << 40), 1 << 40), min_size=8, max_size=8))
def test_each_part_of_memory_taken_is_shown_or_zero(parts) -> None:
    here = DeviceMemory(free=1 << 30, reserved=1 << 20, pools=0, executables=0, tensors=0)
    taken = MemoryTaken(*parts)
    with runner_of(torch.relu) as runner:
        text = str(replace(runner.report(), memory=(here, here), memory_taken=taken))
    shown = {line.rpartition("  ")[0].strip(): line for line in text.splitlines()}
    for name, num_bytes in zip(LINES, parts, strict=True):
        assert (name in shown) is (num_bytes != 0)
        if num_bytes:
            assert ("-" in shown[name].split(name)[1]) is (num_bytes < 0)
    assert taken.plus(MemoryTaken(*(-part for part in parts))) == MemoryTaken()
    assert taken.total == sum(parts)


def runner_of(fn, observer=None, device="simulated", **options) -> CUDAGraphRunner:
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("input", ("tokens",), torch.float32)],
        outputs=OutputSpec({"": "tokens"}),
        sizes={"tokens": [4, 8]},
        examples=lambda sizes, seed: {"input": torch.arange(sizes["tokens"]) + 1.0 * seed},
        device=device,
        observer=observer,
        **options,
    )


def test_report_of_a_failed_key_says_what_failed_and_its_time() -> None:
    with RuntimeLab("PIECEWISE", model=FailsAt4(), asked={"on_capture_error": "skip"}) as lab:
        report = lab.runtime.capture()
        assert report.missing_seconds > 0
        parts = (report.missing_seconds, report.other_seconds, *(g.seconds for g in report.graphs))
        assert sum(parts) == pytest.approx(report.capture_seconds)
        assert "no four" in str(report)
        assert "of keys without a graph" in str(report)
        lab.step(3, 1)
        text = lab.runtime.explain()
        assert "CAPTURE_FAILED" in text
        assert "ValueError: no four" in text
        assert "no four" in explain(report)


def test_explain_above_the_maximum_says_how_far_and_how_often() -> None:
    with RuntimeLab() as lab:
        lab.runtime.capture()
        for num_tokens in (12, 9):
            lab.step(num_tokens, 1)
        text = lab.runtime.explain()
        assert "9 tokens are 1 above the largest captured size, 8." in text
        assert "2 eager for this reason, of 9 to 12 tokens" in text
        whole = explain(lab.runtime.report())
        assert "12 tokens are 4 above the largest captured size, 8" in whole
        assert "To change ABOVE_MAX: " in whole


def test_strict_step_that_missed_is_counted() -> None:
    with RuntimeLab(asked={"on_miss": "strict"}) as lab:
        with pytest.raises(MissError, match="NOT_CAPTURED_YET\n"):
            lab.step(3, 3, True)
        with pytest.raises(MissError, match=r"ABOVE_MAX \(9 tokens are 1 above the largest"):
            lab.step(9, 3)
        assert lab.runtime.report().misses[Reason.NOT_CAPTURED_YET].runs == 1


def test_explain_of_a_replaced_weight_names_it_once() -> None:
    model = torch.nn.Linear(2, 2)
    with CUDAGraphRunner(
        model,
        inputs=[BufferSpec("input", ("rows", 2), torch.float32)],
        outputs=OutputSpec({"": "rows"}),
        sizes={"rows": [1, 2, 4]},
        device="simulated",
    ) as runner:
        runner.capture(like={"input": torch.randn(3, 2)})
        model.weight = torch.nn.Parameter(torch.eye(2))
        runner.run({"input": torch.randn(2, 2)})
        text = runner.explain()
        assert text.endswith("Replaced since the capture: weight (read by 3 keys).")
        assert text.count("weight") == 1
        _, key = runner.keys[0]
        assert "Replaced since the capture: weight." in runner.explain(key)


def test_explain_of_a_key_says_what_the_runner_knows() -> None:
    with runner_of(torch.relu) as runner:
        key = runner.key(tokens=4)
        assert "no graph serves it (NOT_CAPTURED_YET)" in runner.explain(key)
        runner.capture([key])
        runner.run({"input": torch.ones(4)})
        for subject in (key, (FULL, key)):
            text = runner.explain(subject)
            assert "compared with eager execution" in text
            assert "served 1 run" in text
        assert "No key of this runner" in runner.explain(BatchDescriptor(5))
        assert "4 tokens" in explain(key)
        assert explain((FULL, key)).startswith("FULL: ")
        assert "Graphs serve 1 of 2 keys" in runner.explain(runner.report())


@pytest.mark.parametrize("subject", [(1, 2), (FULL, 3), (FULL,), "key", ([], {})])
def test_explain_of_what_is_no_subject_is_refused(subject) -> None:
    with runner_of(torch.relu) as runner, pytest.raises(ConfigError, match="expected"):
        runner.explain(subject)


@pytest.mark.parametrize(("verify", "told"), [("first", "was compared"), ("off", "never compared")])
def test_explain_of_a_ready_program_says_if_it_was_compared(verify, told) -> None:
    with runner_of(torch.relu, verify=verify) as runner:
        report = runner.capture()
        assert told in explain(runner.library.programs[0])
        assert {graph.is_compared for graph in report.graphs} == {verify == "first"}
        assert ("not compared" in str(report)) is (verify == "off")


def test_memory_read_of_a_full_device_stays_a_report() -> None:
    device = SimulatedDevice(driver_bytes=1 << 16)
    with RuntimeLab(device=device, asked={"on_capture_error": "skip"}) as lab:
        assert "free after the last" in str(lab.runtime.capture())
    device.close()


@pytest.mark.parametrize(
    ("fails_at", "where"),
    [
        ({8}, "in a warm-up of double, FULL, BatchDescriptor(num_tokens=8"),
        ({3}, "with a batch of sizes {'n': 3}, as it is and padded"),
    ],
)
def test_error_of_the_callable_says_where_it_was_raised(fails_at, where) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] in fails_at:
            raise AssertionError
        return x * 2

    with rows_runner(double, (2, 4, 8), name="double") as runner:
        with pytest.raises(AssertionError) as raised:
            runner.capture()
        (note,) = raised.value.__notes__
        assert where in note
        (failure,) = runner.report().failures.values()
        assert failure.startswith("AssertionError: ")
        assert where in failure
        assert "capture again" in explain(runner.decide({"n": next(iter(fails_at))}))
