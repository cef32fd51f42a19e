"""Which launches share a compiled variant of a Triton kernel."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch

import graphrt_llm.kernels.launching as launching
from graphrt_llm.kernels.launching import ALIGNMENT, Launcher

GRID = (2, 3, 1)


STREAM = 77


def stream_of(device_index: int | None) -> int:
    return STREAM


class Kernel:
    """A fake of a ``triton.jit`` function, and of the kernels that it compiles."""

    def __init__(self) -> None:
        self.compilations: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*args: Any, num_warps: int) -> Any:
            self.compilations.append((grid, args, num_warps))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    function = "function"
    packed_metadata = "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, *args: Any) -> None:
        launched(self.kernel, *args)


def launched(
    kernel: Kernel, x: int, y: int, z: int, stream: int, function: Any, *args: Any
) -> None:
    assert (stream, function) == (STREAM, Compiled.function)
    metadata, launch_metadata, enter_hook, exit_hook, *arguments = args
    assert metadata == Compiled.packed_metadata
    assert launch_metadata is enter_hook is exit_hook is None
    kernel.launches.append(((x, y, z), arguments))


def tensor(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)


class CudaLauncher:
    """What ``run`` is in a release of Triton: it adds arguments, and calls a function of C."""

    def __init__(self, kernel: Kernel, *added: Any) -> None:
        self.kernel = kernel
        self.added = added
        self.num_asked = 0
        self.launch = self.launch_in_c

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.num_asked += 1
        self.launch(x, y, z, stream, function, *self.added, *args)

    def launch_in_c(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        assert args[: len(self.added)] == self.added
        launched(self.kernel, x, y, z, stream, function, *args[len(self.added) :])


class ScratchLauncher(CudaLauncher):
    """Passes memory on, which is another one at each launch."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.added = (False, object())
        super().__call__(x, y, z, stream, function, *args)


class FailingLauncher(CudaLauncher):
    """Wants the kernel's arguments in any case."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        if len(args) == 4:
            raise TypeError("function takes exactly 9 arguments")
        super().__call__(x, y, z, stream, function, *args)


@pytest.mark.parametrize(
    ("kind", "added", "is_direct"),
    [
        (CudaLauncher, (), True),
        (CudaLauncher, (False, True, None, None), True),
        (CudaLauncher, (False, 0, b"memory"), False),
        (ScratchLauncher, (), False),
        (FailingLauncher, (False,), False),
    ],
)
def test_launches_leave_out_what_tritons_launcher_asks_each_time(
    monkeypatch, kind, added, is_direct
):
    kernel = Kernel()
    run = kind(kernel, *added)
    monkeypatch.setattr(Compiled, "run", property(lambda self: run))
    launch = Launcher(kernel, stream_of)
    launch(GRID, (tensor(),), (5,), (8,), 4)
    second = tensor()
    launch((7, 1, 1), (second,), (5,), (8,), 4)
    assert kernel.launches == [((7, 1, 1), [second.data_ptr(), 5, 8])]
    assert run.num_asked == (not is_direct)


def test_the_second_launch_of_a_variant_compiles_nothing():
    kernel = Kernel()
    launch = Launcher(kernel, stream_of)
    first, second = tensor(), tensor()
    launch(GRID, (first,), (5, 0.5), (8, True), 4)
    launch((7, 1, 1), (second,), (5, 0.5), (8, True), 4)
    assert [(grid, args[1:], warps) for grid, args, warps in kernel.compilations] == [
        (GRID, (5, 0.5, 8, True), 4)
    ]
    ((grid, args),) = kernel.launches
    assert grid == (7, 1, 1)
    assert args == [second.data_ptr(), 5, 0.5, 8, True]


@pytest.mark.parametrize(
    ("tensors", "numbers", "constants", "num_warps"),
    [
        ((tensor(torch.float16), tensor()), (5,), (8,), 4),
        ((tensor(), tensor(torch.float16)), (5,), (8,), 4),
        ((tensor(), tensor()), (16,), (8,), 4),
        ((tensor(), tensor()), (5,), (9,), 4),
        ((tensor(), tensor()), (5,), (8,), 8),
        ((tensor().to("meta"), tensor().to("meta")), (5,), (8,), 4),
    ],
    ids=["dtype", "another dtype", "number", "constant", "warps", "device"],
)
def test_all_that_triton_specialises_on_is_another_variant(tensors, numbers, constants, num_warps):
    kernel = Kernel()
    launch = Launcher(kernel, stream_of)
    launch(GRID, (tensor(), tensor()), (5,), (8,), 4)
    launch(GRID, tensors, numbers, constants, num_warps)
    assert len(kernel.compilations) == 2
    assert not kernel.launches


def test_a_pointer_that_is_not_aligned_is_left_to_triton():
    kernel = Kernel()
    launch = Launcher(kernel, stream_of)
    aligned = tensor()
    assert aligned.data_ptr() % ALIGNMENT == 0
    for _ in range(2):
        launch(GRID, (aligned,), (5,), (8,), 4)
        launch(GRID, (aligned[1:],), (5,), (8,), 4)
    assert len(kernel.compilations) == 3
    assert len(kernel.launches) == 1


def test_an_interpreted_kernel_is_launched_by_triton_each_time():
    class Interpreted:
        num_launches = 0

        def __getitem__(self, grid: Any) -> Any:
            return self.launch

        def launch(self, *args: Any, num_warps: int) -> None:
            self.num_launches += 1

    kernel = Interpreted()
    launch = Launcher(kernel, stream_of)
    for _ in range(2):
        launch(GRID, (tensor(),), (), (8,), 4)
    assert kernel.num_launches == 2


@pytest.mark.parametrize(("can", "asked"), [(False, True), (True, True), (True, False)])
def test_kernels_that_may_start_early_are_told_whether_they_do(can, asked, monkeypatch):
    is_early = can and asked

    class Early(Kernel):
        arg_names = ("x", launching.EARLY)

        def __getitem__(self, grid: Any) -> Any:
            def compile_and_launch(*args: Any, num_warps: int, launch_pdl: bool = False) -> Any:
                self.compilations.append((launch_pdl, args[1:]))
                return Compiled(self)

            return compile_and_launch

    monkeypatch.setattr(launching, "starts_early", lambda device: can)
    kernel, x = Early(), tensor()
    launch = Launcher(kernel, stream_of)
    for _ in range(2):
        launch(GRID, (x,), (5,), (8,), 4, early=asked)
    assert kernel.compilations == [(is_early, (5, 8, is_early))]
    assert kernel.launches == [(GRID, [x.data_ptr(), 5, 8, is_early])]


def test_kernels_never_start_early_on_a_cpu():
    assert not launching.starts_early(torch.device("cpu"))


def test_triton_and_its_assembler_are_asked_once_and_beside_other_work(monkeypatch):
    may_end, threads = threading.Event(), []

    def told(what: str) -> str:
        threads.append(threading.get_ident())
        assert may_end.wait(30)
        return what

    Module = types.SimpleNamespace  # noqa: N806
    active = Module(get_current_target=lambda: "H200")
    runtime = Module(cache=Module(triton_key=lambda: told("hash")), driver=Module(active=active))
    compiler = Module(make_backend=lambda target: Module(hash=lambda: told(f"ptxas of {target}")))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton.compiler", Module(compiler=compiler))
    launching.hash_triton.cache_clear()
    try:
        hashed = launching.hash_triton()
        assert hashed is launching.hash_triton()
        may_end.set()
        assert hashed.result() == ("hash", "ptxas of H200")
        assert len(set(threads)) == 2
        assert threading.get_ident() not in threads
    finally:
        launching.hash_triton.cache_clear()
