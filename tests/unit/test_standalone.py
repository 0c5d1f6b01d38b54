"""Files that run inside images and mods: the standard library alone, and nothing of ours."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from builder.catalog import Catalog
from builder.modexport import mod_files, stale_files, write_mod
from builder.paths import data_dir, package_file
from builder.runtime import IMAGE_VERIFIER

if TYPE_CHECKING:
    from pathlib import Path

RUNTIME = sorted(package_file("runtime").glob("*.py"))
#: What the files may import besides: their siblings, and what the image itself is about.
ALLOWED = {path.stem for path in RUNTIME} | {
    "vllm",
    "torch",
    "packaging",
    "pip",
    "flashinfer",
    "cutlass",
}
BAKED = {name.removesuffix(".py") for name in IMAGE_VERIFIER}
CATALOG = Catalog.discover()
MODS = {CATALOG.profile(name).mod: name for name in CATALOG.profile_files}


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports when it runs, anywhere in it."""
    names: set[str] = set()
    tree = ast.parse(path.read_bytes())
    for top in tree.body:
        if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING":
            top.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_it_imports_nothing_of_ours(path: Path) -> None:
    foreign = imported(path) - sys.stdlib_module_names - ALLOWED
    assert foreign == set()


def test_every_baked_file_is_there_and_used() -> None:
    """Those that others load by name (``import_module``) are named in a string."""
    assert {path.stem for path in RUNTIME} > BAKED
    texts = {path.stem: path.read_text() for path in RUNTIME if path.stem in BAKED}
    for name in BAKED - {"spark_verify"}:
        others = [text for stem, text in texts.items() if stem != name]
        assert any(re.search(rf'\bimport {name}\b|"{name}(\.py)?"', t) for t in others), name


def test_the_check_above_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    import requests\n    from builder.model import X\n")
    assert imported(path) - sys.stdlib_module_names - ALLOWED == {"requests", "builder"}


def test_the_applier_starts_without_anything_installed() -> None:
    script = package_file("runtime", "spark_apply.py")
    command = [sys.executable, "-I", "-S", "-B", str(script), "--help"]
    assert "apply" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------------------------------------- mods


@pytest.mark.parametrize("name", MODS)
class TestShippedMods:
    def files(self, name: str) -> dict[str, tuple[bytes, int]]:
        return mod_files(name, CATALOG.select([MODS[name]]))

    def test_is_fresh(self, name: str) -> None:
        assert stale_files(data_dir("mods") / name, self.files(name)) == []

    def test_run_sh_is_posix_shell(self, name: str) -> None:
        script = data_dir("mods") / name / "run.sh"
        subprocess.run(["sh", "-n", str(script)], check=True)
        text = script.read_text()
        assert text.startswith("#!/bin/sh\n")
        assert "set -eu" in text
        assert not re.search(r"\bgit\b|\[\[|\bfunction\b|\bsource\b|/\.\w", text)

    def test_files_have_no_dots_in_front(self, name: str) -> None:
        assert not [file for file in self.files(name) if file.startswith(".")]

    def test_without_vllm_it_says_so(self, name: str, tmp_path: Path) -> None:
        """No Python here has vLLM: the mod must not end as if it had done its work."""
        write_mod(tmp_path, self.files(name))
        python = tmp_path / "python3"
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        environment = {"PATH": f"{tmp_path}", "VLLM_PYTHON": str(python)}
        script = (tmp_path / "run.sh").read_text()
        here = re.sub(r"/(opt|usr)/\S*/python3", str(python), script)
        (tmp_path / "run.sh").write_text(here)
        answer = subprocess.run(
            ["/bin/sh", "./run.sh"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 6
        assert "no Python here has vllm" in answer.stderr


def test_every_mod_in_the_checkout_belongs_to_a_profile() -> None:
    assert {path.name for path in data_dir("mods").iterdir() if path.is_dir()} == set(MODS)


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

    def test_what_python_leaves_is_no_matter(self, folder: Path) -> None:
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
