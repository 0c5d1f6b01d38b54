"""Files that run inside images and mods: the standard library alone, and nothing of ours."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from builder.common.paths import package_file
from builder.common.programs import CODEGEN, DISPATCH, IDENTIFY, LAUNCH, PREFLIGHT, VERIFIER
from builder.images.engines.maker import applier_bundle
from builder.layers.catalog import Catalog
from builder.pipeline.mods import mod_files, stale_files, write_mod

if TYPE_CHECKING:
    from pathlib import Path

RUNTIME = sorted(package_file("probes").glob("*.py"))
APPLIER = sorted(package_file("applier").glob("*.py"))
#: What the files may import besides the standard library: what the image itself is about.
ALLOWED = {"vllm", "torch", "packaging", "pip", "flashinfer", "cutlass"}
#: Files that are shipped as they are; all others are in archives.
ALONE = {"wheel_loader", "audit_model", "mod_run"}
CATALOG = Catalog.discover()
MODS = {CATALOG.profile(name).mod: name for name in CATALOG.profile_files}


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports when it runs, anywhere in it."""
    names: set[str] = set()
    tree = ast.parse(path.read_bytes())
    for top in tree.body:
        if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING":
            top.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: relative import"
            names.add(node.module or "")
    return names


def not_allowed(path: Path) -> set[str]:
    """What a file in an image imports that is not there."""
    known = sys.stdlib_module_names | ALLOWED
    names = {name for name in imported(path) if name.partition(".")[0] not in known}
    ours = ("builder.probes", "builder.applier")
    return names if path.stem in ALONE else {n for n in names if not n.startswith(ours)}


def test_probes_import_the_standard_library_each_other_and_the_applier() -> None:
    foreign = {path.name: not_allowed(path) for path in RUNTIME}
    assert not any(foreign.values()), foreign


def test_every_probe_is_in_an_archive_or_alone() -> None:
    programs = (DISPATCH, CODEGEN, LAUNCH, PREFLIGHT, IDENTIFY, VERIFIER)
    shipped = {path for program in programs for path in program.sources}
    missing = {f"builder/probes/{path.name}" for path in RUNTIME} - shipped
    assert missing == {f"builder/probes/{name}.py" for name in ALONE}


@pytest.mark.parametrize("name", ["bad.py", *(f"{name}.py" for name in sorted(ALONE))])
def test_the_import_check_detects_a_violation(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = "def f():\n    import requests\n    from builder.common.model import X\n"
    path.write_text(f"{text}    from builder.probes import stub_driver\n")
    alone = {"builder.probes"} if path.stem in ALONE else set()
    assert not_allowed(path) == {"requests", "builder.common.model"} | alone


# ---------------------------------------------------------------------------------------- applier


#: What it compares versions with, where one is there: pip has a copy of the other.
COMPARERS = {"packaging.specifiers", "pip._vendor.packaging.specifiers"}
PIP = "pip._internal.models.index"
OLDEST = (3, 10)
"""The oldest Python that a vLLM with NVFP4 kernels is released for (its ``requires-python``)."""


def modules_imported(source: bytes) -> set[str]:
    """Full names of the modules that a source imports anywhere, for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source, feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def foreign(source: bytes) -> set[str]:
    """What the applier may not import, of what a source does import."""
    own = {f"builder.applier.{path.stem}" for path in APPLIER}
    known = own | COMPARERS | {PIP}
    names = modules_imported(source) - known
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


#: Names that `typing` has since Python 3.11 or later (``docs.python.org/3/library/typing.html``).
NEWER = {
    "LiteralString", "Never", "NoDefault", "NotRequired", "ReadOnly", "Required", "Self", "TypeIs",
    "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform",
    "get_overloads", "override", "reveal_type",
}  # fmt: skip


def too_new(source: bytes) -> set[str]:
    """What a source takes from `typing` when it runs, and the oldest Python does not have."""
    tree = ast.parse(source, feature_version=OLDEST)
    checked = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    unseen = {id(inner) for node in checked for inner in ast.walk(node)}
    imports = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in unseen)
    return {alias.name for n in imports if n.module == "typing" for alias in n.names} & NEWER


def test_nothing_is_newer_than_the_oldest_python() -> None:
    found = {path: too_new(path.read_bytes()) for path in (*APPLIER, *RUNTIME)}
    assert not any(found.values()), found


def test_a_newer_name_is_detected() -> None:
    guarded = "if TYPE_CHECKING:\n    from typing import Self\n"
    assert too_new(f"from typing import Any, NotRequired\n{guarded}".encode()) == {"NotRequired"}


def test_the_applier_imports_the_standard_library_and_itself() -> None:
    found = {path: foreign(path.read_bytes()) for path in APPLIER}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    "line",
    [
        "import requests", "import builder", "from builder import applier",
        "from builder.common.model import X", "from . import text",
        "from builder.applier.gone import X",
    ],
)  # fmt: skip
def test_modules_that_the_applier_must_not_import(line: str) -> None:
    assert foreign(f"def f():\n    {line}\n".encode())


def circle(needs: dict[str, set[str]]) -> set[str]:
    """Modules that need one another, and what needs those."""
    left = dict(needs)
    while free := [name for name, used in left.items() if not used & set(left)]:
        for name in free:
            del left[name]
    return set(left)


def test_the_applier_has_no_import_cycle() -> None:
    used = {path.stem: modules_imported(path.read_bytes()) for path in APPLIER}
    own = {name: {n for n in used if f"builder.applier.{n}" in used[name]} for name in used}
    assert sum(map(len, own.values())) > len(own)
    assert circle(own) == set()
    assert circle(own | {"values": {"commandline"}}) >= {"values", "commandline"}


def test_the_bundle_is_the_same_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = applier_bundle()
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert applier_bundle() == first


# ------------------------------------------------------------------------------------------- mods


@pytest.mark.parametrize("name", MODS)
class TestShippedMods:
    def files(self, name: str) -> dict[str, tuple[bytes, int]]:
        return mod_files(name, CATALOG.select([MODS[name]]))

    def test_files_have_no_dots_in_front(self, name: str) -> None:
        assert not [file for file in self.files(name) if file.startswith(".")]


class TestStaleness:
    FILES: ClassVar = {"run.sh": (b"#!/bin/sh\n", 0o755), "layers.json": (b"{}\n", 0o644)}

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_mod(tmp_path / "mod", self.FILES)
        return tmp_path / "mod"

    def test_fresh(self, folder: Path) -> None:
        assert stale_files(folder, self.FILES) == []

    def test_no_folder(self, tmp_path: Path) -> None:
        assert stale_files(tmp_path / "gone", self.FILES) == ["layers.json", "run.sh"]

    def test_missing(self, folder: Path) -> None:
        (folder / "run.sh").unlink()
        assert stale_files(folder, self.FILES) == ["run.sh"]

    def test_changed(self, folder: Path) -> None:
        (folder / "layers.json").write_text("[]\n")
        assert stale_files(folder, self.FILES) == ["layers.json"]

    def test_extra(self, folder: Path) -> None:
        (folder / "old.patch").write_text("")
        assert stale_files(folder, self.FILES) == ["old.patch"]

    @pytest.mark.parametrize(("name", "mode"), [("run.sh", 0o644), ("layers.json", 0o755)])
    def test_executable_bit(self, folder: Path, name: str, mode: int) -> None:
        (folder / name).chmod(mode)
        assert stale_files(folder, self.FILES) == [name]

    def test_bytecode_files_are_ignored(self, folder: Path) -> None:
        (folder / "__pycache__").mkdir()
        assert stale_files(folder, self.FILES) == []

    def test_writing_makes_it_fresh_again(self, folder: Path) -> None:
        (folder / "run.sh").unlink()
        (folder / "layers.json").chmod(0o755)
        (folder / "old.patch").write_text("")
        (folder / "old").mkdir()
        (folder / "old" / "file").write_text("")
        write_mod(folder, self.FILES)
        assert stale_files(folder, self.FILES) == []
