"""The runtime: where config, plan, buffers, graphs, dispatch and verification meet for an engine.

An engine hands over a model, the tensors it reads, and facts; it gets back ``capture()``,
``step()`` and ``close()``. Everything here joins rooms; each rule lives in the room it belongs to.
"""

from graphrt.runtime.admission import Key
from graphrt.runtime.capturing import Example, Progress
from graphrt.runtime.report import CapturedGraph, RuntimeReport
from graphrt.runtime.runtime import Runtime
from graphrt.runtime.steps import REQUESTS, TOKENS

__all__ = [
    "REQUESTS",
    "TOKENS",
    "CapturedGraph",
    "Example",
    "Key",
    "Progress",
    "Runtime",
    "RuntimeReport",
]
