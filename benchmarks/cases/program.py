"""C-program: what a PIECEWISE program adds to the bare callables of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.harness import Case, Row, difference, row, time_host
from graphrt.device.base import DeviceGraph
from graphrt.graphs.flat import generate_replay
from graphrt.graphs.segments import EagerSegment, GraphSegment, Returned, Segment

INNER = 50
SIZES = (9, 33, 65)


def stub_graph() -> None:
    return None


def stub_gap(a: Any, b: Any, c: Any) -> None:
    return None


def segments_of(count: int) -> list[Segment]:
    """Graph, gap, graph, ...: every second segment is a gap with 3 bound arguments."""
    graph = cast(DeviceGraph, SimpleNamespace(replay=stub_graph))
    arguments = tuple(torch.ones(2) for _ in range(3))
    returned = (Returned((), "host", None),)
    gap = EagerSegment(stub_gap, arguments, {}, returned, "stub", writes_out=False)
    return [GraphSegment(graph) if number % 2 == 0 else gap for number in range(count)]


def per_segment() -> Sequence[Row]:
    rows = []
    for count in SIZES:
        segments = segments_of(count)
        flat = generate_replay(f"benchmark of {count}", segments)
        replay = flat.function
        num_gaps = count // 2
        x = torch.ones(2)

        def program(replay: Any = replay) -> None:
            for _ in range(INNER):
                replay()

        # The same callables, written out: what nobody can do without.
        lines = ["def bare():", f"    for _ in range({INNER}):"]
        lines += ["        graph()" if n % 2 == 0 else "        gap(x, x, x)" for n in range(count)]
        namespace: dict[str, Any] = {"graph": stub_graph, "gap": stub_gap, "x": x}
        exec("\n".join(lines), namespace)

        def one_stub() -> None:
            for _ in range(INNER):
                stub_graph()

        def no_call() -> None:
            for _ in range(INNER):
                pass

        arms = {
            "program": program,
            "bare callables": namespace["bare"],
            "stub": one_stub,
            "loop": no_call,
        }
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
        t_stub = difference(samples, "stub", "loop")
        net = [
            (total - count * cost) / count
            for total, cost in zip(samples["program"], t_stub, strict=True)
        ]
        rows.append(
            row(
                f"C-program-{count}",
                net,
                target=60.0,
                unit="ns",
                samples=samples,
                segments=count,
                gaps=num_gaps,
                timed="(T(replay) - P * t_stub) / P",
            )
        )
        flat.forget()
    return rows


CASES = [
    Case("C-program", "PIECEWISE replay, nanoseconds a segment over its callables", per_segment)
]
