"""Examples: valid inputs of any real sizes, which warm-ups, captures and checks run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt.config.checked import check_type
from graphrt.errors import InputMismatchError, noting
from graphrt.verify import compare

Sizes = Mapping[str, int]
Values = Mapping[str, torch.Tensor]


class Example(NamedTuple):
    """Valid inputs of given real sizes: what warm-up, capture and verification run on.

    ``values``: By input name.
    ``step_info``: What ``Resource.prepare`` gets when the example runs for real (verification). All
      of it varies with the seed where a graph holds what it says.
    ``constant_info``: True: ``step_info`` is the same in every step, so that a graph may hold what
      it says. Where one does, a step with other host values in it is refused; what its tensors hold
      is not compared.
    """

    values: Values
    step_info: Any = None
    constant_info: bool = False


Examples = Callable[[Sizes, int], Example | Values]
"""``examples(sizes, seed)``: valid inputs of exactly these real sizes, different for each seed."""


def make_example(examples: Examples, sizes: Sizes, seed: int) -> Example:
    """What ``examples`` returns. Errors: ``ConfigError`` where that is no batch."""
    given, expected = f"examples({dict(sizes)}, {seed})", "an Example, or values by input name"
    with noting(f"in {given}"):
        made = examples(sizes, seed)
    example = made if isinstance(made, Example) else Example(made)
    check_type(given, example.values, Mapping, expected, "return {name: tensor} for every input")
    return example


def as_example(like: Example | Values) -> Example:
    """``like``, a whole batch. Errors: ``InputMismatchError`` for what is no batch."""
    example = like if isinstance(like, Example) else Example(like)
    if not isinstance(example.values, Mapping):
        raise InputMismatchError(
            "like",
            expected="one real batch: tensors by input name, or an Example of them",
            found=type(example.values).__name__,
            do="pass what a step is given",
        )
    return example


def examples_like(
    example: Example, sizes: Sizes, shapes: Mapping[str, tuple[int | str, ...]]
) -> Examples:
    """Examples made of the first ``sizes`` of one real batch: rows, repeated or cut to other sizes.

    Along each axis, row ``i`` is row ``(i + seed) % n`` of the batch, so that contents stay valid.
    Where that is the example of seed 0 again (one row, or equal ones), floating-point inputs are
    halved for odd seeds, which keeps zeros, signs and infinities. ``shapes``: name -> the spec's.

    Errors: ``InputMismatchError`` for a batch without rows along an axis.
    """
    for axis, size in sizes.items():
        if size == 0:
            raise InputMismatchError(
                f"like: axis {axis!r}",
                expected="at least one row, to repeat",
                found="0",
                do="give a batch that is not empty",
            )
    batch = {}
    for name, value in example.values.items():
        for dim, length in enumerate(shapes[name]):
            if isinstance(length, str):
                value = value.narrow(dim, 0, sizes[length])
        # A copy, because later captures use it too, and the caller may write what it gave.
        batch[name] = value.detach().clone()

    def rows(wanted: Sizes, seed: int) -> dict[str, torch.Tensor]:
        made = {}
        for name, value in batch.items():
            for dim, axis in enumerate(shapes[name]):
                if isinstance(axis, str):
                    index = torch.arange(seed, seed + wanted[axis], device=value.device)
                    value = value.index_select(dim, index % sizes[axis])
            made[name] = value
        return made

    def examples(wanted: Sizes, seed: int) -> Example:
        made = rows(wanted, seed)
        if seed % 2 and compare(rows(wanted, 0), made).is_equal:
            made = {
                name: value / 2 if value.is_floating_point() or value.is_complex() else value
                for name, value in made.items()
            }
        return example._replace(values=made)

    return examples


@contextmanager
def of_example() -> Iterator[None]:
    """Around the staging of an example: say what to do if it does not fit."""
    try:
        yield
    except InputMismatchError as error:
        error.subject = f"an example: {error.subject}"
        error.do = (
            "let examples(sizes, seed) return every input, of exactly the sizes it is asked for: "
            "those of a key, and smaller ones, which check the padding"
        )
        raise
