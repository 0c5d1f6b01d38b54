"""What the evidence page is made of; the page itself is looked at in a browser."""

from __future__ import annotations

import pytest

from builder.verify import LEVELS, Check, Report, Status
from builder.verify.html import ABOUT, Level, breakable, figure, levels_of, render_html
from builder.verify.necessity import Necessity
from builder.verify.summary import render_summary

from .fakes import fake_base, make_layer, make_plan_of, vllm_files


def check(status: Status, level: str = "codegen", **figures: float) -> Check:
    return Check(
        level=level, name="x", status=status, expected="", seen="", reason="r", figures=figures
    )


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([], "not-run"),
        (["pass", "pass"], "pass"),
        (["pass", "not-run"], "not-run"),
        (["not-run", "fail", "pass"], "fail"),
    ],
)
def test_a_level_is_as_good_as_its_worst_check(statuses: list[Status], status: Status) -> None:
    assert Level("codegen", [check(s) for s in statuses]).status == status


def test_a_figure_is_held_against_those_of_its_name() -> None:
    one, other = check("pass", OMMA=128, alone=5), check("pass", OMMA=64, zero=0)
    level = Level("codegen", [one, other, check("pass", zero=0)])
    assert level.compared(one) == {"OMMA": 100.0}
    assert level.compared(other) == {"OMMA": 50.0}


def test_every_level_is_listed_and_described() -> None:
    report = Report(target="t", plan_digest="sha256:0", checks=[check("pass", "static")])
    assert [level.name for level in levels_of(report)] == [*LEVELS]
    assert set(LEVELS) <= set(ABOUT)


@pytest.mark.parametrize(
    ("value", "text"), [(128, "128"), (12800, "12,800"), (0.01134, "0.01134"), (41.25, "41.25")]
)
def test_numbers(value: float, text: str) -> None:
    assert figure(value) == text


def test_references_break_after_their_separators() -> None:
    assert breakable("a/b_c:<1>") == "a/<wbr>b_<wbr>c:<wbr>&lt;1&gt;"


def test_a_plan_without_layers_or_settings_is_a_page_too() -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("idle", package="sglang")).as_json()
    report = Report(target="t", plan_digest=plan["plan_digest"], checks=[check("pass")])
    page = render_html(report, plan)
    assert "<title>verified: t</title>" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_markdown_summary_says_what_fails_without_each_layer() -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("idle", package="sglang")).as_json()
    failed = Check(level="codegen", name="GEMM", status="fail", expected="", seen="a | b")
    report = Report(target="t", plan_digest=plan["plan_digest"], checks=[check("pass")])
    assert "necessary" not in render_summary(report, plan)
    report.necessity = [
        Necessity(layer="fix", state="needed", necessary=True, reason="", check=failed),
        Necessity(layer="idle", state="not-applicable", necessary=False, reason="idle here"),
        Necessity(layer="late", state="needed", necessary="unknown", reason="not asked"),
    ]
    lines = render_summary(report, plan).splitlines()
    assert "| `fix` | **yes** | codegen GEMM fails: a \\| b |" in lines
    assert "| `idle` | no | idle here |" in lines
    assert "| `late` | unknown | not asked |" in lines
