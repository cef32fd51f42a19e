"""The bug classes that both devices share, on CUDA."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("bug_classes")

from bug_classes import BugClasses  # noqa: E402


class TestBugClassesCUDA(BugClasses):
    pass
