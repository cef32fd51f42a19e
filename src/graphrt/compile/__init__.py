"""Levels 1 to 3: a callable traced, at level 3 cut at splitting ops and run as compiled pieces.

The only room that names ``torch.fx``, Dynamo and Inductor; importing it takes seconds. It knows
nothing of graphs: whoever captures says by ``wrap`` what becomes of each piece.
"""

from graphrt.compile.cache import CacheEntry, CompileCache
from graphrt.compile.compiled import Compiled, CompileReport
from graphrt.compile.splitter import PieceInfo
from graphrt.compile.torch_api import compiled_code_refused

__all__ = [
    "CacheEntry",
    "CompileCache",
    "CompileReport",
    "Compiled",
    "PieceInfo",
    "compiled_code_refused",
]
