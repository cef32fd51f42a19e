"""A small decode step compiled by Inductor on the CPU. Says nothing of a GPU.

C-compile-entry: the ways to call it. Through its flat program, graphrt's entry, torch.compile's own
entry; and eagerly. At this size the host decides; with larger matrices the products do, and the
ratios shrink. Then an entry whose pieces run eagerly, beside the model itself.

C-compile-start: the first result of a process that finds it compiled, over one that compiles it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.harness import (
    REPOSITORY,
    CannotRunError,
    Case,
    Row,
    Samples,
    medians,
    need_bytecode,
    ratio,
    row,
    time_host,
)
from graphrt import (
    BufferSpec,
    CompilationConfig,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    SimulatedDevice,
    resolve,
)
from graphrt.gc_pause import gc_paused

TOKENS, HIDDEN = 8, 64
STARTS = 3
"""Cold and warm ones of each number of layers, which take seconds each."""
START_TARGETS = {4: 0.25, 32: 0.30}
"""By layers."""
ATTENTION = "graphrt_benchmarks::attention"


def attend(qkv: torch.Tensor, out: torch.Tensor) -> None:
    """A stand-in of two launches: what attention computes is the same in every arm."""
    query, _, value = qkv.chunk(3, 1)
    torch.mul(torch.softmax(query, -1), value, out=out)


operator = torch.library.custom_op(ATTENTION, mutates_args=("out",))(attend)
operator.register_fake(lambda qkv, out: None)


class Layer(torch.nn.Module):
    """Norm, product, attention, product, norm and a gated network, as models are written."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = torch.nn.RMSNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.attended = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.gate_up = torch.nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        operator(self.qkv(self.input_norm(x)), out)
        x = x + self.attended(out)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Layers(torch.nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.requires_grad_(False)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def config(folder: Path, **options: Any) -> RuntimeConfig:
    asked = {"level": 3, "splitting_ops": [ATTENTION], "cache_dir": folder, **options}
    return RuntimeConfig(
        compilation=CompilationConfig(
            cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[TOKENS], **asked
        ),
        max_num_seqs=TOKENS,
        max_num_batched_tokens=64,
    )


def examples(sizes: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["tokens"], HIDDEN, generator=generator)}


def runtime_of(model: Layers, folder: Path, device: SimulatedDevice) -> Runtime:
    """At level 3 with pieces compiled by Inductor, which are kept in ``folder``."""
    return Runtime(
        model,
        inputs=[BufferSpec("x", ("tokens", HIDDEN), torch.float32, padding=Padding.zero())],
        outputs=OutputSpec({"": "tokens"}, "view"),
        examples=examples,
        config=config(folder, backend="inductor"),
        op_impls={ATTENTION: attend},
        device=device,
    )


def entries(folder: Path) -> Sequence[Row]:
    model, device = Layers(4), SimulatedDevice()
    x = examples({"tokens": TOKENS}, 1)["x"]
    with torch.no_grad(), runtime_of(model, folder, device) as runtime:
        runtime.capture()
        expected = model(x=x)
        torch.testing.assert_close(runtime.step({"x": x}, num_tokens=TOKENS), expected)
        decision = runtime.last_decision
        assert decision is not None, "a step leaves its decision"
        mode, key, _ = decision
        assert mode is RuntimeMode.PIECEWISE, f"served by {mode}"
        program = runtime.library.program("model", mode, key)
        assert program is not None, "the key was captured"
        stock = torch.compile(model, fullgraph=True, dynamic=True)
        torch.testing.assert_close(stock(x=x), expected)
        own = runtime.runner.fn
        torch.testing.assert_close(own(x=x), expected)
        arms = {
            "flat": program.replay,
            "own entry": partial(own, x=x),
            "stock entry": partial(stock, x=x),
            "eager": partial(model, x=x),
        }
        samples = time_host(arms, block_ms=150)
    device.close()
    shape = {"layers": 4, "hidden": HIDDEN, "tokens": TOKENS, "threads": torch.get_num_threads()}
    return [
        row(
            metric,
            ratio(samples, arm, "flat"),
            target=target,
            unit="ratio",
            higher_is_better=True,
            samples=samples,
            timed=f"{arm} over the flat program, ns of host time",
            medians_ns=medians(samples),
            **shape,
        )
        for metric, arm, target in (
            ("C-compile-entry", "stock entry", 1.8),
            ("C-compile-entry-own", "own entry", 1.3),
            ("C-compile-entry-eager", "eager", 1.7),
        )
    ]


def eager_pieces(folder: Path) -> Row:
    from graphrt.compile import Compiled  # Starts are timed with its imports.

    model, x = Layers(4), examples({"tokens": TOKENS}, 1)["x"]
    plan = resolve(config(folder, backend="eager")).compile
    entry = Compiled(model, plan, limits={"tokens": 64})
    with torch.no_grad():
        with gc_paused(collects=False):
            entry.trace(partial(entry, x=x), [(x, 0, "tokens")])
        torch.testing.assert_close(entry(x=x), model(x=x), rtol=0, atol=0)
        arms = {"own entry": partial(entry, x=x), "eager": partial(model, x=x)}
        samples = time_host(arms, block_ms=150)
    return row(
        "C-compile-entry-eager-pieces",
        ratio(samples, "eager", "own entry"),
        target=0.9,
        unit="ratio",
        higher_is_better=True,
        samples=samples,
        timed="eager over the entry of the same model whose pieces run eagerly, ns of host time",
        medians_ns=medians(samples),
        layers=4,
        hidden=HIDDEN,
        tokens=TOKENS,
        threads=torch.get_num_threads(),
    )


def policies(folder: Path) -> Sequence[Row]:
    from graphrt.compile import Compiled  # Starts are timed with its imports.

    model, x = Layers(32), torch.zeros(TOKENS, HIDDEN)
    arms, audits, splits = {}, {}, []
    for policy in ("audit", "keep"):
        asked = config(folder, backend="eager", guard_policy=policy)
        # An entry of its own is traced for each, over one model.
        entry = Compiled(
            model,
            resolve(asked).compile,
            limits={"tokens": 64},
            impls={ATTENTION: lambda qkv, out: None},
            wrap=lambda piece, info: _remembers(piece),
        )
        # Without the collector, for which a runtime freezes the heap meanwhile.
        with torch.no_grad(), gc_paused(collects=False):
            entry.trace(partial(entry, x=x), [(x, 0, "tokens")])
            entry(x=x)
        arms[policy], audits["audit"] = partial(entry, x=x), entry.audit
        assert entry.report is not None, "it was traced"
        splits.append(entry.report.seconds["split"] * 1e3)
    with torch.no_grad():
        samples, audited = time_host(arms, block_ms=150), time_host(audits, block_ms=150)
    return [
        row(
            "C-compile-entry-guards",
            ratio(samples, "audit", "keep"),
            target=0.4,
            unit="ratio",
            samples=samples,
            timed="entry of 32 layers whose pieces compute nothing: audit over torch's guards",
            medians_ns=medians(samples),
            layers=32,
            threads=torch.get_num_threads(),
        ),
        row(
            "C-compile-entry-audit",
            [ns / 1e6 for ns in audited["audit"]],
            target=10,
            unit="ms",
            samples=audited,
            timed="all that the trace of 32 layers read, compared with what stands there now",
            compared=entry.report.num_audited,
        ),
        row(
            "C-compile-entry-split",
            splits,
            target=150,
            unit="ms",
            samples={"split": splits},
            timed="graph of 32 layers traced, to its pieces and their hashes: two traces",
            pieces=len(entry.report.pieces),
            unique=entry.report.num_unique,
        ),
    ]


def _remembers(piece: Any) -> Any:
    """A piece that returns its first result for ever."""
    known: list[Any] = []

    def call(*args: Any) -> Any:
        if not known:
            known.append(piece(*args))
        return known[0]

    return call


def first_result(num_layers: int, folder: Path, began: float) -> dict[str, Any]:
    """Seconds of this process until the first result, by part. ``began``: when it was started, of
    ``time()``. ``compiles``, ``loads``: how many forms of pieces were compiled, and loaded."""
    seconds = {"python, torch and graphrt": time() - began}
    asked = time()
    with gc_paused(collects=False, ages=True):  # As in ``Runtime``, which else would import it.
        from graphrt.runtime import compiling  # noqa: F401
    imported = time()
    # After it, because seeds import most of the compiler too.
    model, device = Layers(num_layers), SimulatedDevice()
    x = examples({"tokens": TOKENS}, 1)["x"]
    with torch.no_grad(), runtime_of(model, folder, device) as runtime:
        result = runtime.step({"x": x}, num_tokens=TOKENS)
        ended = time()
        torch.testing.assert_close(result, model(x=x))
        report = runtime.report().compile
    device.close()
    assert report is not None, "level 3 compiles"
    seconds["imports of the compiler"] = imported - asked
    seconds |= report.seconds
    seconds["rest"] = ended - imported - report.compilation_time
    return {"seconds": seconds, "compiles": report.num_compiles, "loads": report.num_loaded}


START = """
import json, sys
from pathlib import Path
from benchmarks.cases.entry import first_result
num_layers, folder, began = sys.argv[1:]
print(json.dumps(first_result(int(num_layers), Path(folder), float(began))))
"""


def start_of_its_own(num_layers: int, folder: Path) -> dict[str, Any]:
    """``first_result`` of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(num_layers), str(folder), str(time())],
        # Nothing that Inductor keeps for this user is found.
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "other")},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BEFORE = ("python, torch and graphrt",)


def start_rows(num_layers: int, starts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Sequence[Row]:
    """Of the first call, and of the whole process. ``starts``: cold and warm ones, in pairs."""
    assert all(one["compiles"] == 0 for one in starts["warm"]), "a warm start compiles nothing"
    assert all(one["loads"] == 0 for one in starts["cold"]), "a cold start finds nothing"
    parts = {
        arm: medians({part: [one["seconds"][part] for one in all_] for part in all_[0]["seconds"]})
        for arm, all_ in starts.items()
    }
    rows = []
    for suffix, target, left_out, what in (
        ("", START_TARGETS[num_layers], BEFORE, "the runtime and its first call"),
        ("-process", None, (), "a process from its start"),
    ):
        samples: Samples = {
            arm: [
                sum(value for part, value in one["seconds"].items() if part not in left_out)
                for one in all_
            ]
            for arm, all_ in starts.items()
        }
        rows.append(
            row(
                f"C-compile-start-{num_layers}{suffix}",
                ratio(samples, "warm", "cold"),
                target=target,
                unit="ratio",
                samples=samples,
                timed=f"s of {what} until the first result: compiled code found, over none found",
                medians_s=medians(samples),
                parts_s=parts,
                compiled_cold=starts["cold"][0]["compiles"],
                loaded_warm=starts["warm"][0]["loads"],
                layers=num_layers,
                hidden=HIDDEN,
                threads=torch.get_num_threads(),
            )
        )
    return rows


def starts() -> Iterator[Row]:
    _need_compiler()
    need_bytecode()
    with tempfile.TemporaryDirectory() as folder:
        start_of_its_own(min(START_TARGETS), Path(folder))  # Writes the bytecode of the imports.
    for num_layers in START_TARGETS:
        found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        for _ in range(STARTS):
            with tempfile.TemporaryDirectory() as folder:
                for arm in found:
                    found[arm].append(start_of_its_own(num_layers, Path(folder)))
        yield from start_rows(num_layers, found)


def _need_compiler() -> None:
    if shutil.which("g++") is None:
        raise CannotRunError("it needs a C++ compiler (g++)")


def against_entries() -> Sequence[Row]:
    _need_compiler()
    with tempfile.TemporaryDirectory() as folder:
        return [*entries(Path(folder)), eager_pieces(Path(folder)), *policies(Path(folder))]


CASES = [
    Case("C-compile-entry", "compiled 4-layer step: flat program or entry", against_entries),
    Case("C-compile-start", "start with compiled code on disk over one without", starts),
]
