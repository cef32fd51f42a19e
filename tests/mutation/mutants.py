"""Deliberate mistakes, each with the tests that must notice it.

``old`` occurs exactly once in its file; a test of the architecture lane holds that. Whoever changes
such a line changes its mutant too, or deletes it with the rule that it broke.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake: ``old`` in ``file`` (below src/) becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files below tests/, separated by spaces; one of them must fail."""


GRAPHS, RUNNER, SIMULATED = "graphrt/graphs/", "graphrt/runner/", "graphrt/device/simulated/"
CUDA, VERIFY = "graphrt/device/cuda/", "graphrt/verify/"
ARGUMENTS = "simulated/test_arguments_exact.py"
CHECKS = "simulated/test_checks_complete.py"
CUTS = "simulated/test_ubatch_cuts.py"
CLEANUP = "simulated/test_capture_cleanup.py"
STALE = "simulated/test_wrapper_stale.py"
STAGING = "simulated/test_buffers_staging.py"
UNPAD = "simulated/test_outputs_unpad.py"
EXTERNALS = "simulated/test_library_externals.py"
GENERATIONS = "simulated/test_library_generations.py"
REPLAY = "simulated/test_verify_replay.py"
REPORT = "simulated/test_runner_report.py"
UNWINDING = "simulated/test_cuda_unwinding.py"
LORA = "simulated/test_llm_lora.py"
AGREEMENT = "pure/test_parallel_agreement.py"
SPLIT_KEYS = "pure/test_config_ubatch.py"
UBATCH = "graphrt/ubatch/"
OVERLAP, BATON = "simulated/test_ubatch_overlap.py", "simulated/test_ubatch_baton.py"
WRAPPED, SPLIT_STEPS = "simulated/test_ubatch_wrapper.py", "simulated/test_runtime_ubatch.py"

MUTANTS = [
    # Arguments of a replay
    Mutant(
        "pool argument of another shape is accepted",
        GRAPHS + "signature.py",
        '        f"{place}.shape == {constant(value.shape)}",\n',
        "",
        CHECKS,
    ),
    Mutant(
        "argument of another stride is accepted",
        GRAPHS + "signature.py",
        '("kind", "address", "shape", "stride", "dtype", "is_conj", "is_neg")',
        '("kind", "address", "shape", "dtype", "is_conj", "is_neg")',
        CHECKS,
    ),
    Mutant(
        "container with one more entry is accepted",
        GRAPHS + "signature.py",
        '*([f"len({place}) == {node.num_children}"] if counted else [])',
        "",
        STALE,
    ),
    Mutant(
        "negative zero counts as zero",
        GRAPHS + "values.py",
        "return expected == found and math.copysign(1, expected) == math.copysign(1, found)",
        "return expected == found",
        STALE,
    ),
    Mutant(
        "dict in another order is accepted",
        GRAPHS + "signature.py",
        "expected.kind == found.kind and same_host_value(expected.value, found.value)",
        "expected.kind == found.kind",
        ARGUMENTS,
    ),
    Mutant(
        "what a dataclass has besides its fields is not compared",
        GRAPHS + "values.py",
        "names = _attribute_names(value)",
        "names = [field.name for field in dataclasses.fields(value)]",
        ARGUMENTS,
    ),
    # Eager segments
    Mutant(
        "bytes that several results share are laid at the beginning of a block",
        GRAPHS + "recorder.py",
        "lead = source.storage_offset() % _ALIGNMENT",
        "lead = 0",
        ARGUMENTS,
    ),
    Mutant(
        "program of one graph never asks again",
        GRAPHS + "nesting.py",
        "            ask_again()\n",
        "            pass\n",
        "simulated/test_programs_meet.py",
    ),
    # Captures that fail, generations that end
    Mutant(
        "refused capture keeps its graphs",
        GRAPHS + "capture.py",
        "        except BaseException:\n            recorder.reset()\n            raise\n",
        "        except BaseException:\n            raise\n",
        CLEANUP,
    ),
    Mutant(
        "graphs are reset without waiting for the device",
        GRAPHS + "library.py",
        "        self.synchronize()\n        for program in reversed(",
        "        for program in reversed(",
        CLEANUP,
    ),
    Mutant(
        "graphs are reset oldest first",
        GRAPHS + "library.py",
        "for program in reversed(generation.programs):\n            program.retire()",
        "for program in generation.programs:\n            program.retire()",
        CLEANUP,
    ),
    Mutant(
        "scope is opened without trimming the device",
        GRAPHS + "library.py",
        "            device.trim()\n            exits",
        "            exits",
        CLEANUP,
    ),
    Mutant(
        "newest lazy generation is retired first",
        GRAPHS + "library.py",
        "next(g for g in lazy if g.num_graphs)",
        "next(g for g in reversed(lazy) if g.num_graphs)",
        CLEANUP,
    ),
    Mutant(
        "dropped program stays in its generation",
        GRAPHS + "library.py",
        "                    generation.programs.remove(program)\n",
        "                    pass\n",
        CLEANUP,
    ),
    Mutant(
        "remembered error is raised itself",
        GRAPHS + "catalog.py",
        "raise detached(entry.error)",
        "raise entry.error",
        CLEANUP,
    ),
    Mutant(
        "retired program keeps its outputs",
        GRAPHS + "program.py",
        "        self.outputs = None\n        self.externals = self.values = ()\n",
        "",
        GENERATIONS,
    ),
    Mutant(
        "suspended programs can be replayed",
        GRAPHS + "library.py",
        "        self._refuse_all(_suspended_error)\n",
        "        pass\n",
        GENERATIONS,
    ),
    Mutant(
        "capture stream does not come after the caller's",
        GRAPHS + "library.py",
        "            device.order(stream, caller)\n",
        "",
        "simulated/test_capture_scope.py",
    ),
    Mutant(
        "fourth failure in a row is the last, not the third",
        GRAPHS + "catalog.py",
        ">= MAX_FAILURES_IN_A_ROW",
        "> MAX_FAILURES_IN_A_ROW",
        "simulated/test_capture_scope.py simulated/test_capture_faults.py",
    ),
    # What a graph may read, write and keep
    Mutant(
        "pool memory may stay in the caller's objects",
        GRAPHS + "capture.py",
        "            self._refuse_escapes(host)\n",
        "",
        EXTERNALS,
    ),
    Mutant(
        "graph may write any static buffer",
        GRAPHS + "capture.py",
        "            self._refuse_mutated_inputs(written, writes)\n",
        "",
        CLEANUP,
    ),
    Mutant(
        "segment without a kernel becomes a graph",
        GRAPHS + "recorder.py",
        "if graph.num_nodes == 0:",
        "if False:",
        "simulated/test_breaks_segments.py",
    ),
    # Steps
    Mutant(
        "resources reserve for fewer requests than a key has",
        RUNNER + "jobs.py",
        "(key.num_tokens, key.num_reqs or key.num_tokens, key.num_ubatches,",
        "(key.num_tokens, 0, key.num_ubatches,",
        CLEANUP,
    ),
    Mutant(
        "eager step does not end checked views",
        RUNNER + "executor.py",
        "            self._expire()\n        for resource in self._resources:\n"
        "            resource.prepare(key, step_info)",
        "            pass\n        for resource in self._resources:\n"
        "            resource.prepare(key, step_info)",
        CHECKS,
    ),
    Mutant(
        "outputs in static buffers are handed out",
        RUNNER + "executor.py",
        '        if self.outputs.policy == "clone":\n',
        "        if True:\n",
        "simulated/test_runner_run.py",
    ),
    Mutant(
        "strict mode runs a miss eagerly",
        RUNNER + "runner.py",
        "            if self._comparisons.is_strict:\n",
        "            if False:\n",
        "simulated/test_runtime_steps.py",
    ),
    Mutant(
        "resources are not prepared for an eager step",
        RUNNER + "executor.py",
        "            resource.prepare(key, step_info)\n        return self.run_eagerly",
        "            pass\n        return self.run_eagerly",
        "simulated/test_runtime_steps.py simulated/test_runner_run.py",
    ),
    Mutant(
        "micro-batches are trusted although they differ",
        "graphrt/verify/cuts.py",
        "        if outcome.is_equal:\n",
        "        if outcome:\n",
        CUTS,
    ),
    Mutant(
        "what cannot be put back runs twice",
        "graphrt/verify/cuts.py",
        "        if beyond:\n",
        "        if False:\n",
        CUTS,
    ),
    Mutant(
        "micro-batches start from what the whole batch left",
        "graphrt/verify/cuts.py",
        "            _put_back(state, saved, host)\n            stage(key)\n",
        "            stage(key)\n",
        CUTS,
    ),
    Mutant(
        "dependencies below the tolerance are not looked for",
        "graphrt/verify/cuts.py",
        "        if varied is not None and not is_random:\n",
        "        if False:\n",
        CUTS,
    ),
    Mutant(
        "micro-batches of two requests are trusted at once",
        RUNNER + "comparisons.py",
        "known >= ENOUGH_REQUESTS and",
        "known >= 1 and",
        CUTS,
    ),
    Mutant(
        "first replay advances guarded state",
        VERIFY + "run_state.py",
        "        if not on_error:\n            self.restore(saved)\n",
        "        if not on_error:\n            pass\n",
        "simulated/test_runtime_capture.py simulated/test_runner_jobs.py",
    ),
    Mutant(
        "key whose program moved is called not captured",
        GRAPHS + "catalog.py",
        "            entry.reason = Reason.INVALIDATED\n",
        "            entry.reason = Reason.NOT_CAPTURED_YET\n",
        "simulated/test_runtime_capture.py",
    ),
    # Padding in, padding out
    Mutant(
        "rows of the step before stay in the padding",
        GRAPHS + "buffers.py",
        "                    group.refill(dirty, real)\n",
        "                    pass\n",
        STAGING,
    ),
    Mutant(
        "value of another shape is broadcast",
        GRAPHS + "buffers.py",
        "if source.shape != view.shape:",
        "if source.dim() != view.dim():",
        STAGING,
    ),
    Mutant(
        "corner of two axes is filled twice",
        GRAPHS + "bufferspec.py",
        "slice(0, min(was, now))",
        "slice(0, was)",
        STAGING,
    ),
    Mutant(
        "outputs keep their padded rows",
        GRAPHS + "outputs.py",
        "leaf = leaf.narrow(dim, 0, _real_length(dotted(path), leaf.shape[dim], length, n))",
        "_real_length(dotted(path), leaf.shape[dim], length, n)",
        UNPAD,
    ),
    Mutant(
        "axis of another length is cut",
        GRAPHS + "outputs.py",
        "if expected is not None and shape[dim] != expected:",
        "if False:",
        "simulated/test_padding_verified.py",
    ),
    Mutant(
        "cloned outputs are views",
        GRAPHS + "outputs.py",
        "return own_copy(cut)",
        "return cut",
        UNPAD,
    ),
    # Verification
    Mutant(
        "equal bits of another dtype are equal",
        VERIFY + "compare.py",
        "if expected.shape != actual.shape or expected.dtype != actual.dtype:",
        "if expected.shape != actual.shape:",
        CHECKS,
    ),
    Mutant(
        "NaNs of different bits differ",
        VERIFY + "compare.py",
        "    differing &= (left == left) | (right == right)  # NaN is not equal to itself.\n",
        "",
        "simulated/test_verify_compare.py",
    ),
    Mutant(
        "state is not compared",
        VERIFY + "replay.py",
        "self.comparison.is_equal and (self.state is None or self.state.is_equal)",
        "self.comparison.is_equal",
        REPLAY,
    ),
    Mutant(
        "eager side keeps what the model stored in its warm-up",
        VERIFY + "replay.py",
        "with restored(before_warmup):\n                for ",
        "with restored(None):\n                for ",
        REPLAY,
    ),
    Mutant(
        "runs that advance host values are compared once",
        VERIFY + "replay.py",
        "for num_before in range(num_runs):",
        "for num_before in range(1):",
        "simulated/test_runtime_verify.py " + REPLAY,
    ),
    Mutant(
        "state stays as a failed run left it",
        VERIFY + "run_state.py",
        "        except BaseException:\n            self.restore(saved)\n            raise\n",
        "        except BaseException:\n            raise\n",
        REPLAY,
    ),
    Mutant(
        "capture that a gate fails keeps its programs",
        RUNNER + "jobs.py",
        "        except BaseException:\n            self._drop(scope, before)\n            raise\n",
        "        except BaseException:\n            raise\n",
        "simulated/test_runner_jobs.py",
    ),
    Mutant(
        "poisoned padding is not put back",
        VERIFY + "padding.py",
        "            view.copy_(contents)\n",
        "            pass\n",
        "simulated/test_verify_padding.py",
    ),
    # Decisions and plans
    Mutant(
        "excluded modes serve",
        "graphrt/dispatch/dispatcher.py",
        "if place == len(sizes) or mode in exclude:",
        "if place == len(sizes):",
        "pure/test_dispatch_decisions.py",
    ),
    Mutant(
        "negative number of tokens finds a graph",
        "graphrt/dispatch/dispatcher.py",
        "                num_tokens >= 0\n                and num_ubatches == 1",
        "                num_ubatches == 1",
        "pure/test_dispatch_errors.py",
    ),
    Mutant(
        "negative number of adapters finds a graph",
        "graphrt/dispatch/dispatcher.py",
        "elif num_active_loras > 0:",
        "elif num_active_loras:",
        "pure/test_dispatch_errors.py",
    ),
    Mutant(
        "difference of two kernels counts as that of a replay",
        "graphrt/report/metrics.py",
        "VerificationTotals(int(equal), int(not equal)))",
        "VerificationTotals(int(equal), int(not equal), math.inf))",
        "pure/test_report_metrics.py",
    ),
    Mutant(
        "batch padded in adapters alone is a hit",
        "graphrt/dispatch/dispatcher.py",
        "if key.num_tokens == size and key.num_active_loras == count:",
        "if key.num_tokens == size:",
        "pure/test_dispatch_decisions.py",
    ),
    Mutant(
        "eager decision is made anew for each step",
        "graphrt/dispatch/dispatcher.py",
        "                return self._eager.setdefault(name, decision)\n",
        "                return decision\n",
        "pure/test_dispatch_decisions.py pure/test_dispatch_unavailable.py " + CHECKS,
    ),
    Mutant(
        "rounded decode sizes are not said",
        "graphrt/config/resolution.py",
        "others = sorted(set(decode) - set(mixed))",
        "others: list[int] = []",
        "pure/test_plan_limits.py",
    ),
    Mutant(
        "empty list of decode sizes is not said",
        "graphrt/config/resolution.py",
        "    if not decode:\n",
        "    if False:\n",
        "pure/test_plan_limits.py",
    ),
    Mutant(
        "number of keys has no limit",
        "graphrt/config/resolution.py",
        "if num_keys > MOST_KEYS:",
        "if False:",
        "pure/test_plan_limits.py",
    ),
    Mutant(
        "number of decisions has no limit",
        "graphrt/config/resolution.py",
        "if num_decisions > MOST_DECISIONS:",
        "if False:",
        "pure/test_plan_limits.py",
    ),
    Mutant(
        "empty ranges no longer decide the level",
        "graphrt/config/compile_rules.py",
        "is_needed |= options.compile_ranges_endpoints is not None",
        "is_needed |= bool(options.compile_ranges_endpoints)",
        "pure/test_config_compile_rules.py",
    ),
    Mutant(
        "pass that does nothing on one rank decides the level",
        "graphrt/config/compile_rules.py",
        "if facts.tp_size == 1 and options.level in (None, CompilationLevel.PIECEWISE):",
        "if facts.tp_size == 1 and options.level is CompilationLevel.PIECEWISE:",
        "pure/test_config_compile_rules.py",
    ),
    Mutant(
        "pass that reads variables around it counts as told by its text",
        "graphrt/config/compilation.py",
        "if not inspect.isfunction(value) or value.__closure__:",
        "if not inspect.isfunction(value):",
        "pure/test_config_compile_rules.py",
    ),
    Mutant(
        "attention that compiled code holds may read an old cache",
        "graphrt/config/plan.py",
        """(self.backend != "eager" or has_passes)""",
        """has_passes""",
        "pure/test_config_compile_rules.py",
    ),
    # What others wrote
    Mutant(
        "file is read to its end, however long",
        "graphrt/files.py",
        "    if len(data) > most_bytes:\n",
        "    if False:\n",
        "simulated/test_bad_input_files.py",
    ),
    Mutant(
        "key that is said twice is accepted in a trace",
        "graphrt/planner.py",
        "    if repeated:\n",
        "    if False:\n",
        "simulated/test_bad_input_files.py",
    ),
    Mutant(
        "numbers that are not finite are accepted",
        "graphrt/files.py",
        "parse_constant=_no_number, parse_float=_finite",
        "parse_constant=float",
        "simulated/test_bad_input_files.py",
    ),
    # The engine
    Mutant(
        "launch takes the host memory of the step in flight",
        "graphrt_llm/engine.py",
        "return 1 - self._in_flight[-1].storage if self._in_flight else 0",
        "return self._in_flight[-1].storage if self._in_flight else 0",
        "simulated/test_llm_launches.py",
    ),
    Mutant(
        "launch after a failed one does not wait",
        "graphrt_llm/engine.py",
        "        if self._is_launching:\n",
        "        if False:\n",
        "simulated/test_llm_launches.py",
    ),
    Mutant(
        "third step is launched while two are in flight",
        "graphrt_llm/engine.py",
        "while len(self._in_flight) > 1 or (",
        "while False or (",
        "simulated/test_llm_launches.py",
    ),
    Mutant(
        "process that ends builds kernels",
        "graphrt_llm/attention/building.py",
        "or not main_thread().is_alive()",
        "or False",
        "simulated/test_llm_flashinfer.py",
    ),
    Mutant(
        "imports of a process that ends pause",
        "graphrt_llm/attention/building.py",
        "if took > BURST_S and main_thread().is_alive():",
        "if took > BURST_S:",
        "simulated/test_llm_flashinfer.py",
    ),
    # Adapters and drafts
    Mutant(
        "adapter of another request is applied",
        "graphrt_llm/lora.py",
        ".masked_fill_(self._absent, 0)",
        ".masked_fill_(self._absent & False, 0)",
        LORA,
    ),
    Mutant(
        "adapter loses its scaling",
        "graphrt_llm/lora.py",
        "up.double().t() * adapter.scaling",
        "up.double().t()",
        "simulated/test_llm_lora_files.py",
    ),
    Mutant(
        "adapter swapped is not copied",
        "graphrt_llm/engine.py",
        "adapter is not self._loaded[place]:",
        "self._loaded[place] is None:",
        LORA,
    ),
    Mutant(
        "adapter in use is removed",
        "graphrt_llm/engine.py",
        "        if users:\n",
        "        if False:\n",
        LORA,
    ),
    Mutant(
        "request starts without a place for its adapter",
        "graphrt_llm/scheduler.py",
        "or adapter in self.adapters or bool(self._idle)",
        "or adapter in self.adapters or True",
        LORA,
    ),
    Mutant(
        "kernel applies adapters that a graph does not have",
        "graphrt_llm/lora.py",
        "if len(active_loras) < most:\n                # As",
        "if False:\n                # As",
        LORA,
    ),
    Mutant(
        "captures between steps forget batches of fewer requests",
        "graphrt_llm/inputs.py",
        "for n in range(1, num_reqs + 1)",
        "for n in (num_reqs,)",
        "simulated/test_llm_inputs.py",
    ),
    Mutant(
        "step has one adapter whatever its requests name",
        "graphrt_llm/runner.py",
        "num_active_loras=len(batch.active_loras)",
        "num_active_loras=min(1, len(batch.active_loras))",
        LORA,
    ),
    Mutant(
        "step tells the captured count as the live one",
        "graphrt/runtime/runtime.py",
        "shape = (num_reqs, uniform, host_us, num_active_loras)",
        "shape = (num_reqs, uniform, host_us, key.num_active_loras)",
        LORA,
    ),
    Mutant(
        "every draft is accepted",
        "graphrt_llm/scheduler.py",
        "if drafts[i] != sampled[i]), count)",
        "if False), count)",
        "pure/test_llm_drafts.py",
    ),
    Mutant(
        "every draft is accepted, as the distribution shows",
        "graphrt_llm/scheduler.py",
        "if drafts[i] != sampled[i]), count)",
        "if sampled is None), count)",
        "simulated/test_llm_speculation.py",
    ),
    Mutant(
        "drafts are drawn with one noise",
        "graphrt_llm/engine.py",
        "[index + place for index in indices for place in range(1 - q, 1)]",
        "[index for index in indices for place in range(1 - q, 1)]",
        "simulated/test_llm_speculation.py",
    ),
    Mutant(
        "draft has no block",
        "graphrt_llm/input_batch.py",
        "needed = self.num_tokens[rows] + self._num_drafts\n",
        "needed = self.num_tokens[rows]\n",
        "pure/test_llm_drafts.py",
    ),
    Mutant(
        "drafts go past the last token",
        "graphrt_llm/scheduler.py",
        "table.max_num_tokens[rows] - known - 1)",
        "table.max_num_tokens[rows])",
        "pure/test_llm_drafts.py",
    ),
    Mutant(
        "exclusion of an attention backend is forgotten",
        "graphrt_llm/runner.py",
        "exclude |= self._excludes(step_info)",
        "self._excludes(step_info)",
        "simulated/test_llm_support_levels.py",
    ),
    # The simulated device
    Mutant(
        "mask of bytes is allowed in recordings",
        SIMULATED + "forbidden_ops.py",
        "one.dtype in (torch.bool, torch.uint8)",
        "one.dtype in (torch.bool,)",
        CHECKS,
    ),
    Mutant(
        "two recordings share a pool",
        SIMULATED + "device.py",
        "self.is_capturing() or memory.is_recording or ours.recording is not None",
        "self.is_capturing() or ours.recording is not None",
        CHECKS,
    ),
    Mutant(
        "freed memory keeps its bytes",
        SIMULATED + "memory.py",
        "                block.arena.poison(block.offset, block.num_bytes)\n",
        "                pass\n",
        "simulated/test_simulated_pool.py",
    ),
    Mutant(
        "write after a read is no race",
        SIMULATED + "races.py",
        "and (earlier.written or access.written)",
        "and earlier.written",
        "simulated/test_simulated_streams.py",
    ),
    Mutant(
        "recording whose refusal was swallowed ends well",
        SIMULATED + "recorder.py",
        "        if self._first_error is not None:\n            raise self._first_error\n",
        "",
        "simulated/test_simulated_forbidden.py simulated/test_device_contract_simulated.py",
    ),
    # CUDA, over a model of torch
    Mutant(
        "last of several failures is kept",
        CUDA + "observe.py",
        "        if self._first_error is None:\n",
        "        if True:\n",
        CHECKS,
    ),
    Mutant(
        "device error without a code is unknown",
        CUDA + "failures.py",
        "if is_quoted and driver_text in text:",
        "if False:",
        "simulated/test_cuda_failures.py",
    ),
    Mutant(
        "generators stay captured after a capture that failed",
        CUDA + "recording.py",
        "                self._free_generators()\n",
        "                pass\n",
        UNWINDING,
    ),
    Mutant(
        "interrupted begin leaves the stream capturing",
        CUDA + "recording.py",
        "BaseException as error:  # noqa: BLE001  The caller has no recording to abort.",
        "Exception as error:  # noqa: BLE001  The caller has no recording to abort.",
        UNWINDING,
    ),
    Mutant(
        "interrupted end leaves the graph",
        CUDA + "recording.py",
        "            caught = self._capture_end()\n        except BaseException as error:",
        "            caught = self._capture_end()\n        except RuntimeError as error:",
        UNWINDING,
    ),
    Mutant(
        "devices of one GPU do not see each other's recordings",
        CUDA + "recording.py",
        "_open_recordings.setdefault(self.index, OpenRecordings())",
        "OpenRecordings()",
        UNWINDING,
    ),
    # A step
    Mutant(
        "step leaves gradients off",
        RUNNER + "runner.py",
        "            if has_grad:\n                set_grad_enabled(True)\n",
        "",
        "simulated/test_runtime_steps.py",
    ),
    Mutant(
        "one place of four is not looked at",
        GRAPHS + "watch.py",
        "            and get3(box3, name3) is is3\n",
        "",
        "simulated/test_watch_places.py",
    ),
    Mutant(
        "detail of one place of four is not looked at",
        GRAPHS + "watch.py",
        "            and (of2 is None or of2(is2) == was2)\n",
        "",
        "simulated/test_watch_places.py",
    ),
    # Micro-batches and ranks
    Mutant(
        "half of padding alone is split off",
        "graphrt/parallel/agreement.py",
        "elif stride * (num_ubatches - 1) >= real:",
        "elif stride * (num_ubatches - 1) > real:",
        AGREEMENT,
    ),
    Mutant(
        "rank takes its own uniformity to the agreed size",
        "graphrt/parallel/agreement.py",
        "dispatch(padded, uniform, loras, excluded, 1)",
        "dispatch(padded, vote.uniform, loras, excluded, 1)",
        AGREEMENT,
    ),
    Mutant(
        "rank takes its own adapters to the agreed size",
        "graphrt/parallel/agreement.py",
        "dispatch(padded, uniform, loras, excluded, 1)",
        "dispatch(padded, uniform, vote.num_active_loras, excluded, 1)",
        AGREEMENT,
    ),
    Mutant(
        "split batch is padded to any split graph",
        "graphrt/dispatch/dispatcher.py",
        "return _Family(mode, unsplit.sizes, [split.get(size) for size in unsplit.sizes])",
        "return family",
        SPLIT_KEYS,
    ),
    Mutant(
        "rest of a cut request counts as cached",
        "graphrt/ubatch/slices.py",
        "own_lens[-1] -= max(0, loc[-1] - last)",
        "pass",
        "pure/test_ubatch_slices.py",
    ),
    Mutant(
        "failed micro-batch hands the baton on as if nothing had happened",
        UBATCH + "baton.py",
        "self.holder = self.live[0] if self.is_aborting else worker.next",
        "self.holder = worker.next",
        BATON,
    ),
    Mutant(
        "worker does not take over the caller's modes",
        UBATCH + "baton.py",
        "            for mode in modes:\n",
        "            for mode in ():\n",
        BATON,
    ),
    Mutant(
        "mark of a transfer is taken after the hand-over",
        UBATCH + "communication.py",
        "        if self.hand_over(tag):\n            mark",
        "        if True | self.hand_over(tag):\n            mark",
        OVERLAP,
    ),
    Mutant(
        "receive hook runs twice",
        UBATCH + "communication.py",
        "        hook.pop()()\n",
        "        hook[-1]()\n",
        OVERLAP,
    ),
    Mutant(
        "communication stream is not joined at the end",
        UBATCH + "split.py",
        "                device.order(compute, comm)\n",
        "",
        WRAPPED + " " + OVERLAP,
    ),
    Mutant(
        "request in two slices keeps the row of the first",
        UBATCH + "split.py",
        "values[number].narrow(dim, 0, kept)",
        "values[number].narrow(dim, 0, values[number].size(dim))",
        WRAPPED,
    ),
    Mutant(
        "places in the batch are not rebased",
        UBATCH + "split.py",
        "    if axes.rebase is not None:\n",
        "    if False:\n",
        WRAPPED,
    ),
    Mutant(
        "called-off split records another graph",
        UBATCH + "wrapper.py",
        "        if key is None or key.num_ubatches > 1 or key in programs:\n",
        "        if key is None or key.num_ubatches >= 1 or key in programs:\n",
        WRAPPED,
    ),
    Mutant(
        "multiprocessors stay divided after an error",
        UBATCH + "split.py",
        "            control.set_compute(compute_before)\n",
        "            pass\n",
        WRAPPED,
    ),
    Mutant(
        "strided tensors race wherever their intervals meet",
        SIMULATED + "races.py",
        "    if one.is_dense and other.is_dense:\n",
        "    if True:\n",
        OVERLAP,
    ),
    Mutant(
        "replay order ignores marks",
        SIMULATED + "graph.py",
        "                    other is stream or calls[0]",
        "                    True or other is stream or calls[0]",
        OVERLAP,
    ),
    Mutant(
        "memory used on two streams is given to the next one",
        SIMULATED + "device.py",
        "        if block is not None and block.owner is not _ours(stream):\n",
        "        if block is None:\n",
        "simulated/test_device_contract_simulated.py " + OVERLAP,
    ),
    Mutant(
        "split with an empty last slice is replayed",
        "graphrt/runtime/splitting.py",
        "if last_ubatch_is_empty(num_tokens, padded, query_len, num_ubatches):",
        "if False:",
        SPLIT_STEPS,
    ),
    Mutant(
        "step that was not split does not say why",
        "graphrt/runtime/splitting.py",
        "real_sizes=sizes)\n        return dispatch(*batch), None, why\n",
        "real_sizes=sizes)\n        return dispatch(*batch), None, None\n",
        SPLIT_STEPS,
    ),
    # What captures take from the device
    Mutant(
        "memory past the allocator is counted twice",
        RUNNER + "report.py",
        'capture=self._past_allocator["capture"] - executables,',
        'capture=self._past_allocator["capture"],',
        REPORT,
    ),
    Mutant(
        "phase begins where the capture did",
        RUNNER + "report.py",
        "last, self._last = self._last, self._allocated_or_free()",
        "last = self._last; self._allocated_or_free()",
        REPORT,
    ),
    Mutant(
        "memory of the latest capture alone is told",
        RUNNER + "captures.py",
        "self.memory_taken = self.memory_taken.plus(taken)",
        "self.memory_taken = taken",
        REPORT,
    ),
    Mutant(
        "memory of no part is not told",
        RUNNER + "report.py",
        "rest=before.free - after.free - parts.total",
        "rest=0",
        REPORT,
    ),
    Mutant(
        "dead blocks count as tensors",
        SIMULATED + "memory.py",
        "                if not block.is_dead\n            ),",
        "            ),",
        "simulated/test_device_contract_simulated.py",
    ),
]
