"""C-program: what a PIECEWISE program adds to the bare callables of its segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.baselines import require_equal
from benchmarks.harness import Case, Row, difference, row, time_host
from graphrt.device.base import DeviceGraph
from graphrt.graphs import EagerSegment, GraphSegment, Returned
from graphrt.graphs.program import Segment, generate_replay

INNER = 50
SIZES = (9, 33, 65)
COPY_ELEMENTS = 16
COPY_SEGMENTS = 33


def stub_graph() -> None:
    return None


def stub_eager(a: Any, b: Any, c: Any) -> None:
    return None


def alternating(count: int, eager: EagerSegment) -> list[Segment]:
    """Graph, eager segment, graph, ...: graphs at both ends."""
    graph = cast(DeviceGraph, SimpleNamespace(replay=stub_graph))
    return [GraphSegment(graph) if number % 2 == 0 else eager for number in range(count)]


def repeated(replay: Callable[[], None]) -> Callable[[], None]:
    def program() -> None:
        for _ in range(INNER):
            replay()

    return program


def written_out(count: int, call: str, names: dict[str, Any]) -> Callable[[], None]:
    """The same callables without a program: what nobody can do without."""
    lines = ["def bare():", f"    for _ in range({INNER}):"]
    lines += ["        graph()" if n % 2 == 0 else f"        {call}" for n in range(count)]
    namespace = {"graph": stub_graph, **names}
    exec("\n".join(lines), namespace)
    bare: Callable[[], None] = namespace["bare"]
    return bare


def per_segment() -> Sequence[Row]:
    rows = []
    for count in SIZES:
        arguments = tuple(torch.ones(2) for _ in range(3))
        returned = (Returned((), "host", None),)
        eager = EagerSegment(stub_eager, arguments, {}, returned, "stub", writes_out=False)
        replay, _ = generate_replay(alternating(count, eager), f"<benchmark of {count}>")

        def one_stub() -> None:
            for _ in range(INNER):
                stub_graph()

        def no_call() -> None:
            for _ in range(INNER):
                pass

        names = {"eager": stub_eager, "x": torch.ones(2)}
        arms = {
            "program": repeated(replay),
            "bare callables": written_out(count, "eager(x, x, x)", names),
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
                num_eager=count // 2,
                timed="(T(replay) - P * t_stub) / P",
            )
        )
    return [*rows, with_copies()]


def with_copies() -> Row:
    """Eager segments that return a tensor: each is checked and copied for the next graph."""
    static, made = torch.zeros(COPY_ELEMENTS), torch.arange(float(COPY_ELEMENTS))

    def eager(x: torch.Tensor) -> torch.Tensor:
        return made

    returned = (Returned((), "static_output", static),)
    segment = EagerSegment(eager, (made,), {}, returned, "stub", writes_out=False)
    replay, _ = generate_replay(alternating(COPY_SEGMENTS, segment), "<benchmark of copies>")
    replay()
    require_equal(static, made, "C-program-copy")
    arms = {
        "program": repeated(replay),
        "bare callables": written_out(COPY_SEGMENTS, "eager(x)", {"eager": eager, "x": made}),
    }
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    num_eager = COPY_SEGMENTS // 2
    added = difference(samples, "program", "bare callables")
    return row(
        "C-program-copy",
        [nanoseconds / num_eager / 1000 for nanoseconds in added],
        target=1.5,
        unit="us",
        samples=samples,
        segments=COPY_SEGMENTS,
        num_eager=num_eager,
        elements=COPY_ELEMENTS,
        timed="(T(replay) - T(the same calls)) / eager segments; check and copy included",
    )


CASES = [
    Case("C-program", "PIECEWISE replay, nanoseconds a segment over its callables", per_segment)
]
