"""What a model calls around its communication, so that another micro-batch computes meanwhile.

Outside a micro-batch each call does nothing, so that the model runs unsplit as it is. The calls
belong in eager code or opaque operators, never in traced code. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphrt.context import current_forward_context

if TYPE_CHECKING:
    from graphrt.device.base import Device, Mark, Stream
    from graphrt.ubatch.baton import Worker


@dataclass(eq=False)
class MicroBatch:
    """Where one slice of a split step is; the forward context of the slice has it as ``ubatch``.

    ``siblings``: all of the step, this one included. ``worker`` None: the slices run one after the
    other, and a yield returns at once. ``tag``: of the communication that is being issued.
    """

    index: int
    token_offset: int
    device: Device
    compute: Stream
    comm: Stream
    siblings: list[MicroBatch]
    worker: Worker | None = None
    tag: str | None = None
    _own_hook: list[Callable[[], object]] = field(default_factory=list)
    """One that this micro-batch has registered, until one of the two has run it."""
    _next_hook: list[Callable[[], object]] = field(default_factory=list)
    """That of the micro-batch before this one."""

    @property
    def count(self) -> int:
        return len(self.siblings)

    @contextmanager
    def running(self, worker: Worker | None) -> Iterator[None]:
        """Around the slice: on the compute stream; receive hooks that are left run at its end."""
        self.worker = worker
        self._using: AbstractContextManager[None] = nullcontext()
        self.switch(self.compute)
        try:
            yield
            _run(self._next_hook)
            _run(self._own_hook)
        finally:
            self._using.__exit__(None, None, None)
            self.worker = None

    def switch(self, stream: Stream) -> None:
        using = self.device.use(stream)
        self._using.__exit__(None, None, None)
        self._using = using
        using.__enter__()
        self.stream = stream
        if self.worker is not None:
            self.worker.stream = stream.name

    def switch_after_mark(self, stream: Stream, sync: bool) -> None:
        mark = self.device.mark(self.stream) if sync else None
        self.switch(stream)
        if mark is not None:
            self.device.wait(stream, mark)

    def hand_over(self, tag: str) -> bool:
        """Let the others run. Returns whether the own receive hook was left to run here."""
        if self.worker is not None:
            self.worker.hand_over(tag)
        return _run(self._own_hook)

    def hand_over_and_switch(self, tag: str, stream: Stream) -> None:
        mark, self.tag = self.device.mark(self.stream), None
        if self.hand_over(tag):
            mark = self.device.mark(self.stream)  # What the hook has issued comes first too.
        self.switch(stream)
        self.device.wait(stream, mark)

    def register_hook(self, fn: Callable[[], object]) -> None:
        _run(self._own_hook)
        self._own_hook = hook = [fn]
        if self.worker is not None and self.worker.next is not self.worker:
            self.siblings[self.worker.next.index]._next_hook = hook

    def run_recv_hook(self) -> None:
        _run(self._next_hook)


def _run(hook: list[Callable[[], object]]) -> bool:
    """Run a receive hook, which two micro-batches may do, and one does."""
    if hook:
        hook.pop()()
        return True
    return False


class Communication:
    """What ``with communication(...)`` enters in a micro-batch."""

    __slots__ = ("_kept", "_tag", "_ubatch", "_works")

    def __init__(self, ubatch: MicroBatch, tag: str, kept: tuple[Any, ...]) -> None:
        self._ubatch = ubatch
        self._tag = tag
        self._kept = kept
        self._works: list[Any] = []

    def wait_for(self, work: Any) -> None:
        """``work.wait()`` is called when the block has ended, and others have had their turn; for
        work that the host has to wait for (gloo). None is ignored."""
        if work is not None:
            self._works.append(work)

    def hand_to_compute(self, tensor: Any) -> None:
        """Compute goes on to use ``tensor``, which was allocated in this block."""
        self._ubatch.device.record_use(tensor, self._ubatch.compute)

    def __enter__(self) -> Communication:
        self._ubatch.tag = self._tag
        self._ubatch.switch_after_mark(self._ubatch.comm, True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ubatch = self._ubatch
        if kind is not None:
            ubatch.tag = None
            ubatch.switch(ubatch.compute)
            return
        # The mark comes first: compute waits for this transfer, not for those of siblings.
        ubatch.hand_over_and_switch(self._tag, ubatch.compute)
        for work in self._works:
            work.wait()
        self._kept = ()


class Outside:
    """What it enters where nothing is split: one object for all, because a model that is not split
    shall not pay for an object in each layer, nor for binding methods to it."""

    __slots__ = ()

    def wait_for(self, work: Any) -> None:
        """See ``Communication``."""
        if work is not None:
            _works.setdefault(get_ident(), []).append(work)

    def hand_to_compute(self, tensor: Any) -> None:
        """There is one stream."""

    @staticmethod
    def __enter__() -> Outside:
        return _OUTSIDE

    @staticmethod
    def __exit__(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _works:
            for work in _works.pop(get_ident(), ()):
                if kind is None:
                    work.wait()


_works: dict[int, list[Any]] = {}
"""By thread: what a block outside micro-batches waits for at its end."""
_OUTSIDE = Outside()


def communication(tag: str, *kept: Any) -> Communication | Outside:
    """A block whose work goes to the communication stream; other micro-batches run at its end.

    ``with communication(f"{name}.dispatch", send) as c:``. The block begins with everything that
    compute was given so far, and compute goes on after everything in it. ``kept``: tensors that
    stay alive until then, because the transfer reads them. Allocate what it writes before the
    block; memory that is born in it needs ``c.hand_to_compute``. ``c.wait_for(work)``: what the
    host has to wait for. If the block raises, nothing is handed over.
    """
    context = current_forward_context()
    if context is None or context.ubatch is None:
        return _OUTSIDE
    return Communication(context.ubatch, tag, kept)


def yield_(tag: str) -> None:
    """Let the other micro-batches run; the stream stays."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.hand_over(tag)


def switch_to_comm(sync: bool = True) -> None:
    """Go on to the communication stream. ``sync``: after what the stream before was given."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.switch_after_mark(ubatch.comm, sync)


def switch_to_compute(sync: bool = True) -> None:
    """Go back to the compute stream. ``sync``: after what the stream before was given."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.switch_after_mark(ubatch.compute, sync)


def yield_and_switch_to_comm(tag: str) -> None:
    """Let the others run, then go on to the communication stream, after what this one was given."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.hand_over_and_switch(tag, ubatch.comm)


def yield_and_switch_to_compute(tag: str) -> None:
    """Let the others run, then go back to the compute stream, after what this one was given."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.hand_over_and_switch(tag, ubatch.compute)


def register_recv_hook(fn: Callable[[], object]) -> None:
    """``fn`` completes what this micro-batch receives: for sends that come in two parts.

    The next live micro-batch calls it at its ``run_recv_hook`` or its end; otherwise this one does,
    when it has the baton back. Exactly once. Outside a micro-batch it is called at once.
    """
    ubatch = _current()
    if ubatch is None:
        fn()
    else:
        ubatch.register_hook(fn)


def run_recv_hook() -> None:
    """Call what the micro-batch before this one has registered, if nobody has yet."""
    ubatch = _current()
    if ubatch is not None:
        ubatch.run_recv_hook()


def compute_mark() -> Mark | None:
    """A mark of everything computed so far, on whichever stream this micro-batch is.

    A library that waits for the communication stream instead removes the overlap. None outside.
    """
    ubatch = _current()
    return None if ubatch is None else ubatch.device.mark(ubatch.compute)


def active() -> bool:
    """Whether a micro-batch runs here."""
    return _current() is not None


def index() -> int:
    """The number of this micro-batch, from 0; 0 outside."""
    ubatch = _current()
    return 0 if ubatch is None else ubatch.index


def count() -> int:
    """Micro-batches of this step; 1 outside."""
    ubatch = _current()
    return 1 if ubatch is None else ubatch.count


def token_offset() -> int:
    """The first token of this micro-batch in the whole batch; 0 outside."""
    ubatch = _current()
    return 0 if ubatch is None else ubatch.token_offset


def _current() -> MicroBatch | None:
    context = current_forward_context()
    return None if context is None else context.ubatch
