"""``docs/architecture.md`` is so: its functions, files and packages exist, and imports go down."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / "builder"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
#: Function or class, and the module that has it.
FUNCTIONS = re.findall(r"\| `([\w.]+)` \| `(builder[\w.]*)` \|", PAGE)
#: Names in the text: ``builder.settings.during_a_command``.
DOTTED = re.findall(r"`(builder(?:\.\w+)+)`", re.sub(r"(?m)^\|.*\|$", "", PAGE))
FILES = re.findall(r"`((?:builder|tests|docs|patches|dockerfiles)/[\w./-]+|README\.md)`", PAGE)


@cache
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
    assert not found("tar_layers", "builder.images.rootfs.tar")


@pytest.mark.parametrize("file", [file for file in FILES if "NAME" not in file])
def test_every_file_exists(file: str) -> None:
    assert (ROOT / file).exists()


# ------------------------------------------------------------------------------------------ imports


def test_the_table_has_every_package() -> None:
    listed = [name for row in rows(PAGE) for name in row]
    assert sorted(listed) == sorted(path.parent.name for path in BUILDER.glob("*/__init__.py"))


def test_the_table_has_the_order_that_import_linter_checks() -> None:
    """``lint-imports`` is one of the checks of ``bootstrap.py --test``."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    (house,) = [one for one in settings["contracts"] if one["id"] == "house"]
    assert [name for row in rows(PAGE) for name in row] == house["layers"][::-1]
    assert house["containers"] == [settings["root_package"]] == ["builder"]


def test_imports_for_type_checking_count_too() -> None:
    """Within a package ``lint-imports`` looks for circles, in all of them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    assert settings["exclude_type_checking_imports"] is False
    (circles,) = [one for one in settings["contracts"] if one["type"] == "acyclic_siblings"]
    assert circles["ancestors"] == ["builder.**"]
    assert not circles.keys() & {
        "ignore_imports",
        "depth",
    }
