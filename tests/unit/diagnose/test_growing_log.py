"""A log that grows: findings at once, and an end when the server is ready or dead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from builder.diagnose import report
from builder.diagnose.report import watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.diagnose.verdict import Diagnosis, Finding

START = "(APIServer pid=1) INFO 06-01 09:00:00 [a.py:1] vLLM API server version 0.31.0\n"
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"
DEAD = (
    "(EngineCore pid=9) WombatError: no pouch\n"
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
)
IDLE = 0.01


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose other end stays open, as that of ``docker logs -f``."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def watch(pipe: tuple[int, int], text: str) -> tuple[Diagnosis, list[Finding]]:
    said: list[Finding] = []
    os.write(pipe[1], text.encode())
    (result,) = watched(pipe[0], None, said.append, idle=IDLE)
    return result, said


def test_it_ends_when_the_server_is_ready(pipe: tuple[int, int]) -> None:
    result, said = watch(pipe, START + READY)
    assert result.verdict.state == "ready"
    assert said == []


def test_it_ends_at_once_when_the_server_failed(pipe: tuple[int, int]) -> None:
    result, said = watch(pipe, START + DEAD)
    assert result.verdict.state == "failed"
    assert [finding.quote for finding in said] == ["WombatError: no pouch"]
    assert result.findings[0].quote == "WombatError: no pouch"


def test_a_temporary_failure_is_waited_for(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_PATIENCE", 3)
    result, said = watch(pipe, START + "(EngineCore pid=9) WombatError: no pouch\n")
    assert result.verdict.state == "failed"
    assert len(said) == 1


def test_a_complete_log_is_read_to_its_end(pipe: tuple[int, int]) -> None:
    """A crash behind the line that says ready must not be missed."""
    assert watch(pipe, START + READY + DEAD)[0].verdict.state == "failed"


def test_a_closed_pipe_ends_it() -> None:
    reading, writing = os.pipe()
    os.write(writing, START.encode())
    os.close(writing)
    try:
        assert watched(reading, None, print, idle=IDLE)[0].verdict.state == "stopped"
    finally:
        os.close(reading)
