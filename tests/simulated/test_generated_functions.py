"""Functions made from text: one text, many functions that share nothing but it."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator

import pytest
import torch

from graphrt import BatchDescriptor, break_point
from graphrt.errors import StaleInputError
from graphrt.graphs import generated
from graphrt.graphs.generated import make_function
from lab import PIECEWISE, Lab

TEXT = "def answer(x, step):\n    return base + step * x\n"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that are compiled while the test runs."""
    texts: list[str] = []

    def counting(source: str, filename: str, mode: str) -> object:
        texts.append(source)
        return compile(source, filename, mode)

    generated._code_of.cache_clear()
    monkeypatch.setattr(generated, "compile", counting, raising=False)
    yield texts
    generated._code_of.cache_clear()


def test_functions_of_one_text_share_nothing_but_it(
    compilations: list[str],
) -> None:
    first = make_function(TEXT, "<first>", {"base": 1}, (10,))
    second = make_function(TEXT, "<second>", {"base": 2}, (20,))
    assert [first(1), second(1), first(1)] == [11, 22, 11]
    assert compilations == [TEXT]
    # What the interpreter learns of one's globals must not be unlearnt by the other.
    assert first.__code__ is not second.__code__
    assert [f.__code__.co_filename for f in (first, second)] == ["<first>", "<second>"]
    linecache.cache["<second>"] = (len(TEXT), None, TEXT.splitlines(keepends=True), "<second>")
    try:
        with pytest.raises(TypeError) as caught:
            second(None)
        assert "base + step * x" in "".join(traceback.format_exception(caught.value))
    finally:
        del linecache.cache["<second>"]


def test_programs_of_one_model_are_compiled_once(
    compilations: list[str],
) -> None:
    eager = break_point(lambda x: x * 2)
    with Lab() as lab:
        wrapper = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE)
        steps = {BatchDescriptor(size): torch.randn(size) for size in (8, 4, 2, 1)}
        for key, x in steps.items():
            lab.capture(wrapper, x, key=key)
        for _ in range(2):
            for key, x in steps.items():
                found = lab.step(wrapper, x, key=key)
                assert torch.equal(found, (x + 1) * 2 + 1)
        for key, x in steps.items():
            with pytest.raises(StaleInputError):
                lab.step(wrapper, x.clone(), key=key)
        replays = [text for text in compilations if "def replay" in text]
        checks = [text for text in compilations if "def check" in text]
        assert (len(replays), len(checks), len(compilations)) == (1, 2, 3)
