"""The default corpus, on every machine and without a download: Python's own documentation and library.

Domain `docs`: the language reference by topic (pydoc_data.topics) and, for each module, its docstrings as pydoc orders them.
Domain `code`: the modules' sources, cut between top-level definitions. What is read depends on the Python version alone.
"""

import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from k2.data.sources import Document

LICENSE = "PSF-2.0"
CODE_CHARACTERS = 6000  # a code document ends at the first top-level definition beyond this length
# Tests, tables and vendored programs teach little; installed packages have other licences.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "encodings"}
SKIPPED |= {"site-packages", "dist-packages", "__pycache__"}


def read() -> Iterator[Document]:
    """Topics, then all docstrings, then all sources, each in alphabetical order."""
    import pydoc_data.topics

    topics: dict[str, str] = pydoc_data.topics.topics
    for name in sorted(topics):
        yield Document(topics[name], "docs", LICENSE, f"python/topics/{name}", group=f"topic:{name}")
    sources = []
    for name, source, tree in _modules():
        yield Document(docstrings(name, tree), "docs", LICENSE, f"python/docstrings/{name}", group=name)
        sources.append((name, list(pieces(source, tree))))
    for name, parts in sources:
        for number, piece in enumerate(parts):
            yield Document(piece, "code", LICENSE, f"python/source/{name}#{number}", group=name)


def docstrings(name: str, tree: ast.Module) -> str:
    """A module's documentation as one text: its docstring, then each documented class and function with its signature."""
    parts = [ast.get_docstring(tree) or ""]

    def visit(node: ast.AST, depth: int) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            text = ast.get_docstring(child)
            if text:
                indent = "    " * depth
                body = "\n".join(f"{indent}    {line}".rstrip() for line in text.splitlines())
                parts.append(f"{indent}{_signature(child)}\n{body}")
            visit(child, depth + 1)

    visit(tree, 0)
    text = "\n\n".join(part for part in parts if part)
    return f"Module {name}\n\n{text}" if text else ""


def pieces(source: str, tree: ast.Module) -> Iterator[str]:
    """The source in order, cut before top-level definitions so that each piece but the last has at least CODE_CHARACTERS."""
    lines = source.splitlines(keepends=True)
    starts = []
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        starts.append(min([node.lineno, *(d.lineno for d in decorators)]) - 1)
    begin = 0
    for start in starts[1:]:
        piece = "".join(lines[begin:start])
        if len(piece) >= CODE_CHARACTERS:
            yield piece
            begin = start
    yield "".join(lines[begin:])


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Dotted name, source and syntax tree of each module of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED)
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[0].startswith(("config-", "_sysconfigdata")):
                continue  # generated on the machine that built Python
            try:
                source = path.read_text(encoding="utf-8")
                yield ".".join(parts), source, ast.parse(source)
            except (UnicodeDecodeError, SyntaxError):
                continue  # a distribution's own files in the library's folder
