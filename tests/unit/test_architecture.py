"""``docs/architecture.md`` is so: its functions, files and packages exist, and imports go down."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / "builder"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
#: Function or class, and the module that has it.
FUNCTIONS = re.findall(r"\| `([\w.]+)` \| `(builder[\w.]*)` \|", PAGE)
#: Names in the text: ``builder.settings.during_a_command``.
DOTTED = re.findall(r"`(builder(?:\.\w+)+)`", re.sub(r"(?m)^\|.*\|$", "", PAGE))
FILES = re.findall(r"`((?:builder|tests|docs|patches|dockerfiles)/[\w./-]+|README\.md)`", PAGE)


def rows(page: str) -> list[list[str]]:
    """The packages of the table, bottom first; a row may have several."""
    table = page.partition("## Packages, bottom to top")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| (`[^|]*`) \|", table)
    return [re.findall(r"`(\w+)`", cell) for cell in cells]


def found(name: str, module: str) -> bool:
    """Whether a module has that function, class or method."""
    value: object = import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return callable(value)


@pytest.mark.parametrize(("name", "module"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_every_function_of_the_walk_is_where_it_says(name: str, module: str) -> None:
    assert found(name, module)


@pytest.mark.parametrize("dotted", DOTTED)
def test_every_name_in_the_text_exists(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    assert found(name, module)


def test_there_is_a_walk_to_check() -> None:
    assert len(FUNCTIONS) > 12
    assert len(DOTTED) >= 2
    assert not found("tar_layers", "builder.engines.layertar")


@pytest.mark.parametrize("file", [file for file in FILES if "NAME" not in file])
def test_every_file_exists(file: str) -> None:
    assert (ROOT / file).exists()


# ------------------------------------------------------------------------------------------ imports


def test_the_table_has_every_package() -> None:
    listed = [name for row in rows(PAGE) for name in row]
    assert sorted(listed) == sorted(path.parent.name for path in BUILDER.glob("*/__init__.py"))


def imports_of(source: str) -> Iterator[str]:
    """What a module imports of ours, in functions too; not what is for type checkers alone."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        # statements stand in lists of statements only, or in handlers and cases
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, ())
            pending += inside if isinstance(inside, list) else ()
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith("builder."))


def climbing(package: str, source: str, page: str) -> set[str]:
    """What a module of a package imports from packages that the table has further up the house."""
    table = rows(page)
    allowed = next(i for i, row in enumerate(table) if package in row)
    above = {name for row in table[allowed + 1 :] for name in row}
    return set(imports_of(source)) & above


def test_no_package_imports_one_above_it() -> None:
    for package in (name for row in rows(PAGE) for name in row):
        for file in (BUILDER / package).rglob("*.py"):
            assert climbing(package, file.read_text("utf-8"), PAGE) == set(), file


@pytest.mark.parametrize(
    ("package", "source", "above"),
    [
        ("registry", "from builder.rootfs.view import Rootfs", {"rootfs"}),
        ("engines", "def f():\n    from builder.verify import model", {"verify"}),
        ("engines", "from builder import pipeline", {"pipeline"}),
        ("verify", "import builder.cli.root", {"cli"}),
        ("dispatch", "from builder.verify.run import verify", set()),
        ("net", "if TYPE_CHECKING:\n    from builder.cli import app", set()),
        ("cli", "from builder.applier.text import sha256_hex", set()),
    ],
)
def test_an_upward_import_is_detected(package: str, source: str, above: set[str]) -> None:
    assert climbing(package, source, PAGE) == above
