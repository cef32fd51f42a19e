"""What the build of the documentation does beside rendering pages; see ``mkdocs.yml``."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

REPOSITORY = Path(__file__).resolve().parent.parent
OUTSIDE = ("ARCHITECTURE.md", "CHANGELOG.md")
# The theme cuts wide tables instead of breaking their lines.
STYLE = """
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
.wy-nav-content { max-width: 60em; }
"""


class StructureOfDocstrings(griffe.Extension):
    """Makes paragraphs of the labelled parts of a docstring, and a list of its fields.

    Markdown would join such lines to one paragraph. A field gets its type beside its name.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return

        def field(found: re.Match[str]) -> str:
            member = obj.members.get(found[1]) if obj.is_class else None
            annotation = getattr(member, "annotation", None)
            return f"\n- ``{found[1]}``" + (f" (`{_type(annotation)}`):" if annotation else ":")

        parts = r"(?m)^(Shapes|Aliasing|Units|Errors|Source|Compiled|Raises):\s+"
        text = re.sub(parts, r"\n**\1:** ", obj.docstring.value)
        text = re.sub(r"(?m)^``(\w+)``:", field, text)
        # The mark of a literal block: Markdown needs the indentation alone.
        obj.docstring.value = re.sub(r"(?m)^::$", "", text)


class _WithoutValidators(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)


def _type(annotation: object) -> str:
    """An annotation as text, without what ``Annotated`` adds to a type."""
    return ast.unparse(_WithoutValidators().visit(ast.parse(str(annotation), mode="eval")))


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie beside ``docs``, one of all examples, and the styles."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / name)))
    files.append(File.generated(config, "examples.md", content=_examples()))
    style = STYLE + HtmlFormatter().get_style_defs(".codehilite")
    files.append(File.generated(config, "site.css", content=style))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep the text alone of links that leave ``docs``: the site has no such page."""
    return re.sub(r"\[([^\[\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def _examples() -> str:
    pages = ["# Examples\n\nEach is a program of its own, and the tests run it.\n"]
    for path in sorted((REPOSITORY / "examples").glob("[0-9]*.py")):
        text = path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or path.stem
        title = docstring.partition("\n")[0].partition(": ")[2].rstrip(".")
        pages.append(f"## {title}\n\n`examples/{path.name}`\n\n```python\n{text}```\n")
    return "\n".join(pages)
