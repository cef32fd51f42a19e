"""What compiles a piece: nothing (eager), Inductor, or any backend that torch knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import fx
from torch._dynamo.backends.registry import list_backends, lookup_backend

from graphrt.compile import torch_api
from graphrt.compile.ranges import Range
from graphrt.compile.splitter import callable_at
from graphrt.errors import BackendError, ConfigError, GraphrtError
from graphrt.events import CacheMiss

FIELD = "compilation.backend"

# They run the graph operator by operator, so that a recorder sees each.
_SEEN_BY_RECORDERS = ("eager", "eager_noexcept")


class Job(NamedTuple):
    """One piece to compile, for some sizes."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    """Fake, in the mode of the current tracing context."""
    name: str
    structure: str
    sizes: Range
    bounds: str
    """Of the other axes."""


class Form(NamedTuple):
    """A piece, compiled for some sizes. ``missed``: why it did not come from the cache."""

    call: Callable[..., Any]
    missed: CacheMiss | None


def find_backend(name: str) -> Callable[..., Any]:
    """A backend of torch's registry, or the callable at a dotted path."""
    known = list_backends(exclude_tags=())
    try:
        return lookup_backend(name) if name in known else callable_at(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        nearest = get_close_matches(name, known, n=1, cutoff=0.0)
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{FIELD}: {name!r}",
            expected=f"{', '.join(known)}, or package.module.function",
            found=found if "." in name else f"no registered backend; nearest is {nearest[0]!r}",
            do="correct it, or install or import what registers it before the runtime is made",
        ) from error


class BlackBox:
    """Any backend, called as ``backend(graph, fake inputs)``. Nothing of it is cached."""

    keys: Sequence[Mapping[str, object]] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._backend = find_backend(name)
        self.is_opaque = name not in _SEEN_BY_RECORDERS
        """Whether its code hides kernels from dispatch modes, and may move what is written."""

    def compile(self, job: Job) -> Form:
        if self.name == "eager":
            return Form(job.module.forward, CacheMiss.UNCACHEABLE)
        with compiling(self.name, job.name):
            # A copy, because a backend may change its graph.
            graph = fx.GraphModule(job.module, fx.Graph())
            graph.graph.output(graph.graph.graph_copy(job.module.graph, {}))
            graph.recompile()
            return Form(self._backend(graph, list(job.inputs)), CacheMiss.UNCACHEABLE)


@contextmanager
def compiling(backend: str, piece: str) -> Iterator[None]:
    """Turns what a backend raises into a ``BackendError``; our own errors stay."""
    try:
        yield
    except GraphrtError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        needs_compiler = "C++ compiler" in str(error)
        raise BackendError(
            f"{backend}, compiling {piece}",
            expected="compiled code",
            found=f"{type(error).__name__}: {lines[0]}",
            do="install a C++ compiler (g++), or use backend='eager'"
            if needs_compiler
            else "use another backend; backend='eager' compiles nothing",
        ) from error


def check_options(options: Any) -> None:
    """Errors: ``ConfigError`` for what is no option of Inductor."""
    known = torch_api.inductor_option_names()
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.0)
            raise ConfigError(
                f"compilation.inductor_compile_config.{name}",
                expected=f"an option of torch._inductor.config; nearest are {', '.join(near)}",
                found="an unknown key",
                do="correct the name",
            )
