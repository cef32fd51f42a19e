"""What every lane shares: where the reference vectors and traces lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference vectors and real traces beside the checkout.

    It is always there in CI, where its absence is a failure; elsewhere the test skips and says so.
    """
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        message = f"no folder 'shared' beside the checkout ({folder})"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
