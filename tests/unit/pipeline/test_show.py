"""What people see of a verification while it runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from builder.pipeline.show import CheckLines
from builder.util.console import console
from builder.verify.checks import Check, Status
from builder.verify.run import verify
from tests.unit.verify.test_verify import LAYER, target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.verify.levels import Level


def check(level: Level, name: str, status: Status = "pass") -> Check:
    return Check(level=level, name=name, status=status, expected="E", seen="S", reason="R")


CHECKS = [
    check("static", "one"),
    check("static", "two", "fail"),
    check("static", "three"),
    check("imports", "only"),
    check("dispatch", "nvfp4-linear"),
    check("dispatch", "nvfp4-moe", "not-run"),
]


def tell(lines: CheckLines) -> None:
    for _, checks in itertools.groupby(CHECKS, key=lambda one: one.level):
        for one in checks:
            lines(one)
        lines.end()


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    tell(CheckLines())
    return lambda: capsys.readouterr().err


def test_passes_are_one_line_a_level(told: Callable[[], str]) -> None:
    lines = [line for line in told().splitlines() if line.startswith(("  PASS", "  FAIL", "  NOT"))]
    assert lines == [
        "  FAIL    static   two",
        "  PASS    static   2 checks",
        "  PASS    imports  1 check",
        "  PASS    dispatch nvfp4-linear",
        "  NOT RUN dispatch nvfp4-moe",
    ]


def test_failures_and_vllm_messages_are_shown_completely(told: Callable[[], str]) -> None:
    text = told()
    assert text.count("expected: E") == text.count("seen:     S") == 2
    assert "  PASS    dispatch nvfp4-linear\n                   S\n" in text


def test_every_check_with_verbose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "verbose", True)
    tell(CheckLines())
    said = capsys.readouterr().err
    assert all(one.name in said for one in CHECKS)


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, check: Check) -> None:
        self.said.append(f"{check.level} {check.name}")

    def end(self) -> None:
        self.said.append("end")


def test_checks_are_printed_as_they_finish() -> None:
    heard = Heard()
    report = verify(target_of(LAYER), ["static", "dispatch"], heard)
    static = [f"static {one.name}" for one in report.checks if one.level == "static"]
    dispatch = [f"dispatch {one.name}" for one in report.checks if one.level == "dispatch"]
    assert static
    assert heard.said == [*static, "end", *dispatch, "end"]
