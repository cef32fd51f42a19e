"""The engine's door to torch.distributed: what ranks exchange in a layer, as operators of torch.

Operators, so that a graph can hold them and a compiler need not look inside. Registered through
``Library``: a call costs a tenth of what a custom operator in Python does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from graphrt import Exchange
from graphrt.errors import RankLostError


class RankGroup:
    """The ranks that share a model, of the default process group.

    ``number``: by which the operators find it. ``timeout_s``: most seconds that a rank waits in
    them: on a CPU they raise ``RankLostError`` then, on a GPU ``wait_for`` does, and ends
    ``ranks``. ``close`` has to be called before the process group is destroyed.
    Errors: ``RankLostError`` where the others do not come, on a CPU.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float = 600.0,
        ranks: Exchange | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        backend = "nccl" if device.type == "cuda" else "gloo"
        with _told(device):
            self.group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        self._device, self._ranks = device, ranks
        self._limit(timeout_s)
        self.number = max(_groups, default=0) + 1
        _groups[self.number] = self
        if ranks is not None:
            ranks.model_groups.append(self.group)
        # Communicators are built by the first call, which may not be inside a capture.
        row = torch.zeros((world, 1), device=device)
        self.all_to_all(torch.empty_like(row), row, [1] * world, [1] * world)
        self.all_reduce(row)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_rows: Sequence[int],
        sent_rows: Sequence[int],
    ) -> None:
        """Send rows of ``sent`` to each rank, and receive some from each; both lie by rank.

        Shapes: ``received`` [sum(received_rows), width], ``sent`` [sum(sent_rows), width].
        """
        torch.ops.graphrt_llm.all_to_all(
            received, sent, list(received_rows), list(sent_rows), self.number
        )

    def all_reduce(self, x: Tensor) -> None:
        """Add up ``x``, contiguous and of one shape on every rank, in place: equal bits on all."""
        torch.ops.graphrt_llm.all_reduce(x, self.number)

    @contextmanager
    def limited(self, timeout_s: float) -> Iterator[None]:
        """Wait ``timeout_s`` at most inside."""
        before = self._timeout_s
        self._limit(timeout_s)
        try:
            yield
        finally:
            self._limit(before)

    def _limit(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Torch's watchdog ends the process of a GPU: later than ``wait_for``, which says why.
        most = timeout_s if self._device.type == "cpu" else 2 * timeout_s
        self.group._get_backend(self._device)._set_default_timeout(timedelta(seconds=most))

    def wait_for(self, event: torch.Event) -> None:
        """Wait on the host until the device has reached ``event``, and no longer than the time-out.

        Nothing else sees that a collective inside a graph does not end: torch's watchdog knows
        those alone that were called. Errors: ``RankLostError``; ``ranks`` ends with it, so that the
        device ends what it waits in, whose results are worth nothing, and no step follows.
        """
        until = monotonic() + self._timeout_s
        while not event.query():
            if monotonic() > until:
                error = RankLostError(
                    "a step of ranks that share a model",
                    expected=f"its end on the device within {self._timeout_s:g} s",
                    found="a collective that still waits for another rank",
                    do="see the error of the other ranks, and start all of them again",
                )
                if self._ranks is not None:
                    self._ranks.give_up(error)
                raise error

    def close(self) -> None:
        """Destroy the group. Idempotent."""
        if _groups.pop(self.number, None) is not None:
            group, self.group = self.group, None
            if self._ranks is not None and group in self._ranks.model_groups:
                self._ranks.model_groups.remove(group)
            dist.destroy_process_group(group)


_groups: dict[int, RankGroup] = {}


def _all_to_all(
    received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], group: int
) -> None:
    with _told(sent.device):
        dist.all_to_all_single(received, sent, received_rows, sent_rows, group=_groups[group].group)


def _all_reduce(x: Tensor, group: int) -> None:
    with _told(x.device):
        dist.all_reduce(x, group=_groups[group].group)


@contextmanager
def _told(device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if device.type != "cpu":
            raise  # CUDA's own, which says whether the device can go on.
        raise RankLostError(
            "an exchange between the ranks of a layer",
            expected="every rank in it, within the time-out of ranks",
            found=str(error),
            do="see the error of the other ranks",
        ) from error


_library = torch.library.Library("graphrt_llm", "FRAGMENT")
_library.define(
    "all_to_all(Tensor(a!) received, Tensor sent, int[] received_rows, int[] sent_rows, int group)"
    " -> ()"
)
_library.define("all_reduce(Tensor(a!) x, int group) -> ()")
for _name, _run in (("all_to_all", _all_to_all), ("all_reduce", _all_reduce)):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, lambda *args: None, "Meta")
