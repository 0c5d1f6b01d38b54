"""Which installer is used, and that uv asks the index that pip is configured with."""

from __future__ import annotations

import os
import platform
import sys
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.common.console import console
from builder.common.paths import cache_dir, package_file
from builder.common.pypi import PackageIndex
from builder.errors import RemoteError
from builder.proof import isolation
from builder.proof.isolation import (
    environment_command,
    install_command,
    installs_here,
)
from tests.unit.fakes import make_wheel

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = Path("/sandbox/bin/python")


@pytest.fixture(autouse=True)
def pip_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration but ours; gives its file."""
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "TRUSTED_HOST", "NO_INDEX", "CERT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    for name in ("PIP_PROXY", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pip.conf"
    file.write_text("")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return file


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return str(program)


@pytest.mark.parametrize("here", [True, False])
def test_without_uv_pip_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: bool
) -> None:
    """This environment's, where it has one: a second one would have to be unpacked first."""
    monkeypatch.setattr(isolation, "uv", lambda: None)
    monkeypatch.setattr(isolation, "_pip_here", lambda: here)
    assert installs_here() is here
    made = environment_command(tmp_path / "v").words
    install = install_command(PYTHON, ["a==1"], tmp_path / "dsl").words
    what = ("install", "-q", "--no-compile", "--no-deps", "--target", str(tmp_path / "dsl"), "a==1")
    if here:
        assert made == (sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v"))
        assert install == (sys.executable, "-m", "pip", "--python", str(PYTHON), *what)
    else:
        assert made == (sys.executable, "-m", "venv", str(tmp_path / "v"))
        assert install == (str(PYTHON), "-m", "pip", *what)


def test_uv_without_any_configuration(uv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    command = install_command(PYTHON, ["a==1", "b==2"])
    words = (uv, "pip", "install", "--quiet", "--no-config", "--python", str(PYTHON))
    assert command.words == (*words, "--no-deps", "a==1", "b==2")
    assert not command.env
    assert environment_command(Path("/sandbox")).words[:2] == (uv, "venv")


def test_nothing_of_the_installers_cache(uv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--no-cache" in install_command(PYTHON, ["a==1"], fresh=True).words
    monkeypatch.setattr(isolation, "uv", lambda: None)
    assert "--no-cache-dir" in install_command(PYTHON, ["a==1"], fresh=True).words
    assert uv


def test_uv_with_the_configuration_of_pip(uv: str, pip_of_nobody: Path) -> None:
    pip_of_nobody.write_text(
        "[global]\nindex-url = https://one.test/simple\nextra-index-url =\n  https://two.test/s\n"
        "  https://three.test/s\ncert = /etc/ca.pem\ntrusted-host = one.test\n"
        "find-links = /wheels\nproxy = http://proxy.test:3128\nno-index = true\n"
    )
    command = install_command(PYTHON, ["a==1"])
    assert " ".join(command.words[7:]) == (
        "--default-index https://one.test/simple --index https://two.test/s "
        "--index https://three.test/s --index-strategy unsafe-best-match --find-links /wheels "
        "--allow-insecure-host one.test --no-index --no-deps a==1"
    )
    assert command.env["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert command.env["HTTPS_PROXY"] == "http://proxy.test:3128"


def test_an_environment_variable_wins(
    uv: str, pip_of_nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_of_nobody.write_text("[global]\nindex-url = https://one.test/simple\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.test/simple")
    words = install_command(PYTHON, ["a==1"]).words
    assert words[words.index("--default-index") + 1] == "https://other.test/simple"


# ------------------------------------------------------------------------- where uv comes from

VERSION = "0.0.1"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter in a folder of its own, and nothing on PATH."""
    folder = tmp_path / "environment"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder / "python"


def program(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "uv"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def on_the_index(patch: pytest.MonkeyPatch, tmp_path: Path, name: str = "uv") -> list[str]:
    """An index that has uv, whose wheel is pinned; returns what is asked of it."""
    wheel = make_wheel("uv", VERSION, {f"uv-{VERSION}.data/scripts/{name}": b"a program"})
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / wheel.filename).write_bytes(wheel.data)
    asked: list[str] = []

    def index() -> PackageIndex:
        asked.append("index")
        held = PackageIndex()
        held.hold_folder(folder)
        return held

    patch.setattr(isolation, "PackageIndex", index)
    patch.setattr(isolation, "_check_runs", Path.stat)
    pin_of(patch, wheel.pin["sha256"])
    return asked


def pin_of(patch: pytest.MonkeyPatch, sha256: str) -> Path:
    folder = cache_dir() / "sandbox" / f"uv-{VERSION}-{sha256[:12]}"
    patch.setattr(isolation, "_uv_pin", lambda: (folder, VERSION, sha256))
    return folder


def test_the_uv_on_path_comes_first(uv: str, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(python.parent)
    monkeypatch.setenv("PATH", str(Path(uv).parent))
    assert isolation.uv() == uv
    Path(uv).unlink()
    assert isolation.uv() == str(python.with_name("uv"))


def test_a_uv_beside_the_interpreter_that_cannot_be_executed_is_none(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(python.parent).chmod(0o644)
    pin_of(monkeypatch, "")
    assert isolation.uv() is None


def test_uv_of_the_index_is_asked_for_once(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = on_the_index(monkeypatch, tmp_path)
    monkeypatch.setattr(isolation, "_pip_here", lambda: True)
    answers: list[str | None] = []
    threads = [threading.Thread(target=lambda: answers.append(isolation.uv())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = isolation._uv_pin()[0]
    assert answers == [str(folder / "uv")] * 3
    assert os.access(folder / "uv", os.X_OK)
    isolation._uv_of_index.cache_clear()  # as in the next process
    assert isolation.uv() == str(folder / "uv")
    assert asked == ["index"]

    command = install_command(PYTHON, ["a==1"])
    assert command.words[0] == str(folder / "uv")
    assert command.env["UV_CACHE_DIR"] == str(folder / "cache")
    assert command.instead
    assert command.instead.words[-2:] == ("--no-deps", "a==1")
    monkeypatch.setenv("UV_CACHE_DIR", "/own")
    assert "UV_CACHE_DIR" not in environment_command(tmp_path / "v").env


def not_available(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def silent(*_: object) -> None:
        raise RemoteError("the package index did not answer")

    on_the_index(patch, tmp_path)
    patch.setattr(PackageIndex, "choose", silent)


def without_the_program(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_index(patch, tmp_path, name="uvx")


def with_other_bytes(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_index(patch, tmp_path)
    pin_of(patch, "1" * 64)


def not_pinned(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_index(patch, tmp_path)
    pin_of(patch, "")


def not_allowed(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_index(patch, tmp_path)
    patch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (not_available, "did not answer"),
        (without_the_program, "has no uv-0.0.1.data/scripts/uv"),
        (with_other_bytes, "pinned is 1111"),
        (not_pinned, "no wheel is pinned"),
        (not_allowed, "no-index"),
    ],
)
def test_pip_is_used_where_there_is_no_uv(
    case: Callable[[pytest.MonkeyPatch, Path], None],
    why: str,
    python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case(monkeypatch, tmp_path)
    details: list[str] = []
    monkeypatch.setattr(console, "detail", details.append)
    assert isolation.uv() is None
    assert "pip" in install_command(PYTHON, ["a==1"]).words
    (message,) = [line for line in details if line.startswith("pip installs, because uv")]
    assert why in message
    assert not isolation._uv_pin()[0].exists()


def test_the_pinned_uv_is_the_one_that_development_uses() -> None:
    pins = tomllib.loads(package_file("data", "sandbox-requirements.toml").read_text("utf-8"))["uv"]
    lock = (Path(__file__).parents[3] / "requirements-dev.lock").read_text("utf-8")
    block = lock.partition(f"\nuv=={pins['version']} ")[2].partition("# via")[0]
    assert set(pins["wheels"]) == {"x86_64", "aarch64"}
    for sha256 in pins["wheels"].values():
        assert f"sha256:{sha256}" in block
    folder, version, sha256 = isolation._uv_pin()
    assert sha256 == pins["wheels"][platform.machine()]
    assert folder.name == f"uv-{version}-{sha256[:12]}"
