"""G11: two micro-batches: one computes while the other exchanges rows with a second GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import CannotRunError, Case, Row, Samples, medians, ratio, row
from graphrt import launch_ranks

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


CASES = [Case("G11", "overlap efficiency of two micro-batches on 2 GPUs", overlap)]
