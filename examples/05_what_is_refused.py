"""05: What is refused, and how the error reads.

Done by hand, each of these fails without saying where, or gives wrong answers in silence. An error
says what was expected, what was found (with file and line, left out here) and what to do; nothing
half-captured stays behind.

Output::

    waits_for_the_device
      ForbiddenOperationError
        expected: work that the device can repeat without Python
        found:    aten::_local_scalar_dense (.item()) in waits_for_the_device: return x /
                  x.max().item()
        do:       keep the value on the device (torch.where, index_select), or pass it as part
                  of the key.
    keeps_memory_of_the_recording
      EscapedAllocationError
        expected: memory of the recording held by outputs and static outputs alone
        found:    64 bytes kept by KEPT in keeps_memory_of_the_recording
        do:       allocate it before the capture, return it in tensors, tuples, lists, dicts
                  and dataclasses, or delete it before the callable returns; of a weight that
                  a hook computes in each call: prune.remove, remove_weight_norm, or
                  torch.nn.utils.parametrize
    advances_a_state_that_nobody_declared
      StateAdvancedError
        expected: a callable that writes nothing but static buffers declared written, what
                  state= guards and what may_overwrite= names
        found:    STEPS is written in advances_a_state_that_nobody_declared; no state guard
                  was given
        do:       guard it with state=, which puts it back, or name it in may_overwrite=, if
                  inputs point at a reserved place in it or it may hold anything after a
                  capture
    reads_its_padding
      VerificationError
        expected: real rows and state that no padded row reaches
        found:    padding is read: other padded rows in x change the result
        do:       mask the padded rows, or declare what they hold (padding= of the
                  BufferSpec); reads_padding='why' if results are meant to depend on them. If
                  an input holds lengths: examples in place of capture(like=...), which cuts
                  rows and leaves values as they are. If only a row of state meant for padding
                  differs: may_overwrite={tensor: 'input that indexes its rows'} compares the
                  real rows alone
    a batch above the largest size, in strict mode
      MissError
        expected: a captured graph for every step (on_miss='strict')
        found:    none serves it: ABOVE_MAX (9 rows are 1 above the largest captured size, 8)
        do:       capture a size that holds it, or set on_miss='eager'. The step did not run
    a value of another shape
      InputMismatchError
        expected: 1 dimensions, ('rows',)
        found:    2 dimensions, (3, 2)
        do:       pass what its BufferSpec declares
    and the graphs still replay: [2.0, 2.0, 2.0]
"""

import re
from textwrap import fill

import torch

from graphrt import BufferSpec, CUDAGraphRunner, OutputSpec
from graphrt.errors import GraphrtError

KEPT, STEPS = [], torch.zeros(())


def waits_for_the_device(x):
    return x / x.max().item()


def keeps_memory_of_the_recording(x):
    KEPT.append(x + 1)
    return x * 2


def advances_a_state_that_nobody_declared(x):
    STEPS.add_(1)
    return x + STEPS


def reads_its_padding(x):
    return x - x.max()


def a_good_one(x):
    return x * 2


def make_runner(fn):
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("rows",), torch.float32)],
        outputs=OutputSpec({"": "rows"}),
        sizes={"rows": [4, 8]},
        on_miss="strict",
        device="simulated",
    )


def show(title, error):
    print(f"{title}\n  {type(error).__name__}")
    for part in ("expected", "found", "do"):
        text = re.sub(
            r"( at|, allocated at) /\S+|(, while|: \d+ elements).*", "", getattr(error, part)
        )
        print(fill(text, 90, initial_indent=f"    {part + ':':<9} ", subsequent_indent=" " * 14))


def main() -> None:
    like = {"x": torch.arange(1.0, 9.0)}
    for refused in (
        waits_for_the_device,
        keeps_memory_of_the_recording,
        advances_a_state_that_nobody_declared,
        reads_its_padding,
    ):
        with make_runner(refused) as runner:
            try:
                runner.capture(like=like)
            except GraphrtError as error:
                show(refused.__name__, error)

    with make_runner(a_good_one) as runner:
        runner.capture(like=like)
        for title, x in {
            "a batch above the largest size, in strict mode": torch.ones(9),
            "a value of another shape": torch.ones(3, 2),
        }.items():
            try:
                runner.run({"x": x})
            except GraphrtError as error:
                show(title, error)
        print("and the graphs still replay:", runner.run({"x": torch.ones(3)}).tolist())


if __name__ == "__main__":
    main()
