"""``bootstrap.py --test``: what runs, what is started for it, and how lanes report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder import bootstrap

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements-dev.lock"


# ------------------------------------------------------------------------------- what is installed


def test_the_lock_is_installed_as_it_is_and_nothing_is_resolved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pip once met a new release of ``coverage[toml]`` before the pin, and refused the lock."""
    commands: list[list[str]] = []
    monkeypatch.setenv("SPARK_BUILD_VENV", str(tmp_path))
    monkeypatch.setattr(bootstrap, "run_quietly", lambda command, apart: commands.append(command))
    bootstrap.set_up(dev=True)
    locked = next(command for command in commands if "--require-hashes" in command)
    assert "--no-deps" in locked
    assert locked[-1] == str(LOCK)


# ----------------------------------------------------------------------------------- what is needed


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("tests/unit/cli/test_cli.py", False),
        ("tests/unit/cli/test_cli.py::test_version -x", False),
        ("tests/unit tests/registry --cov", False),
        ("tests/compiled", True),
        ("tests/unit tests/wheels/kernels/test_compile.py::test_x", True),
        ("tests", True),
        ("-k name", True),
    ],
)
def test_compilers_are_for_tests_that_compile(words: str, needed: bool) -> None:
    assert bootstrap.compiling(words.split()) is needed


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that bootstrap starts; none is run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_unit_test_starts_pytest_and_nothing_else(started: list[list[str]]) -> None:
    assert bootstrap.run_tests(Path("bin"), ["tests/unit/cli/test_cli.py", "-x"]) == 0
    assert started == [["bin/python", "-m", "pytest", "tests/unit/cli/test_cli.py", "-x"]]


def test_tests_run_with_compiled_modules(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--test", "tests/unit/cli/test_cli.py"])
    monkeypatch.setattr(bootstrap, "set_up", lambda *, dev: tmp_path if dev else None)
    monkeypatch.setenv("SPARK_BUILD_VENV", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert bootstrap.main() == 0
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert started[-1][-1] == "tests/unit/cli/test_cli.py"


def test_a_test_that_compiles_gets_compilers_and_no_engine(started: list[list[str]]) -> None:
    bootstrap.run_tests(Path("bin"), ["tests/compiled"])
    assert [command[2] for command in started] == ["tests.compilers", "pytest"]


# -------------------------------------------------------------------------------------------- lanes


def test_every_folder_of_tests_is_in_one_lane() -> None:
    folders = [f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/__init__.py")]
    words = [word for lane in bootstrap._LANES.values() for word in lane]
    apart = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    places = [word for word in words if not word.startswith("-")]
    assert sorted([*folders, *apart]) == sorted(places), "what one lane leaves out another runs"
    assert all((ROOT / place / "__init__.py").is_file() for place in apart)
    assert set(bootstrap._COMPILING) <= set(folders)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What would run side by side."""
    given: dict[str, list[str]] = {}

    def run_lanes(commands: dict[str, list[str]]) -> int:
        given.update(commands)
        return 7

    monkeypatch.setattr(bootstrap, "run_lanes", run_lanes)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: mock.Mock())
    return given


def test_types_are_checked_beside_the_tests_and_the_rest_before(
    started: list[list[str]], lanes: dict[str, list[str]]
) -> None:
    assert bootstrap.run_everything(Path("bin")) == 7
    quick = [command for command in started if "tests.compilers" not in command]
    assert sorted([*quick, lanes.pop("types")]) == sorted(bootstrap.checks(Path("bin")))
    assert lanes.keys() == bootstrap._LANES.keys()
    pytest_ = ["bin/python", "-m", "pytest", "-q", "-p", "tests.lane"]
    assert lanes["kernels"] == [*pytest_, "tests/wheels/kernels"]


def test_nothing_is_tested_after_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, lanes: dict[str, list[str]]
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, int("--check" in command), "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert bootstrap.run_everything(Path("bin")) == 1
    assert lanes == {}


# -------------------------------------------------------------------------- hooks and the lock file


def test_the_hooks_are_the_checks() -> None:
    """What bootstrap runs on everything, ``pre-commit`` runs on what is about to be committed."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"].split()[:3] for repo in config["repos"] for hook in repo["hooks"]]
    wanted = [
        [word for word in command[:3] if word not in (".", "--check")]
        for command in bootstrap.checks(Path(".venv/bin"))
    ]
    assert [[word for word in hook if word != "--force-exclude"] for hook in hooks] == wanted


def problems(lock: str, wanted: list[Requirement]) -> list[str]:
    """What is wrong with a lock: missing or outdated requirements, no hashes, a host's name."""
    blocks = re.split(r"\n(?=[a-z0-9])", "\n" + re.sub(r"(?m)^ *#.*\n", "", lock))[1:]
    found: dict[str, set[str]] = {}
    said = ["names a host"] if re.search(r"https?://|--(extra-)?index-url", lock) else []
    for block in blocks:
        name, _, version = block.split(" ", 1)[0].partition("==")
        found.setdefault(canonicalize_name(name), set()).add(version)
        if "--hash=sha256:" not in block:
            said.append(f"{name} has no hash")
    for requirement in wanted:
        versions = found.get(canonicalize_name(requirement.name), set())
        if not any(requirement.specifier.contains(v, prereleases=True) for v in versions):
            said.append(f"{requirement} is not locked")
    return said


@pytest.fixture(scope="module")
def wanted() -> list[Requirement]:
    """What ``pyproject.toml`` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [Requirement(line) for line in lines]


def test_the_lock_contains_every_requirement(wanted: list[Requirement]) -> None:
    assert problems(LOCK.read_text("utf-8"), wanted) == []


def test_an_incomplete_lock_is_detected(wanted: list[Requirement]) -> None:
    text = LOCK.read_text("utf-8")
    assert problems(text.replace("\nruff==", "\nrough=="), wanted) == ["ruff>=0.6 is not locked"]
    older = re.sub(r"(?m)^ruff==[\d.]+", "ruff==0.5", text)
    assert problems(older, wanted) == ["ruff>=0.6 is not locked"]
    bare = re.sub(r"(?m)(^ruff==\S+) \\\n(    --hash\S+( \\)?\n)+", r"\1 ;\n", text)
    assert problems(bare, wanted) == ["ruff has no hash"]
    assert problems("--index-url https://host/\n" + text, wanted)[0] == "names a host"
