"""What a recording refuses: with the operation, why, and the user's own line."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from simulated_recording import record
from torch import manual_seed

from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import EmptyCaptureError, ForbiddenOperationError, UnsupportedOperationError

MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture(scope="module")
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


def assign_values_by_mask(x: torch.Tensor) -> None:
    x[x > 0] = x[:1]


def assign_data(x: torch.Tensor) -> None:
    x.data = x + 1


def resize(x: torch.Tensor) -> None:
    (x + 1).resize_(1000)


def rebind(x: torch.Tensor) -> None:
    x.set_(x + 1)


def branch(x: torch.Tensor) -> Any:
    return x + 1 if x.sum() > 0 else x


def resized_by_out(x: torch.Tensor) -> Any:
    return torch.add(x, 1, out=torch.empty(2))


# name -> (what is done with a float vector [4], what the operation is called)
FORBIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "item"),
    "bool": (lambda x: bool(x.sum() > 0), "bool"),
    "branch": (branch, "bool"),
    "int": (lambda x: int(x.sum()), "int"),
    "float": (lambda x: float(x[0]), "float"),
    "complex": (lambda x: complex(x[0]), "complex"),
    "index of a list": (lambda x: [1, 2, 3][x.long()[0]], "index"),
    "contains": (lambda x: 1.0 in x, "in tensor"),
    "formatting": (lambda x: f"{x.sum()}", "__format__"),
    "formatting with a width": (lambda x: f"{x.sum():.2f}", "__format__"),
    "repr": (lambda x: repr(x + 1), "__repr__"),
    "str": (lambda x: str(x), "__repr__"),
    "_local_scalar_dense": (
        lambda x: torch.ops.aten._local_scalar_dense(x[0]),
        "_local_scalar_dense",
    ),
    "nonzero": (lambda x: (x + 1).nonzero(), "nonzero"),
    "nonzero as tuple": (lambda x: x.nonzero(as_tuple=True), "nonzero"),
    "argwhere": (lambda x: torch.argwhere(x), "n"),
    "where with one argument": (lambda x: torch.where(x > 0), "nonzero"),
    "boolean-mask index": (lambda x: x[x > 0], "boolean mask"),
    "boolean-mask assignment of values": (assign_values_by_mask, "boolean mask"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), "unique_consecutive"),
    "bincount": (lambda x: torch.bincount(x.long().abs()), "bincount"),
    "equal": (lambda x: torch.equal(x, x * 2), "equal"),
    "allclose": (lambda x: torch.allclose(x, x * 2), "allclose"),
    "slicing by tensor": (lambda x: x[: x.long().abs()[0]], "_local_scalar_dense"),
    "indexing by a scalar tensor": (lambda x: x[x.long()[0]], "_local_scalar_dense"),
    "resize_": (resize, "resize_"),
    "an out argument that is too small": (resized_by_out, "add"),
    "set_": (rebind, "set_"),
    "assignment to .data": (assign_data, ".data"),
    "tolist": (lambda x: (x + 1).tolist(), "tolist"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "__array__": (lambda x: x.__array__(), "__array__"),
    "deepcopy": (lambda x: copy.deepcopy({"x": [x]}), "__deepcopy__"),
    "copy": (lambda x: copy.copy(x), "__reduce_ex__"),
    "pickle": (lambda x: pickle.dumps(x), "__reduce_ex__"),
    "tensor_split by tensor": (
        lambda x: torch.tensor_split(x, torch.ones(1, dtype=torch.long)),
        "tensor_split",
    ),
    "repeat_interleave by tensor": (
        lambda x: x.repeat_interleave(x.long().abs()),
        "repeat_interleave",
    ),
    "cpu of a result": (lambda x: (x + 1).cpu(), "Tensor.cpu"),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x.long().abs()), "one_hot"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_operation_is_refused_at_its_line(
    device: SimulatedDevice, name: str, mode: Any
) -> None:
    operation, shown = FORBIDDEN[name]
    pool = device.new_pool()
    x = torch.tensor([1.0, -2.0, 3.0, 0.0])
    kept, address = x.clone(), x.data_ptr()
    with pytest.raises(ForbiddenOperationError) as caught:
        record(device, pool, lambda: operation(x), mode)
    error = caught.value
    assert shown in error.operation
    code = operation.__code__
    assert error.source.startswith(f"{code.co_filename}:")
    assert f" in {code.co_name}: " in error.source
    line = int(error.source.removeprefix(f"{code.co_filename}:").split(" ")[0])
    assert line in {place for *_, place in code.co_lines()}
    assert str(error).startswith(f"operation {error.operation} is not permitted while capturing: ")
    assert error.expected
    assert error.found
    assert error.do
    # Nothing was touched, and the device records again.
    assert torch.equal(x, kept)
    assert x.data_ptr() == address
    assert not device.is_capturing()
    graph, out = record(device, pool, lambda: x + 1, mode)
    graph.replay()
    assert torch.equal(out, x + 1)
    graph.reset()
    pool.release()


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "shape and stride": lambda x: (len(x), x.shape[0], x.stride(), x.numel(), x.is_contiguous()),
    "integer index": lambda x: x[torch.arange(2)],
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(
        torch.ones_like(x, dtype=torch.long), output_size=4
    ),
    "repeat_interleave by a number": lambda x: x.repeat_interleave(2),
    "tensor_split by numbers": lambda x: torch.tensor_split(x, 2),
    "meta tensors": lambda x: (torch.empty(2, device="meta") + 1).add_(1),
    "as_tensor of a tensor": lambda x: torch.as_tensor(x) + 1,
    "tensor of no values": lambda x: torch.cat([torch.tensor([], device=x.device), x]),
    "new_tensor of no values": lambda x: torch.cat([x.new_tensor([]), x]),
    "iteration": lambda x: [row + 1 for row in x.view(2, 2)],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_operation_without_a_device_value_is_allowed(device: SimulatedDevice, name: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 0.0])
    pool = device.new_pool()
    graph, (_, out) = record(device, pool, lambda: (ALLOWED[name](x), x + 1))
    graph.replay()
    assert torch.equal(out, x + 1)
    graph.reset()
    pool.release()


def test_operator_tagged_unsafe_is_refused(device: SimulatedDevice) -> None:
    library = torch.library.Library("graphrt_simulated_unsafe", "FRAGMENT")
    try:
        library.define("stop(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("stop", lambda x: x.clone(), "CPU")
        library.define("count(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
        library.impl("count", lambda x: x.clone(), "CPU")
        for name in ("stop", "count"):
            operator = getattr(torch.ops.graphrt_simulated_unsafe, name)
            with pytest.raises(ForbiddenOperationError) as caught:
                record(device, device.new_pool(), lambda call=operator: call(torch.ones(2)))
            assert name in caught.value.operation
    finally:
        library._destroy()


def test_tensor_of_host_values_warns_and_strict_refuses_it() -> None:
    x = torch.zeros(2)
    lax, strict = SimulatedDevice(), SimulatedDevice(strict=True)
    with pytest.warns(
        UserWarning, match=r"torch\.tensor while capturing.*test_simulated_forbidden"
    ):
        graph, out = record(lax, lax.new_pool(), lambda: x + torch.tensor(2.0))
    graph.replay()
    assert out.tolist() == [2.0, 2.0]
    # A constant of the recording is no external.
    assert [use.tensor is x for use in graph.externals] == [True]
    with pytest.raises(ForbiddenOperationError) as caught:
        record(strict, strict.new_pool(), lambda: x + torch.tensor(2.0))
    assert caught.value.operation == "torch.tensor"
    lax.close()
    strict.close()


HOST_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "a number": lambda: torch.tensor(1.0),
    "Tensor": lambda: torch.Tensor([1.0, 2.0]),
    "LongTensor": lambda: torch.LongTensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "asarray": lambda: torch.asarray([1.0, 2.0]),
    "from_numpy": lambda: torch.from_numpy(numpy.ones(2)),
    "as_tensor of an array": lambda: torch.as_tensor(numpy.ones(2)),
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32),
    "from_dlpack": lambda: torch.from_dlpack(numpy.ones(2)),
}


@pytest.mark.parametrize("name", HOST_TENSORS)
def test_host_tensor_warns_at_its_line_and_strict_refuses(name: str) -> None:
    x, make = torch.zeros(2), HOST_TENSORS[name]
    lax, strict = SimulatedDevice(), SimulatedDevice(strict=True)
    line = f"{__file__}:{make.__code__.co_firstlineno}"
    with pytest.warns(UserWarning, match="while capturing") as warned:
        record(lax, lax.new_pool(), lambda: (make(), x + 1))
    assert line in str(warned[0].message)
    with pytest.raises(ForbiddenOperationError) as caught:
        record(strict, strict.new_pool(), lambda: (make(), x + 1))
    assert caught.value.source.startswith(line)


def test_line_that_makes_host_tensors_warns_once_for_all_recordings() -> None:
    x, device = torch.zeros(2), SimulatedDevice()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(3):
            record(device, device.new_pool(), lambda: [x + torch.tensor(2.0) for _ in range(3)])
        record(device, device.new_pool(), lambda: x + torch.tensor(2.0))
    assert len(warned) == 2
    device.close()


def test_packed_weights_are_recorded_in_each_recording(device: SimulatedDevice) -> None:
    packed, x = torch.ops.quantized.linear_prepack_fp16(torch.eye(4), None), torch.zeros(2, 4)
    for _ in range(3):
        graph, out = record(
            device, device.new_pool(), lambda: torch.ops.quantized.linear_dynamic_fp16(x, packed)
        )
        x.fill_(3)
        graph.replay()
        assert torch.equal(out, x)
        x.zero_()


@pytest.mark.filterwarnings("ignore:torch")
def test_host_values_are_computed_and_read_on_the_host(device: SimulatedDevice) -> None:
    x, seen = torch.zeros(2), []

    def body() -> torch.Tensor:
        host = torch.tensor([1.0, 2.0]).mul_(2) + torch.arange(2).new_ones(()).item()
        seen.append(host)
        return x + 1

    with pytest.raises(ForbiddenOperationError):  # The result of arange is the device's.
        record(device, device.new_pool(), body)

    def on_host() -> torch.Tensor:
        host = torch.tensor([1.0, 2.0]) * 2
        assert host.to("cpu").to(torch.float64).numpy().tolist() == [2.0, 4.0]
        assert bool(host[0] == 2.0)
        assert torch.equal(host, host.clone())
        return x + host.sum()

    graph, out = record(device, device.new_pool(), on_host)
    graph.replay()
    assert out.tolist() == [6.0, 6.0]
    assert [use.tensor is x for use in graph.externals] == [True]


def test_name_of_the_device_in_a_variable_is_no_host(device: SimulatedDevice) -> None:
    x, where = torch.zeros(2), str(device.torch_device)
    graph, out = record(device, device.new_pool(), lambda: x.to(where) + 1)
    graph.replay()
    assert out.tolist() == [1.0, 1.0]


def seed_in_a_fork() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(987654321)


def test_refused_seed_is_told_at_its_line(device: SimulatedDevice) -> None:
    x = torch.zeros(2)
    with pytest.raises(ForbiddenOperationError) as caught:
        record(device, device.new_pool(), lambda: (torch.rand_like(x), seed_in_a_fork()))
    assert caught.value.source.startswith(f"{__file__}:")
    assert "seed_in_a_fork" in caught.value.source


@pytest.mark.parametrize("advance", [True, False])
def test_declared_generator_seeded_in_a_recording_is_refused(
    device: SimulatedDevice, advance: bool
) -> None:
    """Each call seeds it, so that eager calls draw the same numbers, and no replay would."""
    x, generator = torch.zeros(2), torch.Generator().manual_seed(5 - advance)

    def draw() -> torch.Tensor:
        generator.manual_seed(4)
        return torch.rand(2, generator=generator) + x

    if advance:
        draw()
    with pytest.raises(ForbiddenOperationError) as caught:
        record(device, device.new_pool(), draw, generators=(generator,))
    assert "seed" in caught.value.operation


def test_random_number_of_an_undeclared_generator_is_refused(device: SimulatedDevice) -> None:
    x, generator = torch.ones(2, 3), torch.Generator()
    for draw in (
        lambda: torch.rand(2, generator=generator),
        lambda: x.clone().normal_(generator=generator),
        lambda: torch.multinomial(x, 1, generator=generator),
    ):
        with pytest.raises(ForbiddenOperationError) as caught:
            record(device, device.new_pool(), draw)
        assert "generators=" in caught.value.do
        record(device, device.new_pool(), draw, generators=(generator,))


@pytest.mark.parametrize(
    "seed",
    [
        lambda: torch.manual_seed(987654321),
        lambda: torch.random.manual_seed(987654321),
        torch.seed,
        lambda: torch.default_generator.manual_seed(987654321),
        lambda: manual_seed(987654321),
        lambda: seed_in_a_fork(),
    ],
    ids=["torch", "torch.random", "seed", "a method", "imported", "put back"],
)
def test_seed_set_in_a_recording_is_refused(
    device: SimulatedDevice, seed: Callable[[], Any]
) -> None:
    x, before = torch.zeros(2), torch.get_rng_state()
    try:
        with pytest.raises(ForbiddenOperationError) as caught:
            record(device, device.new_pool(), lambda: (seed(), torch.rand_like(x)))
    finally:
        torch.set_rng_state(before)
    assert "seed" in caught.value.operation


def test_shown_functions_are_torchs_own_after_a_recording(device: SimulatedDevice) -> None:
    own = torch.manual_seed, torch.frombuffer, torch.from_dlpack
    x = torch.zeros(2)

    def body() -> torch.Tensor:
        assert torch.manual_seed is not own[0]
        other = threading.Thread(target=lambda: torch.frombuffer(bytearray(8), dtype=torch.int64))
        other.start()
        other.join()
        return x + 1

    record(device, device.new_pool(), body)
    assert (torch.manual_seed, torch.frombuffer, torch.from_dlpack) == own
    with pytest.raises(ForbiddenOperationError):
        record(device, device.new_pool(), lambda: x.item())
    assert (torch.manual_seed, torch.frombuffer, torch.from_dlpack) == own


def test_operator_that_returns_a_number_of_data_is_refused(device: SimulatedDevice) -> None:
    library = torch.library.Library("graphrt_simulated_number", "FRAGMENT")
    try:
        library.define("count(Tensor x) -> int")
        library.impl("count", lambda x: int((x > 0).sum()), "CPU")
        library.define("rows(Tensor x) -> int")
        library.impl("rows", lambda x: x.shape[0], "CompositeExplicitAutograd")
        x, ops = torch.ones(3), torch.ops.graphrt_simulated_number
        with pytest.raises(ForbiddenOperationError) as caught:
            record(device, device.new_pool(), lambda: x + ops.count(x))
        assert "count" in caught.value.operation
        graph, out = record(device, device.new_pool(), lambda: x + ops.rows(x))
        graph.replay()
        assert out.tolist() == [4.0] * 3
    finally:
        library._destroy()


def test_assigned_number_is_no_constant_tensor(device: SimulatedDevice) -> None:
    x = torch.zeros(3)

    def assign() -> None:
        x[1:2] = 2.0

    graph, _ = record(device, device.new_pool(), assign)
    assert [(use.tensor is x, use.written) for use in graph.externals] == [(True, True)]
    graph.replay()
    assert x.tolist() == [0.0, 2.0, 0.0]


def test_operator_without_a_fake_kernel_is_unsupported(device: SimulatedDevice) -> None:
    library = torch.library.Library("graphrt_simulated_nofake", "FRAGMENT")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        twice = torch.ops.graphrt_simulated_nofake.twice
        x = torch.ones(3)
        with pytest.raises(UnsupportedOperationError) as caught:
            record(device, device.new_pool(), lambda: twice(x))
        assert "twice" in caught.value.operation
        assert "register_fake" in caught.value.do
        # Without a result there is no shape to be known.
        ran: list[torch.Tensor] = []
        library.define("increment(Tensor(a!) x) -> ()")
        library.impl("increment", lambda x: ran.append(x.add_(1)), "CPU")
        increment = torch.ops.graphrt_simulated_nofake.increment
        graph, _ = record(device, device.new_pool(), lambda: increment(x))
        assert ran == []
        graph.replay()
        assert x.tolist() == [2.0] * 3
    finally:
        library._destroy()


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta")
@pytest.mark.parametrize("made", ["to_sparse", "to_sparse_csr", "to_sparse_bsr"])
@pytest.mark.parametrize(
    "use",
    [
        lambda sparse: torch.mm(sparse, torch.ones(4, 4)),
        lambda sparse: torch.nn.functional.linear(torch.ones(4, 4), sparse),
        lambda sparse: sparse.to_dense() + 1,
        lambda sparse: (sparse._values() if sparse.is_sparse else sparse.values()) + 1,
    ],
)
def test_sparse_tensor_is_unsupported(device: SimulatedDevice, made: str, use: Any) -> None:
    sparse = getattr(torch.eye(4), made)(*[(2, 2)][: made == "to_sparse_bsr"])
    with pytest.raises(UnsupportedOperationError, match="sparse"):
        record(device, device.new_pool(), lambda: use(sparse))


def test_wrong_arguments_raise_what_torch_raises(device: SimulatedDevice) -> None:
    pool = device.new_pool()
    x, y = torch.ones(3), torch.ones(4)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        record(device, pool, lambda: x.matmul(y.view(2, 2)))
    with pytest.raises(RuntimeError, match="size of tensor a"):
        record(device, pool, lambda: x + y)
    with pytest.raises(RuntimeError, match="size of tensor a"):
        record(device, pool, lambda: x.add_(y))
    with pytest.raises(IndexError):
        record(device, pool, lambda: x.sum(3))
    graph, _ = record(device, pool, lambda: x + 1)
    assert graph.num_nodes == 1


def test_views_and_allocations_are_no_kernels(device: SimulatedDevice) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(EmptyCaptureError):
        record(
            device,
            device.new_pool(),
            lambda: (x.t(), torch.empty(3), x.view(6), x.is_same_size(x)),
        )


def test_stricter_fake_kernel_does_not_decide(
    device: SimulatedDevice,
) -> None:
    library = torch.library.Library("graphrt_simulated_strict", "FRAGMENT")
    ran: list[float] = []

    def halve(x: torch.Tensor) -> torch.Tensor:
        ran.append(float(x.sum()))
        return x / 2

    def halve_fake(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only on another device")

    try:
        library.define("halve(Tensor x) -> Tensor")
        library.impl("halve", halve, "CPU")
        library._register_fake("halve", halve_fake)
        x = torch.ones(3)
        graph, out = record(
            device, device.new_pool(), lambda: torch.ops.graphrt_simulated_strict.halve(x)
        )
        assert ran == [0.0]
        graph.replay()
        assert ran == [0.0, 3.0]
        assert out.tolist() == [0.5] * 3
    finally:
        library._destroy()
