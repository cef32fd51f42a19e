"""What the package tells an index: classifiers, links, and a readme that needs no repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]


def index_readme() -> str:
    """The README as the build writes it into the package's metadata."""
    hook = SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join(
        part.get("text") or (REPOSITORY / part["path"]).read_text(encoding="utf-8")
        for part in hook["fragments"]
    )
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_readme_of_the_index_has_no_relative_link() -> None:
    text = index_readme()
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert all(link.startswith("https://") for link in links)
    source = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    fences = re.compile(r"```.*?```", re.DOTALL)
    assert fences.findall(text) == fences.findall(source), "a program was changed"
    assert len(text.splitlines()) > len(source.splitlines())


def test_classifiers_are_given_and_no_link_is_dead() -> None:
    for url in PROJECT.get("urls", {}).values():
        assert url.startswith("https://")
        assert not re.search(r"\.(example|invalid|test|localhost)(/|$)", url), "never resolves"
    least = PROJECT["requires-python"].removeprefix(">=")
    for classifier in (f"Programming Language :: Python :: {least}", "Typing :: Typed"):
        assert classifier in PROJECT["classifiers"]
    assert (REPOSITORY / "src/graphrt/py.typed").is_file()


def test_extras_that_messages_name_exist() -> None:
    named = set()
    for path in (REPOSITORY / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'MissingExtraError\([^)]*?extra="(\w+)"', text))
    assert {"llm", "report", "metrics"} <= named <= set(PROJECT["optional-dependencies"])


def test_what_tests_skip_without_is_in_the_dev_extra() -> None:
    """`make test` installs that extra, so none of its tests is skipped for a missing package."""
    extras = PROJECT["optional-dependencies"]
    for name in ("llm", "metrics", "report"):
        assert any(name in line for line in extras["dev"] + extras["llm"] if "graphrt[" in line)
    lines = [line for name in ("dev", "llm", "metrics", "report") for line in extras[name]]
    installed = {re.split("[<>=[]", line)[0].replace("-", "_") for line in lines}
    for lane in ("pure", "simulated"):
        for path in (REPOSITORY / "tests" / lane).glob("*.py"):
            text = path.read_text(encoding="utf-8")
            needed = set(re.findall(r"""importorskip\(['"](\w+)""", text))
            assert needed <= installed, path
