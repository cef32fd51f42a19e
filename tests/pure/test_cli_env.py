"""``graphrt env``: what a bug report needs, on machines that lack torch, a GPU or the extras."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import graphrt
from graphrt.cli import environment, main

REQUIRES = [
    "torch>=2.11",
    'matplotlib[x]>=3.9; extra == "report"',
    "matplotlib>=3.9; python_version < '4' and extra == 'llm'",
    'no-such-package>=1; extra == "llm"',
]


def versions(name: str) -> str:
    if name in ("graphrt", "matplotlib"):
        return "3.9"
    raise PackageNotFoundError(name)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(environment, "version", versions)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["env", *words])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    return out


@pytest.mark.usefixtures("packages")
def test_env_names_versions_and_packages_of_extras(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(run(capsys, "--json"))
    assert list(answer) == [
        *("graphrt", "location", "python", "executable", "platform"),
        *("torch", "cuda", "driver", "devices", "extras", "problems"),
    ]
    assert answer["graphrt"] == "3.9"
    assert answer["location"] == str(Path(graphrt.__file__).parent)
    assert answer["python"] == platform.python_version()
    assert answer["extras"] == {
        "llm": {"matplotlib": "3.9", "no-such-package": None},
        "report": {"matplotlib": "3.9"},
    }
    out = run(capsys)
    for line in (
        "graphrt: 3.9",
        "  llm: missing no-such-package",
        "  report: installed: matplotlib 3.9",
    ):
        assert line in out.splitlines()


@pytest.mark.usefixtures("packages")
def test_env_of_a_machine_with_a_gpu_lists_it() -> None:
    device = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 150 * 2**30}
    found = {**environment.describe(), "driver": "570.1", "devices": [device]}
    assert "  NVIDIA H200, compute capability 9.0, 150.0 GiB" in environment.lines(found)
    assert "driver: 570.1" in environment.lines(found)


def test_env_without_metadata_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "requires", absent)
    monkeypatch.setattr(environment, "version", absent)
    found = environment.describe()
    assert (found["graphrt"], found["extras"]) == (None, {})
    assert any("not installed" in line for line in environment.lines(found))


def test_env_without_torch_reports_a_problem(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from graphrt.cli import main; main(['env', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["torch"] is None
    assert "torch" in answer["problems"][0]


def test_module_env_is_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")  # The real one takes four seconds.
    done = subprocess.run(
        [sys.executable, "-m", "graphrt", "env"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"graphrt: {graphrt.__version__}\n")
