"""The process that imported a release: it answers several times, and later commands, and ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.paths import cache_dir
from builder.proof import broker, modelserver
from builder.proof.installed import seal
from builder.proof.isolation import SandboxUnavailable
from builder.proof.modelserver import Server, close_servers, end, running
from builder.proof.wholemodel import ModelReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PYTHON = Path(sys.executable)
ECHO = """\
import json, os, sys
held = {}
open(os.environ["TMPDIR"] + "/own", "w").close()
for line in sys.stdin:
    held.update(json.loads(line))
    if held.get("ends"):
        sys.exit(1)
    if held.get("waits"):
        sys.stdin.read()
    answers = [{"error": None, "lines": [f"{os.getpid()} {held['name']}"], "warnings": [],
                "settings": {}, "layers": [], "caches": [], "parameter_bytes": 0}]
    open(os.environ["TMPDIR"] + "/own").close()
    print(json.dumps({"answers": answers * len(held["questions"])}), flush=True)
"""


@pytest.fixture(autouse=True)
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "echo.py").write_text(ECHO)
    program = SimpleNamespace(name="preflight", file=lambda: tmp_path / "echo.py")
    monkeypatch.setattr(modelserver, "PREFLIGHT", program)
    yield
    close_servers()
    end()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes wait for later commands, as they do outside of tests."""
    monkeypatch.setenv("SPARK_BUILD_SERVER_IDLE", "10")


def asked(
    header: Mapping[str, object],
    questions: int = 1,
    spoils: Callable[[ModelReply], bool] = lambda _: False,
) -> list[tuple[str, ...]]:
    """The lines of each answer: the process that gave it, and the name in the header."""
    reply = modelserver.ask_server(
        PYTHON, header, [{}] * questions, ModelReply, label="0.1", timeout=60, spoils=spoils
    )
    return [one.lines for one in reply.answers]


def test_one_process_answers_all_questions_of_a_release() -> None:
    first = asked({"name": "a"})[0]
    assert asked({"name": "a"}, 2) == [first, first], "the header is sent once"
    assert asked({"name": "b"})[0] != first
    asked({"name": "c"})
    assert len(modelserver._servers) == 2
    assert asked({"name": "a"})[0] != first, "it was ended"


def test_a_process_that_ends_gives_no_answer_and_is_started_again() -> None:
    for _ in range(2):
        with pytest.raises(SandboxUnavailable, match="ended without a result"):
            asked({"name": "a", "ends": 1})


def test_a_process_that_never_answers_is_ended() -> None:
    server = Server(PYTHON, {"name": "a", "waits": 1})
    with pytest.raises(SandboxUnavailable, match="took more than"):
        server.ask([{}], 0.2)
    assert server.ended


def test_without_a_time_to_wait_nothing_is_left() -> None:
    first = asked({"name": "a"})
    close_servers()
    assert running() == []
    assert asked({"name": "a"}) != first


@pytest.mark.usefixtures("waits")
def test_a_later_command_gets_the_same_process() -> None:
    first = asked({"name": "a"})
    close_servers()  # as at the end of a command
    (one,) = running()
    assert (one.vllm, one.busy, one.ends_after) == ("0.1", False, 600)
    assert one.bytes > 1 << 20
    assert asked({"name": "a"}) == first
    assert running()[0].busy
    assert asked({"name": "b"}) != first, "other files, another process"


@pytest.mark.usefixtures("waits")
def test_its_temporary_files_are_not_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command's own folder of them is removed when it ends."""
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "run"))
    first = asked({"name": "a"})
    close_servers()
    shutil.rmtree(tmp_path / "run")
    assert asked({"name": "a"}) == first


@pytest.mark.usefixtures("waits")
def test_processes_that_waited_longest_make_room() -> None:
    first = asked({"name": "a"})
    for name in ("b", "c"):
        close_servers()
        asked({"name": name})
    close_servers()
    assert len(running()) == 2
    assert asked({"name": "a"}) != first


@pytest.mark.usefixtures("waits")
def test_they_end_when_asked_to_and_leave_no_socket() -> None:
    first = asked({"name": "a"})
    close_servers()
    assert end() == 1
    assert running() == []
    assert gone(int(first[0][0].split()[0]))
    assert emptied(cache_dir() / "servers"), "its temporary files go last"
    assert asked({"name": "a"}) != first


@pytest.mark.usefixtures("waits")
def test_a_process_with_a_reply_that_spoils_it_answers_nobody_else() -> None:
    """As one that could not import the release while the disk was full."""
    first = asked({"name": "a"}, spoils=lambda _: True)
    assert gone_from_the_list()
    assert asked({"name": "a"}) != first


@pytest.mark.usefixtures("waits")
def test_a_process_is_not_asked_after_its_folder_was_made_again(tmp_path: Path) -> None:
    header = {"name": "a", "paths": [str(tmp_path)]}
    first = asked(header)
    assert asked(header) == first
    seal(tmp_path, {})
    assert asked(header) != first


@pytest.mark.usefixtures("waits")
def test_a_process_that_ended_meanwhile_is_started_again() -> None:
    first = asked({"name": "a"})
    pid = int(first[0][0].split()[0])
    os.kill(pid, 9)
    assert gone(pid)
    assert asked({"name": "a"}) != first
    close_servers()
    # its socket's file is left over, as after a loss of power
    os.kill(running()[0].pid, 9)
    assert asked({"name": "a"})


@pytest.mark.usefixtures("waits")
def test_whoever_leaves_without_an_answer_ends_it() -> None:
    """Its question may take any time, and the next command would wait for it."""
    server = Server(PYTHON, {"name": "a", "waits": 1}, "0.1", "a")
    server._socket.sendall(b'{"questions": [{}]}\n')
    assert running()[0].busy
    server.close()
    assert gone_from_the_list()


def test_a_process_ends_when_it_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelserver, "idle_seconds", lambda: 0.001)
    asked({"name": "a"})
    assert running(), "a command is connected"
    close_servers()
    assert gone_from_the_list()


@pytest.mark.usefixtures("waits")
def test_the_folder_of_the_sockets_is_closed_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    asked({"name": "a"})
    folder = cache_dir() / "servers"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    close_servers()
    end()
    folder.chmod(0o755)
    first = asked({"name": "a"})
    close_servers()
    assert "is open to other users" in capsys.readouterr().err
    assert asked({"name": "a"}) != first, "it ended with its command"
    assert emptied(folder)


def test_only_the_same_user_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request: dict[str, Any] = {
        "command": [str(PYTHON), str(tmp_path / "echo.py")], "env": {}, "header": {"name": "a"},
        "label": "", "linger": 1, "path": None, "first": None, "folder": str(tmp_path),
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as command:
        listener.bind(str(tmp_path / "socket"))
        one = broker.Broker({**request, "listen": os.dup(listener.fileno())})
        try:
            monkeypatch.setattr(broker, "user_of", lambda _: os.getuid() + 1)
            command.connect(str(tmp_path / "socket"))
            one.accept()
            assert one.commands == {}
            assert command.recv(1) == b""
        finally:
            one.close()


@pytest.mark.usefixtures("waits")
def test_a_broker_of_another_user_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked({"name": "a"})
    close_servers()
    with monkeypatch.context() as patch:
        patch.setattr(broker, "user_of", lambda _: os.getuid() + 1)
        assert running() == []
    assert running()


def test_memory_is_short_when_little_of_it_is_available() -> None:
    assert broker.memory_is_short(1.1)
    assert not broker.memory_is_short(0)


def gone(pid: int) -> bool:
    """Whether a process ends in a while."""
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError):
            if ") Z" not in Path(f"/proc/{pid}/stat").read_text():
                time.sleep(0.05)
                continue
        return True
    return False


def emptied(folder: Path) -> bool:
    """Whether a folder is empty in a while."""
    for _ in range(600):
        if not list(folder.iterdir()):
            return True
        time.sleep(0.05)
    return False


def gone_from_the_list() -> bool:
    """Whether no process waits any more, in a while."""
    for _ in range(600):
        if not running():
            return True
        time.sleep(0.05)
    return False
