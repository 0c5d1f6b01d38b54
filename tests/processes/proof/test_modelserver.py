"""The process that imported a release: it answers several times, ends, or is ended."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from builder.proof import wholemodel
from builder.proof.isolation import SandboxUnavailable
from builder.proof.wholemodel import Server, ask_server, close_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = Path(sys.executable)
ECHO = """\
import json, os, sys
held = {}
for line in sys.stdin:
    held.update(json.loads(line))
    if held.get("ends"):
        sys.exit(1)
    if held.get("waits"):
        sys.stdin.read()
    answers = [{"error": None, "lines": [f"{os.getpid()} {held['name']}"], "warnings": [],
                "settings": {}, "layers": [], "caches": [], "parameter_bytes": 0}]
    print(json.dumps({"answers": answers * len(held["questions"])}), flush=True)
"""


@pytest.fixture(autouse=True)
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setattr(
        wholemodel,
        "PREFLIGHT",
        SimpleNamespace(name="preflight", file=lambda: tmp_path / "echo.py"),
    )
    yield
    close_servers()


def test_one_process_answers_all_questions_of_a_release() -> None:
    first = ask_server(PYTHON, {"name": "a"}, [{}]).answers[0].lines
    second = ask_server(PYTHON, {"name": "a"}, [{}, {}]).answers
    assert [one.lines for one in second] == [first, first], "the header is sent once"
    assert ask_server(PYTHON, {"name": "b"}, [{}]).answers[0].lines != first
    ask_server(PYTHON, {"name": "c"}, [{}])
    assert len(wholemodel._servers) == 2
    assert ask_server(PYTHON, {"name": "a"}, [{}]).answers[0].lines != first, "it was ended"


def test_a_process_that_ends_gives_no_answer_and_is_started_again() -> None:
    with pytest.raises(SandboxUnavailable, match="ended without a result"):
        ask_server(PYTHON, {"name": "a", "ends": 1}, [{}])
    with pytest.raises(SandboxUnavailable, match="ended without a result"):
        ask_server(PYTHON, {"name": "a", "ends": 1}, [{}])


def test_a_process_that_never_answers_is_ended() -> None:
    server = Server(PYTHON, {"name": "a", "waits": 1})
    with pytest.raises(SandboxUnavailable, match="took more than"):
        server.ask([{}], 0.2)
    assert server.ended
