"""How one batch runs: as the replay of a key's program, eagerly, or as both, compared.

Deciding which is the runtime's; what every way of running has in common is here: inputs staged into
static buffers, resources prepared once, the decision in the forward context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.context import ForwardContext
from graphrt.events import Observer
from graphrt.graphs import (
    BoundBuffers,
    BufferSet,
    CUDAGraphWrapper,
    OutputSpec,
    Resource,
    StateGuard,
)
from graphrt.verify.hoststate import HostState
from graphrt.verify.replaycheck import check_replay

TOKENS = "tokens"
REQUESTS = "requests"
"""The two axes of an engine's batch; every ``BufferSpec`` of a runtime uses these names."""


def axis_sizes(key: BatchDescriptor, max_num_seqs: int) -> Mapping[str, int]:
    """The padded sizes of a key's static inputs."""
    # Pieces do not depend on requests, their static inputs still have a size: the most a batch
    # of that many tokens can bring.
    num_reqs = key.num_reqs
    if num_reqs is None:
        num_reqs = min(key.num_tokens, max_num_seqs)
    return {TOKENS: key.num_tokens, REQUESTS: num_reqs}


class Launch(NamedTuple):
    """What one key's replay needs, looked up once."""

    mode: RuntimeMode
    key: BatchDescriptor
    bound: BoundBuffers
    take: Callable[[Mapping[str, int]], Any]
    wrapper: CUDAGraphWrapper


class Steps:
    """The ways to run ``model`` on a batch. Each ends the validity of outputs returned before."""

    def __init__(
        self,
        model: Callable[..., Any],
        buffers: BufferSet,
        outputs: OutputSpec,
        resources: tuple[Resource, ...],
        state: StateGuard | None,
        verify_tolerance: float | None,
        observer: Observer | None,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.outputs = outputs
        self.resources = resources
        self.state = state
        self._verify_tolerance = verify_tolerance
        self._observer = observer
        # Eager outputs have their real size where it is an axis, and may be views of static buffers
        # as graph outputs are of graph storage. Another length or policy holds for them too.
        lengths = [length for dims in (outputs.axes or {}).values() for length in dims.values()]
        self._is_eager_as_is = outputs.policy == "view" and not any(map(callable, lengths))

    def launch(self, wrapper: CUDAGraphWrapper, key: BatchDescriptor) -> Launch:
        outputs = wrapper.concrete_cudagraph_entries[key].outputs
        take = self.outputs.bind(outputs).take
        return Launch(wrapper.runtime_mode, key, self.buffers.bind(key), take, wrapper)

    def replay(
        self, launch: Launch, sizes: Mapping[str, int], values: Mapping[str, Any], live: Any
    ) -> Any:
        mode, key, bound, take, wrapper = launch
        self.outputs.expire()
        bound.stage(sizes, values)
        for resource in self.resources:
            resource.prepare(key, live)
        with ForwardContext(mode, key, attn_metadata=live):
            if torch.is_grad_enabled():
                # Gaps run the model's Python; what they return must not grow a graph of its own.
                with torch.no_grad():
                    wrapper(**bound.views)
            else:
                wrapper(**bound.views)
        return take(sizes)

    def eager(
        self,
        key: BatchDescriptor,
        sizes: Mapping[str, int],
        values: Mapping[str, Any],
        live: Any,
    ) -> Any:
        bound = self.buffers.live(sizes)
        self.outputs.expire()
        bound.stage(sizes, values)
        for resource in self.resources:
            resource.prepare(key, live)
        with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=live):
            outputs = self.model(**bound.views)
        if self._is_eager_as_is:
            return outputs
        return self.outputs.bind(outputs).take(sizes)

    def verified(
        self,
        launch: Launch,
        sizes: Mapping[str, int],
        values: Mapping[str, Any],
        live: Any,
        before_warmup: HostState | None = None,
    ) -> Any:
        """Run one step eagerly and as a replay from the same state; raise if they differ.

        Eager means the model itself on the key's *padded* views: padding is not bit-neutral,
        because another number of rows may choose another kernel. Resources are prepared once.
        """
        mode, key, bound, take, wrapper = launch
        self.outputs.expire()
        bound.stage(sizes, values)
        for resource in self.resources:
            resource.prepare(key, live)

        def run_eager() -> Any:
            with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, attn_metadata=live):
                return self.outputs.bind(self.model(**bound.views)).take(sizes)

        def run_replay() -> Any:
            bound.stage(sizes, values)  # Again: the eager run may write buffers.
            with torch.no_grad(), ForwardContext(mode, key, attn_metadata=live):
                wrapper(**bound.views)
            return take(sizes)

        return check_replay(
            mode=mode,
            key=key,
            run_eager=run_eager,
            run_replay=run_replay,
            state=self.state,
            runnable=self.model,
            before_warmup=before_warmup,
            tolerance=self._verify_tolerance,
            observer=self._observer,
        ).outputs
