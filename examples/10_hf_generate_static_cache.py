"""10: Greedy decoding of a transformers model: its own module, its static cache, one graph.

The loop is yours; model and cache are those of transformers, as they are. All decode steps have
the same shapes, so ``examples`` says all that there is to say of inputs. A step advances lengths
that the cache keeps: what a capture does to them is undone (``state``). Rows behind these lengths
may hold anything until a step writes them (``may_overwrite``). The cache is passed by position
because its name, ``past_key_values``, became ``cache`` in transformers 5.24.

Output::

    prompt 0: [62, 243, 93, 236] -> [253, 250, 145, 103, 82, 92, 170, 103]
    equal to transformers' generate: True
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

from graphrt import CUDAGraphRunner, TensorStateGuard


def generate(model, prompts, num_new):
    """[prompts, length + num_new]: ``prompts`` [prompts, length], and what follows each."""
    cache = StaticCache(model.config, max_cache_len=prompts.shape[1] + num_new)

    def next_tokens(ids):
        return model(ids, None, None, cache).logits[:, -1:].argmax(-1)

    tokens = [next_tokens(prompts)]  # the prefill is eager, and allocates the cache
    with CUDAGraphRunner(
        next_tokens,
        examples=lambda sizes, seed: {"ids": torch.full_like(tokens[0], seed)},
        state=TensorStateGuard(layer.cumulative_length for layer in cache.layers),
        may_overwrite=[t for layer in cache.layers for t in (layer.keys, layer.values)],
    ) as runner:
        runner.capture()
        while len(tokens) < num_new:
            tokens.append(runner.run({"ids": tokens[-1]}))
    return torch.cat([prompts, *tokens], 1)


def main():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=256, **shape, **heads, eos_token_id=None, pad_token_id=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM(config).to(device).eval().requires_grad_(False)
    prompts = torch.randint(256, (3, 4)).to(device)

    tokens = generate(model, prompts, num_new=8)
    expected = model.generate(prompts, max_new_tokens=8, do_sample=False)
    print(f"prompt 0: {prompts[0].tolist()} -> {tokens[0, 4:].tolist()}")
    print("equal to transformers' generate:", torch.equal(tokens, expected))


if __name__ == "__main__":
    main()
