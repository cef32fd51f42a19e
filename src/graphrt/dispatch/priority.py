"""Which key to capture next, where a plan is captured in parts: what steps missed most often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode
from graphrt.config import Plan
from graphrt.dispatch.dispatcher import NOTHING, CUDAGraphDispatcher
from graphrt.errors import ConfigError

Key = tuple[RuntimeMode, BatchDescriptor]


class CapturePriority:
    """The keys of ``plan`` that are left to capture, in the order in which they are wanted.

    Left is what is ``NOT_CAPTURED_YET``: before the first ``publish``, everything. Equal misses
    give equal orders.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._own = {item: item for item in plan.capture_order}
        # How often each key was missed, the latest last.
        self._misses: dict[Key, int] = {}
        # Dispatches as if nothing were left. Made when it is asked for: it serves no step.
        self._prospects: CUDAGraphDispatcher | None = None
        self._others: Mapping[Key, MissReason] = MappingProxyType({})
        self.left: tuple[Key, ...] = plan.capture_order
        """In capture order."""

    def publish(self, missing: Mapping[Key, MissReason]) -> None:
        """Learn which keys no graph serves now, and why."""
        yet = MissReason.NOT_CAPTURED_YET
        self.left = tuple(item for item in self._plan.capture_order if missing.get(item) is yet)
        self._others = {item: why for item, why in missing.items() if why is not yet}
        self._prospects = None

    def key_for(
        self,
        num_tokens: int,
        uniform: bool = False,
        num_active_loras: int = 0,
        exclude: frozenset[RuntimeMode] = NOTHING,
    ) -> Key | None:
        """The key that serves such a step once nothing is left; None if it runs eager even then.

        Errors: ``BatchError`` for what is no batch.
        """
        if self._prospects is None:
            self._prospects = CUDAGraphDispatcher(self._plan, unpublished=self._others)
        mode, key, _ = self._prospects.dispatch(num_tokens, uniform, num_active_loras, exclude)
        return None if mode is RuntimeMode.NONE else (mode, key)

    def note_miss(
        self, num_tokens: int, uniform: bool, num_active_loras: int, exclude: frozenset[RuntimeMode]
    ) -> None:
        """Count a step that ran eager because its key is left."""
        item = self.key_for(num_tokens, uniform, num_active_loras, exclude)
        if item is not None:
            self._misses[item] = self._misses.pop(item, 0) + 1

    def order(self, first: Key | None = None) -> list[Key]:
        """What is left: ``first``, then the most missed, the latest before others, then the rest.

        Errors: ``ConfigError`` if ``first`` is no key of the plan.
        """
        wanted = [] if first is None else self.own([first])
        missed = list(reversed(self._misses))
        missed.sort(key=self._misses.__getitem__, reverse=True)  # Stable, also in reverse.
        is_left = frozenset(self.left)
        return [item for item in dict.fromkeys((*wanted, *missed, *self.left)) if item in is_left]

    def own(self, keys: Iterable[Key]) -> list[Key]:
        """The plan's own objects for ``keys``: wrappers compare keys by identity first.

        Errors: ``ConfigError`` for what is no key of the plan.
        """
        keys = tuple(keys)
        strangers = [item for item in keys if item not in self._own]
        if strangers:
            raise ConfigError(
                "keys to capture",
                expected="keys of the plan, each with its mode",
                found=", ".join(map(str, strangers)),
                do="take the pairs from plan.capture_order",
            )
        return [self._own[item] for item in keys]
