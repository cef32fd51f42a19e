"""The garbage collector while scopes are open, and afterwards: run by ``pure/test_gc_pause.py``."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from graphrt.gc_pause import all_objects, frozen_heap, gc_paused, is_heap_frozen


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    assert not is_heap_frozen()
    yield
    assert gc.isenabled()
    assert not is_heap_frozen()


class Cycle:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_all_objects_are_those_of_a_frozen_heap_too() -> None:
    kept = Cycle()
    with frozen_heap():
        assert any(one is kept for one in all_objects())
        assert is_heap_frozen()
    assert any(one is kept for one in all_objects())


def test_gc_paused_collects_before_and_after() -> None:
    old = weakref.ref(Cycle())
    with gc_paused():
        assert old() is None
        assert not gc.isenabled()
        assert is_heap_frozen()
        made = weakref.ref(Cycle())
        with gc_paused():
            pass
        assert made() is not None, "the inner scope was not the last one out"
        assert not gc.isenabled()
    assert made() is None


def test_gc_paused_for_imports_collects_only_if_a_scope_inside_does() -> None:
    for opens_scope in (False, True):
        old = weakref.ref(Cycle())
        with gc_paused(collects=False):
            assert old() is not None
            assert not gc.isenabled()
            assert not is_heap_frozen()
            if opens_scope:
                with gc_paused():
                    assert not gc.isenabled()
        assert (old() is None) is opens_scope
        assert gc.isenabled()
        gc.collect()


@pytest.mark.parametrize("ages", [False, True])
def test_gc_paused_makes_what_lives_old_where_it_is_to(ages: bool) -> None:
    with gc_paused(collects=False, ages=ages):
        made = Cycle()
    is_young = any(one is made for one in gc.get_objects(generation=0))
    assert is_young is not ages
    assert not is_heap_frozen()


def test_gc_paused_in_frozen_heap_leaves_the_old_heap_alone() -> None:
    gc.collect()
    old = Cycle()
    gc.collect()  # Old now, or it would be collected on the way in.
    old_ref = weakref.ref(old)
    del old
    with frozen_heap():
        with frozen_heap(), gc_paused():
            made = weakref.ref(Cycle())
        assert made() is None
        assert old_ref() is not None
        assert is_heap_frozen(), "the inner ones thawed what the outer one froze"
    gc.collect()
    assert old_ref() is None


@pytest.mark.parametrize("manager", [gc_paused, frozen_heap])
def test_heap_that_the_user_froze_stays_frozen(manager: Any) -> None:
    gc.freeze()
    try:
        with manager():
            assert is_heap_frozen()
        assert is_heap_frozen()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("manager", [gc_paused, frozen_heap])
@pytest.mark.parametrize("call", ["collect", "freeze"])
def test_interrupt_while_freezing_restores_the_collector(
    manager: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = getattr(gc, call)

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        done(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, call, interrupted)
    with pytest.raises(KeyboardInterrupt), manager():
        pass
    assert gc.isenabled()
    assert not is_heap_frozen()
    with manager():
        assert is_heap_frozen()


def test_finaliser_that_opens_a_scope_is_counted() -> None:
    later = gc_paused()

    class Opens(Cycle):
        def __del__(self) -> None:
            with gc_paused():
                pass
            later.__enter__()

    with gc_paused():
        Opens()
    assert not gc.isenabled()
    assert is_heap_frozen()
    later.__exit__(None, None, None)


def test_scopes_of_many_threads_share_one_pause() -> None:
    wrong: list[str] = []
    started = threading.Barrier(4)

    def work() -> None:
        started.wait()
        for _ in range(20):
            with gc_paused():
                if gc.isenabled():  # Whether it is frozen takes long to ask.
                    wrong.append("a scope runs without the pause")

    with frozen_heap():  # Or each pause would collect all that torch made.
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
