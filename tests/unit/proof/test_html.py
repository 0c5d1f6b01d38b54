"""What the evidence page is made of; the page itself is looked at in a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from builder.common.console import plain
from builder.images.engines.oci import name_of_both
from builder.proof.checks import LEVELS, Check, Necessity, Status
from builder.proof.report import (
    Level,
    Report,
    breakable,
    counted,
    figure,
    layer_words,
    levels_of,
    links_of,
    render_html,
    render_summary,
    run_lines,
    tag_of,
)
from tests.unit.common.test_plain import EVIL
from tests.unit.fakes import BACKEND, fake_base, make_layer, make_plan_of, vllm_files
from tests.unit.plans import PULL, planned


def check(status: Status, level: Any = "codegen", **figures: float) -> Check:
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
def test_a_level_has_the_status_of_its_worst_check(statuses: list[Status], status: Status) -> None:
    assert Level("codegen", [check(s) for s in statuses]).status == status


def test_a_figure_is_compared_with_others_of_the_same_name() -> None:
    one, other = check("pass", OMMA=128, alone=5), check("pass", OMMA=64, zero=0)
    level = Level("codegen", [one, other, check("pass", zero=0)])
    assert level.compared(one) == {"OMMA": 100.0}
    assert level.compared(other) == {"OMMA": 50.0}


def test_numbers_are_a_table_and_passes_are_folded() -> None:
    good, bad = check("pass", "numbers", values=64, wrong=0), check("fail", "numbers", values=9)
    idle = check("not-run", "numbers")
    level = Level("numbers", [good, bad, idle])
    assert (level.rows, level.open, level.folded) == ([good, bad], [bad, idle], [good])
    assert Level("codegen", [check("pass", OMMA=1)]).rows == []
    plan = make_plan_of(fake_base(vllm_files()), make_layer()).document
    wrong = check("fail", "numbers", values=1234, wrong=5, races=0)
    report = Report(target="t", plan=plan, checks=[wrong])
    page = render_html(report)
    assert '<td class="number" data-name="values">1,234</td>' in page
    assert '<td class="number bad" data-name="wrong">5</td>' in page
    assert '<td class="number" data-name="races">0</td>' in page
    assert '<div class="bars' not in page


def test_what_a_release_does_not_have_is_not_counted_as_not_run() -> None:
    right, absent = (
        check("pass", "numbers", values=64),
        replace(check("not-run", "numbers"), moot=True),
    )
    assert Level("numbers", [right, absent]).status == "pass"
    assert Level("numbers", [right, check("not-run", "numbers")]).status == "not-run"
    assert Level("numbers", [absent]).status == "not-run", "nothing ran"
    assert counted([right, absent]) == {"pass": 1, "fail": 0, "not-run": 0, "refused": 0, "idle": 1}
    line = replace(check("not-run", "dispatch"), moot=True)
    assert Level("dispatch", [check("pass", "dispatch"), line]).status == "not-run"


def test_the_table_of_numbers_is_summed_up() -> None:
    right = check("pass", "numbers", values=1200, wrong=0, races=0, schedules=3)
    wrong = check("fail", "numbers", values=34, wrong=5, races=1, schedules=3)
    words = "2 checks computed 1,234 values, each input in 3 schedules."
    assert Level("numbers", [right, right]).total == (
        f"{words.replace('1,234', '2,400')} Nothing wrong was found."
    )
    said = f"{words} 1 of them failed: 5 wrong values, 1 race."
    assert Level("numbers", [right, wrong]).total == said
    stuck = replace(wrong, figures={"values": 34, "did not end": 3})
    assert Level("numbers", [stuck]).total.endswith("1 of them failed: 3 runs that did not end.")
    plan = make_plan_of(fake_base(vllm_files()), make_layer()).document
    assert said in render_html(Report(target="t", plan=plan, checks=[right, wrong]))


def test_every_level_is_listed_and_described() -> None:
    report = Report(target="t", plan=planned(), checks=[check("pass", "static")])
    assert [level.name for level in levels_of(report)] == [*LEVELS]
    assert all(level.about for level in levels_of(report))


@pytest.mark.parametrize(
    ("value", "text"), [(128, "128"), (12800, "12,800"), (0.01134, "0.01134"), (41.25, "41.25")]
)
def test_numbers(value: float, text: str) -> None:
    assert figure(value) == text


def test_references_break_after_their_separators() -> None:
    assert breakable("a/b_c:<1>") == "a/<wbr>b_<wbr>c:<wbr>&lt;1&gt;"


def test_a_plan_without_layers_or_settings_gives_a_valid_page() -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("idle", package="sglang")).document
    report = Report(target="t", plan=plan, checks=[check("pass")])
    page = render_html(report)
    assert "<title>verified: t</title>" in page
    assert "<script" not in page
    links = re.findall(r'<a href="(http[^"]*)"', page)
    assert links == ["https://github.com/vllm-project/vllm/releases/tag/v0.20.1"]
    assert page.replace("http-equiv", "").count("http") == len(links), "links, and nothing fetched"


def test_only_https_links_are_rendered() -> None:
    page = "https://github.com/a/b/pull/1"
    urls = {"a/b#1": page, "a/b#2": "javascript:alert(1)", "a/b#3": ""}
    pulls = tuple(replace(PULL, request=name, url=url) for name, url in urls.items())
    base = replace(planned().base, packages={"vllm": "0.20.2.dev1+x"})
    assert links_of(replace(planned(), base=base, pulls=pulls)) == {
        "a/b#1": "https://github.com/a/b/pull/1"
    }


@pytest.mark.parametrize(
    ("target", "tag"),
    [
        ("oci:out", ""),
        ("pypi:vllm==0.20.1", ""),
        ("dir:/site", ""),
        ("docker://ghcr.io/a/b:v1-2@sha256:0", "v1-2"),
        ("localhost:5000/a/b", ""),
        ("a/b:latest", "latest"),
    ],
)
def test_tags(target: str, tag: str) -> None:
    assert tag_of(target) == tag


def test_an_image_is_run_with_docker_and_files_with_vllm() -> None:
    plan = planned(serve_flags=["--a", "b"], moe_serve_flags=["--c", "d"])
    files = Report(target="pypi:vllm==0.24.0", plan=plan)
    assert run_lines(files) == ["vllm serve MODEL --a b", "vllm serve MODEL --a b --c d"]
    image = Report(target="docker://h.io/a:1", plan=plan, digests=("sha256:1",))
    first, second = run_lines(image)
    assert first.startswith("docker run --rm --gpus all ")
    assert first.endswith(" h.io/a:1 serve MODEL --a b")
    assert second == f"{first} --c d"


def test_an_overlay_has_no_run_command() -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("fix", BACKEND)).document
    plan = replace(plan, base=replace(plan.base, kind="pypi"))
    overlay = Report(target="oci:out", plan=plan, digests=("sha256:1",))
    (line,) = run_lines(overlay)
    assert line.endswith(f" {name_of_both(plan)} serve MODEL")
    assert "This is an overlay" in render_html(overlay)
    overlay.plan = replace(plan, base=replace(plan.base, kind="image"))
    assert "This is an overlay" not in render_html(overlay)


@pytest.mark.parametrize("status", ["pass", "fail"])
def test_needed_layers_are_shown_as_added(status: Status) -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("fix", BACKEND)).document
    found = Check(level="static", name="layer fix", status=status, expected="", seen="")
    report = Report(target="t", plan=plan, checks=[found])
    word = "added" if status == "pass" else "needed"
    assert f"</b> {word}</span>" in render_html(report)
    assert f"| `fix` | {word} | 1 file " in render_summary(report)
    assert layer_words(report, plan.layers[0]) == (
        ("added", "1 file changed") if status == "pass" else ("needed", "1 file to change")
    )


def test_the_page_has_its_creation_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    plan = make_plan_of(fake_base(vllm_files()), make_layer("fix", BACKEND)).document
    page = render_html(Report(target="t", plan=plan))
    assert '<time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13 UTC</time>' in page


def test_the_markdown_summary_names_what_fails_without_each_layer() -> None:
    plan = make_plan_of(fake_base(vllm_files()), make_layer("idle", package="sglang")).document
    failed = Check(level="codegen", name="GEMM", status="fail", expected="", seen="a | b")
    report = Report(target="t", plan=plan, checks=[check("pass")])
    assert "necessary" not in render_summary(report)
    report.necessity = [
        Necessity.by("fix", "needed", failed),
        Necessity(layer="idle", state="not-applicable", necessary=False, reason="idle here"),
        Necessity(layer="late", state="needed", necessary="unknown", reason="not asked"),
    ]
    lines = render_summary(report).splitlines()
    assert "| `fix` | **yes** | codegen GEMM fails: a \\| b |" in lines
    assert "| `idle` | no | idle here |" in lines
    assert "| `late` | unknown | not asked |" in lines


def test_no_control_or_bidirectional_character_is_in_the_page() -> None:
    evil = replace(check("fail", "dispatch"), reason=EVIL, seen=EVIL)
    plan = make_plan_of(fake_base(vllm_files()), make_layer()).document
    page = render_html(Report(target=EVIL, plan=plan, checks=[evil]))
    assert plain(page) == page
    assert r"\u202eevil\u2028" in page
