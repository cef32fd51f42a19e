"""What happened, for people and for other programs: counters, tables, a page, Prometheus.

This room knows events and batches only. Everything in it follows from the stream of events, so it
works as well on a stream that was recorded elsewhere.
"""

from graphrt.report.logs import LoggingObserver
from graphrt.report.metrics import (
    RELATIVE_ERROR,
    Histogram,
    Metrics,
    RunningHistogram,
    StepCounts,
    StepMetrics,
    TokenSeries,
)
from graphrt.report.page import ReportPage, check_report_path, render_report, write_report
from graphrt.report.progress import Progress, ProgressBars, shown
from graphrt.report.prometheus import PrometheusObserver
from graphrt.report.tables import (
    PolicyRun,
    TextRow,
    TextTable,
    capture_table,
    comparison_table,
    eager_reasons,
    lora_table,
    miss_table,
    size_text,
    summarize_runs,
    time_text,
)

__all__ = [
    "RELATIVE_ERROR",
    "Histogram",
    "LoggingObserver",
    "Metrics",
    "PolicyRun",
    "Progress",
    "ProgressBars",
    "PrometheusObserver",
    "ReportPage",
    "RunningHistogram",
    "StepCounts",
    "StepMetrics",
    "TextRow",
    "TextTable",
    "TokenSeries",
    "capture_table",
    "check_report_path",
    "comparison_table",
    "eager_reasons",
    "lora_table",
    "miss_table",
    "render_report",
    "shown",
    "size_text",
    "summarize_runs",
    "time_text",
    "write_report",
]
