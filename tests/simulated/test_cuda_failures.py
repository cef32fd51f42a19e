"""Errors of CUDA become graphrt's, by their codes and texts; no GPU is needed for that."""

from __future__ import annotations

import contextlib

import pytest
import torch

from graphrt.device import make_device
from graphrt.device.cuda import error_code, private, replay_failure, translate
from graphrt.errors import (
    BreakError,
    CaptureError,
    ConfigError,
    DeviceReplayError,
    ForbiddenOperationError,
    GraphMemoryError,
    UnjoinedStreamError,
)

TEXTS = {
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    902: "operation would result in a merge of separate capture sequences",
    903: "capture was not ended in the same stream as it began",
    904: "capturing stream has unjoined work",
    905: "dependency created on uncaptured work in another stream",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    907: "operation not permitted on an event last recorded in a capturing stream",
    908: "attempt to terminate a thread-local capture sequence from another thread",
}

TYPES = {
    900: ForbiddenOperationError,
    901: CaptureError,
    902: UnjoinedStreamError,
    903: CaptureError,
    904: UnjoinedStreamError,
    905: UnjoinedStreamError,
    906: ForbiddenOperationError,
    907: UnjoinedStreamError,
    908: CaptureError,
}


class CodedError(RuntimeError):
    """As torch raises them: the driver's text, and the code as an attribute."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"CUDA error: {text}\nCompile with TORCH_USE_CUDA_DSA to ...")
        self.error_code = code


def raised(error: BaseException) -> BaseException:
    with contextlib.suppress(type(error)):
        raise error
    return error


@pytest.mark.parametrize("code", TYPES)
def test_capture_code_becomes_its_error_type(code: int) -> None:
    error = raised(CodedError(code, "whatever the driver says"))
    translated = translate(error)
    assert type(translated) is TYPES[code]
    assert translated.__cause__ is error
    assert translated.expected
    assert translated.do
    assert "whatever the driver says" in str(translated)


@pytest.mark.parametrize("code", TYPES)
@pytest.mark.parametrize("prefix", ["CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: "])
def test_error_without_a_code_is_known_by_its_text(code: int, prefix: str) -> None:
    error = raised(RuntimeError(f"{prefix}{TEXTS[code]}\n..."))
    assert error_code(error) == code
    assert prefix not in str(translate(error))


def test_out_of_memory_becomes_graph_memory_error() -> None:
    error = raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    translated = translate(error)
    assert isinstance(translated, GraphMemoryError)
    assert isinstance(translated, MemoryError)
    for other in (
        CodedError(2, "out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        assert isinstance(translate(raised(other)), GraphMemoryError)


@pytest.mark.parametrize(
    "text",
    [
        "Cannot call CUDAGeneratorImpl::seed during CUDA graph capture. If you need this call ...",
        "Attempt to increase offset for a CUDA generator not in capture mode.",
        "philox_cuda_state for an unexpected CUDA generator used during capture. In regions ...",
    ],
)
def test_error_of_torchs_own_check_is_a_forbidden_operation(text: str) -> None:
    translated = translate(raised(RuntimeError(text)))
    assert isinstance(translated, ForbiddenOperationError)
    assert ("generators" in translated.do) == ("CUDA generator" in text)


def test_new_seed_in_a_capture_is_a_forbidden_operation() -> None:
    text = (
        "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed "
        "is the same as the original seed."
    )
    translated = translate(raised(RuntimeError(text)))
    assert isinstance(translated, ForbiddenOperationError)
    assert translated.do == "seed before the capture, or between two replays"


@pytest.mark.parametrize(
    ("name", "code"), [("StreamCaptureUnsupported", 900), ("MemoryAllocation", 0)]
)
def test_error_that_thrust_quotes_is_known_by_its_text(name: str, code: int) -> None:
    text = TEXTS.get(code, "out of memory")
    error = raised(RuntimeError(f"transform: failed to synchronize: cudaError{name}: {text}"))
    code = code or 2
    assert error_code(error) == code
    assert isinstance(translate(error), TYPES.get(code, GraphMemoryError))


def test_other_device_error_becomes_capture_error_with_text() -> None:
    for prefix, text in (
        ("", "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
        ("CUDA error: ", "eek"),
        ("Triton Error [CUDA]: ", "invalid argument"),
    ):
        translated = translate(raised(RuntimeError(prefix + text)))
        assert type(translated) is CaptureError
        assert text in str(translated)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the caller's own"),
        RuntimeError("shapes do not match"),
        KeyboardInterrupt(),
        BreakError("already ours"),
    ],
    ids=repr,
)
def test_error_that_is_not_the_devices_passes_unchanged(error: BaseException) -> None:
    assert translate(raised(error)) is error


def test_source_is_the_innermost_line_outside_torch() -> None:
    def inner() -> None:
        torch._check(False, lambda: f"CUDA error: {TEXTS[900]}")

    with pytest.raises(RuntimeError) as caught:
        inner()
    failure = translate(caught.value)
    number, line = inner.__code__.co_firstlineno + 1, failure.operation
    assert failure.source == f"{__file__}:{number} in {inner.__qualname__}: {line}"
    assert line == 'torch._check(False, lambda: f"CUDA error: {TEXTS[900]}")'


def test_operation_is_named_if_known_and_quoted_if_not() -> None:
    error = raised(CodedError(900, TEXTS[900]))
    named = translate(error, "aten._local_scalar_dense.default")
    assert isinstance(named, CaptureError)
    assert named.operation == "aten._local_scalar_dense.default"
    assert "operation aten._local_scalar_dense.default is not permitted" in str(named)
    quoted = translate(error)
    assert isinstance(quoted, CaptureError)
    assert quoted.operation == "raise error"


def test_failed_launch_says_not_to_run_the_step_again() -> None:
    error = raised(CodedError(719, "unspecified launch failure"))
    failure = replay_failure(error, "FULL 8")
    assert isinstance(failure, DeviceReplayError)
    assert failure.__cause__ is error
    assert "do not run the step again" in failure.do


def test_optional_argument_is_passed_if_the_function_has_it() -> None:
    def older(pool: int, capture_error_mode: str = "global") -> None: ...

    def newer(pool: int, check_input_liveness: bool = False) -> None: ...

    assert private.supported(older, check_input_liveness=True) == {}
    assert private.supported(newer, check_input_liveness=True) == {"check_input_liveness": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_device_without_a_gpu_names_the_simulated_one() -> None:
    with pytest.raises(ConfigError, match="simulated"):
        make_device("cuda")


def test_unknown_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="tpu"):
        make_device("tpu")  # type: ignore[arg-type]
