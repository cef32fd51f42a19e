"""What the simulated device replays is bit-equal and stride-equal to eager."""

from __future__ import annotations

import torch

from graphrt.device.simulated import SimulatedDevice


def test_a_graph_reads_what_its_inputs_hold_at_replay() -> None:
    device = SimulatedDevice()
    pool, stream = device.new_pool(), device.stream("capture")
    x, weight = torch.randn(4, 8), torch.nn.Parameter(torch.randn(16, 8))
    with torch.no_grad(), device.use(stream):
        recording = device.begin(pool, stream, "linear")
        out = torch.nn.functional.linear(x, weight).relu_()
        graph = recording.end()
    assert out.isnan().all()
    x.copy_(torch.randn(4, 8))
    graph.replay()
    assert torch.equal(out, torch.nn.functional.linear(x, weight).relu())
    device.close()
