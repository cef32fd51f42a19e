"""The interrupted captures that both devices share, on CUDA, where memory tells as well."""

from __future__ import annotations

from runtime_interrupts import RuntimeInterrupts


class TestRuntimeInterruptsCUDA(RuntimeInterrupts):
    pass
