"""The flashinfer backend's plans and staging, compared with sdpa, over a fake of the library.

The real library runs in the GPU lane only.
"""

from __future__ import annotations

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from threading import Event
from unittest import mock

import fake_flashinfer
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llm_paged import DenseDecode, attention, make_step, shuffled_tables

from graphrt import AttentionSupport, BatchDescriptor
from graphrt_llm.attention import (
    AttentionMetadata,
    attend,
    building,
    choose_attention,
    flashinfer,
    make_attention,
    paged,
    registry,
)
from graphrt_llm.config import Limits
from graphrt_llm.errors import AttentionBackendError
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import ModelConfig
from ranks_lab import launcher

BLOCK, MAX_BLOCKS, NUM_BLOCKS = 4, 6, 40
LIMITS = Limits(
    max_num_seqs=6,
    max_num_batched_tokens=24,
    max_model_len=BLOCK * MAX_BLOCKS,
    block_size=BLOCK,
    num_blocks=NUM_BLOCKS,
)


def random_cache() -> KVCache:
    cache = KVCache(
        ModelConfig.tiny(), num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype=torch.float64
    )
    cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    return cache


@pytest.fixture
def wrappers(monkeypatch):
    return fake_flashinfer.install(monkeypatch)


def decode_key(num_reqs: int, query_len: int = 1) -> BatchDescriptor:
    return BatchDescriptor(num_reqs * query_len, num_reqs, uniform=True)


def compare(backend, cache: KVCache, spans, key: BatchDescriptor | None, seed: int) -> None:
    """One layer's attention by ``backend``, as a step with ``key``, against sdpa."""
    generator = torch.Generator().manual_seed(seed)
    tables = shuffled_tables(len(spans), MAX_BLOCKS, NUM_BLOCKS, generator)
    num_tokens = sum(new for _, new in spans)
    padding = 0 if key is None else key.num_tokens - num_tokens
    rows = 0 if key is None or key.num_reqs is None else key.num_reqs - len(spans)
    step = make_step(spans, tables, BLOCK, pad_tokens=padding, pad_requests=rows)
    metadata = step.metadata._replace(block_tables=tables.numpy())
    q = torch.randn(num_tokens + padding, 4, 16, generator=generator, dtype=torch.float64)
    kv = torch.randn(num_tokens + padding, 2, 2, 16, generator=generator, dtype=torch.float64)
    before = cache.tensor.clone()
    results = []
    if key is not None and key.num_reqs is not None:
        # Padding of a uniform batch: as many tokens a request.
        positions = step.positions.view(key.num_reqs, -1)
        positions[len(spans) :] = torch.arange(positions.shape[1])
    for one in (make_attention("sdpa", cache), backend):
        cache.tensor.copy_(before)
        one.prepare(key or BatchDescriptor(num_tokens), metadata)
        out = torch.full_like(q, torch.nan)
        shared = one.begin(step.positions, step.attn)
        results.append(attention(one, 0, q, kv, step.attn, shared, out=out))
        assert results[-1].isfinite().all(), "padding is not finite"
    torch.testing.assert_close(results[1][:num_tokens], results[0][:num_tokens])


def test_memory_that_kernels_read_by_address_is_never_replaced(wrappers):
    backend = make_attention("flashinfer", random_cache(), LIMITS)
    before = [held.data_ptr() for held in backend.keep_alive]
    assert len(set(before)) == 2
    tables = np.full((2, MAX_BLOCKS), 1)
    for key, lengths in ((decode_key(2), [1, 1]), (BatchDescriptor(9), [4, 5])):
        backend.prepare(key, None)
        metadata = AttentionMetadata(np.array(lengths), np.array(lengths) + 1, tables)
        backend.prepare(key, metadata)
    assert [held.data_ptr() for held in backend.keep_alive] == before
    staged = backend._staging.device(2)[0]
    assert staged.untyped_storage() is backend.keep_alive[1].untyped_storage()


spans = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    spans=spans.filter(lambda spans: sum(new for _, new in spans) <= 24),
    padding=st.integers(0, 3),
    apart=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_an_eager_batch_attends_to_its_own_tokens(spans, padding, apart, seed):
    """Whether decoding requests at its front are computed with the chunks or apart."""
    spans = sorted(spans, key=lambda span: span[1] > 1)
    with pytest.MonkeyPatch.context() as patch:
        made = fake_flashinfer.install(patch)
        patch.setattr(flashinfer, "DECODES_APART", apart)
        cache = random_cache()
        backend = make_attention("flashinfer", cache, LIMITS)
        num_tokens = sum(new for _, new in spans)
        compare(backend, cache, spans, BatchDescriptor(num_tokens + padding), seed)
        num_decodes = sum(new == 1 for _, new in spans)
        planned = [len(wrapper.last) for wrapper in made if wrapper.plans]
        if num_decodes in (0, len(spans)) or num_decodes < apart:
            assert planned == [len(spans)]
        else:
            assert sorted(planned) == sorted([num_decodes, len(spans) - num_decodes])
        decodes = [(before, 1) for before, _ in spans]
        compare(backend, cache, decodes, None, seed)


@settings(max_examples=40, deadline=None)
@given(
    spans=spans.filter(lambda spans: sum(new for _, new in spans) <= 24),
    padding=st.integers(0, 3),
    query_len=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_a_kernel_of_its_own_decodes_beside_chunks(spans, padding, query_len, seed):
    """At the front of a batch, with drafts too, and without a plan."""
    spans = sorted(spans, key=lambda span: span[1] != query_len)
    with pytest.MonkeyPatch.context() as patch:
        made = fake_flashinfer.install(patch)
        patch.setattr(flashinfer, "DECODES_APART", 2)
        cache, decode = random_cache(), DenseDecode(query_len)
        limits = replace(LIMITS, query_len=query_len)
        backend = flashinfer.FlashInferAttention(cache, limits, decode=decode)
        num_tokens = sum(new for _, new in spans)
        compare(backend, cache, spans, BatchDescriptor(num_tokens + padding), seed)
        num_decodes = sum(new == query_len for _, new in spans)
        apart = num_decodes if 2 <= num_decodes < len(spans) else 0
        assert decode.rows == [apart] * (apart > 0)
        assert [len(wrapper.last) for wrapper in made if wrapper.plans] == [len(spans) - apart]


def test_a_static_wrapper_serves_growing_and_padded_batches(wrappers):
    cache = random_cache()
    backend = make_attention("flashinfer", cache, LIMITS)
    for size in (4, 2):
        backend.prepare(decode_key(size), None)
    static = [wrapper for wrapper in wrappers if wrapper.is_static]
    assert [len(wrapper.last) for wrapper in static] == [4, 2]
    bound = [(w.begins.data_ptr(), w.last.data_ptr(), w.blocks.data_ptr()) for w in static]
    for length in range(20):
        compare(backend, cache, [(length, 1), (3, 1), (19 - length, 1)], decode_key(4), length)
        compare(backend, cache, [(length, 1)], decode_key(2), length)
    assert [wrapper for wrapper in wrappers if wrapper.is_static] == static
    assert bound == [(w.begins.data_ptr(), w.last.data_ptr(), w.blocks.data_ptr()) for w in static]
    # The first plan compiles the kernels; the later ones copy nothing that is staged already.
    assert all(wrapper.plans[0] == "whole" for wrapper in static)
    assert all(set(wrapper.plans[1:]) == {"fast"} for wrapper in static)
    # One plan for the capture, one for each batch of its size.
    assert [len(wrapper.plans) for wrapper in static] == [21, 21]


@settings(max_examples=30, deadline=None)
@given(query_len=st.integers(2, 4), data=st.data())
def test_drafts_in_a_full_graph_see_what_is_before_them(query_len, data):
    """Growing and padded batches of one wrapper."""
    with pytest.MonkeyPatch.context() as patch:
        made = fake_flashinfer.install(patch)
        cache = random_cache()
        limits = replace(LIMITS, query_len=query_len)
        backend = make_attention("flashinfer", cache, limits)
        assert backend.support is AttentionSupport.UNIFORM_BATCH
        backend.prepare(decode_key(4, query_len), None)
        [static] = [wrapper for wrapper in made if wrapper.is_static]
        assert len(static.last) == 4
        before = st.integers(0, BLOCK * MAX_BLOCKS - query_len)
        for seed in range(2):
            starts = data.draw(st.lists(before, min_size=1, max_size=4))
            spans = [(start, query_len) for start in starts]
            compare(backend, cache, spans, decode_key(4, query_len), seed)
            compare(backend, cache, spans, None, seed)
        assert [wrapper for wrapper in made if wrapper.is_static] == [static]


def test_graphs_of_drafts_split_while_the_workspace_suffices(wrappers, monkeypatch):
    """FlashInfer reserves tiles of 128 rows of float32 for each request, 4 heads of 16."""
    limits = replace(LIMITS, query_len=2)
    tables = np.ones((1, MAX_BLOCKS), np.int64)
    batch = AttentionMetadata(np.array([2]), np.array([9]), tables)
    for tiles, splits in ((1000, True), (60, False)):
        monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", tiles * 128 * 4 * 17 * 4)
        backend = make_attention("flashinfer", random_cache(), limits)
        for num_reqs in (1, 6):
            backend.prepare(decode_key(num_reqs, 2), None)
            backend.prepare(decode_key(num_reqs, 2), batch)
            static = [wrapper for wrapper in wrappers if wrapper.is_static][-1]
            assert static.splits is splits


def test_padding_rows_read_one_token_of_the_null_block(wrappers):
    staging = make_attention("flashinfer", random_cache(), LIMITS)._staging
    staging.stage(6, np.full(6, 24), np.full((6, MAX_BLOCKS), 39), BLOCK)
    # A smaller batch reads nothing of the largest one before it.
    tables = np.array([[7, 8, 9], [3, 0, 0]])
    staging.stage(4, np.array([9, 4]), tables, BLOCK)
    for begins, blocks, last in (staging.host(4), staging.device(4)):
        assert begins.tolist() == [0, 3, 4, 5, 6]
        assert last.tolist() == [1, 4, 1, 1]
        assert blocks[:6].tolist() == [7, 8, 9, 3, 0, 0]
    # With drafts as many tokens as they bring, here more than a block.
    drafts = make_attention("flashinfer", random_cache(), replace(LIMITS, query_len=4))._staging
    drafts._query_len = 6
    drafts.stage(3, np.array([9]), tables[:1], BLOCK)
    begins, blocks, last = drafts.host(3)
    assert (begins.tolist(), last.tolist()) == ([0, 3, 5, 7], [1, 2, 2])
    assert blocks.tolist() == [7, 8, 9, 0, 0, 0, 0]
    staging.stage(1, np.array([1]), np.array([[5, 6]]), BLOCK)
    begins, blocks, last = staging.host(1)
    assert (begins.tolist(), last.tolist(), blocks.tolist()) == ([0, 1], [1], [5])


def test_piecewise_keys_are_prepared_without_a_batch(wrappers):
    backend = make_attention("flashinfer", random_cache(), LIMITS)
    for num_tokens in (1, 3, LIMITS.max_num_batched_tokens):
        backend.prepare(BatchDescriptor(num_tokens), None)
        heads = torch.zeros(num_tokens, 4 + 2 * 2, 16, dtype=torch.float64)
        out = attend(backend, 0, heads, None)
        assert out.shape == (num_tokens, 4, 16)


def test_full_graphs_other_than_decode_are_refused(wrappers):
    backend = make_attention("flashinfer", random_cache(), LIMITS)
    with pytest.raises(AttentionBackendError, match="decode"):
        backend.prepare(BatchDescriptor(8, 4, uniform=True), None)


def test_steps_without_preparation_or_blocks_are_refused(wrappers):
    backend = make_attention("flashinfer", random_cache(), LIMITS)
    with pytest.raises(AttentionBackendError):
        backend.begin(torch.zeros(1), None)
    with pytest.raises(AttentionBackendError, match="block_tables"):
        backend.prepare(BatchDescriptor(1), AttentionMetadata((1,), (1,)))


def test_flashinfer_needs_a_gpu_and_limits(monkeypatch):
    with pytest.raises(AttentionBackendError, match="CUDA"):
        make_attention("flashinfer", random_cache(), LIMITS)
    choice = choose_attention("auto", random_cache())
    assert choice.name == "sdpa"
    assert "CUDA" in choice.reason
    assert choose_attention("flashinfer", random_cache()).name == "flashinfer"
    fake_flashinfer.install(monkeypatch)
    assert choose_attention("auto", random_cache()).name == "flashinfer"
    with pytest.raises(AttentionBackendError, match="limits"):
        make_attention("flashinfer", random_cache())


@pytest.mark.parametrize(
    ("missing", "waits", "first", "built"),
    [
        (("fa2", "fa3"), False, "SdpaAttention", []),  # It does not ask yet.
        (("fa2", "fa3"), True, "FlashInferAttention", ["fa3"]),
        (("fa2",), True, None, []),
        ((), False, "SdpaAttention", []),
    ],
)
def test_kernels_that_are_not_built_are_built_while_others_serve(
    wrappers, monkeypatch, missing, waits, first, built
):
    building: list[str] = []
    monkeypatch.setattr(paged, "obstacle", lambda cache: None)
    decode = DenseDecode(1)
    monkeypatch.setattr(paged, "triton_decode", lambda *args: decode)
    monkeypatch.setattr(registry, "missing_modules", lambda cache: [(name,) for name in missing])
    monkeypatch.setattr(
        registry, "flashinfer_build", lambda modules: building.extend(name for (name,) in modules)
    )
    backend = registry.make_cold_attention(random_cache(), LIMITS, waits=waits)
    assert building == built
    assert (backend is None) == (first is None)
    if backend is not None:
        assert type(backend.switching._serving).__name__ == first
        assert backend.switching._later._own_decode is decode
        assert getattr(backend.switching._serving, "_own_decode", decode) is decode
    assert make_attention("paged", random_cache(), LIMITS)._fallback._own_decode is decode
    # Of too many queries a key head neither has one.
    monkeypatch.setattr(paged, "MOST_QUERIES", 1)
    assert make_attention("paged", random_cache(), LIMITS)._own_decode is None


def loaded(build: building.LoadedLater) -> None:
    """Begin to load, and wait for it."""
    build.poll()
    wait([build._loaded])


@pytest.mark.parametrize("modules", [[], ["fa2"]])
def test_library_is_imported_after_the_first_polls(monkeypatch, modules):
    asked = []
    built = mock.Mock()
    monkeypatch.setattr(building, "missing_modules", lambda cache: asked.append(cache) or modules)
    monkeypatch.setattr(building, "flashinfer_build", lambda modules: built)
    build = building.LoadedLater(random_cache())
    for _ in range(building.POLLS_BEFORE_IMPORT):
        assert build.poll() is None
    assert not asked
    loaded(build)
    built.poll.side_effect = [None, ""]
    assert build.poll() == ("" if not modules else None)
    assert build.poll() == ""
    assert len(asked) == 1
    build.close()
    assert built.close.called == bool(modules)


@pytest.mark.parametrize("failing", ["missing_modules", "flashinfer_build"])
@pytest.mark.parametrize("error", [ImportError("no libcuda"), PermissionError("its cache")])
def test_library_that_cannot_be_loaded_is_told(monkeypatch, failing, error):
    monkeypatch.setattr(building, "missing_modules", lambda cache: ["fa2"])
    monkeypatch.setattr(building, failing, mock.Mock(side_effect=error))
    monkeypatch.setattr(building, "POLLS_BEFORE_IMPORT", 0)
    build = building.LoadedLater(random_cache())
    loaded(build)
    assert build.poll() == build.poll() == f"{type(error).__name__}: {error}"
    build.close()


@pytest.fixture
def closing(monkeypatch):
    """A build under way, what goes on with it, and the mock that builds."""
    goes_on, built = Event(), mock.Mock()
    monkeypatch.setattr(building, "missing_modules", lambda cache: goes_on.wait(30) and ["fa2"])
    monkeypatch.setattr(building, "flashinfer_build", built)
    monkeypatch.setattr(building, "POLLS_BEFORE_IMPORT", 0)
    build = building.LoadedLater(random_cache())
    assert build.poll() is None
    yield build, goes_on, built
    goes_on.set()


@pytest.mark.parametrize("is_late", [False, True])
def test_build_begun_while_it_is_closed_is_closed(monkeypatch, closing, is_late):
    build, goes_on, built = closing
    closed = mock.Mock(set=goes_on.set, is_set=lambda: is_late)
    monkeypatch.setattr(build, "_is_closed", closed)
    build.close()
    assert built.called is not is_late
    assert built.return_value.close.called is not is_late


def test_forked_child_closes_without_waiting_for_the_load(monkeypatch, closing):
    build, goes_on, built = closing
    number = os.getpid()
    monkeypatch.setattr(building.os, "getpid", lambda: number + 1)
    with ThreadPoolExecutor(1) as thread:
        assert wait([thread.submit(build.close)], 10).done
        goes_on.set()
    assert not built.return_value.close.called


ENDS_UNCLOSED = """
from threading import main_thread
from graphrt_llm.attention import building

main_thread_ended = main_thread().join
building.missing_modules = lambda cache: main_thread_ended() or ["fa2"]
building.flashinfer_build = lambda modules: print("built")
building.POLLS_BEFORE_IMPORT = 0
assert building.LoadedLater(None).poll() is None
print("ends")
"""


def test_process_that_ends_without_close_builds_nothing():
    (done,) = launcher().run(ENDS_UNCLOSED)
    assert (done.stdout, done.status) == ("ends\n", 0), done.stderr


def test_imports_of_a_process_that_ends_do_not_pause(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(building, "BURST_S", 0.0)
    monkeypatch.setattr(building, "main_thread", lambda: mock.Mock(is_alive=lambda: False))
    (tmp_path / "import_at_the_end.py").write_text("")
    goes_on = mock.Mock()
    with building.paused_imports(goes_on):
        importlib.import_module("import_at_the_end")
    assert not goes_on.wait.called


def test_imports_pause_in_their_own_thread_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(building, "BURST_S", 0.0)
    for name in ("import_one", "import_two", "import_other"):
        (tmp_path / f"{name}.py").write_text("import import_two" if name == "import_one" else "")
    finders, goes_on = [*sys.meta_path], mock.Mock()
    with building.paused_imports(goes_on), ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "import_other").result()
        assert not goes_on.wait.called
        importlib.import_module("import_one")
    assert len(goes_on.wait.mock_calls) == 2
    assert sys.meta_path == finders


def test_imports_of_other_threads_go_on_beside_pauses(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(building, "BURST_S", 0.0)
    for name in ("import_paused", "import_beside"):
        (tmp_path / f"{name}.py").write_text("")
    pauses, ends, goes_on = Event(), Event(), mock.Mock()
    goes_on.wait.side_effect = lambda seconds: pauses.set() or ends.wait(30)

    def load():
        with building.paused_imports(goes_on):
            importlib.import_module("import_paused")

    with ThreadPoolExecutor(2) as threads:
        loaded = threads.submit(load)
        assert pauses.wait(30)
        beside = threads.submit(importlib.import_module, "import_beside")
        assert wait([beside], 10).done
        ends.set()
        loaded.result()


def test_import_begun_beside_paused_ones_finds_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "import_across.py").write_text("")
    with ExitStack() as pausing:
        pausing.enter_context(building.paused_imports(Event()))
        ends = mock.Mock(find_spec=lambda *asked: pausing.close())
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:-1], ends, sys.meta_path[-1]])
        found = importlib.import_module("import_across")
    assert found.__file__ == str(tmp_path / "import_across.py")


def test_finder_put_back_after_the_pauses_waits_no_more(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(building, "BURST_S", 0.0)
    (tmp_path / "import_later.py").write_text("")
    goes_on = mock.Mock()
    with building.paused_imports(goes_on):
        kept = sys.meta_path
    monkeypatch.setattr(sys, "meta_path", kept)
    importlib.import_module("import_later")
    assert not goes_on.wait.called


def test_library_is_imported_by_the_first_step(wrappers):
    backend = make_attention("flashinfer", random_cache(), LIMITS)
    assert not wrappers
    backend.prepare(decode_key(2), None)
    assert len(wrappers) == 3
