"""The errors of the engine; all derive from graphrt's.

::

    GraphrtError
      ConfigError
        EngineConfigError                 an engine configuration that cannot be used
      SamplingParamsError                 sampling parameters that describe no distribution
      RequestError                        a request that cannot be served
        PromptTooLongError                it can never fit: context or cache is too small
        UnknownRequestError               no unfinished request has this id
      BlockError                          a block was freed that is not allocated
        OutOfBlocksError                  the cache is exhausted and no request can be preempted
      EngineStateError                    the engine is closed, or busy where it must be idle
      ModelConfigError                    a model description unreadable or not supported
      AttentionBackendError               no attention backend of this name, or none attached
      AdapterError                        an adapter (LoRA) that cannot be loaded or applied
        AdapterModelError                 it was made for another model
        UnknownAdapterError               no adapter has this name
        AdapterInUseError                 unfinished requests use it
      WeightsError                        a checkpoint that cannot be loaded
        WeightsFileError                  a file is absent, truncated or unreadable
        MissingTensorError                the checkpoint lacks a tensor of the model
        UnexpectedTensorError             the checkpoint has a tensor the model has no place for
        TensorShapeError                  a tensor has another shape than the model's
        TensorDtypeError                  a tensor has a dtype that this engine does not compute in
        TensorRangeError                  a tensor has a value that the model's dtype cannot hold
"""

from __future__ import annotations

from graphrt import GraphrtError
from graphrt.errors import ConfigError


class EngineConfigError(ConfigError):
    """An engine configuration that cannot be used."""


class SamplingParamsError(GraphrtError, ValueError):
    """Sampling parameters that describe no distribution."""


class RequestError(GraphrtError, ValueError):
    """A request that cannot be served."""


class PromptTooLongError(RequestError):
    """Prompt and output can never fit the context or the cache."""


class UnknownRequestError(RequestError, KeyError):
    """No unfinished request has this id."""


class BlockError(GraphrtError, RuntimeError):
    """The block accounting was used wrongly."""


class OutOfBlocksError(BlockError):
    """The cache is exhausted and no other request can be preempted."""


class EngineStateError(GraphrtError, RuntimeError):
    """The engine is closed, or busy where it must be idle."""


class ModelConfigError(GraphrtError, ValueError):
    """A model description that cannot be read, is inconsistent, or is not supported."""


class AttentionBackendError(GraphrtError, ValueError):
    """No attention backend has this name, or the model runs without one."""


class AdapterError(GraphrtError, ValueError):
    """An adapter (LoRA) that cannot be loaded or applied. Those loaded before are as they were."""


class AdapterModelError(AdapterError):
    """An adapter was made for another model."""


class UnknownAdapterError(AdapterError, KeyError):
    """No adapter has this name."""


class AdapterInUseError(AdapterError):
    """An adapter cannot be removed, because unfinished requests use it."""


class WeightsError(GraphrtError, ValueError):
    """A checkpoint that cannot be loaded. Unless a leaf says otherwise, nothing of it was."""


class WeightsFileError(WeightsError):
    """A file of the checkpoint is absent, truncated or unreadable."""


class MissingTensorError(WeightsError):
    """The checkpoint lacks a tensor that the model needs."""


class UnexpectedTensorError(WeightsError):
    """The checkpoint holds a tensor that the model has no place for."""


class TensorShapeError(WeightsError):
    """A tensor of the checkpoint has another shape than the model's."""


class TensorDtypeError(WeightsError):
    """A tensor of the checkpoint has a dtype that this engine does not compute in."""


class TensorRangeError(WeightsError):
    """A tensor of the checkpoint has a value that the model's dtype cannot hold.

    The tensors before it are in the model already.
    """
