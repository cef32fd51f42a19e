"""Levels 1 to 3: a callable traced, at level 3 cut at splitting ops and run as compiled pieces.

The only room that names ``torch.fx``, Dynamo and Inductor. It knows nothing of graphs: whoever
captures says by ``wrap`` what becomes of each piece. Names are imported on first use, because the
compiler takes seconds to load, and a model needs custom operations only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrt.gc_pause import gc_paused

if TYPE_CHECKING:
    from graphrt.compile.cache import CacheEntry as CacheEntry, CompileCache as CompileCache
    from graphrt.compile.compilation import CompileReport as CompileReport
    from graphrt.compile.compiled import Compiled as Compiled
    from graphrt.compile.custom_ops import (
        CustomOp as CustomOp,
        CustomOpCounts as CustomOpCounts,
        check_custom_ops as check_custom_ops,
        count_custom_ops as count_custom_ops,
    )
    from graphrt.compile.splitter import PieceInfo as PieceInfo
    from graphrt.compile.stock import Stock as Stock

_NAMES = {
    "cache": ("CacheEntry", "CompileCache"),
    "compilation": ("CompileReport",),
    "compiled": ("Compiled",),
    "custom_ops": ("CustomOp", "CustomOpCounts", "check_custom_ops", "count_custom_ops"),
    "splitter": ("PieceInfo",),
    "stock": ("Stock",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"graphrt.compile.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_compiler() -> None:
    """Import what levels 1 to 3 need: a second of Python in which the GPU does nothing.

    A ``Runtime`` of such a level does it too. Call this earlier where other threads have work for
    the GPU or its driver meanwhile. At level 0 it costs time and memory for nothing.
    """
    with gc_paused(collects=False, ages=True):
        for module in _NAMES:
            import_module(f"graphrt.compile.{module}")
