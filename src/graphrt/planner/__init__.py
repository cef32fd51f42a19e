"""Traffic traces: readers of two published forms and a generator. Pure, offline, torch-free."""

from graphrt.planner.trace import (
    TraceRequest,
    generate_azure_like,
    read_azure_csv,
    read_mooncake_jsonl,
    read_trace,
)

__all__ = [
    "TraceRequest",
    "generate_azure_like",
    "read_azure_csv",
    "read_mooncake_jsonl",
    "read_trace",
]
