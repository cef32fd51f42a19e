"""Level 3: a callable traced once, cut at splitting ops, run as its pieces.

The only room that names ``torch.fx`` and Dynamo. It knows nothing of graphs: whoever captures says
by ``wrap`` what becomes of each piece. Names are imported on first use, because the compiler takes
seconds to load and a model needs custom operations only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.compile.compiled import Compiled, CompileReport
    from graphrt.compile.custom_ops import (
        CustomOp,
        CustomOpCounts,
        check_custom_ops,
        count_custom_ops,
    )
    from graphrt.compile.splitter import PieceInfo

__all__ = [
    "CompileReport",
    "Compiled",
    "CustomOp",
    "CustomOpCounts",
    "PieceInfo",
    "check_custom_ops",
    "count_custom_ops",
]

_MODULE_OF = {
    "CompileReport": "compiled",
    "Compiled": "compiled",
    "PieceInfo": "splitter",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF.get(name, "custom_ops")
    return getattr(import_module(f"graphrt.compile.{module}"), name)
