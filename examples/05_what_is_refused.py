"""05: What is refused, and how the error reads.

A capture that met one of these would replay wrong answers in silence. Each error says what was
expected, what was found and what to do; nothing half-captured stays behind.

Output::

    waits_for_the_device
      ForbiddenOperationError
        expected: work that the device can repeat without Python
        found:    aten::_local_scalar_dense (.item())
        do:       keep the value on the device (torch.where, index_select), or pass it as part
                  of the key.
    keeps_memory_of_the_recording
      EscapedAllocationError
        expected: memory of the recording held by outputs and static outputs alone
        found:    64 bytes kept by KEPT
        do:       allocate it before the capture, return it, or name it in allow_escape
    an unseen key outside a scope
      CaptureOutsideScopeError
        expected: a key that was captured: BatchDescriptor(num_tokens=4)
        found:    an unseen key, and no capture scope in the forward context
        do:       capture it in library.capture_scope(), or dispatch only to captured keys
    another host value
      UnkeyedValueError
        expected: 2, the value that was captured
        found:    3
        do:       put it in the key's `variant` or pass a tensor
    a tensor of another shape
      StaleInputError
        expected: torch.float32 tensor of shape (4,), stride (1,)
        found:    torch.float32 tensor of shape (3,), stride (1,)
        do:       write new values into the captured tensor (`copy_`), or capture again
    and the graph of 4 still replays: [2.0, 2.0, 2.0, 2.0]
"""

import re
from textwrap import fill

import torch

from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    SimulatedDevice,
)
from graphrt.errors import CaptureError, ReplayError

FULL, KEY = RuntimeMode.FULL, BatchDescriptor(4)
KEPT = []


def waits_for_the_device(x):
    return x / x.max().item()


def keeps_memory_of_the_recording(x):
    KEPT.append(x + 1)
    return x * 2


def show(title, error):
    print(f"{title}\n  {type(error).__name__}")
    for part in ("expected", "found", "do"):
        text = re.sub(r"( at|, allocated at) /.*", "", getattr(error, part))  # without the place
        print(fill(text, 90, initial_indent=f"    {part + ':':<9} ", subsequent_indent=" " * 14))


def main() -> None:
    device = SimulatedDevice()
    with GraphLibrary(device) as library, torch.inference_mode():
        x = torch.ones(4)
        for refused in (waits_for_the_device, keeps_memory_of_the_recording):
            wrapped = CUDAGraphWrapper(refused, library, FULL)
            try:
                with library.capture_scope() as scope, scope.step(FULL, KEY):
                    wrapped(x)
            except CaptureError as error:
                show(refused.__name__, error)
        KEPT.clear()

        scaled = CUDAGraphWrapper(lambda x, factor: x * factor, library, FULL, name="scaled")
        with library.capture_scope() as scope, scope.step(FULL, KEY):
            scaled(x, 2)
        calls = {
            "an unseen key outside a scope": (BatchDescriptor(8), (x, 2)),
            "another host value": (KEY, (x, 3)),
            "a tensor of another shape": (KEY, (torch.ones(3), 2)),
        }
        for title, (key, args) in calls.items():
            try:
                with ForwardContext(FULL, key):
                    scaled(*args)
            except (CaptureError, ReplayError) as error:
                error.expected, error.found = (
                    text.split(", at 0x")[0] for text in (error.expected, error.found)
                )
                show(title, error)
        with ForwardContext(FULL, KEY):
            print("and the graph of 4 still replays:", scaled(x, 2).tolist())
    device.close()


if __name__ == "__main__":
    main()
