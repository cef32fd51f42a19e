"""G11: two micro-batches: one computes while the other communicates.

With a second GPU over which rows are exchanged, and on one GPU by copies to the host and back.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import (
    CannotRunError,
    Case,
    Row,
    Samples,
    cuda_device,
    medians,
    ratio,
    row,
    time_gpu,
)
from graphrt import BufferSpec, Device, OutputSpec, Runtime, RuntimeConfig, launch_ranks, ubatch

LEAST_RATIO = 0.5
"""Of communication to computation: from here on overlap has a goal."""


def overlap() -> Sequence[Row]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < 2:
        raise CannotRunError(f"it needs two GPUs, and torch {torch.__version__} sees {num_gpus}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"
        status = launch_ranks(2, ["-m", "benchmarks.rank_overlap", str(file)])
        if status:
            raise RuntimeError(f"a rank ended with status {status}")
        results = json.loads(file.read_text(encoding="utf-8"))
    return [each for asked, found in results.items() for each in _rows(asked, found)]


def _rows(asked: str, found: dict[str, Samples]) -> list[Row]:
    samples: Samples = found["samples"]
    each = zip(*(samples[n] for n in ("serial", "overlapped", "compute", "comm")), strict=True)
    hidden = [(serial - overlapped) / min(c, m) for serial, overlapped, c, m in each]
    forms = ("serial", "unsplit", "serial over NCCL", "unsplit over NCCL")
    told = medians(samples)
    best = min(forms, key=lambda name: told[name])
    # As a runtime does it: timed once, then kept.
    chosen = min(("overlapped", "unsplit"), key=lambda name: samples[name][0])
    later = {name: samples[name][1:] for name in ("unsplit", chosen)}
    about = {
        "communication_over_computation": told["comm"] / told["compute"],
        "mib_sent_by_a_micro_batch_in_a_layer": found["mib"],
        "ms": told,
    }
    rows = [
        row(
            f"G11-chosen-{asked}",
            ratio(later, "unsplit", chosen),
            target=0.99,
            unit="ratio",
            higher_is_better=True,
            samples={},
            timed=f"unsplit over {chosen}, the faster of both in the first block",
            **about,
        )
    ]
    if float(asked) < LEAST_RATIO:
        return rows
    rows += [
        row(
            f"G11-efficiency-{asked}",
            hidden,
            target=0.85,
            unit="share",
            higher_is_better=True,
            samples=samples,
            timed="(one by one - overlapped) / the lesser of computation and communication",
            **about,
        ),
        row(
            f"G11-over-best-{asked}",
            ratio(samples, best, "overlapped"),
            target=1.0,
            unit="ratio",
            higher_is_better=True,
            samples={},
            timed=f"{best}, the fastest form without overlap, over overlapped",
            **about,
        ),
    ]
    return rows


LAYERS, WIDTH = 8, 4096
SIZES = (32, 256, 2048)
"""Tokens of a step. Of few of them the weights are most of the work, and a cut reads them twice."""
SENT = WIDTH // 8
"""Of each row, to the host and back."""


class HostCopies(torch.nn.Module):
    """In each layer four products, then a part of every row to pinned memory and back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
        self.weight = torch.nn.Parameter(weight.mul_(WIDTH**-0.5), requires_grad=False)
        pin = device.type == "cuda"
        self.host = [
            torch.zeros(max(SIZES), SENT, dtype=weight.dtype, pin_memory=pin) for _ in range(2)
        ]

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            for _ in range(4):
                x = x @ self.weight
            send = x[:, :SENT].contiguous()
            received = torch.empty_like(send)
            host = self.host[ubatch.index()][: len(x)]
            with ubatch.communication(f"layer{layer}", send):
                host.copy_(send, non_blocking=True)
                received.copy_(host, non_blocking=True)
            x = torch.cat([received, x[:, SENT:]], 1)
        return x


def served(model: HostCopies, device: Device, mode: str, **asked: object) -> Runtime:
    """A runtime for steps of ``model``; ``asked``: how they are cut."""
    config = RuntimeConfig(
        compilation={"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES},
        max_num_seqs=max(SIZES),
        max_num_batched_tokens=max(SIZES),
        ubatch={"decode_token_threshold": 2, "prefill_token_threshold": 2, **asked},
    )
    specs = [BufferSpec("x", ("tokens", WIDTH), torch.bfloat16)]
    outputs = OutputSpec({"": "tokens"})
    return Runtime(
        model,
        inputs=specs,
        outputs=outputs,
        config=config,
        device=device,
        may_overwrite=model.host,
    )


def auto_off() -> Sequence[Row]:
    """Steps as the runtime chose to run them, over the same steps never cut and always cut."""
    torch.manual_seed(0)
    rows: list[Row] = []
    with cuda_device() as device:
        model = HostCopies(device.torch_device)
        x = torch.randn(max(SIZES), WIDTH, dtype=torch.bfloat16, device=device.torch_device)
        for mode in ("FULL_DECODE_ONLY", "NONE"):
            cuts = {"chosen": {"num_ubatches": 2}, "whole": {}}
            cuts["cut"] = {"num_ubatches": 2, "auto_off": False}
            made = {name: served(model, device, mode, **asked) for name, asked in cuts.items()}
            for runtime in made.values():
                runtime.capture(like={"x": x})
            told = made["chosen"].report().split_ms
            for tokens in SIZES:
                arms = {
                    name: lambda runtime=runtime, tokens=tokens: runtime.step({"x": x[:tokens]})
                    for name, runtime in made.items()
                }
                expected = arms["whole"]().clone()
                for name, arm in arms.items():
                    # Products of half the rows may be summed by another kernel.
                    torch.testing.assert_close(arm(), expected, rtol=0.5, atol=0.5, msg=name)
                samples = time_gpu(arms, repeats=20)
                found = [ms for key, ms in told.items() if key.num_tokens == tokens]
                rows.append(
                    row(
                        f"G11-auto-off-{mode.split('_')[0].lower()}-{tokens}",
                        ratio(samples, "whole", "chosen"),
                        target=0.99,
                        unit="ratio",
                        higher_is_better=True,
                        samples=samples,
                        timed="a step never cut over the same one as the runtime chose to run it",
                        ms=medians(samples),
                        timed_by_the_runtime_ms=list(found[0]) if found else None,
                    )
                )
            for runtime in made.values():
                runtime.close()
    return rows


CASES = [
    Case("G11", "overlap efficiency of two micro-batches on 2 GPUs", overlap),
    Case("G11-auto-off", "steps cut where it pays, over steps never cut, on 1 GPU", auto_off),
]
