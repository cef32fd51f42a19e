"""The exporter shows what StepMetrics counted, in Prometheus' text form."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from report_events import captured

from graphrt import BatchDescriptor, PrometheusObserver, Reason, RuntimeMode
from graphrt.batch import UBatchReason
from graphrt.errors import ConfigError, MissingExtraError
from graphrt.events import (
    CaptureEnded,
    CaptureFailed,
    KeysChanged,
    MemoryTaken,
    RanEager,
    Replayed,
    Retired,
    Verified,
)
from graphrt.report.prometheus import HOST_SECONDS_BOUNDS

KEY = BatchDescriptor(8)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    observe = PrometheusObserver(registry)
    for _ in range(3):
        observe(Replayed(RuntimeMode.FULL, Reason.PADDED, 3, 4, 3, True, 150.0))
    observe(Replayed(RuntimeMode.FULL, Reason.PADDED, 7, 8, 7, True, 90.0))
    observe(Replayed(RuntimeMode.PIECEWISE, Reason.HIT, 16, 16, 2, False, 400.0, 3, 4))
    observe(RanEager(Reason.ABOVE_MAX, 90, 2, False, 10e6, 3))
    for size in (8, 4):
        observe(captured(RuntimeMode.FULL, size, graphs=1))
    observe(CaptureFailed("model", RuntimeMode.FULL, KEY, "GraphMemoryError", "no room"))
    observe(Verified(RuntimeMode.FULL, KEY, True, 0.0))
    observe(Retired(0, 1, 1100))
    observe(KeysChanged("model", 1, ((Reason.CAPTURE_FAILED, 9),)))
    observe(KeysChanged("model", 3, ((Reason.CAPTURE_FAILED, 1), (Reason.INVALIDATED, 2))))
    observe(KeysChanged("draft", 2, ((Reason.CAPTURE_FAILED, 4),)))
    for num_bytes in (1024, 1024):
        taken = MemoryTaken(pools=num_bytes, rest=-256)
        observe(CaptureEnded("model", 1, 1, 0.5, taken))
    return registry


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("graphrt_steps_total", {"mode": "FULL", "reason": "PADDED", "uniform": "true"}, 4),
        ("graphrt_steps_total", {"mode": "NONE", "reason": "ABOVE_MAX", "uniform": "false"}, 1),
        ("graphrt_lora_steps_total", {"live": "0", "captured": "0"}, 4),
        ("graphrt_lora_steps_total", {"live": "3", "captured": "4"}, 1),
        ("graphrt_lora_steps_total", {"live": "3", "captured": "eager"}, 1),
        ("graphrt_tokens_total", {"mode": "FULL"}, 16),
        ("graphrt_padding_tokens_total", {"mode": "FULL"}, 4),
        ("graphrt_padding_tokens_total", {"mode": "NONE"}, 0),
        ("graphrt_step_host_seconds_count", {"mode": "FULL"}, 4),
        ("graphrt_step_host_seconds_sum", {"mode": "FULL"}, 540e-6),
        ("graphrt_step_host_seconds_bucket", {"mode": "FULL", "le": "0.0001"}, 1),
        ("graphrt_step_host_seconds_bucket", {"mode": "FULL", "le": "0.0002"}, 4),
        ("graphrt_step_host_seconds_bucket", {"mode": "NONE", "le": "5"}, 0),
        ("graphrt_step_host_seconds_bucket", {"mode": "NONE", "le": "+Inf"}, 1),
        ("graphrt_captures_total", {"mode": "FULL"}, 2),
        ("graphrt_capture_seconds_total", {"mode": "FULL"}, 0.5),
        ("graphrt_graph_bytes", {}, 2 * (1024 + 512) - 1100),
        ("graphrt_capture_memory_bytes", {"part": "pools"}, 2048),
        ("graphrt_capture_memory_bytes", {"part": "rest"}, -512),
        ("graphrt_graphs_alive", {}, 5),
        ("graphrt_keys_missing", {"reason": "CAPTURE_FAILED"}, 5),
        ("graphrt_keys_missing", {"reason": "INVALIDATED"}, 2),
        ("graphrt_keys_missing", {"reason": "NOT_CAPTURED_YET"}, 0),
        ("graphrt_capture_failures_total", {"error": "GraphMemoryError"}, 1),
        ("graphrt_verifications_total", {"equal": "true"}, 1),
        ("graphrt_retired_programs_total", {}, 1),
    ],
)
def test_each_count_appears(
    registry: CollectorRegistry, name: str, labels: dict[str, str], value: float
) -> None:
    assert registry.get_sample_value(name, labels) == pytest.approx(value)


def test_the_text_form_is_complete(registry: CollectorRegistry) -> None:
    text = generate_latest(registry).decode()
    assert text.count("graphrt_step_host_seconds_bucket{") == 3 * (len(HOST_SECONDS_BOUNDS) + 1)
    assert 'graphrt_captured_graphs_total{mode="FULL"} 2.0' in text


def test_second_observer_of_one_registry_is_an_error(registry: CollectorRegistry) -> None:
    with pytest.raises(ConfigError, match="one observer"):
        PrometheusObserver(registry)


def test_closing_frees_the_registry() -> None:
    registry = CollectorRegistry()
    first = PrometheusObserver(registry)
    first(RanEager(Reason.NO_KEY, 1, 1, False, 1.0))
    assert first.snapshot().total().steps == 1
    first.close()
    PrometheusObserver(registry).close()


def test_prometheus_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"graphrt\[metrics\]") as raised:
        PrometheusObserver()
    assert raised.value.extra == "metrics"


def test_split_steps_and_why_not_are_counted() -> None:
    registry = CollectorRegistry()
    observe = PrometheusObserver(registry)
    observe(Replayed(RuntimeMode.FULL, Reason.HIT, 16, 16, 2, True, 400.0, num_ubatches=2))
    for _ in range(2):
        observe(
            RanEager(Reason.ABOVE_MAX, 90, 2, False, 1.0, ubatch_reason=UBatchReason.NO_FULL_GRAPH)
        )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("graphrt_ubatch_steps_total", split="true") == 1
    assert value("graphrt_ubatch_steps_total", split="false") == 2
    assert value("graphrt_unsplit_steps_total", reason="NO_FULL_GRAPH") == 2
