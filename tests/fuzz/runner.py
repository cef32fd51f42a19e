"""Random runners over random chains of operators: every run must give what eager gives.

Eager is the callable itself on the values of the run, not padded and outside any runner.
"""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from graphrt import (
    BufferSpec,
    CUDAGraphMode,
    CUDAGraphRunner,
    Event,
    GraphLibrary,
    OutputSpec,
    Padding,
    Reason,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    SimulatedDevice,
    TensorStateGuard,
)
from graphrt.errors import (
    LibraryClosedError,
    MissError,
    StaleOutputError,
    VerificationError,
)
from graphrt.values import map_tensors, tensors_of

from .chains import (
    ALL_WRONG,
    ALSO,
    ANY,
    COMPLEX_INSIDE,
    FLOAT,
    HARMLESS,
    INEXACT,
    NEEDS_REAL,
    NUM_ROWS,
    OVER_LENGTH,
    OVER_ROWS,
    PATHS,
    REAL,
    SOMETIMES_WRONG,
    WHOLE,
    Chain,
    Inner,
    paths_of,
)
from .common import (
    TOLERANCE,
    Case,
    Counts,
    Problem,
    Watch,
    attempt,
    decide_tokens,
    num_fired,
    require,
    require_no_leaks,
    same,
    touch,
)

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE
MOST_TOKENS = 20
"""Of a runtime's step: more than its largest graph."""


def make_case(seed: int, wrong: bool = False) -> Case:
    """One random model, its runner, and what is done with it."""
    rng = random.Random(f"runner {seed}")
    dtype = rng.choice(
        ["float64", "float64", "float32", "float16", "bfloat16", "complex64", "int64"]
    )
    has_length = rng.random() < 0.4
    axes = {"rows": 5, "length": 7} if has_length else {"rows": 14}
    runtime = None
    if rng.random() < 0.3:
        has_length, axes = False, {"tokens": 14}
        runtime = {
            "mode": rng.choice([mode for mode in CUDAGraphMode.__members__ if mode != "NONE"]),
            "num_speculative_tokens": rng.choice([0, 1, 2]),
            "max_num_seqs": rng.randint(1, 5),
            "stale_check": rng.choice(["identity", "pointer", "off"]),
        }
    names = list(ANY)
    if dtype in REAL:
        names += [*FLOAT, *INEXACT]
    elif dtype == "complex64":
        names += ["matmul", "tanh", "eager_tensor", "eager_out"]
    if dtype in ("float64", "float32"):
        names += COMPLEX_INSIDE
    if has_length and dtype in REAL:
        names += [*OVER_LENGTH, *OVER_LENGTH]
    if dtype in REAL and rng.random() < 0.4:
        names += [*OVER_ROWS, *OVER_ROWS]
    ops: list[list[Any]] = []
    for name in rng.choices(names, k=rng.randint(1, 6)):
        is_late = name == "cast" and any(op[0] not in (*ANY, *FLOAT) for op in ops)
        if is_late:
            continue  # A rounding error before it would grow to one of the narrower dtype.
        ops.append(
            [name, rng.choice(["float16", "bfloat16", "float32"])] if name == "cast" else [name]
        )
    if wrong:
        usable = [name for name in ALL_WRONG if dtype in REAL or name not in NEEDS_REAL]
        if {dtype, *(op[-1] for op in ops)} & {"float16", "bfloat16"}:
            # In half precision a row more or less is lost in the tolerance of the comparison.
            usable = [name for name in usable if name not in ("divided_by_rows", "times_rows")]
        at = rng.randint(0, len(ops))
        ops[at:] = [[rng.choice(usable)], *([op] for op in rng.choices(HARMLESS, k=len(ops) - at))]
    case = {
        "seed": seed,
        "wrong": wrong,
        "runtime": runtime,
        "dtype": dtype,
        "width": rng.choice([2, 4, 6]),
        "ops": ops,
        "outputs": rng.choice(list(PATHS)),
        "sizes": {
            axis: sorted(rng.sample(range(1, most + 1), rng.randint(1, min(3, most))))
            for axis, most in axes.items()
        },
        "modes": rng.choice([["FULL"], ["PIECEWISE"], ["FULL", "PIECEWISE"]]),
        "policy": rng.choice(["view", "view", "clone", "checked_view"]),
        "poison": rng.choice(["recording", "always"]),
        "capture": rng.choice(["all", "all", "parts", "next", "none"]),
        "keys_of_caller": rng.random() < 0.2 and runtime is None,
        "specs_by_key": rng.random() < 0.2 and runtime is None,
        "strided": rng.random() < 0.5,
        "on_miss": "strict" if rng.random() < 0.1 and not wrong else "eager",
        "on_capture_error": rng.choice(["raise", "skip"]),
        "verify_first_replay": rng.random() < 0.9 or wrong,
        "watch": rng.choice(["spread", "spread", "always", "off"]),
        "padding": rng.choice(["keep", "none"] if wrong else ["zero", "zero", "keep", "none"]),
        "arbitrary_index": rng.random() < 0.5,
        "rows_named": rng.random() < 0.5,
        "verify_every": rng.choice([None, None, 1, 2, 5]),
        "warmups": rng.choice([1, 1, 0, 2]),
        "observe": rng.choice([None, None, "ends", "always"]),
        "num_runs": rng.choice([20, 40, 60]),
        "weights": rng.choice([0.0, 0.1]),
        "recapture": rng.choice([0.0, 0.1]),
        "reopen": rng.choice([0.0, 0.0, 0.03]),
        "faults": 0.0 if wrong else rng.choice([0.0, 0.0, 0.1, 0.3]),
        "interrupts": rng.random() < 0.5,
        "also": sorted(rng.sample(list(ALSO), rng.choice([0, 0, 2, 5]))),
        "given_back": rng.choice([0.0, 0.8]),
        "keeps": rng.random() < 0.5,
        "empty": rng.choice([0.0, 0.1]),
        "one_library": rng.random() < 0.3 and runtime is None,
    }
    if case["one_library"]:
        case["reopen"] = 0.05
    if case["also"] and dtype == "complex64":
        case["also"] = sorted({*case["also"], "conjugate"})
    if case["given_back"]:
        case["also"] = sorted({*case["also"], rng.choice(["x", "x", "index", "flag"])})
    if case["keys_of_caller"]:  # Every output is cut to the real sizes.
        case["also"] = [name for name in case["also"] if name not in WHOLE]
    return case


def simplify(case: Case) -> Iterator[Case]:
    """The same case with one field simpler."""
    for index in range(len(case["ops"])):
        yield {**case, "ops": case["ops"][:index] + case["ops"][index + 1 :]}
    simple: Case = {
        "dtype": "float64",
        "width": 2,
        "outputs": "single",
        "modes": ["FULL"],
        "policy": "clone",
        "poison": "recording",
        "capture": "all",
        "keys_of_caller": False,
        "specs_by_key": False,
        "strided": False,
        "on_miss": "eager",
        "on_capture_error": "raise",
        "verify_first_replay": True,
        "verify_every": None,
        "watch": "spread",
        "padding": "zero",
        "arbitrary_index": False,
        "rows_named": False,
        "warmups": 1,
        "observe": None,
        "weights": 0.0,
        "recapture": 0.0,
        "reopen": 0.0,
        "faults": 0.0,
        "interrupts": False,
        "given_back": 0.0,
        "keeps": False,
        "empty": 0.0,
        "one_library": False,
    }
    for index in range(len(case["also"])):
        yield {**case, "also": case["also"][:index] + case["also"][index + 1 :]}
    for name, value in simple.items():
        if case[name] != value:
            yield {**case, name: value}
    if case["num_runs"] > 1:
        yield {**case, "num_runs": case["num_runs"] // 2}
        yield {**case, "num_runs": case["num_runs"] - 1}
    for axis, listed in case["sizes"].items():
        if len(listed) > 1:
            for size in listed:
                fewer = [other for other in listed if other != size]
                yield {**case, "sizes": {**case["sizes"], axis: fewer}}


# -- inputs


def _specs(case: Case) -> tuple[BufferSpec, ...]:
    axes = tuple(case["sizes"])
    is_written = any(op[0] == "written" for op in case["ops"])
    padding: Case = {"padding": Padding.zero() if case["padding"] == "zero" else Padding.keep()}
    if case["padding"] == "none" and case["dtype"] != "int64":
        padding = {}
    return (
        BufferSpec(
            "x",
            (*axes, case["width"]),
            getattr(torch, case["dtype"]),
            **padding,
            written=is_written,
        ),
        BufferSpec("index", axes, torch.int64, Padding.fill(0, arbitrary=case["arbitrary_index"])),
        BufferSpec("slots", axes, torch.int64, Padding.fill(0)),
        BufferSpec("flag", axes, torch.bool, Padding.fill(False)),
    )


def _values(case: Case, sizes: Mapping[str, int], rng: random.Random) -> dict[str, Tensor]:
    """A batch of exactly these sizes. No two rows have one slot."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    shape = tuple(sizes.values())
    dtype = getattr(torch, case["dtype"])
    if dtype == torch.int64:
        x = torch.randint(-5, 6, (*shape, case["width"]), generator=generator)
    else:
        x = torch.randn(*shape, case["width"], generator=generator, dtype=torch.float64).to(dtype)
    flag = torch.rand(shape, generator=generator) < 0.7
    if "length" in sizes:
        flag[..., 0] = True  # Else there is nothing for attention to look at.
    slots = torch.randperm(NUM_ROWS, generator=generator)[: math.prod(shape)] + 1
    return {
        "x": x,
        "index": torch.randint(1, NUM_ROWS + 1, shape, generator=generator),
        "slots": slots.reshape(shape),
        "flag": flag,
    }


def _strided(tensor: Tensor, rng: random.Random) -> Tensor:
    """Equal values in another layout, or said in another way."""
    how = rng.randrange(8)
    if how == 0:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 1:
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if how == 2:
        return torch.cat([tensor, tensor])[tensor.shape[0] :]
    if how == 3 and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    if how == 4 and tensor.is_floating_point():
        return torch._neg_view(-tensor)
    if how == 5 and tensor.is_floating_point():
        return tensor.detach().clone().requires_grad_()
    if how == 6 and tensor.dtype is torch.int64:
        return tensor.to(torch.int32)
    return tensor


def _padded(values: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """As a caller pads who chooses the keys: zero, 0, 0 and False."""
    padded = {}
    for name, tensor in values.items():
        own = tensor.new_zeros((*sizes.values(), *tensor.shape[len(sizes) :]))
        own[tuple(slice(0, size) for size in tensor.shape)] = tensor
        padded[name] = own
    return padded


def _tolerance(case: Case) -> float:
    dtypes = {case["dtype"]} | {op[1] for op in case["ops"] if op[0] == "cast"}
    names = {op[0] for op in case["ops"]}
    inexact = {*INEXACT, *COMPLEX_INSIDE, *OVER_LENGTH, *OVER_ROWS, *ALL_WRONG}
    if "complex" in names:
        dtypes.add("complex64")
    if case["dtype"] == "int64" or not (names & inexact or case["dtype"] == "complex64"):
        return 0.0
    return max(TOLERANCE[getattr(torch, name)] for name in dtypes)


# -- what is replaced


def _register(name: str) -> Callable[[Chain], bool]:
    def change(model: Chain) -> bool:
        after = -getattr(model, name).detach()
        setattr(model, name, torch.nn.Parameter(after, requires_grad=False))
        return True

    return change


def _data(name: str) -> Callable[[Chain], bool]:
    def change(model: Chain) -> bool:
        getattr(model, name).data = -getattr(model, name).detach()
        return False

    return change


def _assign(name: str) -> Callable[[Chain], bool]:
    def change(model: Chain) -> bool:
        loaded = {name: -getattr(model, name).detach()}
        model.load_state_dict(loaded, strict=False, assign=True)
        return True

    return change


def _write_into(name: str) -> Callable[[Chain], bool]:
    def change(model: Chain) -> bool:
        after = -getattr(model, name).detach()
        model._parameters[name] = torch.nn.Parameter(after, requires_grad=False)
        return False

    return change


def _stack(model: Chain) -> bool:
    model.stack[0] = model.stack[0] + 1
    return False


def _scale(model: Chain) -> bool:
    model.scale = 5 - model.scale
    return False


def _factor(model: Chain) -> bool:
    model.factor = 5 - model.factor
    return False


def _settings(model: Chain) -> bool:
    model.settings["shift"] += 3
    return False


def _helper(model: Chain) -> bool:
    model.helper.bias = model.helper.bias + 1
    return False


def _submodule(model: Chain) -> bool:
    model.inner = Inner(model.inner.gain + 1)
    return True


CHANGES: tuple[tuple[str, Callable[[Chain], bool]], ...] = (
    ("matmul", _register("weight")),
    ("matmul", _data("weight")),
    ("linear", _register("weight")),
    ("linear", _data("table")),
    ("linear", _assign("weight")),
    ("linear", _write_into("table")),
    ("table", _register("table")),
    ("table", _data("table")),
    ("scaled", _scale),
    ("made", _factor),
    ("shifted", _settings),
    ("helped", _helper),
    ("gained", _submodule),
    ("stacked", _stack),
)
"""By the operator that reads it. True: torch's registration hooks see it, hence the next step."""


# -- what is done with a runner


class _Run:
    def __init__(self, case: Case, counts: Counts, say: Callable[[str], None]) -> None:
        self.case, self.counts, self.say = case, counts, say
        self.rng = random.Random(f"runner traffic {case['seed']}")
        self.model = Chain(case)
        # What remembers has to remember the same runs.
        self.eager = copy.deepcopy(self.model) if case["wrong"] else self.model
        self.device = SimulatedDevice(poison=case["poison"])
        self.tolerance = _tolerance(case)
        self.is_over = False
        self.old = self.model
        self.num_late_allowed = 0
        """Graph steps that may still be served with what ``old`` has."""
        self.names = {op[0] for op in case["ops"]}
        self.last: dict[str, list[Tensor]] = {}
        """By input: what the run before returned that may be its next value."""
        self.given_back: set[str] = set()
        """The values of this run that are."""
        self.kept: list[tuple[Any, Any]] = []
        """Outputs of earlier runs, and what they were."""
        self.library: GraphLibrary | None = None
        if case["one_library"]:
            self.library = GraphLibrary(self.device, observer=lambda event: self.observe(event))
        self.open()

    def observe(self, event: Event) -> None:
        self.watch.observe(event)

    def open(self) -> None:
        case, model = self.case, self.model
        self.watch = Watch((), has_budget=False)
        specs, axes = _specs(case), tuple(case["sizes"])
        lengths = dict(enumerate(axes))
        state: Case = {"may_overwrite": [model.cache]}
        uses = [op[0] for op in case["ops"] if op[0] in ("scatter", "recall")]
        if uses[:1] == ["recall"]:  # It may read rows that the same run writes after it: a state.
            state = {"state": TensorStateGuard([model.cache])}
            if "scatter" in uses:
                state["may_overwrite"] = {model.cache: "slots"}
        elif "scatter" in uses and (case["rows_named"] or "recall" in uses):
            state = {"may_overwrite": {model.cache: "slots"}}
        keys: Case = {"sizes": case["sizes"]}
        if case["keys_of_caller"]:
            keys = {"capacity": {axis: max(listed) + 2 for axis, listed in case["sizes"].items()}}

        def examples(sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
            touch("examples")
            own = random.Random(f"example {tuple(sizes.values())} {seed}")
            made = _values(case, {axis: sizes[axis] for axis in axes}, own)
            if "requests" in sizes:
                made["lens"] = torch.full((sizes["requests"],), seed + 1)
            return made

        if case["runtime"] is not None:
            self.open_runtime(specs, examples, state)
            return
        self.runner = self.owner = CUDAGraphRunner(
            model,
            inputs=(lambda key: specs) if case["specs_by_key"] else specs,
            outputs=OutputSpec(dict.fromkeys(paths_of(case), lengths), case["policy"]),
            modes=case["modes"],
            examples=examples,
            device=self.device,
            library=self.library,
            verify="first" if case["verify_first_replay"] else "off",
            verify_every=case["verify_every"],
            watch=case["watch"],
            on_miss=case["on_miss"],
            on_capture_error=case["on_capture_error"],
            warmups=case["warmups"],
            observe=case["observe"],
            observer=self.watch.observe,
            **state,
            **keys,
        )
        self.modes = sorted((RuntimeMode[name] for name in case["modes"]), reverse=True)
        if case["keys_of_caller"]:
            combinations = [
                dict(zip(axes, n, strict=True)) for n in product(*case["sizes"].values())
            ]
            self.planned = {
                self.runner.key(variant=variant, **sizes): sizes
                for sizes in combinations
                for variant in (None, "a", ("b", 2))
            }
            self.all_keys = [(mode, key) for mode in self.modes for key in self.planned]
        else:
            self.all_keys = list(self.runner.keys)
            self.watch.status = dict.fromkeys(self.all_keys, Reason.NOT_CAPTURED_YET)

    def open_runtime(self, specs: Any, examples: Any, state: Case) -> None:
        """A runtime in place of a bare runner: tokens and requests, a policy, uniform batches."""
        case, asked = self.case, self.case["runtime"]
        paths = {f"out.{path}".rstrip("."): "tokens" for path in paths_of(case)}
        self.owner = Runtime(
            self.model,
            inputs=[*specs, BufferSpec("lens", ("requests",), torch.int64, Padding.fill(0))],
            outputs=OutputSpec({**paths, "lens": "requests"}, case["policy"]),
            examples=examples,
            device=self.device,
            config=RuntimeConfig(
                compilation={
                    "cudagraph_mode": asked["mode"],
                    "cudagraph_capture_sizes": case["sizes"]["tokens"],
                    "cudagraph_num_of_warmups": case["warmups"],
                },
                max_num_seqs=asked["max_num_seqs"],
                max_num_batched_tokens=MOST_TOKENS,
                num_speculative_tokens=asked["num_speculative_tokens"],
                stale_check=asked["stale_check"],
                on_miss=case["on_miss"],
                on_capture_error=case["on_capture_error"],
                verify_first_replay=case["verify_first_replay"],
                verify_every=case["verify_every"],
                watch=case["watch"],
            ),
            observer=self.watch.observe,
            **state,
        )
        self.runner = self.owner.runner
        self.all_keys = list(self.runner.keys)
        self.watch.status = dict.fromkeys(self.all_keys, Reason.NOT_CAPTURED_YET)

    def attempt(self, act: Callable[[], Any]) -> Any:
        return attempt(act, self.case, self.rng, self.device, self.watch, self.say, self.counts)

    def capture(self, how: str) -> None:
        runner, rng = self.runner, self.rng
        if how == "none" or not self.all_keys:
            return
        self.last.clear()
        drawn = torch.get_rng_state()
        fired, at_most, asked = num_fired(), None, None
        if how == "next" and self.watch.status:
            at_most = rng.randint(1, 3)
            first = rng.choice([None, *self.watch.status])
            done = self.attempt(lambda: (runner.capture_next(at_most, first=first),))
        else:
            num = len(self.all_keys) if how == "all" else rng.randint(1, len(self.all_keys))
            asked = rng.sample(self.all_keys, num)
            if self.case["keys_of_caller"]:
                for key in asked:
                    self.watch.status.setdefault(key, Reason.NOT_CAPTURED_YET)
            done = self.attempt(lambda: runner.capture(asked))
        is_left = torch.equal(torch.get_rng_state(), drawn)
        require(is_left, "wrong", "a capture left the random generator elsewhere")
        self.look_at_kept(may_serve=True)
        self.settle(asked, done is None or num_fired() > fired, at_most)

    def settle(self, asked: Any, fired: bool, at_most: int | None = None) -> None:
        if self.case["wrong"]:
            missing = self.runner.missing()
            self.watch.status = {k: missing.get(k, Reason.HIT) for k in self.runner.keys}
            self.watch.problem = None
            self.eager.hidden.copy_(
                self.model.hidden
            )  # Captures advance it, because it is neither guarded nor declared.
            # A later part of a capture may drop a memo that a run made; it is made again.
            self.eager.memo = copy.deepcopy(self.model.memo)
            return
        if at_most is not None and any(s is Reason.INVALIDATED for s in self.watch.status.values()):
            at_most = None
        self.watch.captured(self.runner.missing(), asked, fired=fired, at_most=at_most)

    def expect(
        self, sizes: Mapping[str, int], exclude: Any, key: Any, statuses: Mapping[Any, Reason]
    ) -> tuple[Any, Reason]:
        """The rules: each axis up to its next size, the best mode that has that key."""
        if key is not None:
            why = Reason.NO_KEY
            for mode in self.modes:
                status = statuses.get((mode, key))
                if status is Reason.HIT:
                    exact = sizes == self.planned[key]
                    return (mode, key), Reason.HIT if exact else Reason.PADDED
                why = status or why
            return None, why
        reasons: list[Reason] = []
        for mode in self.modes:
            listed = self.case["sizes"]
            if any(size > max(listed[axis]) for axis, size in sizes.items()):
                reasons.append(Reason.ABOVE_MAX)
            elif mode in exclude:
                reasons.append(Reason.EXCLUDED)
            else:
                padded = {a: min(n for n in listed[a] if n >= size) for a, size in sizes.items()}
                item = (mode, self.runner.key(**padded))
                status = statuses[item]
                if status is Reason.HIT:
                    return item, Reason.HIT if padded == sizes else Reason.PADDED
                reasons.append(status)
        named = [reason for reason in reasons if reason is not Reason.EXCLUDED]
        return None, (named or reasons)[0]

    def run(self) -> None:
        """One run of a random batch, compared with eager and with the rules."""
        case, rng, watch = self.case, self.rng, self.watch
        act, values, told, sizes = (
            self.runtime_step() if case["runtime"] is not None else self.runner_run()
        )
        model = self.model
        self.give_back(values)
        given = values
        if case["keys_of_caller"]:
            given = _padded(values, self.planned[self.key])
        before = model.cache.clone()
        values_before = {name: tensor.clone() for name, tensor in given.items()}
        drawn = torch.manual_seed(self.counts.runner_steps).get_state()
        # Who pads by himself gets what eager makes of his padding.
        expected = self.plain(self.eager, given, sizes)
        after, drawn_after = self.eager.cache.clone(), torch.get_rng_state()
        model.cache.copy_(before)
        if case["strided"]:
            given = {
                name: tensor if name in self.given_back else _strided(tensor, rng)
                for name, tensor in given.items()
            }
        own = {name: tensor for name, tensor in given.items() if name not in self.given_back}
        inputs_before = {name: tensor.clone() for name, tensor in own.items()}
        self.counts.runner_steps += 1
        watch.steps.clear()
        may_be_late = bool(watch.unnoticed) and self.num_late_allowed > 0
        watch.may_differ = may_be_late
        num_compared = watch.num_padding_compared
        explain = partial(watch.explain_step, missing=self.runner.missing, counts=self.counts)
        torch.set_rng_state(drawn)
        try:
            done = self.attempt(lambda: (act(given),))
        except MissError as error:
            require(case["on_miss"] == "strict", "unexplained", str(error))
            explain((RuntimeMode.NONE, None, error.reason), told)
            return
        except VerificationError:
            # The comparison has found what was replaced before the watch came to it.
            self.note_compared(told)
            return
        finally:
            watch.may_differ = False
        if case["wrong"]:
            watch.problem = None
        watch.raise_problem()
        if done is None:
            watch.hear(self.runner.missing)
            self.is_over = case["wrong"]  # Refused; what it remembers now is not eager's affair.
            return
        [outputs] = done
        decision = self.runner.last_decision
        self.say(f"{sizes} {decision}")
        if not case["wrong"] and explain(decision, told, may_be_late=may_be_late):
            self.num_late_allowed -= 1
            written = model.cache.clone()
            model.cache.copy_(before)
            torch.set_rng_state(drawn)
            expected = self.plain(self.old, values_before, sizes)
            after = self.old.cache.clone()
            model.cache.copy_(written)
        event = watch.steps[-1]
        require(event.reason is decision.reason, "unexplained", f"event {event}")
        for name, tensor in inputs_before.items():
            require(torch.equal(own[name], tensor), "wrong", f"the run wrote over {name}")
            with torch.no_grad():
                own[name].zero_()  # As a caller does who fills his tensors anew.
        is_drawn = torch.equal(torch.get_rng_state(), drawn_after)
        require(is_drawn, "wrong", f"{sizes}, {decision}: drew other random numbers than eager")
        is_same = same(outputs, expected, self.tolerance)
        is_compared = watch.num_padding_compared > num_compared
        if not is_same and self.names & SOMETIMES_WRONG.keys() and not is_compared:
            self.counts.missed += 1
            self.is_over = True
            return
        require(
            is_same,
            "wrong",
            lambda: f"{sizes}, {decision}: {_told(outputs)}, eager: {_told(expected)}",
        )
        require(
            same(model.cache[1:], after[1:], self.tolerance),
            "wrong",
            lambda: f"{sizes}, {decision}: the cache differs from what eager wrote",
        )
        self.look_at_kept()
        self.keep(outputs, sizes)

    def give_back(self, values: dict[str, Tensor]) -> None:
        """Take rows that the run before returned, as they lie, for some of ``values``."""
        rng, last = self.rng, dict(self.last)
        self.last.clear()
        self.given_back.clear()
        if not self.case["given_back"] or self.case["keys_of_caller"]:
            return
        for name, returned in last.items():
            shape, tensor = values[name].shape, rng.choice(returned)
            fits = all(map(int.__ge__, tensor.shape, shape))
            if not fits or not shape[0] or rng.random() >= self.case["given_back"]:
                continue
            first = rng.randint(0, tensor.shape[0] - shape[0])
            step = 2 if rng.random() < 0.3 and first + 2 * shape[0] <= tensor.shape[0] else 1
            rows = tensor[first::step][: shape[0]]
            values[name] = rows[:, : shape[1]] if len(shape) > 1 else rows
            self.given_back.add(name)

    def keep(self, outputs: Any, sizes: Mapping[str, int]) -> None:
        """Keep what later runs are given, and what they must leave as it is."""
        case = self.case
        found = outputs["out"] if case["runtime"] is not None else outputs
        also = found["also"] if case["also"] else {}
        found = found["base"] if case["also"] else found
        made = tensors_of(found)[0]
        if case["keeps"] and case["policy"] != "view" and made.numel():
            self.kept = [*self.kept[-3:], (outputs, map_tensors(outputs, torch.clone))]
        usable = {name: [also[name]] for name in ("x", "index", "flag") if name in also}
        # Others would grow from run to run, beyond the tolerance.
        if made.numel() and made.dtype is getattr(torch, case["dtype"]) and made.abs().max() <= 4:
            usable.setdefault("x", []).append(made)
        self.last = usable

    def look_at_kept(self, *, may_serve: bool = False) -> None:
        """Outputs of earlier runs: the caller's own are as they were, checked views refuse.

        ``may_serve``: these may also be as they were, because perhaps nothing was captured.
        """
        is_checked = self.case["policy"] == "checked_view"
        for outputs, before in self.kept:
            is_plain = all(type(tensor) is Tensor for tensor in tensors_of(before))
            require(is_plain, "wrong", "a copy of a checked view is one itself")
            try:
                is_same = same(outputs, before, 0.0)
            except StaleOutputError:
                is_same = is_checked
            else:
                is_same &= may_serve or not is_checked
            require(is_same, "wrong", "outputs of an earlier run changed, or are not refused")
        if is_checked and not may_serve:
            self.kept.clear()
        elif not is_checked and self.kept and self.rng.random() < 0.3:
            mine, _ = self.kept.pop()
            for tensor in tensors_of(mine):
                tensor.zero_()  # Nothing may read it.

    def note_compared(self, told: Any) -> None:
        """A compared run of a program over what was replaced has raised: the next one asks."""
        watch = self.watch
        item, _ = told({**watch.status, **dict.fromkeys(watch.unnoticed, Reason.HIT)})
        require(item in watch.unnoticed, "wrong", f"refused, and not over what changed: {item}")
        watch.unnoticed.remove(item)
        watch.status[item] = self.runner.missing().get(item, Reason.HIT)
        require(watch.status[item] is Reason.CAPTURE_FAILED, "unexplained", f"{item} was refused")
        self.num_late_allowed = 0

    def runner_run(self) -> Any:
        """What runs values, these values, what the rules say, and the real sizes."""
        case, rng, runner = self.case, self.rng, self.runner
        if case["keys_of_caller"]:
            self.key = rng.choice(list(self.planned))
            sizes = {axis: rng.randint(1, most) for axis, most in self.planned[self.key].items()}
            self.empty_some(sizes)
            options: Case = {"key": self.key, "sizes": sizes}
            told = partial(self.expect, sizes, (), self.key)
        else:
            sizes = {
                axis: rng.randint(1, max(listed) + 2 * (rng.random() < 0.1))
                for axis, listed in case["sizes"].items()
            }
            self.fit_to_last(sizes)
            self.empty_some(sizes)
            exclude: frozenset[RuntimeMode] = frozenset()
            options = {}
            if rng.random() < 0.15:
                exclude = frozenset(rng.sample([FULL, PIECEWISE], rng.randint(0, 2)))
                decision = runner.decide(sizes, exclude)
                if decision.reason is Reason.NOT_CAPTURED_YET:
                    runner.note_miss(sizes, exclude)
                options = {"decision": decision}
            told = partial(self.expect, sizes, exclude, None)
        values = _values(case, sizes, rng)
        return lambda given: runner.run(given, **options), values, told, sizes

    def fit_to_last(self, sizes: dict[str, int]) -> None:
        """Often let the run before have returned more rows, for some to be values now."""
        if self.last and self.case["given_back"]:
            [returned, *_] = [tensor for found in self.last.values() for tensor in found]
            for (axis, size), most in zip(tuple(sizes.items()), returned.shape, strict=False):
                sizes[axis] = max(1, min(size, most - (axis == "rows")))

    def empty_some(self, sizes: dict[str, int]) -> None:
        """Now and then, let a batch have no rows, where eager takes it."""
        usable = self.names.isdisjoint((*OVER_ROWS, *ALL_WRONG))
        if self.case["empty"] and usable and self.rng.random() < self.case["empty"]:
            sizes["rows"] = 0

    def runtime_step(self) -> Any:
        """As ``runner_run``."""
        asked, rng, runtime = self.case["runtime"], self.rng, self.owner
        query_len = 1 + asked["num_speculative_tokens"]
        uniform = rng.random() < 0.5
        num_reqs = rng.randint(1, asked["max_num_seqs"])
        num_tokens = num_reqs * query_len if uniform else rng.randint(num_reqs, MOST_TOKENS)
        exclude = frozenset()
        if rng.random() < 0.15:
            exclude = frozenset(rng.sample([FULL, PIECEWISE], rng.randint(0, 2)))
        mode = runtime.plan.cudagraph_mode
        told = lambda status: decide_tokens(status, mode, num_tokens, uniform, exclude)  # noqa: E731
        options: Case = {"uniform": uniform, "exclude": exclude}
        # What is left out is read off the values.
        given = {"num_tokens": num_tokens, "num_reqs": num_reqs}
        options |= {name: size for name, size in given.items() if rng.random() < 0.8}
        values = _values(self.case, {"tokens": num_tokens}, rng)
        values["lens"] = torch.arange(num_reqs) + 1
        sizes = {"tokens": num_tokens, "requests": num_reqs}
        act = lambda given: runtime.step(given, **options)  # noqa: E731
        return act, values, told, sizes

    def plain(self, model: Chain, values: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Any:
        with torch.no_grad():
            if model is not self.model:
                model.cache.copy_(self.model.cache)
            outputs = model(**{name: tensor.clone() for name, tensor in values.items()})
        # Copies, because a model may return what later runs write.
        real = tuple(slice(0, size) for size in sizes.values())
        cut = real if self.case["keys_of_caller"] else ()
        outputs = map_tensors(outputs, lambda tensor: tensor[cut].clone())
        return outputs

    def change_weights(self) -> None:
        """Copy into something that graphs read, or replace it; only the watch may notice."""
        model, rng, watch = self.model, self.rng, self.watch
        usable = [change for op, change in CHANGES if op in self.names]
        if not usable or self.case["wrong"] or watch.unnoticed:
            return
        if rng.random() < 0.2 and not self.names.isdisjoint(("matmul", "linear")):
            with torch.no_grad():
                model.weight.copy_(-model.weight)
            return
        self.old = copy.deepcopy(model)
        is_registered = rng.choice(usable)(model)
        watch.replaced()
        self.num_late_allowed = 0
        if self.case["watch"] == "spread" and not is_registered:
            # The run that finds it is eager.
            self.num_late_allowed = math.ceil(self.runner.num_watched / 4) - 1
        if self.case["watch"] == "off":
            self.runner.check_externals()
            watch.noticed(self.runner.missing())

    def reopen(self) -> None:
        self.last.clear()
        self.owner.close()
        self.owner.close()
        self.look_at_kept()
        try:
            self.runner.run(_values(self.case, dict.fromkeys(self.case["sizes"], 1), self.rng))
        except LibraryClosedError:
            self.open()
            return
        raise Problem("wrong", "a closed runner runs")


def _told(value: Any) -> str:
    return str(map_tensors(value, lambda tensor: tensor.detach().clone())).replace("\n", "")


def run_case(case: Case, counts: Counts, say: Callable[[str], None] = lambda text: None) -> None:
    """Run one case. Raises ``Problem``."""
    fired, threads = num_fired(), threading.active_count()
    run = _Run(case, counts, say)
    device, rng = run.device, run.rng
    try:
        run.capture(case["capture"])
        for _ in range(case["num_runs"]):
            if rng.random() < case["recapture"]:
                run.capture(rng.choice(["all", "parts", "next"]))
            if rng.random() < case["weights"]:
                run.change_weights()
            if rng.random() < case["reopen"]:
                run.reopen()
            run.run()
            if run.is_over:
                break
    finally:
        run.owner.close()
        if run.library is not None:
            run.library.close()
        counts.faults += num_fired() - fired
    del run
    require_no_leaks(device, threads)
