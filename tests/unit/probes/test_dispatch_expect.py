"""What a plan asks, and what counts as meeting an expectation."""

from __future__ import annotations

from typing import Any

import pytest

from builder.common.document import read
from builder.probes.dispatch_expect import (
    Answer,
    Expectation,
    asks,
    backends,
    describe,
    flag_value,
    found,
    headline,
)

LINE = "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
REFUSAL = "--linear-backend=b was requested but no 'b' kernel exists for NVFP4 layers."


def answer(**changes: Any) -> Answer:
    """What the probe says of a release that selected Marlin."""
    said: dict[str, Any] = {
        "kind": "nvfp4-linear",
        "request": {},
        "debug": [],
        "not_applicable": None,
    }
    chosen = {"selected": "MarlinNvFp4LinearKernel", "lines": ["noise", LINE], "error": None}
    told = {**said, **chosen, **changes}
    assert Answer.of(told) == read(told, Answer), "the verifier in an image reads it as we do"
    return Answer.of(told)


SELECTED = answer()
SILENT = answer(lines=[])
REFUSED = answer(selected=None, lines=[], error={"type": "ValueError", "message": REFUSAL})
NOT_ASKED = answer(selected=None, lines=[], not_applicable="no such setting")


@pytest.mark.parametrize(
    ("expectation", "given", "met"),
    [
        ({"line": LINE}, SELECTED, LINE),
        ({"line": "MarlinNvFp4"}, SELECTED, LINE),
        ({"line": "CutlassNvFp4"}, SELECTED, None),
        ({"line": LINE}, SILENT, None),
        ({"line": LINE}, answer(error={"type": "E", "message": "later"}), None),
        ({"line": LINE}, REFUSED, None),
        ({"line": LINE}, NOT_ASKED, None),
        ({"selected": "Marlin*"}, SELECTED, LINE),
        (
            {"selected": "Marlin*"},
            SILENT,
            "selected MarlinNvFp4LinearKernel; no log line says so",
        ),
        ({"selected": "marlin*"}, SELECTED, None),
        ({"selected": "Cutlass*"}, SELECTED, None),
        ({"selected": "*"}, SELECTED, LINE),
        ({"selected": "*"}, REFUSED, None),
        ({"selected": "*"}, NOT_ASKED, None),
        ({"selected": "*"}, answer(error={"type": "E", "message": "later"}), None),
        ({"refused": "no 'b' kernel exists"}, REFUSED, f"refused: ValueError: {REFUSAL}"),
        ({"refused": "no 'c' kernel exists"}, REFUSED, None),
        ({"refused": "no 'b' kernel exists"}, SELECTED, None),
        ({"refused": "such setting"}, NOT_ASKED, None),
    ],
)
def test_answers_that_meet_an_expectation(
    expectation: dict[str, str], given: Answer, met: str | None
) -> None:
    assert found(Expectation(kind="x", **expectation), given) == met


@pytest.mark.parametrize(
    ("expectation", "words"),
    [
        ({"line": LINE}, LINE),
        ({"selected": "Marlin*"}, "selected: Marlin*"),
        ({"selected": "*"}, "any kernel"),
        ({"refused": "no kernel"}, "refused: no kernel"),
    ],
)
def test_an_expectation_in_words(expectation: dict[str, str], words: str) -> None:
    assert describe(Expectation(kind="x", **expectation)) == words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SELECTED, LINE),
        (NOT_ASKED, "not applicable: no such setting"),
        # 0.19 logs a kernel for block scales that another one then takes the place of
        (
            answer(selected="Op._run_cutlass", lines=["Selected CutlassFP8 for Fp8LinearMethod"]),
            "selected Op._run_cutlass; no log line says so",
        ),
        (answer(error={"type": "E", "message": "a\n  b"}), "E: a b"),
        (answer(error={"type": "E", "message": "x" * 500}), f"E: {'x' * 400}..."),
    ],
)
def test_the_log_line_of_a_selection(given: Answer, words: str) -> None:
    assert headline(given) == words


@pytest.mark.parametrize(
    ("flags", "value"), [([], "auto"), (["--a", "1"], "1"), (["--b", "--a"], "auto")]
)
def test_the_value_of_a_flag(flags: list[str], value: str) -> None:
    assert flag_value(flags, "--a") == value


def test_each_kind_is_checked_with_its_flag() -> None:
    expect = [Expectation("fp8-block"), Expectation("w4a16-moe")]
    flags = ["--linear-backend", "marlin", "--moe-backend", "cutlass"]
    assert asks(expect, flags) == [
        {"kind": "fp8-block", "linear_backend": "marlin"},
        {"kind": "w4a16-moe", "moe_backend": "cutlass"},
    ]
    assert backends([], "nvfp4-moe") == {"moe_backend": "auto"}


def test_expectations_are_read_without_the_keys_of_newer_plans() -> None:
    rows = [{"kind": "a", "line": "x"}, {"kind": "b", "refused": "no", "later": 1}]
    wanted = [Expectation("a", line="x"), Expectation("b", refused="no")]
    assert Expectation.of({"expect": rows}) == wanted
