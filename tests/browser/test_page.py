"""The evidence page as people see it: complete, quiet, narrow enough, and clear without colour."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.document import plain
from builder.proof.checks import LEVELS, Check, Necessity
from builder.proof.report import Report, render_html
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .chromium import Chromium, Page

    Show = Callable[..., Page]

LONG = "registry.example.org/some/quite-long-namespace/vllm-openai-b12x-full:v0.20.1-8f2c1d9e77aa"
MARKUP = "<script>document.title = 'hacked'</script><img src=x onerror='console.error(1)'>"
REFUSAL = "W4A16 MoE models will not start with this profile:"
OMMA = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
WIDTHS = (320, 390, 768, 1280)
SCHEMES = ("light", "dark")


def check(level: Any, name: str, status: Any = "pass", **more: Any) -> Check:
    """A check with all of its fields."""
    reason = "" if status == "pass" else "there is no GB10 here"
    values = {"expected": f"{name} as expected", "seen": "" if status == "not-run" else "seen"}
    return Check(level=level, name=name, status=status, **{**values, "reason": reason, **more})


RIGHT = {"values": 153600, "wrong": 0, "races": 0, "inputs": 3, "schedules": 3, "% of code run": 98}
CHECKS = [
    check("static", "plan"),
    check("static", "layer fix", "fail", where="vllm/" + "deep/" * 20 + "file.py"),
    check("imports", f"names used by {'a_long_name_without_a_break' * 4}.py"),
    check("dispatch", "nvfp4-linear", "fail", seen=MARKUP, simulated=("the device", MARKUP)),
    check("dispatch", "nvfp4-moe", expected=f"Using {['LONG_BACKEND_NAME'] * 12}"),
    check("dispatch", "w4a16-moe", seen=f"refused: {MARKUP}", refusal=f"{REFUSAL} {MARKUP}"),
    check("codegen", "GEMM", figures={OMMA: 128}),
    check("codegen", "MoE", figures={OMMA: 192, "QMMA": 0}),
    check("codegen", "gate", "not-run"),
    check("numbers", "GEMM with a long name, several tiles a block", figures=RIGHT),
    check("numbers", "experts", "fail", figures={**RIGHT, "wrong": 19200, "races": 4}),
    check("device", "b12x against a reference", "not-run"),
    check("serve", "tokens a second", figures={"at once: 1": 17.25, "at once: 16": 12800}),
    check("another-level", "something new"),
    check("another-level", "nothing", "not-run", moot=True),
]
LAYERS: list[dict[str, Any]] = [
    {"variant": None, "digest": "0" * 64, "files": [], **row}
    for row in (
        {"name": "fix", "state": "needed", "reason": "1 file to change"},
        {"name": "late", "state": "upstream", "reason": "the base has it", "since": "vLLM 0.22.0"},
        {"name": "odd", "state": "drift", "reason": MARKUP},
        {"name": "idle", "state": "needed", "reason": "2 files to change"},
    )
]
PACKAGES = {"vllm": "0.20.1", "nvidia-cutlass-dsl-libs-base": "4.4.2"}
PLAN = planned(
    name="b12x-full",
    profiles=["b12x-full"],
    base={**plain(planned().base), "ref": LONG, "packages": PACKAGES},
    env={"VLLM_NVFP4_GEMM_BACKEND": "flashinfer-b12x", "EVIL": MARKUP},
    serve_flags=["--linear-backend", "flashinfer_b12x"],
    moe_serve_flags=["--moe-backend", "flashinfer_b12x"],
    layers=LAYERS,
)
VERDICTS = [
    Necessity.by(
        "fix",
        "needed",
        check("codegen", "GEMM", "fail", seen="OpError: expects arch to be one of"),
        [check("codegen", "MoE", "fail", seen="")],
    ),
    Necessity(layer="late", state="upstream", necessary=False, reason="it changes nothing here"),
    Necessity(
        layer="odd", state="drift", necessary="unknown", reason="verification of the full set fails"
    ),
    Necessity(layer="idle", state="needed", necessary=False, reason="no check fails without it"),
]


def written(folder: Path, checks: list[Check]) -> Path:
    """The page on these checks."""
    report = Report(
        target=LONG,
        plan=PLAN,
        digests=(f"sha256:{'2' * 64}", f"sha256:{'3' * 64}"),
        checks=checks,
        necessity=VERDICTS,
    )
    (folder / "evidence.html").write_text(render_html(report, ["dispatch"]))
    return folder / "evidence.html"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one of everything; its target failed."""
    return written(tmp_path_factory.mktemp("page"), CHECKS)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a target of which no check failed."""
    return written(
        tmp_path_factory.mktemp("passing"), [one for one in CHECKS if one.status != "fail"]
    )


@pytest.fixture
def show(browser: Chromium, file: Path) -> Iterator[Show]:
    """Opens the page, or another; tabs are closed at the end."""
    opened: list[Page] = []

    def shown(width: int = 1280, path: Path = file, *, folded: bool = False, **how: Any) -> Page:
        opened.append(browser.open(path, width=width, **how))
        if not folded:
            opened[-1].evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        return opened[-1]

    yield shown
    for page in opened:
        page.close()


def texts(page: Page, selector: str) -> list[str]:
    """The visible text of elements."""
    found = page.evaluate(
        f"Array.from(document.querySelectorAll({selector!r})).map(e => e.innerText)"
    )
    return [" ".join(text.split()) for text in found]


# -------------------------------------------------------------------------------------- complete


def test_page_lists_every_check_with_its_evidence(show: Show) -> None:
    page = show()
    assert len(texts(page, ".check")) == len(CHECKS)
    words = {"pass": "✓ pass", "fail": "✕ FAIL", "not-run": "○ not run"}
    for number, one in enumerate(CHECKS, 1):
        (text,) = texts(page, f"#check-{number}")
        for part in (one.name, one.expected, one.seen, one.reason):
            assert " ".join(part.split()) in text
        word = "– not judged" if one.moot else words[one.status]
        assert ("⊘ expected refusal" if one.refusal else word) in text


def test_passes_are_folded_and_everything_else_is_visible(show: Show) -> None:
    page = show(folded=True)
    for number, one in enumerate(CHECKS, 1):
        seen = page.evaluate(f"document.querySelector('#check-{number}').checkVisibility()")
        drawn = one.figures and one.level != "numbers"  # those are a table
        assert seen is (one.status != "pass" or bool(one.refusal or drawn))
    assert texts(page, "summary") == ["1 check passed"] * 5


def test_verdict_is_at_the_top(show: Show) -> None:
    """The verdict, the kernels, the limits, and what to build; all before any check."""
    page = show(390)
    order = page.evaluate("Array.from(document.querySelectorAll('h1, h2')).map(e => e.innerText)")
    assert order[1:4] == ["Kernels that vLLM selects on SM121", "Limits", "What to build"]
    (kernels, limits, run) = (
        texts(page, f"section:has(#{n})")[0] for n in ("kernels", "limits", "run")
    )
    assert "NVFP4 linear ✕ FAIL" in kernels
    assert "W4A16 NVFP4 MoE ⊘ expected refusal" in kernels
    assert REFUSAL in limits
    assert f"spark-build image --layers b12x-full,fix,late,odd,idle --base {LONG}" in run


def test_flags_are_recommended_only_if_no_check_failed(show: Show, passing: Path) -> None:
    (run,) = texts(show(390, passing), "section:has(#run)")
    assert f"{LONG} serve MODEL --linear-backend flashinfer_b12x --moe-backend" in run
    assert "VLLM_NVFP4_GEMM_BACKEND=flashinfer-b12x" in run
    failed = " ".join(texts(show(390), "body"))
    assert "serve MODEL" not in failed
    assert "Proven" not in failed


def test_one_click_copies_a_digest_or_a_command(show: Show, passing: Path) -> None:
    page = show(390, passing)
    for text in (f"sha256:{'2' * 64}", f"{LONG} serve MODEL"):
        taken = page.evaluate(
            f"(() => {{ const e = Array.from(document.querySelectorAll('.pick')).find("
            f"e => e.innerText.includes({text!r}));"
            "getSelection().selectAllChildren(e); return getSelection().toString()"
            " + '|' + getComputedStyle(e).userSelect })()"
        )
        assert taken.endswith("|all")
        assert text in taken


def test_page_lists_every_level_requested_or_not(show: Show) -> None:
    page = show()
    shown = dict(
        page.evaluate(
            "Array.from(document.querySelectorAll('.level'))"
            ".map(e => [e.dataset.level, e.dataset.status])"
        )
    )
    assert set(shown) == {*LEVELS, *(one.level for one in CHECKS)}
    assert (shown["static"], shown["imports"], shown["device"]) == ("fail", "pass", "not-run")
    assert shown["codegen"] == "not-run", "one that did not wholly run did not pass"
    unasked = [level for level in LEVELS if level not in {one.level for one in CHECKS}]
    assert [t for t in texts(page, ".level") if "not asked for" in t] == [
        f"{level} ○ not run not asked for" for level in unasked
    ]


def test_layers_show_what_fails_without_them(show: Show) -> None:
    fix, late, odd, idle = texts(show(), ".layer")
    assert "● needed" in fix
    assert "★ necessary" in fix
    assert "codegen GEMM fails, and MoE" in fix
    assert "OpError: expects arch to be one of" in fix
    assert "– not necessary" in late
    assert "(since vLLM 0.22.0)" in late
    assert "✕ drift" in odd
    assert "? unknown" in odd
    assert "no check fails without it" in idle


def test_failures_are_named_at_the_top_and_linked(show: Show) -> None:
    page = show()
    links = page.evaluate(
        "Array.from(document.querySelectorAll('header a')).map(a => a.getAttribute('href'))"
    )
    failed = [one for one in CHECKS if one.status == "fail"]
    assert len(links) == len(failed)
    for link, one in zip(links, failed, strict=True):
        assert page.evaluate(f"document.querySelector({link!r}).dataset.name") == one.name
    assert "NOT verified" in texts(page, "header")[0]
    assert (
        "3 failed · 2 not run · 1 refused as expected · 8 passed · 1 not judged"
        in texts(page, "header")[0]
    )


def test_figures_are_compared_with_others_of_the_same_name(show: Show) -> None:
    page = show()
    bars = page.evaluate(
        "Array.from(document.querySelectorAll('.bar')).map(e => [e.clientWidth, "
        "e.firstElementChild.getBoundingClientRect().width])"
    )
    assert len(bars) == 2, "a figure that no other check has is only written"
    assert [round(inner / outer, 2) for outer, inner in bars] == [0.67, 1.0]
    assert texts(page, ".bars .number") == ["128", "192", "0", "17.25", "12,800"]


# ----------------------------------------------------------------------------------------- quiet


def test_page_makes_no_requests_and_logs_nothing(show: Show, file: Path) -> None:
    page = show()
    assert page.requests == [file.as_uri()]
    assert page.complaints == []


def test_text_from_the_target_is_escaped(show: Show) -> None:
    page = show()
    assert page.evaluate("document.title") == f"not verified: {LONG}"
    assert page.evaluate("document.querySelectorAll('script, img').length") == 0
    assert MARKUP in page.evaluate("document.body.innerText").replace("\n", " ")


NOISE = {
    "fetches": ("<p>x</p>", "<img src='http://127.0.0.1:9/x.png'>"),
    "fails": ("<p>x</p>", "<script>console.error('x'); throw new Error('y')</script>"),
}


@pytest.mark.parametrize("noise", NOISE)
def test_a_page_that_makes_requests_is_detected(show: Show, tmp_path: Path, noise: str) -> None:
    before, after = NOISE[noise]
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text(before)
    bad.write_text(before + after)
    page = show(path=good)
    assert (page.requests, page.complaints) == ([good.as_uri()], [])
    page = show(path=bad)
    assert page.complaints
    assert (len(page.requests) > 1) is (noise == "fetches")


def test_page_has_a_strict_content_security_policy(show: Show, file: Path, tmp_path: Path) -> None:
    """What slips through escaping some day would still not run, and not be fetched."""
    path = tmp_path / "spoilt.html"
    path.write_text(file.read_text().replace("</body>", f"{NOISE['fails'][1]}</body>"))
    page = show(path=path)
    assert not page.happened("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert "Content Security Policy" in str(page.complaints)


# ------------------------------------------------------------------------------------- fits


def too_wide(page: Page) -> list[str]:
    """Elements that reach beyond the window."""
    found: list[str] = page.evaluate(
        "Array.from(document.querySelectorAll('body *'))"
        f".filter(e => e.getBoundingClientRect().right > {page.width} + 0.5)"
        ".map(e => e.tagName + '.' + e.className + ' ' + e.innerText.slice(0, 40))"
    )
    wide = page.evaluate(f"document.documentElement.scrollWidth > {page.width}")
    return [*found, *(["the page"] if wide else [])]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(show: Show, width: int) -> None:
    page = show(width)
    assert page.evaluate("innerWidth") == width
    assert too_wide(page) == []


def test_an_element_that_is_too_wide_is_detected(show: Show, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "wide.html"
    text = file.read_text()
    assert text.count("overflow-wrap: anywhere") == 1
    path.write_text(text.replace("overflow-wrap: anywhere", "overflow-wrap: normal"))
    assert too_wide(show(390, path))


def test_it_can_be_printed(show: Show) -> None:
    page = show(800, folded=True, media="print")
    assert too_wide(page) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for number in range(1, len(CHECKS) + 1):
        assert texts(page, f"#check-{number}")[0], "paper has nothing to unfold"
    assert page.pdf().startswith(b"%PDF")


# ------------------------------------------------------------------------------- without colour

#: Form of a mark and of the edge beside it, and luminance (0 to 1) of what it is filled with.
LOOKS = """
Array.from(document.querySelectorAll('.check:not(:has(.mark.off, .mark.limit))')).map(e => {
  const channel = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 };
  const parts = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parts(c);
    return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b) };
  const behind = e => { const c = getComputedStyle(e).backgroundColor, p = parts(c);
    return p.length > 3 && p[3] === 0 && e.parentElement ? behind(e.parentElement) : c };
  const mark = e.querySelector('.mark'), style = getComputedStyle(mark);
  const fill = light(behind(mark)), ink = light(style.color);
  return {status: e.dataset.status, words: mark.innerText, border: style.borderTopStyle,
    edge: getComputedStyle(e).borderLeftStyle, fill,
    contrast: (Math.max(fill, ink) + .05) / (Math.min(fill, ink) + .05)};
})
"""


def looks(page: Page) -> dict[str, dict[str, Any]]:
    """How a check of each status looks; those of one status look alike."""
    found: dict[str, dict[str, Any]] = {}
    for look in page.evaluate(LOOKS):
        known = found.setdefault(look["status"], look)
        assert {**look, "contrast": 0, "fill": 0} == {**known, "contrast": 0, "fill": 0}
    assert set(found) == {"pass", "fail", "not-run"}
    return {status: found[status] for status in ("pass", "fail", "not-run")}


def alike(found: dict[str, dict[str, Any]]) -> list[str]:
    """In what two statuses do not differ, as somebody sees them who sees no colour."""
    same = [
        f"{what} of {one['status']} and {other['status']}"
        for one, other in itertools.combinations(found.values(), 2)
        for what, differ in (
            ("words", one["words"] != other["words"]),
            ("sign", one["words"][0] != other["words"][0]),
            ("edge", one["edge"] != other["edge"]),
        )
        if not differ
    ]
    fills = {status: look["fill"] + 0.05 for status, look in found.items()}
    same += [
        f"lightness of fail and {status}"
        for status in ("pass", "not-run")
        if max(fills["fail"], fills[status]) < 3 * min(fills["fail"], fills[status])
    ]
    if found["not-run"]["border"] != "dashed" or found["pass"]["border"] != "solid":
        same.append("border of not-run and pass")
    return same


@pytest.mark.parametrize("scheme", SCHEMES)
def test_statuses_differ_in_words_form_and_lightness(show: Show, scheme: str) -> None:
    assert alike(looks(show(scheme=scheme))) == []


@pytest.mark.parametrize(
    ("rule", "instead", "same"),
    [
        ("background: var(--fail);", "", "lightness of fail and pass"),
        ("border-style: dashed;", "", "border of not-run and pass"),
        ("border-left: .4rem double", "border-left: .4rem solid", "edge of pass and fail"),
        ("✕", "✓", "sign of pass and fail"),
    ],
)
def test_statuses_that_differ_only_in_colour_are_detected(
    show: Show, file: Path, tmp_path: Path, rule: str, instead: str, same: str
) -> None:
    path = tmp_path / "spoilt.html"
    assert rule in file.read_text()
    path.write_text(file.read_text().replace(rule, instead))
    assert same in alike(looks(show(path=path)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_has_enough_contrast(show: Show, scheme: str) -> None:
    """Contrast of at least 4.5 to 1, as WCAG 2 asks for text of this size."""
    for status, look in looks(show(scheme=scheme)).items():
        assert look["contrast"] >= 4.5, status
