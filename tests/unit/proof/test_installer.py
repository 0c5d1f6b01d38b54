"""uv asks the index that pip is configured with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from builder.proof import isolation
from builder.proof.isolation import environment_command, install_command

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
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(isolation, "_pip_here", lambda: here)
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
