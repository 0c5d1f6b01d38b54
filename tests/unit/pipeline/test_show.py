"""What people see of a verification while it runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from builder.common.console import console
from builder.pipeline.show import CheckLines, show_plan, verdict_of_plan
from builder.proof.checks import Check, Status
from builder.proof.run import verify
from tests.unit.fakes import (
    BACKEND,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    replace_op,
    vllm_files,
)
from tests.unit.proof.test_verify import LAYER, target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.applier.layers import Layer
    from builder.proof.checks import Level


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


def test_unreached_lines_are_shown_with_verbose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("k.py:7", "k.py:8", "k.py:11", "l.py:12")
    checks = [structs.replace(one, unreached=lines) for one in CHECKS if one.level == "static"]
    for verbose in (False, True):
        monkeypatch.setattr(console, "verbose", verbose)
        said = CheckLines()
        for one in checks:
            said(one)
        text = capsys.readouterr().err
        assert text.count("not reached: k.py:7-8, k.py:11, l.py:12\n") == len(checks) * verbose


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


FLAGS = {
    "variant": {"serve-flags": ["--linear-backend", "b12x"], "moe-serve-flags": ["--moe", "x"]}
}
FIX = make_layer("fix", BACKEND)
SETS = make_layer("sets", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"), **FLAGS)
OLD = make_layer("old", BACKEND, variant={"when": {"vllm": "<0.1"}})
DRIFTED = make_layer("drifted", replace_op("nothing like it", "b"))
FIXED = "1 layer fixes defects of them"
SERVE = "; serve with --linear-backend b12x, and for MoE models that it supports --moe x"


@pytest.mark.parametrize(
    ("layers", "fixes", "said"),
    [
        ((FIX,), (), "needs a patch for test: 1 layer changes files"),
        (
            (FIX, SETS),
            (),
            f"needs a patch for test: 1 layer changes files, 1 sets variables only{SERVE}",
        ),
        ((SETS,), (), f"needs no patch for test, only settings{SERVE}"),
        (
            (FIX, SETS),
            ("fix", "other"),
            f"needs no patch to select the kernels of test; {FIXED}, 1 sets variables only{SERVE}",
        ),
        ((OLD,), (), "has nothing that test would change"),
        ((OLD, FIX), (), "needs a patch for test: 1 layer changes files"),
        ((DRIFTED, FIX), (), "cannot be patched for test: drifted does not fit"),
    ],
)
def test_verdict_of_a_plan(layers: tuple[Layer, ...], fixes: tuple[str, ...], said: str) -> None:
    plan = make_plan_of(fake_base(vllm_files("0.24.0")), *layers)
    plan = dataclasses.replace(plan, fixes=frozenset(fixes))
    assert verdict_of_plan(plan) == f"vLLM 0.24.0 {said}."


def test_a_base_that_has_the_change() -> None:
    files = vllm_files()
    files["vllm/core.py"] = files["vllm/core.py"].replace(b"cutlass", b"b12x")
    plan = make_plan_of(fake_base(files), FIX)
    assert verdict_of_plan(plan) == "vLLM 0.20.1 already has test."


def test_a_plan_begins_with_its_verdict_and_its_lines_wrap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    long = make_layer("long", BACKEND, variant={"when": {"vllm": "<0.1"}}, **{
        "not-applicable": [{"when": {"vllm": ">=0.1"}, "reason": "a reason of many words " * 9}]
    })  # fmt: skip
    show_plan(make_plan_of(fake_base(vllm_files()), FIX, long, SETS))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("vLLM 0.20.1 needs a patch for test")
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith(" " * 46 + "a ") or "many words" in line for line in lines) > 2


def test_what_is_to_do_and_what_is_done_differ_in_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    files = vllm_files()
    show_plan(make_plan_of(fake_base(files), FIX))
    files["vllm/core.py"] = files["vllm/core.py"].replace(b"cutlass", b"b12x")
    show_plan(make_plan_of(fake_base(files), FIX))
    colours = re.findall(r"\x1b\[(\d+)m(needed|applied|upstream) ", capsys.readouterr().err)
    assert len({colour for colour, _ in colours}) == len(colours) == 2
