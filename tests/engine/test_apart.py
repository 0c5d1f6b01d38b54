"""A container that holds nothing of its own: where code of an image runs if there is no bwrap."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.proof.isolation import Container, find_isolation, interpreter_folders
from builder.proof.replies import DispatchReply
from builder.proof.sandbox import ask_probe
from builder.proof.trust import IsolatedRun
from tests.isolated import NOSY
from tests.unit.fakevllm import write_fake_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from . import machine


@pytest.fixture
def way(engine: machine.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """The way that is found where an engine answers and bubblewrap is not installed."""
    monkeypatch.setenv("DOCKER_HOST", engine.env["DOCKER_HOST"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    find_isolation.cache_clear()
    found = find_isolation()
    assert isinstance(found, Container), found
    yield found
    find_isolation.cache_clear()


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder that others may read, as the cache is."""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "nosy.py").write_text(NOSY)
    return folder


def test_isolated_program_sees_only_its_files(way: Container, given: Path) -> None:
    """No network, no HOME, nothing to write to, and no file but programs and what it is given."""
    python = Path(sys.executable)
    targets = [given / "new", given / "nosy.py", Path("/usr/new"), Path("/new")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = [str(python), str(given / "nosy.py"), port, *map(str, targets)]
        answer = way.run(words, "asked", [given, *interpreter_folders(python)], 60)
    seen: dict[str, Any] = json.loads(answer)
    assert seen["stdin"] == "asked"
    assert seen["uid"] != 0
    assert seen["network"] == ["lo"]
    assert seen["connect"] == "ConnectionRefusedError"
    assert set(seen["write"].values()) <= {"OSError", "PermissionError"}
    assert seen["scratch"].startswith("did")
    assert not {"boot", "home", "srv", "var"} & set(seen["root"])
    assert not [name for name in seen["env"] if name in os.environ and name.startswith("DOCKER")]
    assert "shadow" not in seen["etc"]


def test_a_program_that_takes_too_long_is_killed(
    way: Container, given: Path, engine: machine.Engine
) -> None:
    (given / "slow.py").write_text("import time\ntime.sleep(600)\n")
    python = Path(sys.executable)
    folders = [given, *interpreter_folders(python)]
    before = engine.run("ps", "--all", "--quiet").split()  # other tests have theirs
    with pytest.raises(subprocess.TimeoutExpired):
        way.run([str(python), str(given / "slow.py")], "", folders, 1)
    assert engine.run("ps", "--all", "--quiet").split() == before, "no container is left"


def test_vllm_runs_in_isolation(way: Container, tmp_path: Path) -> None:
    """The dispatch probe, with the interpreter and the folders that it is given."""
    root = write_fake_vllm(tmp_path / "site")
    apart = IsolatedRun(isolation=way, because="a test")
    request = {"paths": [str(root)], "ask": [{"kind": "nvfp4-linear"}]}
    result = ask_probe(Path(sys.executable), request, DispatchReply, apart=apart)
    (answer,) = result.answers
    assert answer.lines == ("Using CutlassKernel for NVFP4 GEMM",)
    assert result.simulated[0] == apart.text()
