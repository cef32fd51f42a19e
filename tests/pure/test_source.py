"""The user's line is found among callers and in tracebacks."""

from __future__ import annotations

import pytest

from graphrt.source import Source, caller_source, is_user_file, traceback_source


def test_caller_source_names_the_calling_line():
    found = caller_source()
    assert found.file == __file__
    assert found.function == "test_caller_source_names_the_calling_line"
    assert found.text == "found = caller_source()"
    assert str(found) == f"{__file__}:{found.line} in {found.function}"
    assert found.with_text.endswith(": found = caller_source()")


def test_traceback_source_is_the_innermost_user_line():
    def inner():
        Source(**{"no such field": 1})  # raises in the standard library or in generated code

    with pytest.raises(TypeError) as caught:
        inner()
    found = traceback_source(caught.value.__traceback__)
    assert found.function.endswith("inner")
    assert not traceback_source(None)


def test_user_files_are_not_the_library_nor_generated():
    import graphrt.batch

    assert is_user_file(__file__)
    assert is_user_file("<stdin>")
    assert not is_user_file(graphrt.batch.__file__)
    assert not is_user_file("<graphrt model FULL>")
    assert not is_user_file("<frozen importlib._bootstrap>")
    assert is_user_file("somewhere/site-packages/package/module.py")
