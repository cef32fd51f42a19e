"""03: Capture and replay one callable, on the simulated device: no GPU needed.

A wrapper trusts the forward context: mode NONE runs the callable, FULL replays its graph. Only
inside a capture scope may it capture. A replay runs the kernels and no Python.

Output::

    capture: one warm-up and one recording of each key
      (Python runs)
      (Python runs)
      (Python runs)
      (Python runs)
    3 rows, FULL, graph of 4:
       [1.0, 3.0, 5.0]
    6 rows, FULL, graph of 8:
       [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    3 rows, NONE, graph of 4:
      (Python runs)
       [1.0, 3.0, 5.0]
    2 graphs
"""

import torch

from graphrt import (
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    OutputSpec,
    RuntimeMode,
    SimulatedDevice,
    capture_all,
)

KEYS = [BatchDescriptor(8), BatchDescriptor(4)]  # the largest first: it sizes the pool


def main() -> None:
    def model(x):
        print("  (Python runs)")
        return x * 2 + 1

    device = SimulatedDevice()
    with GraphLibrary(device) as library, torch.inference_mode():
        spec = BufferSpec("x", ("tokens",), torch.float32)
        buffers = BufferSet([spec], {"tokens": 8}, lambda key: {"tokens": key.num_tokens}, device)
        library.add_buffers(buffers)
        wrapped = CUDAGraphWrapper(model, library, RuntimeMode.FULL, name="model")

        print("capture: one warm-up and one recording of each key")
        with library.capture_scope() as scope:
            capture_all(
                scope.library,
                [
                    CaptureJob(
                        wrapped, RuntimeMode.FULL, key, lambda k=key: ((), buffers.bind(k).views)
                    )
                    for key in KEYS
                ],
            )
        programs = wrapped.concrete_cudagraph_entries
        outputs = {key: OutputSpec({"": "tokens"}).bind(programs[key]) for key in KEYS}

        for n, mode in [(3, RuntimeMode.FULL), (6, RuntimeMode.FULL), (3, RuntimeMode.NONE)]:
            key = min((k for k in KEYS if k.num_tokens >= n), key=lambda k: k.num_tokens)
            print(f"{n} rows, {mode.name}, graph of {key.num_tokens}:")
            bound = buffers.bind(key)
            bound.stage(n, {"x": torch.arange(n, dtype=torch.float32)})
            with ForwardContext(mode, key):
                result = wrapped(**bound.views)
            print("  ", outputs[key].unpad(n).tolist() if mode else result[:n].tolist())
        print(f"{library.num_cudagraph_captured} graphs")
    device.close()


if __name__ == "__main__":
    main()
