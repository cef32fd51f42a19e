"""What the engine raises; every error roots in graphrt's own.

::

    GraphrtError
      EngineConfigError                   an engine configuration that cannot be honoured
      SamplingParamsError                 sampling parameters that describe no distribution
      RequestError                        a request that cannot be served as it stands
        PromptTooLongError                it can never fit: context or cache is too small
        UnknownRequestError               no unfinished request has this id
      BlockError                          a block was freed that is not allocated
        OutOfBlocksError                  the cache is exhausted and nobody can give way
      EngineStateError                    the engine is closed, or busy where it must be idle
"""

from __future__ import annotations

from graphrt import GraphrtError


class EngineConfigError(GraphrtError, ValueError):
    """An engine configuration that cannot be honoured."""


class SamplingParamsError(GraphrtError, ValueError):
    """Sampling parameters that describe no distribution."""


class RequestError(GraphrtError, ValueError):
    """A request that cannot be served as it stands."""


class PromptTooLongError(RequestError):
    """Prompt and output can never fit the context or the cache."""


class UnknownRequestError(RequestError, KeyError):
    """No unfinished request has this id."""


class BlockError(GraphrtError, RuntimeError):
    """The block accounting was used wrongly."""


class OutOfBlocksError(BlockError):
    """The cache is exhausted and no other request can give way."""


class EngineStateError(GraphrtError, RuntimeError):
    """The engine is closed, or busy where it must be idle."""
