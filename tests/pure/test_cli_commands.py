"""The command line as a whole: other packages' commands, interrupts, and what is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
import typer

from graphrt.cli import application, main
from graphrt.errors import MissingExtraError

SEEN: list[tuple[str, int, bool]] = []


def works(name: str, count: int = 1, loud: bool = False) -> None:
    """Greet."""
    SEEN.append((name, count, loud))


def interrupted() -> None:
    raise KeyboardInterrupt


def needs_more() -> None:
    raise MissingExtraError("a chart", extra="report", found="no matplotlib")


def fails() -> None:
    raise typer.Exit(5)


not_callable = 3


def __getattr__(name: str) -> object:
    """What a package does whose optional library is missing at import."""
    if name == "lacking":
        raise MissingExtraError("the whole command", extra="llm", found="no safetensors")
    raise AttributeError(name)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "works": f"{__name__}:works",
        "interrupted": f"{__name__}:interrupted",
        "needs-more": f"{__name__}:needs_more",
        "lacking": f"{__name__}:lacking",
        "fails": f"{__name__}:fails",
        "gone": "no_such_module_anywhere:command",
        "nameless": f"{__name__}:no_such_name",
        "number": f"{__name__}:not_callable",
        "resolve": "no_such_module_anywhere:resolve",
    }
    entries = [EntryPoint(name, value, application.GROUP) for name, value in names.items()]
    monkeypatch.setattr(application, "entry_points", lambda group: entries)


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.usefixtures("plugins")
def test_a_registered_command_gets_its_own_words() -> None:
    SEEN.clear()
    assert status_of("works", "--count", "3", "ada", "--loud") == 0
    assert status_of("works", "bob") == 0
    assert SEEN == [("ada", 3, True), ("bob", 1, False)]
    assert status_of("works", "ada", "--", "--loud") == 2


@pytest.mark.usefixtures("plugins")
def test_a_registered_command_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("works", "--help") == 0
    assert "Greet." in capsys.readouterr().out


@pytest.mark.usefixtures("plugins")
def test_help_says_what_each_command_does_or_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("--help") == 0
    out = capsys.readouterr().out
    for name in ("resolve", "dispatch", "env", "works", "Greet.", "gone"):
        assert name in out
    said = " ".join(
        out.replace("│", " ").split()
    )  # Lines are as wide as the terminal lets them be.
    assert "Cannot be loaded from no_such_module_anywhere" in said
    assert "no safetensors" in said


def test_help_of_the_demo_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    assert "Serve one traffic under several graph" in capsys.readouterr().out


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["gone", "nameless", "number"])
def test_a_broken_command_is_an_error_when_it_is_used(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(name, "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "CommandError"
    assert f"graphrt {name}" in err


@pytest.mark.usefixtures("plugins")
def test_a_built_in_command_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    assert status_of("resolve", str(tmp_path / "c.json"), "--json") == 0


@pytest.mark.usefixtures("plugins")
def test_command_errors_and_interrupts_become_exit_statuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of("needs-more") == 2
    assert "graphrt[report]" in capsys.readouterr().err
    assert status_of("lacking") == 2
    assert "graphrt[llm]" in capsys.readouterr().err
    assert status_of("interrupted") == 130
    assert status_of("fails") == 5


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(application, "_application", interrupt)
    assert status_of("resolve") == 130


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"graphrt {version('graphrt')}\n"


@pytest.mark.parametrize("words", [["resolve"], ["nonsense"], ["resolve", "a", "--nonsense"]])
def test_wrong_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert status_of(*words, "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["message"]
    assert err


ROOMS = [
    "batch",
    "errors",
    "config",
    "dispatch",
    "dispatch.buckets",
    "planner",
    "parallel",
    "ubatch.slices",
    "cli",
    "cli.files",
    "cli.simulate",
    "cli.tables",
]


def test_the_deciding_rooms_work_where_there_is_no_torch(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"num_tokens": 3}\n', encoding="utf-8")
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for room in {ROOMS!r}:
    importlib.import_module("graphrt." + room)
from graphrt.cli import main
for words in (["resolve", "c.json"], ["dispatch", "c.json", "b.jsonl"]):
    for options in ([], ["--json"]):
        try:
            main(words + options)
        except SystemExit as end:
            assert end.code == 0, end.code
assert not [name for name in sys.modules if name.startswith("graphrt_llm")]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


WITHOUT_EXTRAS = """
import sys
for name in ("numpy", "safetensors", "matplotlib", "jinja2", "prometheus_client"):
    sys.modules[name] = None
from graphrt.cli import main
main(sys.argv[1:])
"""


def without_extras(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_work_where_no_extra_is_installed(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"num_tokens": 3}\n', encoding="utf-8")
    for words in (
        ["--help"],
        ["demo", "--help"],
        ["resolve", "c.json"],
        ["resolve", "--schema"],
        ["dispatch", "c.json", "b.jsonl"],
    ):
        done = without_extras(tmp_path, *words)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout


@pytest.mark.parametrize("options", [[], ["--json"], ["--report", "none", "--json"]])
def test_demo_without_its_extra_names_it_and_exits_2(tmp_path: Path, options: list[str]) -> None:
    done = without_extras(tmp_path, "demo", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("MissingExtraError: graphrt demo\n")
    assert "pip install 'graphrt[llm]'" in done.stderr
    assert "Traceback" not in done.stderr
    if options:
        answer = json.loads(done.stdout)["error"]
        assert answer["type"] == "MissingExtraError"
        assert "pip install 'graphrt[llm]'" in answer["message"]
    else:
        assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_json_answers_do_not_load_what_only_tables_need(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    code = (
        "import sys; from graphrt.cli import main\n"
        "try: main(['resolve', 'c.json', '--json'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join(name for name in ('rich.table', 'torch', 'numpy', 'graphrt_llm')"
        " if name in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
