"""Functions made from text: one compilation for all programs whose text is the same.

The programs of one model differ in their constants, hardly ever in their text, and compiling is
most of what generating costs.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any


def make_function(
    source: str, filename: str, scope: dict[str, Any], defaults: Sequence[Any] = ()
) -> FunctionType:
    """Return the one function that ``source`` defines, over ``scope`` as its globals.

    ``defaults``: values of its last parameters; ``source`` need not state them.
    """
    # A copy for each: CPython keeps what it has learned of a function's globals in its code, and
    # two programs that took turns in one would make it learn anew each time.
    code = _code_of(source).replace(co_filename=filename)
    # Builtins are named, because C code that imports something (torch does, under a device mode)
    # looks for them among the globals of the function that called it.
    scope.setdefault("__builtins__", builtins)
    return FunctionType(code, scope, argdefs=tuple(defaults))


@functools.lru_cache(maxsize=32)
def _code_of(source: str) -> CodeType:
    [code] = (
        constant
        for constant in compile(source, "<graphrt>", "exec").co_consts
        if isinstance(constant, CodeType)
    )
    return code
