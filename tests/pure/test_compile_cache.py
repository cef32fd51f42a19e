"""The cache of compiled code: whole files only, and a reason for each miss; ``graphrt cache``."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from graphrt.cli import main
from graphrt.compile.cache import CompileCache, key_of
from graphrt.errors import ConfigWarning
from graphrt.events import CacheMiss

ABOUT = {"piece": "piece 0", "sizes": "1-8"}


def one_entry(folder: Path, payload: bytes = b"code") -> tuple[CompileCache, str]:
    cache, key = CompileCache(folder, "torch", "device"), key_of({"a": 1})
    assert cache.read(key) is CacheMiss.ABSENT
    assert cache.write(key, payload, ABOUT)
    assert cache.read(key) == payload
    return cache, key


@given(payload=st.binary(max_size=99), at=st.integers(0, 999), bit=st.integers(0, 7))
@example(payload=b"code", at=-1, bit=0)
@settings(max_examples=40, deadline=None)
def test_entry_with_any_bit_flipped_is_never_returned(tmp_path_factory, payload, at, bit):
    cache, key = one_entry(tmp_path_factory.mktemp("cache"), payload)
    [entry] = cache.entries()
    data = bytearray(entry.path.read_bytes())
    place = at % len(data)
    data[place] ^= 1 << bit
    entry.path.write_bytes(data)
    # What the header says of the piece is for people.
    assert cache.read(key) in (payload, *CacheMiss)
    if place >= data.find(b"\n") or b"piece" not in data:
        assert isinstance(cache.read(key), CacheMiss)


@given(length=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_entry_cut_anywhere_is_corrupt(tmp_path_factory, length):
    cache, key = one_entry(tmp_path_factory.mktemp("cache"), b"code" * 50)
    [entry] = cache.entries()
    data = entry.path.read_bytes()
    entry.path.write_bytes(data[: min(length, len(data) - 1)])
    assert cache.read(key) is CacheMiss.CORRUPT
    assert not cache.is_good(next(iter(cache.entries())))
    cache.write(key, b"new", ABOUT)
    assert cache.read(key) == b"new"


def test_entry_of_nested_brackets_is_corrupt(tmp_path):
    cache, key = one_entry(tmp_path, b"code")
    [entry] = cache.entries()
    entry.path.write_bytes(b"[" * 50_000 + b"\n")
    assert cache.read(key) is CacheMiss.CORRUPT
    assert [cache.is_good(one) for one in cache.entries()] == [False]


def link(path):
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def link_to_a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def moved_behind_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    (path / "inner").mkdir(parents=True)


@pytest.mark.parametrize(
    "spoil", [link, link_to_itself, link_to_a_device, moved_behind_a_link, pipe, folder]
)
def test_what_is_no_file_is_a_miss_and_makes_room(tmp_path, capsys, spoil):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    spoil(entry.path)
    assert cache.read(key) is CacheMiss.LOAD_FAILED
    [found] = cache.entries()
    assert (found.about, cache.is_good(found)) == ({}, False)
    assert run(capsys, "verify", "--dir", str(tmp_path))[0] == 1
    assert cache.write(key, b"new", ABOUT)
    assert cache.read(key) == b"new"
    spoil(entry.path)
    assert len(cache.prune(older_than=-1)) == 1
    assert cache.read(key) is CacheMiss.ABSENT


def put(folder, text, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_other_inductor_folder_mends_the_one_that_neighbours_use(tmp_path):
    """A neighbour may load any file there; Triton's name the folder that they were written in."""
    cache, _ = one_entry(tmp_path)
    shared, own = cache.inductor_folder, ["aa/x.so", "locks/x.lock", "triton/0/ab/x.json"]
    put(shared, "before", *own, "aa/neighbours.so", "triton/0/cd/x.json")
    lock = (shared / "locks/x.lock").stat().st_ino
    with suppress(RuntimeError), cache.other_inductor_folder() as folder:
        put(folder, "new", *own)
        raise RuntimeError
    assert {path.read_text() for path in shared.rglob("*.*")} == {"before"}
    with cache.other_inductor_folder() as folder:
        put(folder, "new", *own, "bb/y.so")
    texts = {str(path.relative_to(shared)): path.read_text() for path in shared.rglob("*.*")}
    assert texts == {
        "aa/x.so": "new",
        "bb/y.so": "new",
        "aa/neighbours.so": "before",
        "locks/x.lock": "before",
        "triton/0/cd/x.json": "before",
    }
    assert (shared / "locks/x.lock").stat().st_ino == lock
    assert [path.name for path in tmp_path.glob("v*/inductor*")] == ["inductor"]
    shutil.rmtree(shared)
    with cache.other_inductor_folder() as folder:
        put(folder, "new", "aa/x.so")
    assert (shared / "aa/x.so").read_text() == "new"


def test_prune_removes_a_file_in_place_of_inductors_folder(tmp_path):
    cache, _ = one_entry(tmp_path)
    cache.inductor_folder.write_text("")
    assert len(cache.prune(max_bytes=0)) == 1
    assert not cache.inductor_folder.exists()


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"null", b"1", b'"ab"', b'["ab"]', b"[[[1], 2]]", b"\xff{}", b"{}"]
)
def test_header_of_another_kind_is_corrupt(tmp_path, header):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    entry.path.write_bytes(header + b"\ncode")
    assert cache.read(key) is CacheMiss.CORRUPT
    assert [cache.is_good(one) for one in cache.entries()] == [False]


def test_entry_under_the_name_of_another_is_corrupt(tmp_path):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    other = key_of({"a": 2})
    cache.write(other, b"code of another piece", ABOUT)
    for path in tmp_path.glob(f"v*/objects/*/{other}*"):
        path.replace(entry.path)
    assert cache.read(key) is CacheMiss.CORRUPT
    assert [cache.is_good(one) for one in cache.entries()] == [False]


@pytest.mark.parametrize(
    ("torch", "device", "reason"),
    [("other", "device", CacheMiss.FOREIGN_TORCH), ("torch", "other", CacheMiss.FOREIGN_DEVICE)],
)
def test_entry_of_another_torch_or_device_is_foreign(tmp_path, torch, device, reason):
    _, key = one_entry(tmp_path)
    assert CompileCache(tmp_path, torch, device).read(key) is reason


def test_entry_of_another_schema_is_foreign(tmp_path):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    data = entry.path.read_bytes().replace(b'"schema": 7', b'"schema": 1', 1)
    entry.path.write_bytes(data)
    assert cache.read(key) is CacheMiss.FOREIGN_SCHEMA


def test_folder_of_another_user_is_neither_read_nor_written(tmp_path, monkeypatch):
    cache, key = one_entry(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert cache.read(key) is CacheMiss.LOAD_FAILED
    with pytest.warns(ConfigWarning, match="another user"):
        assert not cache.write(key, b"new", ABOUT)


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_folder_that_others_may_write_is_neither_read_nor_written(tmp_path, mode):
    cache, key = one_entry(tmp_path)
    (tmp_path / "v7").chmod(mode)
    assert cache.read(key) is CacheMiss.LOAD_FAILED
    with pytest.warns(ConfigWarning, match="others may write"):
        assert not cache.write(key, b"new", ABOUT)


def test_entry_of_another_user_is_not_read(tmp_path, monkeypatch):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    state = [*entry.path.lstat()]
    state[stat.ST_UID] += 1
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result(state))
    assert cache.read(key) is CacheMiss.LOAD_FAILED


def test_entry_longer_than_memory_is_corrupt(tmp_path):
    cache, key = one_entry(tmp_path)
    [entry] = cache.entries()
    os.truncate(entry.path, 8 << 40)  # No block of it is written.
    assert cache.read(key) is CacheMiss.CORRUPT


def test_many_writers_leave_one_good_file(tmp_path):
    cache, key = one_entry(tmp_path)
    payloads = [bytes([number]) * 100_000 for number in range(8)]

    def write_and_read(payload):
        return cache.write(key, payload, ABOUT) and cache.read(key) in payloads

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, payloads * 9))
    assert [path.suffix for path in tmp_path.glob("v*/objects/*/*")] == [".bin"]


KILLED_WHILE_IT_WRITES = """
import os, sys
from pathlib import Path
from graphrt.compile.cache import CompileCache
Path.replace = lambda *_: os._exit(9)
CompileCache(Path(sys.argv[1]), "torch", "device").write("aa", b"code", {})
"""


def test_prune_leaves_folders_that_are_no_cache(tmp_path):
    kept = [
        tmp_path / "videos" / "unfinished-film" / "scene",
        tmp_path / "vendor" / "objects" / "lib" / "firmware.bin",
        tmp_path / "v2" / "inductor-notes" / "text",
    ]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        os.utime(path.parent, (1, 1))
    one_entry(tmp_path)
    assert len(CompileCache(tmp_path).prune(max_bytes=0)) == 1
    assert all(path.exists() for path in kept)


def test_prune_removes_what_a_killed_writer_left_after_a_day(tmp_path):
    cache, key = one_entry(tmp_path)
    before = set(tmp_path.rglob("*"))
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path)])
    assert done.returncode == 9
    (tmp_path / "v7" / "inductor-abc" / "held").mkdir(parents=True)
    left = {path for path in tmp_path.glob("v7/*-*") if path not in before}
    assert len(left) == 2
    assert not cache.prune(older_than=3600)
    assert all(path.exists() for path in left), "a process may be using them"
    for path in left:
        os.utime(path, (1, 1))
    assert not cache.prune(older_than=3600)
    assert set(tmp_path.rglob("*")) - {tmp_path / "v7" / "objects" / "aa"} == before
    assert cache.read(key) == b"code"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; see the next test")
def test_folder_that_cannot_be_written_is_one_warning(tmp_path):
    tmp_path.chmod(0o500)
    cache = CompileCache(tmp_path / "inner")
    with pytest.warns(ConfigWarning, match="cache_dir"):
        assert not cache.write("aa", b"", {})
    tmp_path.chmod(0o700)


def test_file_in_place_of_the_folder_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file")
    with pytest.warns(ConfigWarning, match="cache_dir"):
        assert not cache.write("aa", b"", {})
    assert not cache.write("bb", b"", {})  # Without a second warning.
    assert cache.read("aa") in (CacheMiss.ABSENT, CacheMiss.LOAD_FAILED)


def test_folder_is_for_its_owner_alone(tmp_path):
    one_entry(tmp_path)
    assert (tmp_path / "v7").stat().st_mode & 0o077 == 0


def run(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(["cache", *words])
    return caught.value.code, capsys.readouterr().out


def test_cache_command_lists_measures_verifies_and_prunes(tmp_path, capsys):
    cache, _ = one_entry(tmp_path)
    cache.write(key_of({"a": 2}), b"more" * 999, ABOUT)
    where = ("--dir", str(tmp_path))
    code, out = run(capsys, "list", *where, "--json")
    listed = json.loads(out)
    assert (code, listed["num_entries"], len(listed["entries"])) == (0, 2, 2)
    assert listed["entries"][0]["piece"] == "piece 0"
    assert "piece 0" in run(capsys, "list", *where)[1]
    assert json.loads(run(capsys, "size", *where, "--json")[1])["entry_bytes"] > 3996
    assert run(capsys, "verify", *where)[0] == 0
    [newest, oldest] = cache.entries()
    os.utime(oldest.path, (1, 1))
    newest.path.write_bytes(newest.path.read_bytes()[:-1])
    code, out = run(capsys, "verify", *where, "--json")
    assert (code, len(json.loads(out)["bad"])) == (1, 1)
    assert run(capsys, "prune", *where, "--max-mib", "inf")[0] == 0
    code, out = run(capsys, "prune", *where, "--older-than-days", "1", "--json")
    assert (code, len(json.loads(out)["removed"]), json.loads(out)["num_entries"]) == (0, 1, 1)
    (tmp_path / "v7" / "inductor").mkdir()
    code, out = run(capsys, "prune", *where, "--max-mib", "0")
    assert code == 0
    assert not list(cache.entries())
    assert not (tmp_path / "v7" / "inductor").exists()


@pytest.mark.parametrize("words", [("prune",), ("list", "--max-mib", "3")])
def test_cache_command_refuses_limits_that_do_not_fit(tmp_path, capsys, words):
    assert run(capsys, *words, "--dir", str(tmp_path))[0] == 2


def test_cache_command_refuses_a_named_folder_that_is_none(tmp_path, capsys):
    code, out = run(capsys, "list", "--dir", str(tmp_path / "typo"), "--json")
    assert code == 2
    assert "typo" in json.loads(out)["error"]["message"]
    assert run(capsys, "size", "--dir", "", "--json")[0] == 2


def test_cache_command_refuses_a_file_in_place_of_the_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        monkeypatch.setenv("GRAPHRT_CACHE_DIR", str(tmp_path / name))
        code, out = run(capsys, "size", "--json")
        assert (code, "GRAPHRT_CACHE_DIR" in out) == (2, True)
    monkeypatch.setenv("GRAPHRT_CACHE_DIR", str(tmp_path / "nothing yet"))
    assert run(capsys, "size", "--json")[0] == 0
