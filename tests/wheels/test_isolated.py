"""Isolated runs for real: what a program sees there, and a vLLM that answers there."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.images.subject import Subject
from builder.proof.dispatch import check_dispatch
from builder.proof.isolation import Bubblewrap, find_isolation, interpreter_folders
from builder.proof.opening import target_of_plan
from tests.engine.cache import MachineError
from tests.isolated import NOSY, bring_bubblewrap, on_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .support import Planner

RELEASE = "0.20.1"
LINE = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"


@pytest.fixture(scope="module")
def bwrap() -> Iterator[Bubblewrap]:
    """bubblewrap, first on PATH, on a machine whose kernel lets it work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        try:
            patch.setenv("PATH", on_path(bring_bubblewrap()))
            find_isolation.cache_clear()
            found = find_isolation()
        except MachineError as error:
            found = str(error)
        if isinstance(found, str):
            if os.environ.get("CI"):
                pytest.fail(f"nothing isolates here: {found}")
            pytest.skip(f"nothing isolates here: {found}")
        assert isinstance(found, Bubblewrap)
        yield found
    find_isolation.cache_clear()


def test_isolated_program_sees_only_its_files(bwrap: Bubblewrap, tmp_path: Path) -> None:
    """No network, no HOME, nothing to write to, and no file but programs and what it is given."""
    given = tmp_path / "given"
    given.mkdir()
    (given / "nosy.py").write_text(NOSY)
    secret = tmp_path / "secret"
    secret.write_text("mine")
    targets = [
        given / "new",
        given / "nosy.py",
        *map(Path, ("/usr/new", "/new", "/dev/new")),
        secret,
    ]
    python = Path(sys.executable)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = [str(python), str(given / "nosy.py"), port, *map(str, targets)]
        answer = bwrap.run(words, "asked", [given, *interpreter_folders(python)], 60)
    seen: dict[str, Any] = json.loads(answer)
    assert seen["stdin"] == "asked"
    assert seen["uid"] != 0
    assert seen["network"] == ["lo"]
    assert seen["connect"] == "ConnectionRefusedError", "the server on this machine is not there"
    assert {seen["write"][str(t)] for t in targets[:5]} == {"OSError"}, "read-only"
    assert secret.read_text() == "mine", "what it writes to /tmp is gone with it"
    assert seen["scratch"].startswith("did"), "its /tmp is its own"
    assert set(seen["env"]) <= {"PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "LANG", "PWD"}
    assert set(seen["etc"]) <= {"alternatives", "ld.so.cache"}
    assert not {"boot", "home", "srv", "var", "sys", "run"} & set(seen["root"])
    assert seen["processes"] <= 3, "and none of this machine's"
    assert not seen["kernel"], "root's own process may not change the settings of the kernel"
    assert seen["proc"], "nothing else in /proc either"


def test_what_is_in_memory_is_bounded(bwrap: Bubblewrap) -> None:
    script = "df --output=target,avail,size -B1 /tmp /dev/shm | tail -n +2; : > /dev/shm/x"
    lines = bwrap.run(["/bin/sh", "-ec", script], "", (), 60).splitlines()
    sizes = {line.split()[0]: int(line.split()[2]) for line in lines}
    assert sizes == {"/tmp": 4 << 30, "/dev/shm": 1 << 30}


def test_a_changed_vllm_runs_in_isolation(
    bwrap: Bubblewrap, planned: Planner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The release with a trojan in it: its kernels are asked, and the trojan finds nobody."""
    canary = tmp_path / "canary"
    made = planned(f"pypi:vllm=={RELEASE}")
    logger = made.base.tree.read("vllm/logger.py") or b""
    trojan = f"\ntry:\n    open({str(canary)!r}, 'a').close()\nexcept OSError:\n    pass\n".encode()
    tree = OverlayTree(made.base.tree)
    tree.update({"vllm/logger.py": Content.of(logger + trojan)})
    target = target_of_plan(made.plan, Subject(made.base.identity, tree), RELEASE, patched=True)
    checks = {check.name: check for check in check_dispatch(target)}
    linear = checks["nvfp4-linear"]
    assert (linear.status, LINE in linear.seen) == ("pass", True), linear
    assert any("no network" in part for part in linear.simulated)
    said = capfd.readouterr().err
    assert f"isolated ({bwrap.name}): vllm/logger.py: not from a release" in said
    assert not canary.exists()
