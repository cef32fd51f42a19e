"""Tokens on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A copy of ``tokens`` [num_reqs], begun at once and waited for later.

    A copy on a CPU too: the tokens may be graph storage, which the next step overwrites.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._arrived: torch.Event | None = None
        if tokens.device.type == "cpu":
            self._host = tokens.clone()
        else:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.Event(tokens.device)
            self._arrived.record()

    def wait(self) -> list[int]:
        """The tokens, once the device has computed and sent them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[int] = self._host.tolist()
        return token_ids
