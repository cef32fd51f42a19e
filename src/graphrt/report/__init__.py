"""What happened, for people and for other programs: counters, tables, a page, Prometheus.

This room knows events and batches only. Everything in it follows from the stream of events, so it
works as well on a stream that was recorded elsewhere.
"""

from graphrt.report.logs import LoggingObserver as LoggingObserver
from graphrt.report.metrics import (
    RELATIVE_ERROR as RELATIVE_ERROR,
    Histogram as Histogram,
    Metrics as Metrics,
    RunningHistogram as RunningHistogram,
    StepCounts as StepCounts,
    StepMetrics as StepMetrics,
    TokenSeries as TokenSeries,
)
from graphrt.report.page import (
    ReportPage as ReportPage,
    check_report_path as check_report_path,
    render_report as render_report,
    write_report as write_report,
)
from graphrt.report.progress import (
    Progress as Progress,
    ProgressBars as ProgressBars,
    shown as shown,
)
from graphrt.report.prometheus import PrometheusObserver as PrometheusObserver
from graphrt.report.tables import (
    PolicyRun as PolicyRun,
    TextRow as TextRow,
    TextTable as TextTable,
    capture_table as capture_table,
    comparison_table as comparison_table,
    eager_reasons as eager_reasons,
    lora_table as lora_table,
    miss_table as miss_table,
    size_text as size_text,
    summarize_runs as summarize_runs,
    time_text as time_text,
)
