"""The runtime of an engine: a plan and its dispatcher over one runner.

An engine hands over a model, the tensors it reads, and facts; it gets back ``capture()``,
``step()`` and ``close()``.
"""

from graphrt.runtime.runtime import Runtime as Runtime, RuntimeReport as RuntimeReport
