"""The verdict: what is proven, what is not, and what to do, in the same words everywhere."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common.document import plain
from builder.common.plan import ExpectedChoice
from builder.errors import SparkBuildError
from builder.pipeline import verify as verify_module
from builder.pipeline.show import CheckLines
from builder.pipeline.verify import Verified
from builder.probes.dispatch_expect import limit
from builder.proof.checks import Check
from builder.proof.report import (
    Report,
    family_of,
    kernel_of,
    render_html,
    render_summary,
    serve_lines,
)
from builder.proof.run import verify
from builder.proof.target import VerifyTarget
from tests.documents import validated
from tests.unit.fakes import (
    BACKEND,
    FakeRunner,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)
from tests.unit.imagefiles import put_vllm
from tests.unit.plans import PULL, planned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.common.plan import PlanDocument
    from builder.proof.checks import Level
    from tests.unit.caller import Call

LINEAR = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
MOE = "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of potential backends: ['MARLIN']"
REFUSAL = ExpectedChoice(kind="w4a16-moe", refused="does not support")
REASON = "the package index offers only a CUDA build; try: export SPARK_BUILD_TORCH_INDEX=URL"
PLAN = planned(
    make_plan_of(fake_base(vllm_files()), make_layer("idle", package="sglang")),
    moe_serve_flags=["--moe-backend", "flashinfer_b12x"],
    expect=[{"kind": "nvfp4-linear", "line": LINEAR}],
)


def check(level: Level, name: str = "x", status: Any = "pass", **more: Any) -> Check:
    return Check(level=level, name=name, status=status, **{"expected": "e", "seen": "s", **more})


def idle(level: Level, name: str = "x", reason: str = REASON, **more: Any) -> Check:
    return check(level, name, "not-run", seen="", reason=reason, **more)


STATIC = check("static", "layer fix")
DISPATCH = [
    check("dispatch", "nvfp4-linear", seen=LINEAR),
    check("dispatch", "nvfp4-moe", seen=MOE),
    check("dispatch", "fp8-linear", seen="Selected CutlassFP8ScaledMMLinearKernel for X"),
    check(
        "dispatch",
        "w4a16-moe",
        seen="refused: ValueError: no",
        refusal=limit(REFUSAL, "refused: ValueError: no"),
    ),
]
UNASKED = [idle("dispatch", "nvfp4-linear"), idle("dispatch", "nvfp4-moe")]


def report_of(*checks: Check, plan: PlanDocument = PLAN) -> Report:
    return Report(target="oci:out", checks=list(checks), plan=plan)


def test_the_verdict_states_what_is_proven_and_not_run() -> None:
    verdict = report_of(STATIC, *DISPATCH).verdict()
    assert verdict.status == "proven"
    assert verdict.sentence == (
        "Proven without hardware: NVFP4 linear and MoE use b12x "
        "(MoE with --moe-backend flashinfer_b12x). Not run on a GB10."
    )
    assert verdict.kernels == {
        "nvfp4-linear": "FlashInferB12xNvFp4LinearKernel",
        "nvfp4-moe": "FLASHINFER_B12X",
        "fp8-linear": "CutlassFP8ScaledMMLinearKernel",
    }
    assert verdict.limits == ("W4A16 MoE models will not start with this profile: ValueError: no",)
    assert verdict.todo == ()


def test_a_default_run_without_dispatch_does_not_pass() -> None:
    report = report_of(STATIC, *UNASKED)
    assert report.passed(), "the exit code is that of what was asked for by name"
    verdict = report.verdict()
    assert verdict.status == "not-proven"
    assert verdict.sentence == (
        "NOT PROVEN: which kernels vLLM selects, because dispatch did not run: the package index "
        "offers only a CUDA build. Proven without hardware: the files are as planned. "
        "Not run on a GB10."
    )
    assert verdict.todo == (
        "export SPARK_BUILD_TORCH_INDEX=URL",
        "spark-build verify oci:out --level dispatch",
    )


@pytest.mark.parametrize(
    ("checks", "require", "status", "words"),
    [
        ([], (), "not-proven", "NOT PROVEN: nothing was checked. Not checked: which kernels"),
        (
            [STATIC],
            (),
            "proven",
            "the files are as planned. Not checked: which kernels vLLM selects",
        ),
        ([STATIC], ("dispatch",), "not-proven", "vLLM selects, because dispatch did not run."),
        ([STATIC, check("imports", "m", "fail")], (), "failed", "FAILED: imports m. Not checked"),
        ([*DISPATCH[:2], UNASKED[0]], (), "not-proven", "NVFP4 linear and MoE use b12x"),
        ([*DISPATCH, idle("imports", moot=True)], ("imports",), "proven", "use b12x"),
        ([*DISPATCH, check("codegen")], (), "proven", "); the kernels compile for SM121. Not run"),
        ([*DISPATCH, check("device")], (), "proven", "GB10: the kernels give the right numbers."),
        (
            [*DISPATCH, check("device"), idle("serve", reason="no GPU; on the Spark: docker run")],
            (),
            "not-proven",
            "whether vllm serve works on a GB10, because serve did not run: no GPU.",
        ),
    ],
)
def test_statuses(checks: list[Check], require: tuple[str, ...], status: str, words: str) -> None:
    verdict = report_of(*checks).verdict(require)
    assert verdict.status == status
    assert words in verdict.sentence


def test_a_release_as_published_is_not_taken_for_the_patched_one() -> None:
    """The verdict's first words, the error's first line, and the command that builds it."""
    plan = planned(make_plan_of(fake_base(vllm_files()), make_layer("fix", BACKEND)))
    target = VerifyTarget(
        name="pypi:vllm==1", subject=fake_base(vllm_files()), plan=plan, layers=(),
        runner=FakeRunner(),
    )  # fmt: skip
    assert target.unapplied == ("fix",)
    assert dataclasses.replace(target, label="").unapplied == (), "an image, by its own plan"
    assert target.planned(target.tree, {}).unapplied == (), "patched"
    report = verify(target, ["static"])
    assert report.unapplied == ("fix",)
    report.checks[:] = [check("numbers", "MoE", "fail")]
    verdict = report.verdict()
    build = f"spark-build image --layers test,fix --base {plan.base.ref} --output oci:patched"
    words = "as it is, without a layer of the plan (fix)"
    assert verdict.sentence.startswith(f"The target {words}; with them: {build}. FAILED: numbers")
    assert verdict.todo == (build, "spark-build verify oci:patched --level numbers")
    with pytest.raises(SparkBuildError) as refused:
        Verified(report=report, required=()).refuse_failed("pypi:vllm==1")
    assert str(refused.value).startswith(f"pypi:vllm==1, {words}: a check failed:\n")
    assert refused.value.hint == build


def lacking(*names: str) -> list[Check]:
    return [check("static", f"layer {name}", "fail") for name in names]


def test_a_failed_target_proves_and_recommends_nothing() -> None:
    """It was checked with these flags, and refutes them."""
    report = report_of(*lacking("a"), *DISPATCH, plan=replace(PLAN, serve_flags=("--flag", "x")))
    verdict = report.verdict()
    assert verdict.sentence == "FAILED: static layer a. Not run on a GB10."
    assert verdict.serve == ()
    page, summary = render_html(report), render_summary(report)
    for text in (page, summary):
        assert "Run it" not in text
        assert "--flag x" not in text
        assert "Proven" not in text
    validated("verify", plain(report.document()))


@pytest.mark.parametrize(
    ("base", "profiles", "layers", "command"),
    [
        ("pypi:vllm==0.24.0", ["b12x-full"], ["b12x-env"], "image --layers b12x-full --base {}"),
        ("oci:a b", ["b12x-full"], ["b12x-env", "mine"], "image --layers b12x-full,mine --base {}"),
        ("vllm/x:1", [], ["one", "two"], "image --layers one,two --base {}"),
        ("vllm/x:1", ["of-old"], ["one"], "image --layers of-old,one --base {}"),
        ("dir:/env/lib", ["marlin"], ["marlin-env"], "apply /env/lib --layers marlin"),
        ("oci:layout", ["marlin"], ["marlin-env"], ""),
    ],
)
def test_a_target_that_lacks_layers_says_what_to_build(
    base: str, profiles: list[str], layers: list[str], command: str
) -> None:
    rows: list[dict[str, Any]] = [
        {"variant": None, "digest": "0" * 64, "files": [], "state": "needed", "reason": "r"}
        for _ in layers
    ]
    plan = planned(
        base={
            **plain(PLAN.base),
            "ref": base,
            "kind": "dir" if base.startswith("dir:") else "image",
        },
        profiles=profiles,
        layers=[{**row, "name": name} for row, name in zip(rows, layers, strict=True)],
    )
    wanted = (f"spark-build {command.format(shlex.quote(base))}",) if command else ()
    assert report_of(*lacking("one", "two"), plan=plan).verdict().todo == wanted
    assert report_of(check("dispatch", "nvfp4-moe", "fail"), plan=plan).verdict().todo == ()
    page = render_html(report_of(*lacking("one"), plan=plan))
    assert ("What to build" in page) is bool(command)
    assert ("What to do" in page) is (not command)


def test_a_pull_request_is_part_of_what_to_build() -> None:
    plan = planned(
        layers=[
            {"name": "pr-1", "variant": None, "digest": "0" * 64, "files": [], "state": "needed",
             "reason": "r"}
        ],
        pulls=[plain(PULL)],
        profiles=[],
    )  # fmt: skip
    (command,) = report_of(*lacking("pr-1"), plan=plan).verdict().todo
    assert command.startswith("spark-build image --with-pr 'o/r#1' --base ")


@pytest.mark.parametrize("number", [1, 6, 7, 11])
def test_an_error_says_how_many_failures_it_leaves_out(number: int) -> None:
    report = report_of(*lacking(*(f"n{i}" for i in range(number))))
    with pytest.raises(SparkBuildError) as raised:
        Verified(report=report, required=()).refuse_failed("x")
    lines = str(raised.value).splitlines()[1:]
    assert len(lines) == min(number, 6) + (number > 6)
    assert lines[-1].endswith(f"and {number - 6} more" if number > 6 else f"n{number - 1}: s")


def test_a_long_reason_is_shortened_and_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = " | ".join(["pip failed", "x" * 300, "ERROR: no torch; try: spark-build again"])
    report = report_of(STATIC, *(idle("dispatch", name, said) for name in ("one", "two")))
    sentence = report.verdict().sentence
    assert "because dispatch did not run: ERROR: no torch. Proven" in sentence
    told = CheckLines()
    for one in report.checks:
        told(one)
    err = capsys.readouterr().err
    assert err.count("x" * 300) == 1
    assert err.count("reason:   the same") == 1


def test_without_a_profile_no_kernel_is_claimed() -> None:
    nothing = idle("dispatch", reason="no profile was named", moot=True)
    plan = replace(PLAN, moe_serve_flags=(), expect=())
    verdict = report_of(STATIC, nothing, plan=plan).verdict()
    assert verdict.status == "proven"
    assert verdict.sentence == (
        "Proven without hardware: the files are as planned. Not run on a GB10."
    )
    assert report_of(STATIC, nothing, plan=plan).verdict(["dispatch"]).status == "not-proven"


def test_the_verdict_names_the_required_flags() -> None:
    flags = ("--linear-backend", "flashinfer_b12x")
    verdict = report_of(*DISPATCH, plan=replace(PLAN, serve_flags=flags)).verdict()
    assert (
        "NVFP4 linear and MoE use b12x with the flags --linear-backend flashinfer_b12x "
        "--moe-backend flashinfer_b12x."
    ) in verdict.sentence
    assert verdict.serve == (
        "vllm serve MODEL --linear-backend flashinfer_b12x",
        "vllm serve MODEL --linear-backend flashinfer_b12x --moe-backend flashinfer_b12x",
    )
    assert serve_lines(planned()) == ("vllm serve MODEL",)


@pytest.mark.parametrize(
    ("seen", "kernel", "family"),
    [
        (LINEAR, "FlashInferB12xNvFp4LinearKernel", "b12x"),
        (MOE, "FLASHINFER_B12X", "b12x"),
        ("Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM", "MARLIN", "Marlin"),
        ("Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM", "VLLM_CUTLASS", "CUTLASS"),
        ("selected W8A8BlockFp8LinearOp._run_cutlass; no log line", "_run_cutlass", "CUTLASS"),
        ("Using 'FLASHINFER_CUTLASS' backend", "FLASHINFER_CUTLASS", "FlashInfer's CUTLASS"),
        ("Using Odd_Kernel for x", "Odd_Kernel", "Odd_Kernel"),
        ("something else", "", ""),
    ],
)
def test_kernels_have_their_common_names(seen: str, kernel: str, family: str) -> None:
    assert (kernel_of(seen), family_of(kernel)) == (kernel, family)


def test_a_failure_that_is_no_layer_needs_no_build() -> None:
    for failed in (check("static", "RECORD", "fail"), check("imports", "layer fix", "fail")):
        assert report_of(failed).verdict().todo == ()


@pytest.mark.parametrize("number", [2, 3, 4, 9])
def test_the_sentence_names_three_failures_and_counts_the_rest(number: int) -> None:
    sentence = report_of(*lacking(*(f"n{i}" for i in range(number)))).verdict().sentence
    assert ("more" in sentence) is (number > 3)
    assert number <= 3 or f"static layer n2, {number - 3} more" in sentence


@pytest.mark.parametrize(
    ("refusals", "words"), [(1, "1 expected refusal"), (2, "2 expected refusals")]
)
def test_refusals_are_counted(refusals: int, words: str) -> None:
    report = report_of(STATIC, *DISPATCH[-1:] * refusals)
    assert report.counts() == ["1 pass", words, "0 fail", "0 not run"]


def test_the_summary_of_a_failure_has_no_command_to_serve() -> None:
    good, bad = report_of(STATIC, *DISPATCH), report_of(*lacking("one"), *DISPATCH)
    assert "vllm serve" in render_summary(good)
    assert "vllm serve" not in render_summary(bad)


def test_a_row_of_the_summary_says_what_was_expected_if_it_was_not_seen() -> None:
    passed, failed = check("static", "one"), check("static", "two", "fail")
    rows = render_summary(report_of(passed, failed)).splitlines()
    assert rows[-2].endswith("| static one | s |")
    assert rows[-1].endswith("| static two | expected e; seen s |")


def test_the_summary_names_what_stood_in() -> None:
    stood_in = check("dispatch", simulated=("triton", "the driver"))
    assert render_summary(report_of(stood_in)).endswith("\n\nSimulated: the driver; triton\n")
    assert "Simulated" not in render_summary(report_of(STATIC))


# ------------------------------------------------------------------------------------- everywhere


def test_the_page_and_the_summary_start_with_the_verdict() -> None:
    for report in (report_of(STATIC, *DISPATCH), report_of(STATIC, *UNASKED)):
        verdict = report.verdict()
        title, _, first, *rest = render_summary(report).splitlines()
        assert first == f"**{verdict.sentence.replace('_', chr(92) + '_')}**"
        assert title.endswith("passed" if verdict.status == "proven" else "**NOT PROVEN**")
        assert all(f"- try: `{command}`" in rest for command in verdict.todo)
        page = render_html(report)
        assert verdict.sentence in page
        assert all(limit in page for limit in verdict.limits)
        assert ("expected refusal" in page) is bool(verdict.limits)
        validated("verify", plain(report.document()))


@pytest.fixture
def call(call: Call, tmp_path: Path) -> Call:
    """With an image of vLLM beside it."""
    put_vllm(tmp_path / "base")
    return call


def verifier(report: Report) -> Callable[..., Report]:
    """Verification with that report."""

    def verify(_target: Any, _levels: Any, told: Callable[[Check], None]) -> Report:
        for one in report.checks:
            told(one)
        return report

    return verify


@pytest.mark.parametrize("json", [False, True])
def test_image_ends_with_the_verdict(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json: bool
) -> None:
    words = ["image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "-o", "oci:out"]
    for report in (report_of(STATIC, *DISPATCH), report_of(STATIC, *UNASKED)):
        verdict = report.verdict()
        monkeypatch.setattr(verify_module, "verify", verifier(report))
        done = call(*words, *(["--json"] if json else []))
        assert done.code == 0
        assert verdict.sentence in done.err
        if verdict.status == "proven":
            assert done.err.splitlines()[-1].endswith(verdict.serve[-1])
            assert "expected refusal dispatch w4a16-moe" in done.err
            assert "4 pass, 1 expected refusal, 0 fail, 0 not run" in done.err
        else:
            assert "warning: NOT PROVEN: which kernels vLLM selects" in done.err
            assert done.err.splitlines()[-1].endswith(verdict.todo[-1])
        if json:
            assert done.json["verify"]["verdict"] == plain(verdict)
            validated("image", done.json)


def test_verify_does_not_call_an_unproven_target_verified(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("image", "-l", "fix", "-b", f"oci:{tmp_path}/base", "-o", "oci:out", "--no-verify")
    monkeypatch.setattr(verify_module, "verify", verifier(report_of(STATIC, *UNASKED)))
    done = call("-q", "verify", "oci:out")
    assert (done.code, done.out) == (0, "NOT PROVEN oci:out\n")
    assert "NOT PROVEN: which kernels vLLM selects" in done.err
    done = call("verify", "oci:out", "--level", "static,dispatch")
    assert done.code == 5
    assert "error: oci:out: NOT PROVEN: which kernels vLLM selects, because" in done.err
    assert "try: export SPARK_BUILD_TORCH_INDEX=URL" in done.err
