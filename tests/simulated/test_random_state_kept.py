"""Random generators stand after a capture where they stood before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from graphrt import CaptureJob
from graphrt.errors import GraphrtError, VerificationError
from lab import FULL, KEY, Lab, rows_runner
from ranks_lab import launcher

OWN = torch.Generator()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(generators=(OWN,)) as lab:
        yield lab


def states() -> list[Any]:
    of_numpy = numpy.random.get_state(legacy=False)
    return [
        random.getstate(),
        (of_numpy["state"]["pos"], of_numpy["state"]["key"].tolist()),  # type: ignore[index]
        torch.get_rng_state().tolist(),
        OWN.get_state().tolist(),
    ]


def draws_all(x: Tensor) -> Tensor:
    random.random()
    numpy.random.rand()
    return x + torch.rand_like(x) + torch.rand(1, generator=OWN)


def fails(x: Tensor) -> Tensor:
    draws_all(x)
    return x.nonzero()


@pytest.mark.parametrize("warmups", [0, 1, 2])
@pytest.mark.parametrize("fn", [draws_all, fails])
def test_generators_stand_where_they_stood(
    lab: Lab, fn: Callable[[Tensor], Tensor], warmups: int
) -> None:
    x = torch.zeros(4)

    def inputs(seed: int) -> Any:
        random.random()
        return (x.copy_(torch.rand(4)),), {}

    before = states()
    job = CaptureJob(lab.wrap(fn), FULL, KEY, inputs)
    if fn is fails:
        with pytest.raises(GraphrtError):
            lab.capture_all(job, warmups=warmups)
    else:
        lab.capture_all(job, warmups=warmups)
    assert states() == before


def test_generators_of_a_runner_stand_where_they_stood_after_each_part() -> None:
    def examples(sizes: Any, seed: int) -> dict[str, Tensor]:
        random.random()
        return {"x": torch.rand(sizes["n"], 4)}

    before = states()
    with rows_runner(lambda x: x + torch.rand_like(x), (2, 4), examples=examples) as runner:
        while runner.capture_next():
            assert states() == before
        runner.capture()
        assert states() == before
        first, second = (runner.run({"x": torch.zeros(4, 4)}).clone() for _ in range(2))
        assert not torch.equal(first, second)


def test_graph_that_draws_draws_what_eager_draws_after_its_capture(lab: Lab) -> None:
    def draw(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(8)
    torch.manual_seed(5)
    wrapper = lab.wrap_and_capture(draw, x)
    replayed = [lab.step(wrapper, x).clone() for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(draw(x), each) for each in replayed)


@pytest.mark.parametrize("warmups", [0, 1])
def test_number_that_a_graph_freezes_is_still_found(warmups: int) -> None:
    for draw in (random.random, numpy.random.rand, lambda: torch.rand(1).item()):
        with (
            pytest.raises((VerificationError, GraphrtError)),
            rows_runner(lambda x, draw=draw: x * draw(), warmups=warmups) as runner,
        ):
            runner.capture()


def test_numpy_is_not_imported_to_keep_its_state() -> None:
    code = (
        "import numpy, sys\n"
        "vars(numpy).pop('random', None); sys.modules['numpy.random'] = None\n"
        "from graphrt.verify.run_state import random_state\n"
        "import random, torch\n"
        "put_back = random_state(()); first = random.random(), torch.rand(1).item()\n"
        "put_back(); assert (random.random(), torch.rand(1).item()) == first"
    )
    (done,) = launcher().run(code)
    assert done.status == 0, done.stderr
