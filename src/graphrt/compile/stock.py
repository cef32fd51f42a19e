"""Level 1: torch.compile as it is: its guards, graph breaks and recompiles, which are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import fx
from torch._guards import CompileContext

from graphrt.compile import effects, torch_api
from graphrt.compile.backends import compiled_by, find_backend
from graphrt.compile.compilation import CompileReport
from graphrt.compile.compiled import Varying, own_root, told_not_to_compile
from graphrt.compile.dump import Dump
from graphrt.compile.effects import Copies
from graphrt.compile.failures import OF_TRACING, translated
from graphrt.config import CompilePlan
from graphrt.errors import copy_error


class Stock:
    """``target``, compiled when it is called, as often as torch finds that it has to be.

    ``refuse_now``: called before each compilation; raises where none may happen.
    Errors: ``ConfigError`` for an unknown backend; what compiling and ``refuse_now`` raise.
    """

    is_backed = False
    is_audit_due = False
    """Set by who finds something replaced; torch checks its guards at each call anyway."""
    is_opaque = True
    """A mode that observes makes torch run it uncompiled."""
    refused = staticmethod(torch_api.compiled_code_refused)

    def __init__(
        self,
        target: Callable[..., Any],
        plan: CompilePlan,
        *,
        refuse_now: Callable[[], None] = lambda: None,
        rank: int = 0,
    ) -> None:
        self.runnable = target
        self._backend_name = plan.backend
        self._backend = find_backend(plan.backend)
        self._dump = Dump(plan.debug_dump_path, rank)
        self._refuse_now = refuse_now
        self._seconds = 0.0
        self._frames: list[int] = []
        """Of each graph that was compiled, which compilation of its code it is, from 0."""
        self._reasons: list[str] = []
        self._held: Copies | None = None
        """What the traced run writes, with what it was; None in other runs."""
        root, _ = own_root(target)
        # Dynamo keeps backends for good: this one keeps no model.
        own = WeakMethod(self._compile)

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compile_now = own()
            assert compile_now is not None, "it is called by an entry that is alive"
            return compile_now(graph, inputs)

        self._entry = torch_api.stock_compile(root, backend, self._reasons.append)

    @property
    def report(self) -> CompileReport | None:
        """What was compiled until now; None before."""
        if not self._frames:
            return None
        return CompileReport(
            backend=self._backend_name,
            seconds={"compile": self._seconds},
            num_compiles=len(self._frames),
            num_graphs=sum(number == 0 for number in self._frames),
            recompiles=tuple(self._reasons),
        )

    def trace(self, run: Callable[[], object], varying: Varying) -> None:
        """Run it once, which compiles it for these sizes. What that code writes is put back."""
        self._held = held = Copies()
        try:
            run()
        finally:
            self._held = None
            effects.put_back(held)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch_api.is_recorded():
            # Dynamo would run it so too, and never compile again any code that it meets here.
            return torch.compiler.disable(self.runnable)(*args, **kwargs)
        try:
            return self._entry(*args, **kwargs)
        except OF_TRACING as error:
            stop = translated(error)
            self._dump.failed(stop)
            raise stop from error
        except RuntimeError as error:
            if not torch_api.is_told_not_to(error):
                raise
            raise told_not_to_compile() from error

    def __reduce_ex__(self, _: object) -> NoReturn:
        # A copied model would keep this one, which runs the parameters of the first.
        raise copy_error(self)

    def audit(self, *, again: bool = False) -> None:
        """Nothing: torch checks its guards at each call."""

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._refuse_now()
        if self._held is not None:
            self._held += effects.copies_of_written(graph, inputs)
        name = f"graph_{len(self._frames)}"
        self._dump.graph(f"{name}.py", graph)
        began = perf_counter()
        with torch.no_grad():
            compiled = compiled_by(self._backend, self._backend_name, graph, inputs, name)
        self._seconds += perf_counter() - began
        compile_id: Any = CompileContext.current_compile_id()
        self._frames.append(compile_id.frame_compile_id or 0)
        if (report := self.report) is not None:
            self._dump.json("report.json", report._asdict)
        return compiled
