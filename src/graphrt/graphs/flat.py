"""Turns the segments of a program into one generated function: a line per segment.

The function reads no context, hashes nothing and tests nothing per segment. Its source is
registered with ``linecache``, so a traceback out of a gap shows the segment it stands in.
"""

from __future__ import annotations

import keyword
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.profiler import record_function

from graphrt.graphs.generated import make_function
from graphrt.graphs.segments import EagerSegment, GraphSegment, Segment

Replay = Callable[[], None]


class FlatReplay(NamedTuple):
    """A generated function, its text and the name tracebacks know it by."""

    function: Replay
    source: str
    filename: str

    def forget(self) -> None:
        """Take the text back from ``linecache``."""
        linecache.cache.pop(self.filename, None)


def generate_replay(
    title: str,
    segments: Sequence[Segment],
    after_gap: Callable[[], None] | None = None,
    annotate: bool = False,
) -> FlatReplay:
    """Write and compile the replay of ``segments``.

    ``after_gap`` runs after every gap, before its result is stored (it joins side streams).
    ``annotate`` wraps each segment in a profiler range: another function, so that the plain one
    carries no flag.
    """
    # Constants are globals of the function, not default arguments: a program of 65 segments has
    # some 150 of them, and each default argument is copied at each call.
    constants: dict[str, Any] = {"after_gap": after_gap}
    lines = ["def replay():"]
    for number, segment in enumerate(segments):
        body = _segment_lines(number, segment, constants, after_gap is not None)
        if annotate:
            constants["annotation"] = record_function
            body = [f"with annotation('segment {number}'):", *(f"    {line}" for line in body)]
        lines += [f"    {line}" for line in body]
    source = "\n".join([*lines, ""])
    filename = _free_filename(f"{title} annotated" if annotate else title)
    # No modification time: linecache keeps such an entry when it checks its files.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return FlatReplay(make_function(source, filename, constants), source, filename)


def _segment_lines(
    number: int, segment: Segment, constants: dict[str, Any], joins: bool
) -> list[str]:
    if isinstance(segment, GraphSegment):
        constants[f"graph_{number}"] = segment.graph.replay
        return [f"graph_{number}()"]
    return _gap_lines(number, segment, constants, joins)


def _gap_lines(number: int, gap: EagerSegment, constants: dict[str, Any], joins: bool) -> list[str]:
    constants[f"gap_{number}"] = gap.fn
    constants[f"store_{number}"] = gap.store
    arguments = []
    for index, value in enumerate(gap.args):
        constants[f"arg_{number}_{index}"] = value
        arguments.append(f"arg_{number}_{index}")
    others = {}
    for name, value in gap.kwargs.items():
        if name.isidentifier() and not keyword.iskeyword(name):
            constants[f"arg_{number}_{name}"] = value
            arguments.append(f"{name}=arg_{number}_{name}")
        else:
            others[name] = value
    if others:
        constants[f"others_{number}"] = others
        arguments.append(f"**others_{number}")
    call = f"gap_{number}({', '.join(arguments)})"
    comment = f"  # {gap.site}".replace("\n", " ")
    # What it returned may still be in the making on a side stream: joined before it is looked at.
    joined = [f"result = {call}{comment}", "after_gap()"] if joins else []
    only = gap.returned[0] if len(gap.returned) == 1 and not gap.returned[0].path else None
    if only is None or only.kind == "opaque" or (only.kind == "host" and only.value is not None):
        return [*joined, f"store_{number}({'result' if joins else call}){comment}"]
    expected = "None"
    if only.kind != "host":
        expected = f"kept_{number}"
        constants[expected] = only.value
    result = "result" if joins else f"(result := {call})"
    return [*joined, f"if {result} is not {expected}:{comment}", f"    store_{number}(result)"]


def _free_filename(title: str) -> str:
    """Two libraries may hold programs of one name; each keeps its own text."""
    filename = f"<graphrt {title}>"
    number = 2
    while filename in linecache.cache:
        filename = f"<graphrt {title} ({number})>"
        number += 1
    return filename
