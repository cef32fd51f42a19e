"""Level 3: a callable traced once, cut at splitting ops, run as its pieces.

The only room that names ``torch.fx`` and Dynamo; importing it takes seconds. It knows nothing of
graphs: whoever captures says by ``wrap`` what becomes of each piece.
"""

from graphrt.compile.compiled import Compiled, CompileReport
from graphrt.compile.splitter import PieceInfo

__all__ = ["CompileReport", "Compiled", "PieceInfo"]
