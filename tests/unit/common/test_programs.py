"""Programs for other interpreters: what is in their archives."""

from __future__ import annotations

import ast
import io
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.common import programs
from builder.common.paths import cache_dir
from builder.common.programs import Program

if TYPE_CHECKING:
    from pathlib import Path

ALL = [one for one in vars(programs).values() if isinstance(one, Program)]
#: A program with siblings, imported in each way that there is, and one that only a type names.
ENTRY = """\
from __future__ import annotations
import json, os.path
from typing import TYPE_CHECKING
import builder.probes.first
from builder.probes import (
    second,  # with a comment
    third as other,
)
from builder.probes.fourth import VALUE

if TYPE_CHECKING:
    from builder.probes.typed import Name

    from builder.elsewhere import Other

def main() -> int:
    from builder.probes import fifth
    print("from builder.probes import text")
    return 0
"""
NAMES = ("first", "second", "third", "fourth", "fifth")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with one program."""
    (tmp_path / "probes").mkdir()
    for name in ("__init__", *NAMES, "typed", "text", "unused"):
        (tmp_path / "probes" / f"{name}.py").write_text("VALUE = 1\n")
    (tmp_path / "probes" / "entry.py").write_text(ENTRY)
    return tmp_path


def test_a_program_has_the_modules_that_it_imports(package: Path) -> None:
    program = Program("builder.probes.entry", package)
    modules = {f"builder/probes/{name}.py" for name in ("__init__", "entry", *NAMES)}
    assert set(program.sources) == modules | {"builder/__init__.py"}
    with zipfile.ZipFile(io.BytesIO(program.data)) as archive:
        assert archive.namelist() == sorted([*program.sources, "__main__.py"])
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.read("builder/probes/entry.py").decode() == ENTRY


def test_a_module_that_is_not_there_is_an_error(package: Path) -> None:
    (package / "probes" / "second.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"second\.py"):
        _ = Program("builder.probes.entry", package).data


def test_a_change_anywhere_is_another_program(package: Path) -> None:
    first = Program("builder.probes.entry", package).digest
    assert Program("builder.probes.entry", package).digest == first
    (package / "probes" / "unused.py").write_text("VALUE = 2\n")
    assert Program("builder.probes.entry", package).digest == first
    (package / "probes" / "fifth.py").write_text("VALUE = 2\n")
    assert Program("builder.probes.entry", package).digest != first


def test_the_archive_is_a_file_of_the_cache(package: Path) -> None:
    program = Program("builder.probes.entry", package)
    file = program.file()
    assert file.is_relative_to(cache_dir())
    assert (file.read_bytes(), program.file()) == (program.data, file)
    file.write_bytes(b"damaged")
    assert program.file().read_bytes() == program.data


def imported(source: bytes) -> set[str]:
    """What a source imports of ours when it runs, by its syntax tree."""
    names: set[str] = set()
    tree = ast.parse(source)
    for top in tree.body:
        if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING":
            top.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.partition(".")[0] == "builder"}


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.name)
def test_nothing_is_missing_or_not_needed(program: Program) -> None:
    """The quick way to find imports finds those of the syntax tree."""
    paths = {path for path in program.sources if not path.endswith("__init__.py")}
    beside = set(programs.APPLIER.sources) if program.on_applier else set()
    wanted = {f"{program.module.replace('.', '/')}.py"}
    for path in paths:
        for name in imported(program.sources[path]):
            parts = name.split(".")
            known = ["/".join(parts[:end]) + ".py" for end in (len(parts), len(parts) - 1)]
            (found,) = (paths | beside) & set(known)
            wanted.add(found)
    assert wanted - beside == paths
    assert all(path.startswith(("builder/applier/", "builder/probes/")) for path in paths)


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.name)
def test_its_start_is_a_function_main(program: Program) -> None:
    source = program.sources[f"{program.module.replace('.', '/')}.py"]
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
    (start,) = [one for one in functions if one.name == "main"]
    assert len(start.args.args) == len(start.args.defaults)


def test_the_verifier_has_no_copy_of_the_applier() -> None:
    """An image has both archives, and each of their modules once."""
    verifier, applier = programs.VERIFIER.sources, programs.APPLIER.sources
    assert verifier.keys() & applier.keys() == {"builder/__init__.py"}
    whole = Program(programs.VERIFIER.module).sources
    assert {name for name in whole if "/applier/" in name} <= applier.keys()
    assert whole.keys() - applier.keys() < verifier.keys()
