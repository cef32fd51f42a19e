"""Puts an engine together: model, weights, cache, attention, runtime.

Graphs bind addresses, so everything that a graph reads exists before the runtime does: weights
first, then the cache in the remaining memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args
from zlib import crc32

import torch

from graphrt import (
    CUDAGraphMode,
    Device,
    Exchange,
    Facts,
    Observer,
    OutputSpec,
    Runtime,
    RuntimeConfig,
    agree_least,
    compare,
    load_compiler,
    make_device,
    rank_variables,
    resolve,
)
from graphrt_llm.attention import (
    ATTENTION_OP,
    LAYER,
    AttentionBackend,
    AttentionChoice,
    attention as attention_impl,
    choose_attention,
    make_attention,
    make_cold_attention,
)
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.background import in_thread
from graphrt_llm.blocks import blocks_for
from graphrt_llm.collectives import RankGroup
from graphrt_llm.config import MOST_BLOCKS, DType, EngineConfig, Limits
from graphrt_llm.errors import EngineConfigError
from graphrt_llm.inputs import Examples, input_specs
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.lora import LoRAWeights
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models import CausalLM, SplitLM
from graphrt_llm.runner import NamedInputs
from graphrt_llm.scheduler import Scheduler
from graphrt_llm.weights import load_safetensors, random_weights

TINY_CONFIG = EngineConfig(
    runtime=RuntimeConfig(max_num_seqs=16, max_num_batched_tokens=64),
    dtype="float64",
    load_format="dummy",
)
"""The default of ``LLMEngine.tiny``. In float64, padding changes no greedy choice in practice."""


GRAPH_BYTES = 2**30
"""Left free beside the cache for pools, and for what the driver keeps for each graph: graphs of the
default sizes have taken 794 MiB of an H200."""

SIMULATED_BYTES = 2**31
"""What counts as free on the simulated device, whose memory is the host's."""


class EngineParts(NamedTuple):
    """What an ``LLMEngine`` is made of. It closes ``runtime``, its device and ``group``."""

    config: EngineConfig
    runtime: Runtime
    scheduler: Scheduler
    examples: Examples
    model_config: ModelConfig
    """Of this rank's part, where ranks share each layer."""
    attention: AttentionChoice
    attention_backend: AttentionBackend
    group: RankGroup | None
    ranks: Exchange | None
    lora: LoRAWeights | None


def assemble(
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    model_dir: Path | None = None,
    observer: Observer | None = None,
    ranks: Exchange | None = None,
) -> EngineParts:
    """Load the model and make a runtime for it. ``model_dir`` None: random weights.

    ``ranks``: of an engine of several ranks, all of which have as many cache blocks as the least.

    Errors: ``EngineConfigError`` for limits beyond the model or the memory; those of the
    weight reader and of ``Runtime``.
    """
    _check(model_config, config, ranks)
    dtype = _dtype(model_config, config)
    if config.load_format == "dummy":
        model_dir = None
    if ranks is not None:
        _check_alike(model_config, config, ranks, is_random=model_dir is None)
    asked = config.runtime
    if config.tensor_parallel:
        asked = replace(asked, ranks=replace(asked.ranks, same_batch=True))
    started = rank_variables() if ranks is not None else None
    with ExitStack() as undo:
        device = make_device(config.device, None if started is None else started.local_rank)
        undo.callback(device.close)
        is_cuda = device.name == "cuda"
        group = _group(model_config, config, device, ranks)
        if group is not None:
            undo.callback(group.close)
        loaded = None
        if is_cuda and (config.capture == "by_priority" or asked.compilation.level):
            loaded = in_thread(partial(_load_kernels, model_config, dtype, device.torch_device))
            undo.callback(loaded.exception)  # An error waits for it too.
        model = _load(model_config, config, dtype, model_dir, device, group)
        model_config = model.config
        if loaded is not None:
            # What counts the memory drops cuBLAS's workspaces, of every thread: a product that this
            # one is about to launch would read memory that is gone.
            loaded.result()
        # After the weights, because the cache gets the memory that is left.
        limits = _limits(model_config, config, model.dtype, device)
        if ranks is not None:
            limits = replace(limits, num_blocks=agree_least(ranks, [limits.num_blocks])[0])
        cache = KVCache(
            model_config,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            dtype=model.dtype,
            device=device.torch_device,
        )
        attention, backend = _attention(config, cache, limits, ranks)
        if (switching := getattr(backend, "switching", None)) is not None:
            undo.callback(switching.close)
        model.attention = backend
        scheduler = Scheduler(limits)
        allocator = scheduler.input_batch.allocator
        examples = Examples(limits, model_config.vocab_size, allocator, pinned=is_cuda)
        facts = Facts(
            attention_groups={attention.name: backend.support},
            attention_ops=(ATTENTION_OP,),
            device="cuda" if is_cuda else "simulated",
        )
        split = _split(model, config, facts)
        runtime = Runtime(
            NamedInputs(split or model, model.kernels),
            config=asked,
            inputs=input_specs(limits),
            outputs=OutputSpec(
                {"logits": "requests", "tokens": "requests"},
                # The engine has read what a step returned, or started its copy, before the next.
                "view",
                chosen_from={"tokens": "logits"},
            ),
            device=device,
            facts=facts,
            layers=None if split is None else {LAYER: split.attention},
            compile_part=None if split is None else split.traced,
            op_impls=None if split is None else {ATTENTION_OP: attention_impl},
            examples=examples,
            resources=[backend],
            # Verification need not restore the cache: examples use free blocks only.
            may_overwrite={cache.all_slots: "slot_mapping"},
            # This package's kernels are launched by address, so torch does not see what they read.
            keep_alive=[cache.tensor, *backend.keep_alive],
            observer=observer,
            ranks=ranks,
        )
        undo.pop_all()  # From here on the engine closes them.
    lora = model.lora
    return EngineParts(
        config, runtime, scheduler, examples, model_config, attention, backend, group, ranks, lora
    )


def _load_kernels(model_config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Run PyTorch's kernels of a prompt, and of the check of its graph, beside imports and weights:
    the driver loads a kernel at its first launch, and cuBLAS itself, these in 0.3 s, outside of the
    interpreter's lock."""
    rows = torch.zeros(128, model_config.hidden_size, dtype=dtype, device=device)
    product = rows @ rows.T
    product.addmm_(product, product)
    cache = KVCache(model_config, num_blocks=2, block_size=1, dtype=dtype, device=device)
    SdpaAttention(cache).load_kernels()
    logits = cache.tensor.new_zeros(2, 8)
    results = [
        {"logits": logits + number, "tokens": logits.argmax(-1) + number} for number in range(2)
    ]
    for tolerance in (None, {logits.dtype: 2.0}):
        compare(*results, tolerance=tolerance, chosen_from={"tokens": "logits"})
    tokens = results[0]["tokens"]
    logits.view(torch.int16).index_fill_(0, tokens, 1)
    torch._foreach_zero_([tokens])


def _check(model_config: ModelConfig, config: EngineConfig, ranks: Exchange | None) -> None:
    """Errors: ``EngineConfigError`` for options that exclude each other, or that the model has no
    place for."""
    loras, drafts = config.runtime.max_loras, config.runtime.num_speculative_tokens
    longest = model_config.max_position_embeddings
    asked = config.max_model_len or longest
    for is_wrong, name, expected, found in (
        (
            ranks is not None and config.capture == "by_priority",
            "EngineConfig.capture",
            "before_serving, because ranks capture together",
            config.capture,
        ),
        (
            model_config.num_experts and loras,
            "RuntimeConfig.max_loras",
            "0 for a model with experts, whose linear maps have no adapters",
            loras,
        ),
        (
            asked > longest,
            "EngineConfig.max_model_len",
            f"at most the model's context of {longest} tokens",
            asked,
        ),
        (
            drafts and config.overlap,
            "EngineConfig.overlap",
            "None or False with speculative decoding: drafts depend on accepted tokens",
            f"True, and num_speculative_tokens = {drafts}",
        ),
        (
            drafts >= asked,
            "RuntimeConfig.num_speculative_tokens",
            f"fewer than the context of {asked} tokens",
            drafts,
        ),
    ):
        if is_wrong:
            raise EngineConfigError(name, expected=expected, found=str(found))


def _attention(
    config: EngineConfig, cache: KVCache, limits: Limits, ranks: Exchange | None
) -> tuple[AttentionChoice, AttentionBackend]:
    """Errors: those of ``make_attention``; ``EngineConfigError`` for a backend that cannot serve
    micro-batches."""
    num_ubatches, asked = config.runtime.ubatch.num_ubatches, config.attention_backend
    if num_ubatches > 1 and asked == "auto":
        attention = AttentionChoice("sdpa", "the one that serves micro-batches")
    else:
        attention = choose_attention(asked, cache)
        if asked == "auto" and ranks is None:  # Ranks would have to switch in the same step.
            # Who captures before serving waits anyway, and would capture slowly over sdpa.
            waits = config.capture == "before_serving"
            cold = make_cold_attention(cache, limits, waits=waits)
            if cold is not None:
                first = "its fa2" if waits else "sdpa"
                reason = f"{attention.reason}, once it is loaded and built; until then {first}"
                return attention._replace(reason=reason), cold
    backend = make_attention(attention.name, cache, limits)
    if num_ubatches > 1 and not getattr(backend, "serves_micro_batches", False):
        raise EngineConfigError(
            "EngineConfig.attention_backend",
            expected="one that prepares each micro-batch of a step by itself: 'sdpa'",
            found=f"{attention.name!r}, with ubatch.num_ubatches = {num_ubatches}",
            do="use 'sdpa', or leave ubatch.num_ubatches at 1.",
        )
    return attention, backend


def _split(model: CausalLM, config: EngineConfig, facts: Facts) -> SplitLM | None:
    """The traced form of ``model``; None at level 0.

    Errors: ``EngineConfigError`` for a level that cannot serve it; those of ``resolve``.
    """
    resolved = resolve(config.runtime, facts)
    compiling = resolved.compile
    if compiling.level == 1:
        raise EngineConfigError(
            "RuntimeConfig.compilation.level",
            expected="0, 2 or 3, because attention finds its step where the graph is traced",
            found="1",
            do="use level 3, which compiles between attention calls.",
        )
    if not compiling.level:
        return None
    if model.lora is not None:
        raise EngineConfigError(
            "RuntimeConfig.max_loras",
            expected="0 at levels 2 and 3: the one trace has no adapters",
            found=str(config.runtime.max_loras),
            do="use level 0, which cuts at break points.",
        )
    assert model.attention is not None, "it is set before"
    return SplitLM(model, model.attention, compiling, resolved.plan.max_capture_size)


def _check_alike(
    model_config: ModelConfig, config: EngineConfig, ranks: Exchange, *, is_random: bool
) -> None:
    """Errors: ``EngineConfigError``, on every rank, where ranks that share a model would have
    parts of different ones, or choose different tokens."""
    told: dict[str, object] = {
        "tensor_parallel, expert_parallel": (config.tensor_parallel, config.expert_parallel)
    }
    if config.tensor_parallel or config.expert_parallel:
        told |= {
            "the model": model_config,
            "dtype, load_format": (config.dtype, "dummy" if is_random else config.load_format),
            "seed": config.seed if config.tensor_parallel or is_random else None,
        }
    own = [crc32(repr(value).encode()) for value in told.values()]
    own += [0] * (4 - len(own))
    least = agree_least(ranks, own + [-number for number in own])
    for number, name in enumerate(told):
        if least[number] != -least[4 + number]:
            raise EngineConfigError(
                f"EngineConfig: {name}",
                expected="the same on every rank, because ranks share the model",
                found=f"another on another rank; here {told[name]}",
                do="make the engines of all ranks with the same configuration.",
            )


def _group(
    model_config: ModelConfig, config: EngineConfig, device: Device, ranks: Exchange | None
) -> RankGroup | None:
    """The ranks that share the model; None if each has all of it.

    Errors: ``EngineConfigError`` for a model that cannot be shared.
    """
    if not (config.expert_parallel or config.tensor_parallel):
        return None
    experts, world = model_config.num_experts, 1 if ranks is None else ranks.world
    level, loras = config.runtime.compilation.level, config.runtime.max_loras
    if config.tensor_parallel:
        name = "tensor_parallel"
        expected = "several ranks, a model without experts, no adapters, and compilation level 0"
        is_met = ranks is not None and not (experts or loras or config.expert_parallel)
    else:
        name = "expert_parallel"
        expected = (
            "ranks whose number divides the model's experts, whose messages are gathered"
            " because eager steps need every rank's size, and compilation level 0"
        )
        is_met = ranks is not None and ranks.tells_sizes and experts > 0 and not experts % world
    if ranks is None or not is_met or level:
        raise EngineConfigError(
            f"EngineConfig.{name}",
            expected=expected,
            found=f"{world} ranks, {experts} experts, {loras} adapters,"
            f" level {0 if level is None else level}",
        )
    if config.tensor_parallel:
        model_config.part(world)  # Before a rank waits for the others.
    timeout_s = config.runtime.ranks.step_timeout_s
    return RankGroup(ranks.rank, world, device.torch_device, timeout_s, ranks)


def _dtype(model_config: ModelConfig, config: EngineConfig) -> torch.dtype:
    """Errors: ``EngineConfigError`` for that of a checkpoint that is none to compute in."""
    name = config.dtype or model_config.checkpoint_dtype or "float32"
    if name not in get_args(DType):
        raise EngineConfigError(
            "EngineConfig.dtype",
            expected=f"one of {', '.join(get_args(DType))}",
            found=f"None, and the checkpoint says {name}",
            do="name the dtype to compute in.",
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _load(
    model_config: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    model_dir: Path | None,
    device: Device,
    group: RankGroup | None,
) -> CausalLM:
    context = config.max_model_len or model_config.max_position_embeddings
    num_positions = context + config.runtime.num_speculative_tokens
    model = CausalLM(model_config, dtype, device.torch_device, group, num_positions)
    if config.runtime.compilation.level:
        # Now, because weights need the driver, which loads kernels in other threads until then.
        load_compiler()
    if model_dir is None:
        random_weights(model, seed=config.seed)
    else:
        load_safetensors(model, model_dir)
    if config.runtime.max_loras:
        model.lora = LoRAWeights(
            model.config,
            max_loras=config.runtime.max_loras,
            max_rank=config.max_lora_rank,
            dtype=model.dtype,
            device=device.torch_device,
        )
    return model.eval()


def _limits(
    model_config: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: Device
) -> Limits:
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    num_drafts = config.runtime.num_speculative_tokens
    num_blocks = config.num_blocks
    if num_blocks is None:
        block_bytes = KVCache.bytes_per_block(model_config, config.block_size, dtype)
        num_blocks = _num_blocks(config, max_model_len + num_drafts, block_bytes, device)
    return Limits(
        max_num_seqs=config.runtime.max_num_seqs,
        max_num_batched_tokens=config.runtime.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_loras=config.runtime.max_loras,
        query_len=1 + num_drafts,
    )


def _num_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, device: Device) -> int:
    """As many blocks as ``max_num_seqs`` longest requests need, if the free memory holds them.

    Errors: ``EngineConfigError`` if it does not hold one such request.
    """
    device.trim()  # What loading the weights left in the allocator's cache is free too.
    free = device.memory().free_bytes
    if device.name == "simulated":
        free = min(free, SIMULATED_BYTES)
    is_eager = config.runtime.compilation.cudagraph_mode is CUDAGraphMode.NONE
    room = 0 if is_eager else GRAPH_BYTES
    budget = int(free * config.gpu_memory_utilization) - room
    longest = blocks_for(max_model_len, config.block_size)
    if budget < (1 + longest) * block_bytes:
        raise EngineConfigError(
            "EngineConfig.num_blocks",
            expected=f"{_mib((1 + longest) * block_bytes)} for the cache: one request of"
            f" {max_model_len} tokens, and the null block",
            found=f"{_mib(max(budget, 0))}: {config.gpu_memory_utilization:g} of the {_mib(free)}"
            f" that are free beside the weights, less {_mib(room)} for graphs",
            do="lower max_model_len, raise gpu_memory_utilization, use a smaller dtype, or name"
            " num_blocks.",
        )
    wanted = 1 + config.runtime.max_num_seqs * longest
    return min(wanted, budget // block_bytes, MOST_BLOCKS)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
