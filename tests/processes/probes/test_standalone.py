"""Files of images and mods, started with the standard library alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import data_dir
from builder.images.engines.maker import APPLIER as BUNDLE
from builder.images.engines.maker import applier_bundle
from builder.pipeline.mods import mod_files, write_mod
from tests.unit.fakes import BACKEND, copy_op, make_layer, vllm_files, write_tree
from tests.unit.probes.test_standalone import APPLIER, CATALOG, MODS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The applier as an image has it, in a folder of its own that cannot be written."""
    folder = tmp_path / "share"
    folder.mkdir()
    path = folder / BUNDLE
    path.write_bytes(applier_bundle())
    folder.chmod(0o555)
    return path


def alone(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The bundle with the standard library alone, from a folder that has nothing of ours."""
    command = [sys.executable, "-I", "-S", "-B", str(path), *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_the_bundle_starts_without_anything_installed(bundle: Path) -> None:
    shown = alone(bundle, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "apply" in shown.stdout
    assert [path.name for path in bundle.parent.iterdir()] == [BUNDLE]


def test_the_bundle_applies_and_reverts(bundle: Path, tmp_path: Path) -> None:
    site = write_tree(tmp_path / "site", vllm_files())
    layers = tmp_path / "layers.json"
    every: dict[str, object] = {"when": {}}  # to compare versions takes packaging, or pip's copy
    layer = make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n"), variant=every)
    mod = {"name": "t", "needs": {}, "needs_reason": "", "layers": [layer.rendered]}
    layers.write_text(json.dumps(mod))
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    words = ("--root", str(site), "--layers", str(layers))
    applied = alone(bundle, "apply", *words)
    assert applied.returncode == 0, applied.stderr
    assert (site / "vllm/new.py").read_bytes() == b"N = 1\n"
    assert alone(bundle, "status", "--root", str(site)).stdout.startswith("fix\t")
    assert alone(bundle, "revert", *words).returncode == 0
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before


def test_every_module_of_the_bundle_can_be_imported_alone(bundle: Path) -> None:
    """Python's own reader of archives finds each one in it."""
    with zipfile.ZipFile(bundle) as archive:
        names = [name for name in archive.namelist() if name.startswith("builder/applier/")]
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    assert {name.rpartition("/")[2] for name in names} == {p.name for p in APPLIER}
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if "__" not in name]
    code = f"import sys; sys.path.insert(0, {str(bundle)!r})\nfor name in {modules!r}:\n"
    code += "    assert __import__(name, fromlist=['x']).__file__.startswith(sys.path[0])"
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], cwd="/", check=True)


@pytest.mark.parametrize("name", MODS)
def test_run_sh_is_posix_shell(name: str) -> None:
    script = data_dir("mods") / name / "run.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/bin/sh\n")
    assert "set -eu" in text
    assert not re.search(r"\bgit\b|\[\[|\bfunction\b|\bsource\b|/\.\w", text)


@pytest.mark.parametrize("name", MODS)
def test_without_vllm_it_says_so(name: str, tmp_path: Path) -> None:
    """No Python here has vLLM: the mod must not end as if it had done its work."""
    write_mod(tmp_path, mod_files(name, CATALOG.select([MODS[name]])))
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
