"""01: From options to a plan, and from a batch to a decision. Loads no torch.

A policy and the facts resolve once, with a reason for whatever had to be changed. A dispatcher
over the plan's keys then answers each batch from a table: which mode, which graph, and why.

Output::

    cudagraph_mode: asked FULL, got FULL_AND_PIECEWISE
      because
        the attention backend supports UNIFORM_BATCH
        a full graph of mixed batches needs ALWAYS
    7 graphs, captured in this order:
      PIECEWISE 8 tokens
      PIECEWISE 4 tokens
      PIECEWISE 2 tokens
      PIECEWISE 1 tokens
      FULL      4 tokens, uniform
      FULL      2 tokens, uniform
      FULL      1 tokens, uniform
    3 uniform -> FULL, 4 tokens, PADDED
    3 mixed   -> PIECEWISE, 4 tokens, PADDED
    8 mixed   -> PIECEWISE, 8 tokens, HIT
    9 mixed   -> NONE, 9 tokens, ABOVE_MAX
"""

from graphrt import CompilationConfig, CUDAGraphDispatcher, Facts, RuntimeConfig, resolve


def main() -> None:
    config = RuntimeConfig(
        compilation=CompilationConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 4, 8]),
        max_num_seqs=4,
    )
    # This attention can stand in a full graph only if every request brings as many tokens.
    resolved = resolve(config, Facts(attention_support="UNIFORM_BATCH"))

    for change in resolved.adjustments:
        print(f"{change.field}: asked {change.asked}, got {change.effective}")
        print("  because", *change.reason.split("; "), sep="\n    ")
    print(f"{len(resolved.plan.capture_order)} graphs, captured in this order:")
    for mode, key in resolved.plan.capture_order:
        print(f"  {mode.name:<9} {key.num_tokens} tokens" + (", uniform" if key.uniform else ""))

    dispatcher = CUDAGraphDispatcher(resolved.plan)
    for num_tokens, uniform in [(3, True), (3, False), (8, False), (9, False)]:
        mode, key, reason = dispatcher.dispatch(num_tokens, uniform=uniform)
        kind = "uniform" if uniform else "mixed"
        print(f"{num_tokens} {kind:<7} -> {mode.name}, {key.num_tokens} tokens, {reason.name}")


if __name__ == "__main__":
    main()
