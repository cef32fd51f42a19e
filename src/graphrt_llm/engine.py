"""The engine: requests in, tokens out, one step at a time.

A step is schedule, run, sample, store the tokens. The host reads the device once a step, for the
sampled tokens. After a failure in between the requests are as before, and the next step repeats it.

With ``overlap`` a call launches one step and finishes the previous one, so that the host prepares a
step while the device runs another. A request that stops at a token then computes one token too
many, which is dropped; the tokens that it gets do not change.

An engine that captures by priority captures between schedule and run, when the batch has its blocks
already: the graph of this batch, if it is missing, else another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, Self, cast, overload
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from graphrt import (
    BatchDescriptor,
    Decision,
    Exchange,
    Observer,
    Reason,
    Runtime,
    RuntimeMode,
    RuntimeReport,
    interrupted_between_steps,
)
from graphrt.errors import RankLostError, RankTimeoutError
from graphrt.files import checked_path
from graphrt_llm.assembly import TINY_CONFIG, EngineParts, assemble
from graphrt_llm.attention import AttentionBackend, AttentionChoice, SwitchingAttention
from graphrt_llm.config import EngineConfig
from graphrt_llm.errors import (
    AdapterError,
    AdapterInUseError,
    EngineConfigError,
    EngineStateError,
    ModelConfigError,
    RequestError,
    UnknownAdapterError,
)
from graphrt_llm.lora import LoRAAdapter, random_lora
from graphrt_llm.lora_files import load_lora
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.request import Request, RequestOutput, SamplingParams
from graphrt_llm.runner import EVERY_GRAPH, LaunchedStep, Runner
from graphrt_llm.sampling import Sampler, derive_seed
from graphrt_llm.scheduler import DraftCounts, ScheduledBatch


class StepResult(NamedTuple):
    """What one call of ``step`` did.

    Without unfinished requests: nothing, and no decision. With ``overlap``, the outputs are those
    of the previous step; a call that has nothing to launch still returns these, with no tokens, no
    requests and no decision of its own.

    ``outputs``: Of the requests that got tokens.
    ``num_tokens``: Tokens of the batch.
    ``num_reqs``: Its requests.
    ``uniform``: Whether it was a uniform decode batch.
    ``decision``: What ran, and why.
    ``num_preempted``: Requests that had to give their cache blocks back.
    ``all_idle``: Of an engine of several ranks: none of them had anything to compute.
    """

    outputs: tuple[RequestOutput, ...]
    num_tokens: int
    num_reqs: int
    uniform: bool
    decision: Decision | None
    num_preempted: int
    all_idle: bool = False


def _config_of(config: EngineConfig | None) -> EngineConfig:
    if config is not None and not isinstance(config, EngineConfig):
        raise EngineConfigError("config", expected="an EngineConfig", found=repr(config))
    return config or EngineConfig()


class LLMEngine:
    """Serves requests through a runtime and a device that it owns and closes.

    Made by ``from_model_dir``, ``with_random_weights`` or ``tiny``; a context manager, which closes
    it. Not thread-safe.

    ``ranks``, given where it is made, is the exchange with the other ranks of a data-parallel
    engine, which the caller closes after it. Each rank has an engine with requests of its own. All
    call ``capture`` together, and then ``step`` equally often, also without requests, until a step
    says ``all_idle``: a step of one rank waits for those of the others. With
    ``EngineConfig.tensor_parallel`` all add the same requests in the same order instead.

    ``runtime`` is the ``graphrt.Runtime`` of its model, ``scheduler`` has the requests, ``limits``
    are the largest batch's, ``attention`` says which back end serves and why, ``overlap`` whether
    tokens come one call late, ``vocab_size`` which token ids exist.
    """

    runtime: Runtime
    attention_backend: AttentionBackend

    def __init__(self, parts: EngineParts) -> None:
        self.runtime = parts.runtime
        self.scheduler = parts.scheduler
        self.attention = parts.attention
        self.attention_backend = parts.attention_backend
        self.vocab_size = parts.model_config.vocab_size
        self.limits = limits = parts.scheduler.limits
        self._examples = parts.examples
        self._eos_token_ids = frozenset(parts.model_config.eos_token_ids)
        config, self._ranks = parts.config, parts.ranks
        self._seed = config.seed
        self._serves_alike = config.tensor_parallel
        """All ranks serve the same requests."""
        # Of requests and tokens, in their order: ranks that serve alike have the same.
        self._digest = 0
        self._model_config = parts.model_config
        self._lora = parts.lora
        self._adapters: dict[str, LoRAAdapter] = {}
        # What is in each slot on the device; None also while it is written.
        self._loaded: list[object] = [None] * limits.max_loras
        self._group = parts.group
        # While the kernels of another attention backend are being built.
        self._switching = getattr(parts.attention_backend, "switching", None)
        # Graphs that steps may still capture.
        planned = self.runtime.plan.capture_order
        self._num_missing = len(planned) if config.capture == "by_priority" else 0
        self._device = self.runtime.device
        place = self._device.torch_device
        excludes = getattr(parts.attention_backend, "excludes", None)
        is_cuda = place.type == "cuda"
        self.overlap = is_cuda and limits.query_len == 1
        if config.overlap is not None:
            self.overlap = config.overlap
        self._runner = Runner(self.runtime, limits, pinned=is_cuda, excludes=excludes)
        most_rows = limits.max_num_seqs * limits.query_len
        self._sampler = Sampler(max_rows=most_rows, device=place)
        self._num_added = 0
        # Launched, oldest first, their tokens not read: at most one between two calls of step, two
        # where a step failed to read the first one's.
        self._in_flight: deque[LaunchedStep] = deque()
        # From the begin of a launch until it is in flight or its tokens are read.
        self._is_launching = False
        # Not returned yet: a step may fail after it has finished the previous one, or after it has
        # preempted requests.
        self._unreturned: list[RequestOutput] = []
        self._num_preempted = 0
        self._is_closed = False

    @property
    def rank(self) -> int:
        """Which of ``world`` ranks this is; 0 where there is one."""
        return 0 if self._ranks is None or self._serves_alike else self._ranks.rank

    @property
    def world(self) -> int:
        """How many ranks serve requests of their own; 1 where all serve the same."""
        return 1 if self._ranks is None or self._serves_alike else self._ranks.world

    @property
    def max_request_tokens(self) -> int:
        """Most prompt and output tokens of one request: what fits the context, and the cache."""
        in_cache = (self.limits.num_blocks - 1) * self.limits.block_size
        in_cache -= self.limits.query_len - 1
        return min(self.limits.max_model_len, in_cache)

    @classmethod
    def from_model_dir(
        cls,
        model_dir: str | Path,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        ranks: Exchange | None = None,
    ) -> Self:
        """An engine for the model in ``model_dir``: a HF ``config.json`` and safetensors.

        Errors: those of the model and weight readers, which name file and tensor;
        ``EngineConfigError``; graphrt's ``ConfigError``.
        """
        directory = checked_path("model directory", model_dir, ModelConfigError)
        parts = assemble(
            ModelConfig.from_directory(directory),
            _config_of(config),
            model_dir=directory,
            observer=observer,
            ranks=ranks,
        )
        return cls(parts)

    @classmethod
    def with_random_weights(
        cls,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        ranks: Exchange | None = None,
    ) -> Self:
        """An engine for a model without a checkpoint; ``config.seed`` decides its weights.

        Errors: ``EngineConfigError``; graphrt's ``ConfigError``.
        """
        parts = assemble(model_config, _config_of(config), observer=observer, ranks=ranks)
        return cls(parts)

    @classmethod
    def tiny(
        cls,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        ranks: Exchange | None = None,
    ) -> Self:
        """``with_random_weights`` of the built-in tiny model. Default: small limits, float64."""
        config = config or TINY_CONFIG
        return cls.with_random_weights(ModelConfig.tiny(), config, observer=observer, ranks=ranks)

    @property
    def is_building(self) -> bool:
        """True while the kernels of another attention backend are built, which steps will take."""
        return self._switching is not None

    def capture(
        self, progress: Callable[[int, int, BatchDescriptor], None] | None = None
    ) -> RuntimeReport:
        """Capture every graph of the plan. The largest ones need the whole cache to themselves.

        Errors: ``EngineStateError`` while requests are unfinished; those of ``Runtime.capture``.
        """
        self._require_idle("capture")
        # Half, so that a rank left alone in a layer is in time where the others wait for it.
        group, most_s = self._group, self.runtime.config.ranks.capture_timeout_s / 2
        with nullcontext() if group is None else group.limited(most_s):
            report = self.runtime.capture(progress)
        self._num_missing = 0  # Only another call of this method retries what failed.
        return report

    def add_request(
        self,
        prompt_token_ids: Sequence[int] | NDArray[np.int64],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        lora: str | None = None,
    ) -> str:
        """Queue a request and return its id.

        ``lora``: the name of its adapter; None: the model as it is. It waits until fewer than
        ``max_loras`` other adapters are in use.
        Errors: ``RequestError`` for an empty prompt, a token that the model does not have, or an id
        in use; ``PromptTooLongError`` if it could never be served; ``UnknownAdapterError``.
        """
        self._require_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling parameters", expected="SamplingParams, or None", found=repr(params)
            )
        index = self._num_added
        request_id = f"request-{index}" if request_id is None else request_id
        if not isinstance(request_id, str):
            raise RequestError("request_id", expected="a string, or None", found=repr(request_id))
        stop = frozenset(params.stop_token_ids)
        request = Request(
            request_id,
            self._checked_prompt(request_id, prompt_token_ids),
            params,
            seed=derive_seed(self._seed, index) if params.seed is None else params.seed,
            stop_token_ids=stop if params.ignore_eos else stop | self._eos_token_ids,
            adapter=None if lora is None else self._adapter(lora),
        )
        if any(output.request_id == request_id for output in self._unreturned):
            raise RequestError(
                f"request {request_id!r}",
                expected="an id that no other request has",
                found="one whose last tokens no step has returned yet",
                do="step, or abort it, first.",
            )
        was_idle = not self.has_unfinished()
        self.scheduler.add(request)
        # One that is refused uses up no number, and with it no seed.
        self._num_added += 1
        if self._serves_alike:
            # Not its id, which each rank may choose for itself.
            self._tell((request.prompt_token_ids, params, request.seed), anew=was_idle)
        return request_id

    @property
    def drafts(self) -> DraftCounts:
        """What speculative decoding has drafted and accepted so far; zeros without it."""
        return self.scheduler.drafts

    @property
    def loras(self) -> tuple[str, ...]:
        """The names of the adapters that requests may name, in the order they were added."""
        return tuple(self._adapters)

    def add_lora(
        self, name: str, directory: str | Path | None = None, *, seed: int = 0, rank: int = 8
    ) -> None:
        """Let requests name an adapter: that of ``directory`` in PEFT's format, or a random one.

        It is read, and checked, now; any number may be added. An adapter is copied to the device
        when a request with it starts, into memory that graphs know already: no graph changes.
        ``seed`` and ``rank`` are those of a random one.

        Errors: ``AdapterError`` and those below it, and ``WeightsError``; nothing is added then.
        """
        self._require_open()
        weights = self._lora
        if weights is None:
            raise AdapterError(
                f"adapter {name!r}",
                expected="an engine with RuntimeConfig.max_loras above 0",
                found="one without adapters",
            )
        if not isinstance(name, str) or name in self._adapters:
            raise AdapterError(
                f"adapter {name!r}",
                expected="a name that no other adapter has",
                found=f"{', '.join(map(repr, self._adapters)) or 'a ' + type(name).__name__}",
                do="remove_lora(name) first, or choose another name.",
            )
        if directory is not None:
            adapter = load_lora(directory, self._model_config, max_rank=weights.max_rank)
        elif type(rank) is int and 1 <= rank <= weights.max_rank:
            adapter = random_lora(self._model_config, rank=rank, seed=seed)
        else:
            raise AdapterError(
                f"adapter {name!r}: rank",
                expected=f"1 to EngineConfig.max_lora_rank = {weights.max_rank}",
                found=repr(rank),
            )
        overflow = weights.first_overflow(adapter)
        if overflow is not None:
            layer, part = overflow
            raise AdapterError(
                f"adapter {name!r}, layer {layer}, {part}",
                expected=f"values that are finite in {weights.qkv_a.dtype}, also once scaled",
                found=f"others, with a scaling of {adapter.scaling:g}",
            )
        self._adapters[name] = adapter

    def remove_lora(self, name: str) -> None:
        """Forget an adapter; its name may be given to another.

        Errors: ``UnknownAdapterError``; ``AdapterInUseError`` while unfinished requests use it.
        """
        self._require_open()
        adapter = self._adapter(name)
        users = self.scheduler.users_of(adapter)
        if users:
            raise AdapterInUseError(
                f"adapter {name!r}",
                expected="no unfinished request that uses it",
                found=f"{len(users)}: {', '.join(users[:4])}",
                do="let them finish, or abort them, first.",
            )
        self.scheduler.adapter_slots.forget(adapter)
        # Its weights on the host go at once, not when another adapter needs the slot.
        self._loaded = [None if held is adapter else held for held in self._loaded]
        del self._adapters[name]

    def _adapter(self, name: str) -> LoRAAdapter:
        adapter = self._adapters.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise UnknownAdapterError(
                f"adapter {name!r}",
                expected="one that add_lora has added",
                found=", ".join(map(repr, self._adapters)) or "none was added",
            )
        return adapter

    def has_unfinished(self) -> bool:
        """True if ``step`` has tokens to compute, or to return because a failed step did not."""
        return self.scheduler.has_unfinished() or bool(self._unreturned)

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now; returns its tokens that a failed step did not return.

        A request that has already ended keeps its reason if such tokens are left of it.
        Errors: ``UnknownRequestError``; ``EngineStateError`` if the engine is closed.
        """
        self._require_open()
        late = [output for output in self._unreturned if output.request_id == request_id]
        has_ended = bool(late) and late[-1].finish_reason is not None
        if self._serves_alike and not has_ended:
            known = [*self.scheduler.running, *self.scheduler.waiting]
            self._tell([request.request_id == request_id for request in known])
        output = late[-1] if has_ended else self.scheduler.abort(request_id)
        self._unreturned = [other for other in self._unreturned if other.request_id != request_id]
        tokens = tuple(token for output in late for token in output.new_token_ids)
        return output._replace(new_token_ids=tokens)

    def step(self, *, exclude: frozenset[RuntimeMode] = frozenset()) -> StepResult:
        """Advance the batch by one step: one token for each request that decodes, and prompts.

        ``exclude``: modes that this step may not run, because it does what their graphs do not
        (it takes the output of an encoder, or returns log-probabilities of prompts). A step for
        which the attention backend ``excludes`` modes does not run these either.

        An engine that captures by priority first captures one missing graph, even if it has nothing
        to launch; such a call returns the tokens of its own step, with ``overlap`` too.

        Errors: ``OutOfBlocksError``; those of ``Runtime.step``, and of ``Runtime.capture`` for the
        one graph. The requests are then as they were.
        """
        self._require_open()
        # There are two host storages: of two steps in flight one must end before the next begins.
        while len(self._in_flight) > 1 or (self._in_flight and self.scheduler.would_preempt()):
            self._finish_oldest()
        if self._switching is not None:
            self._poll_attention(self._switching)
        batch = self.scheduler.schedule()
        if batch is None and self._ranks is not None and self._in_flight:
            # Others may wait for the requests that end with these tokens. Only a rank without any
            # says that it is idle, because all ranks stop when all say so.
            while self._in_flight:
                self._finish_oldest()
            batch = self.scheduler.schedule()
        if batch is not None:
            self._num_preempted += len(batch.preempted)
        has_captured = self._num_missing > 0 and self._capture_next(batch, exclude)
        if batch is not None and not self.overlap:
            token_ids = self._launch(batch, exclude).wait()
            self._is_launching = False
            self._keep(self.scheduler.update(batch, token_ids))
        else:
            if batch is not None:
                try:
                    launched = self._launch(batch, exclude)
                except (RankLostError, RankTimeoutError):
                    raise  # Tokens in flight may wait for that rank too, and no step follows.
                except BaseException:
                    # A replay that failed half-way may have overwritten graph storage, and with it
                    # the tokens in flight: the repeated step takes them from the host.
                    while self._in_flight:
                        self._finish_oldest()
                    raise
                self._in_flight.append(launched)
                self._is_launching = False
                self.scheduler.advance(batch)
            # After a capture none stays in flight: its tokens have waited long enough.
            while len(self._in_flight) > (batch is not None and not has_captured):
                self._finish_oldest()
        all_idle = batch is None and self._ranks is not None and not self.runtime.step_idle()
        outputs, self._unreturned = tuple(self._unreturned), []
        num_preempted, self._num_preempted = self._num_preempted, 0
        if batch is None:
            return StepResult(outputs, 0, 0, False, None, num_preempted, all_idle)
        return StepResult(
            outputs=outputs,
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform=batch.uniform,
            decision=self.runtime.last_decision,
            num_preempted=num_preempted,
        )

    def _poll_attention(self, switching: SwitchingAttention) -> None:
        """Take the attention backend whose kernels are built now, if they are."""
        switch = switching.poll()
        if switch is None:
            return
        name, reason = self.attention
        end = f"not built: {switch.failure}" if switch.failure else "it is built now"
        choice = AttentionChoice(name, f"{reason}; {end}")
        keys = [(RuntimeMode.FULL, key) for key in switch.keys]
        if not switch.failure:
            # Those that failed with the kernels of before are tried again.
            missing = self.runtime.report().missing
            keys += [key for key, why in missing.items() if why is Reason.CAPTURE_FAILED]
        if keys:
            self._keep_tokens()
        self.runtime.withdraw(keys, f"attention {choice.reason}")
        # Only now, so that the next step goes on with what an interrupt has left.
        self._num_missing += len(keys)
        self.attention, self._switching = choice, None

    def _capture_next(self, batch: ScheduledBatch | None, exclude: frozenset[RuntimeMode]) -> bool:
        """Capture the graph of ``batch`` if it is missing, or else another; True if one was tried.

        A graph whose example needs more blocks than are free waits.
        """
        wanted = None
        if batch is not None:
            wanted = self.runtime.key_for(
                batch.num_tokens,
                uniform=batch.uniform,
                num_active_loras=len(batch.active_loras),
                exclude=exclude,
            )
        is_tried = False

        def allow(key: BatchDescriptor) -> bool:
            nonlocal is_tried
            is_tried = self._examples.can_fill(key)
            if is_tried:
                self._keep_tokens()
            return is_tried

        self._num_missing = self.runtime.capture_next(first=wanted, allow=allow)
        return is_tried

    def _keep_tokens(self) -> None:
        """Copy the tokens in flight, which are the next step's input, before graph storage that
        they may be in is freed or overwritten."""
        if self._in_flight:
            step = self._in_flight[-1]
            step.tokens = step.tokens.clone()

    def _launch(self, batch: ScheduledBatch, exclude: frozenset[RuntimeMode]) -> LaunchedStep:
        """Run and sample ``batch`` without waiting for the device."""
        previous = self._in_flight[-1] if self._in_flight else None
        storage = self._free_storage()
        self._load_adapters()
        logits, greedy = self._runner.run(
            batch,
            self.scheduler.input_batch,
            exclude=exclude,
            previous=previous,
            storage=storage,
        )
        q, requests = batch.query_len, batch.requests
        ends = (batch.starts + batch.query_lens).tolist()
        indices = [
            end - len(request.prompt_token_ids) for request, end in zip(requests, ends, strict=True)
        ]
        if q > 1:
            # Each position is sampled as if all before it were accepted: its draw is then the one
            # that decoding token by token makes there.
            requests = tuple([request for request in requests for _ in range(q)])
            indices = [index + place for index in indices for place in range(1 - q, 1)]
            logits, greedy = logits.flatten(0, 1), greedy.flatten()
        tokens = self._sampler.sample(
            logits, requests, greedy=greedy, indices=indices, storage=storage
        )
        return LaunchedStep(batch, tokens, storage, self._group)

    def _load_adapters(self) -> None:
        """Copy adapters that the scheduler has given a slot to it."""
        for place, adapter in enumerate(self.scheduler.adapter_slots.adapters):
            if isinstance(adapter, LoRAAdapter) and adapter is not self._loaded[place]:
                assert self._lora is not None, "without adapters there are no slots"
                self._loaded[place] = None
                self._lora.load(place, adapter)
                self._loaded[place] = adapter

    def _free_storage(self) -> int:
        """The host storage that the device does not read; the caller ends ``_is_launching``."""
        if self._is_launching:
            # A launch that raised may have begun to copy from the storage that this one fills.
            self.runtime.library.synchronize()
        self._is_launching = True
        return 1 - self._in_flight[-1].storage if self._in_flight else 0

    def _finish_oldest(self) -> None:
        """Wait for the tokens of the oldest step in flight and store them."""
        token_ids = self._in_flight[0].wait()
        batch = self._in_flight.popleft().batch
        self._keep(self.scheduler.resolve(batch, token_ids))

    def _keep(self, outputs: list[RequestOutput]) -> None:
        self._unreturned += outputs
        if outputs and self._serves_alike:
            self._tell([output.new_token_ids for output in outputs])

    def _tell(self, done: object, *, anew: bool = False) -> None:
        """Have ranks that serve alike find out in their next step if another has not done this:
        one that continued with other tokens would give all of them wrong ones. ``anew``: of what
        was before nothing is left."""
        self._digest = crc32(repr(done).encode(), 0 if anew else self._digest)
        self.runtime.tell_batch(self._digest)

    @overload
    def generate(
        self,
        prompts: Sequence[int],
        params: SamplingParams | None = None,
        loras: str | None = None,
    ) -> list[int]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        loras: str | Sequence[str | None] | None = None,
    ) -> list[list[int]]: ...

    def generate(
        self,
        prompts: Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        loras: str | Sequence[str | None] | None = None,
    ) -> list[int] | list[list[int]]:
        """Serve one prompt, or several at a time, to their ends; returns their output tokens.

        ``prompts``: the token ids of one prompt (``[1, 2, 3]`` gives a list of tokens), or several
        prompts (``[[1, 2, 3]]`` gives a list of such lists, in their order). Arrays of 1 or 2
        dimensions will do. ``params``: one for all, or one for each. ``loras``: the name of the
        adapter of all, or of each. If anything fails, all of them are aborted; an interrupt
        (Ctrl-C) takes effect between two steps.

        Errors: ``RequestError`` for what is neither; ``EngineStateError`` while other requests are
        unfinished; those of ``add_request`` and ``step``.
        """
        self._require_idle("generate")
        is_single = _is_one_prompt(prompts)
        if is_single:
            prompts = cast("list[Sequence[int]]", [prompts])
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        is_for_each = hasattr(loras, "__len__") and not isinstance(loras, str)
        names = cast("Sequence[str | None]", loras if is_for_each else [loras] * len(prompts))
        for what, given in (("sampling parameters", each), ("names of adapters", names)):
            if len(given) != len(prompts):
                raise RequestError(
                    "generate",
                    expected=f"{what} for {len(prompts)} prompts",
                    found=f"{len(given)}",
                )
        tokens: dict[str, list[int]] = {}
        try:
            for prompt, its_params, lora in zip(prompts, each, names, strict=True):
                ids = cast("Sequence[int]", prompt)
                tokens[self.add_request(ids, its_params, lora=lora)] = []
            with interrupted_between_steps() as check_interrupt:
                # With other ranks until none of them has work.
                goes_on = self._ranks is not None or self.has_unfinished()
                while goes_on:
                    result = self.step()
                    for output in result.outputs:
                        tokens[output.request_id] += output.new_token_ids
                    check_interrupt()
                    is_done = result.all_idle or self._ranks is None
                    goes_on = not is_done or self.has_unfinished()
        finally:
            self.abort_all()
        served = list(tokens.values())
        return served[0] if is_single else served

    def abort_all(self) -> None:
        """End every unfinished request now, and drop tokens that no step has returned."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request.request_id)
        self._unreturned = []
        self._num_preempted = 0

    def top2_margin(self, token_ids: Sequence[int], lora: str | None = None) -> float:
        """The difference of the two largest logits after ``token_ids``, computed without graphs.

        ``lora``: the name of an adapter. Errors: ``EngineStateError`` while requests are
        unfinished; those of ``add_request``.
        """
        self._require_idle("top2_margin")
        if self.world > 1:
            raise EngineStateError(
                "top2_margin",
                expected="an engine of one rank, or of ranks that serve the same requests",
                found="several, which would have to run it together",
            )
        name = "top2-margin"
        once = SamplingParams(max_tokens=1)
        adapter = None if lora is None else self._adapter(lora)
        prompt = self._checked_prompt(name, token_ids)
        self.scheduler.add(Request(name, prompt, once, seed=0, adapter=adapter))
        if self._serves_alike:
            self._tell(prompt, anew=True)
        try:
            while True:
                batch = self.scheduler.schedule()
                assert batch is not None, "the request that was just added is unfinished"
                self._load_adapters()
                logits, greedy = self._runner.run(
                    batch,
                    self.scheduler.input_batch,
                    exclude=EVERY_GRAPH,
                    storage=self._free_storage(),
                )
                # Reading the tokens also waits until the host inputs may be filled again.
                token_ids = greedy.flatten().tolist()
                self._is_launching = False
                if batch.completes.all():
                    # The next token follows the last one of a prompt, or the one before drafts.
                    is_prompt = batch.num_drafts is None or batch.num_drafts[0] < 0
                    row = logits.view(-1, self.vocab_size)[-1 if is_prompt else 0]
                    first, second = row.topk(2).values.double().tolist()
                    return float(first - second)
                self.scheduler.update(batch, token_ids)
        finally:
            self.abort_all()

    def close(self) -> None:
        """Free graphs, weights and cache; drop unfinished requests. Idempotent.

        Every later call but this one raises ``EngineStateError``; ``has_unfinished`` is False.
        Whoever has kept ``runtime`` or ``attention_backend`` keeps their memory too.
        Errors: ``CaptureInProgressError`` while a capture scope of the runtime is open;
        ``RankLostError`` where the device waits for another rank, as ``Runtime.close`` says.
        """
        if self._is_closed:
            return
        self.abort_all()
        try:
            self.runtime.close()
        except RankLostError:
            self._drop_rest(is_idle=self._device.ends_within(0.1))
            raise
        self._drop_rest()

    def _drop_rest(self, *, is_idle: bool = True) -> None:
        """Drop what is left after the runtime; what the device still uses, nothing can free."""
        self._is_closed = True
        if self._switching is not None:
            self._switching.close()
            self._switching = None
        self._in_flight.clear()
        if is_idle:
            self._device.close()
            if self._group is not None:
                self._group.close()
        # What refers to weights and cache: ``__getattr__`` answers for it from now on.
        del self.runtime, self.attention_backend, self._runner
        self._lora = None
        if is_idle:
            self._device.trim()

    def __getattr__(self, name: str) -> Any:
        if name in ("runtime", "attention_backend"):
            self._require_open()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _checked_prompt(self, request_id: str, prompt: Any) -> list[int]:
        if isinstance(prompt, range):  # Longer than any prompt may be, it is not listed.
            prompt = prompt[: self.limits.max_model_len + 1]
        try:
            tokens = np.asarray(prompt)
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"request {request_id!r}",
                expected="a flat sequence of integer token ids",
                found=f"values that make no array: {error}",
            ) from error
        if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
            raise RequestError(
                f"request {request_id!r}",
                expected="a flat sequence of integer token ids",
                found=f"an array of shape {tokens.shape} and dtype {tokens.dtype}",
            )
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if wrong.size:
            raise RequestError(
                f"request {request_id!r}",
                expected=f"token ids in [0, {self.vocab_size})",
                found=f"{tokens[wrong[0]]} at index {wrong[0]}",
            )
        checked: list[int] = tokens.tolist()
        return checked

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineStateError("engine", expected="an open engine", found="it is closed")

    def _require_idle(self, action: str) -> None:
        self._require_open()
        if self.has_unfinished():
            raise EngineStateError(
                action,
                expected="no unfinished request",
                found="there are some",
                do="step the engine until has_unfinished() is False, or abort them.",
            )


def _is_one_prompt(prompts: object) -> bool:
    """True for token ids, False for prompts. Errors: ``RequestError`` for anything else."""
    found = f"a {type(prompts).__name__}"
    if isinstance(prompts, range) and prompts:
        return True
    is_array = getattr(prompts, "ndim", 0) > 0
    if is_array or (isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)):
        elements = list(cast("Sequence[object]", prompts))
        is_token = [isinstance(e, Number) or getattr(e, "ndim", None) == 0 for e in elements]
        if elements and all(is_token):
            return True
        are_prompts = [hasattr(e, "__len__") and not isinstance(e, str | bytes) for e in elements]
        if all(are_prompts) and not any(is_token):
            return False
        kinds = sorted({type(element).__name__ for element in elements})
        found = f"{found} of {' and '.join(kinds)}"
    raise RequestError(
        "generate: prompts",
        expected="the token ids of one prompt, [1, 2, 3], or a list of prompts, [[1, 2, 3]]",
        found=found,
        do="turn texts into token ids with the model's tokenizer.",
    )
