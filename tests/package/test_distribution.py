"""The wheel and the source archive hold what they must, and run where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from builder import __version__
from builder.probes import TERMS
from builder.proof.isolation import uv_environment, uv_index

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def data_files(*folders: str) -> set[str]:
    """The committed files below these folders."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def missing_from_wheel(names: set[str]) -> set[str]:
    """What a wheel lacks of the license terms and of the files that the tool reads."""
    folder = f"spark_build-{__version__}.dist-info/licenses"
    data = data_files("patches", "dockerfiles", "mods") | set(TERMS)
    wanted = {f"builder/_data/{file}" for file in data} | {f"{folder}/{name}" for name in TERMS}
    return (wanted | data_files("builder")) - names


def missing_from_sdist(names: set[str]) -> set[str]:
    """What a source archive lacks of the same, and of what a maintainer needs."""
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", *TERMS}
    wanted = pages | data_files(
        "builder", "patches", "dockerfiles", "mods", "docs", "tests", "recipes"
    )
    wanted |= data_files(".sparkrun")
    return {f"spark_build-{__version__}/{file}" for file in wanted} - names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``python -m build`` makes: the wheel, out of the source archive beside it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def sdist(wheel: Path) -> Path:
    """The source archive."""
    (made,) = wheel.parent.glob("*.tar.gz")
    return made


def test_the_wheel_holds_license_and_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"spark_build-{__version__}.dist-info/METADATA").decode()
    assert missing_from_wheel(names) == set()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert all(f"\nLicense-File: {name}\n" in metadata for name in TERMS)


def test_the_source_archive_holds_license_and_data(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    assert missing_from_sdist(names) == set()


@pytest.mark.parametrize(
    "name", ["builder/_data/LICENSE", "builder/_data/patches/b12x-env/layer.toml"]
)
def test_a_missing_file_is_detected(wheel: Path, name: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert missing_from_wheel(names - {name}) == {name}
    assert missing_from_sdist(set()) >= {f"spark_build-{__version__}/LICENSE"}


def run_elsewhere(folder: Path, *words: str) -> str:
    """Run a command in an empty folder, without the checkout on any path."""
    env = {**os.environ, **uv_environment(), "PIPX_HOME": str(folder / "pipx")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_uvx_runs_it(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    package = request.getfixturevalue(kind)
    uvx = (str(BIN / "uvx"), "--no-config", *uv_index(), "--python", sys.executable)
    command = (*uvx, "--from", str(package), "spark-build")
    assert run_elsewhere(tmp_path, *command, "--version") == f"spark-build {__version__}\n"
    # reads the profiles, the layers, the license terms and every file of the mods
    assert "up to date" in run_elsewhere(tmp_path, *command, "mods", "export", "--check")


def test_pipx_runs_it(wheel: Path, tmp_path: Path) -> None:
    pipx = (str(BIN / "pipx"), "run", "--no-cache", "--python", sys.executable)
    command = (*pipx, "--spec", str(wheel), "spark-build")
    assert "up to date" in run_elsewhere(tmp_path, *command, "mods", "export", "--check")
