"""The core of ``Runtime`` and of any engine of its own: keys, capture, checks, runs, for any axes.

What captures keys, checks each first replay, runs a key, counts reasons and emits events knows
nothing of tokens and requests here: axes are named, and keys may be the caller's.

    runner = CUDAGraphRunner(encoder, inputs=specs, outputs=outputs, examples=examples,
                             sizes={"batch": [1, 2, 4], "length": [32, 64]})
    runner.capture()           # one graph for each of the six pairs, checked against eager
    rows = runner.run({"x": x})  # x: [batch, length, ...], any real sizes

An engine that pads by itself names the key: ``runner.run(padded, key=runner.key(batch=4,
length=64), sizes={"batch": 3, "length": 60})``.
"""

from graphrt.report import Progress as Progress
from graphrt.runner.examples import Example as Example
from graphrt.runner.jobs import (
    CaptureJob as CaptureJob,
    CaptureReport as CaptureReport,
    Gate as Gate,
    capture_all as capture_all,
)
from graphrt.runner.report import (
    CapturedGraph as CapturedGraph,
    RunnerReport as RunnerReport,
    Subject as Subject,
)
from graphrt.runner.runner import CUDAGraphRunner as CUDAGraphRunner
