"""Levels 1 to 3: a callable traced, at level 3 cut at splitting ops and run as compiled pieces.

The only room that names ``torch.fx``, Dynamo and Inductor. It knows nothing of graphs: whoever
captures says by ``wrap`` what becomes of each piece. Names are imported on first use, because the
compiler takes seconds to load, and a model needs custom operations only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.compile.cache import CacheEntry, CompileCache
    from graphrt.compile.compiled import Compiled, CompileReport
    from graphrt.compile.custom_ops import (
        CustomOp,
        CustomOpCounts,
        check_custom_ops,
        count_custom_ops,
    )
    from graphrt.compile.splitter import PieceInfo
    from graphrt.compile.stock import Stock

__all__ = [
    "CacheEntry",
    "CompileCache",
    "CompileReport",
    "Compiled",
    "CustomOp",
    "CustomOpCounts",
    "PieceInfo",
    "Stock",
    "check_custom_ops",
    "count_custom_ops",
]

_MODULE_OF = {
    "CacheEntry": "cache",
    "CompileCache": "cache",
    "CompileReport": "compiled",
    "Compiled": "compiled",
    "PieceInfo": "splitter",
    "Stock": "stock",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF.get(name, "custom_ops")
    return getattr(import_module(f"graphrt.compile.{module}"), name)
