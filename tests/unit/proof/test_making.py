"""The parts of a sandbox are installed side by side, and what is there is not installed again."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.proof import installed, sandbox
from builder.proof.isolation import Command, SandboxUnavailable
from builder.proof.sandbox import Sandbox, Torch, make, requirements_for

if TYPE_CHECKING:
    from collections.abc import Sequence

NEEDS = requirements_for("0.20.1")
PACKAGES = {"vllm": "0.20.1", "nvidia-cutlass-dsl": "4.4.2"}


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch(folder=Path("torch"), version="1", what="a torch")
    monkeypatch.setattr(sandbox, "torch_folder", lambda _: torch)
    return torch


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The interpreters for which something was installed into a folder."""
    asked: list[Path] = []

    def command(python: Path, packages: Sequence[str], into: Path | None = None) -> Command:
        assert into
        asked.append(python)
        for package in packages:
            info = into / f"{package.replace('-', '_').replace('==', '-')}.dist-info"
            info.mkdir(parents=True)
            (info / "RECORD").touch()
        return Command(())

    monkeypatch.setattr(installed, "install_command", command)
    monkeypatch.setattr(installed, "call", lambda _: "")
    return asked


def test_the_dsl_is_installed_while_the_packages_are(
    interpreters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    def call(_command: object) -> str:
        done.set()
        return ""

    monkeypatch.setattr(installed, "call", call)
    monkeypatch.setattr(sandbox, "installs_here", lambda: True)
    beside: list[bool] = []
    monkeypatch.setattr(Sandbox, "prepare", lambda _: beside.append(done.wait(60)))
    parts = make(NEEDS, "2.9.0", PACKAGES)
    assert beside == [True]
    assert parts.paths[0].is_dir()
    assert parts.paths[0].name.startswith("dsl-")
    assert interpreters == [Path(sys.executable)]


def test_nothing_is_asked_for_where_all_is_there(
    interpreters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "installs_here", lambda: True)
    monkeypatch.setattr(Sandbox, "prepare", lambda _: None)
    parts = make(NEEDS, "2.9.0", PACKAGES)
    monkeypatch.setattr(sandbox, "installs_here", lambda: pytest.fail("uv is asked for"))
    assert make(NEEDS, "2.9.0", PACKAGES).paths == parts.paths
    assert len(interpreters) == 1


def test_without_uv_and_pip_the_sandbox_installs_it_itself(
    interpreters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "installs_here", lambda: False)
    own = Sandbox(NEEDS)
    own.dsl(PACKAGES)
    assert interpreters == [own.python]


@pytest.mark.usefixtures("interpreters")
def test_a_dsl_that_cannot_be_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[threading.Thread] = []

    def call(_command: object) -> str:
        calls.append(threading.current_thread())
        raise SandboxUnavailable("no DSL")

    monkeypatch.setattr(installed, "call", call)
    monkeypatch.setattr(sandbox, "installs_here", lambda: True)
    monkeypatch.setattr(Sandbox, "prepare", lambda _: None)
    with pytest.raises(SandboxUnavailable, match="no DSL"):
        make(NEEDS, "2.9.0", PACKAGES)
    assert calls[-1] is threading.current_thread()  # which says why
    assert not list((Sandbox(NEEDS).root.parent).glob("dsl-*"))
