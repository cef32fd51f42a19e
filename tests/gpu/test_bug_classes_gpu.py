"""The bug classes that both devices share, on CUDA."""

from __future__ import annotations

from bug_classes import BugClasses


class TestBugClassesCUDA(BugClasses):
    pass
