"""Levels device and serve from outside: what is put in, what comes back, what cannot run."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common.document import plain
from builder.common.plan import ExpectedChoice
from builder.errors import UsageError
from builder.images.engines.docker import tar_of
from builder.images.engines.maker import VERIFIER, programs
from builder.probes import verify_checks
from builder.probes.dispatch_expect import limit
from builder.proof.gpulevels import check_on_gpu
from builder.proof.gpuoptions import GpuOptions
from builder.proof.ongpu import NoGpu, run_beside, verifier_document, verifier_files
from builder.proof.run import verify
from builder.proof.runners import NO_GPU
from builder.proof.target import VerifyTarget
from tests.documents import validated
from tests.unit.fakes import FakeImage, FakeRunner, MemoryTree, subject_of
from tests.unit.inimage import load
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.proof.checks import VerifierDocument

LINE = "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
PLAN = planned(expect=[{"kind": "nvfp4-linear", "line": LINE}])
GOOD = {"level": "device", "name": "x", "status": "pass", "expected": "a", "seen": "b"}


def target(**changes: Any) -> VerifyTarget:
    made = VerifyTarget(
        name="me/image:1",
        subject=subject_of(MemoryTree({}), image=FakeImage(in_engine=True)),
        plan=PLAN,
        layers=[],
        runner=FakeRunner(why=NO_GPU),
    )
    return dataclasses.replace(made, **changes)


def answering(*checks: Mapping[str, Any]) -> VerifyTarget:
    document = {"schema": 1, "plan_digest": PLAN.plan_digest, "passed": True, "checks": checks}
    text = json.dumps(document)
    return target(runner=FakeRunner(gpu=lambda _level: verifier_document(text, 0)))


def test_checks_of_the_image_are_reported() -> None:
    check = {**GOOD, "figures": {"at 1": 81.5}, "where": "w", "reason": "r"}
    report = verify(answering(check), ["device"])
    assert report.passed(["device"])
    assert plain(report.checks[0]) == check


def test_a_failure_in_the_image_is_a_failure() -> None:
    assert not verify(answering(GOOD, {**GOOD, "status": "fail"}), ["device"]).passed()


def test_a_failed_server_comes_with_its_root_cause() -> None:
    """The log that the image sends is read as ``spark-build diagnose`` reads one."""
    log = "\n".join(
        [
            "(EngineCore pid=9) Traceback (most recent call last):",
            '(EngineCore pid=9)   File "/x/vllm/a.py", line 3, in f',
            "(EngineCore pid=9)     hop()",
            "(EngineCore pid=9) WombatError: no pouch",
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See above.",
        ]
    )
    bad = {**GOOD, "level": "serve", "name": "dense starts", "status": "fail", "reason": log}
    (check,) = check_on_gpu(answering(bad), "serve")
    assert check.reason.startswith("WombatError: no pouch (vllm/a.py, line 3, in f)")
    assert "Engine core initialization failed" in check.reason
    # what passes, and a reason of one line, stay as they are
    for same in ({**bad, "status": "pass"}, {**bad, "reason": "OSError: gone"}):
        (check,) = check_on_gpu(answering(same), "serve")
        assert check.reason == same["reason"]


@pytest.mark.parametrize(
    "bad",
    [
        {**GOOD, "status": "passed"},
        {**GOOD, "level": "static"},
        {"level": "device", "status": "pass"},
        {**GOOD, "figures": []},
    ],
)
def test_a_malformed_check_is_never_a_pass(bad: dict[str, Any]) -> None:
    report = verify(answering(GOOD, bad), ["device"])
    assert [check.status for check in report.checks] == ["not-run"]
    assert "malformed" in report.checks[0].reason


def test_an_empty_document_is_never_a_pass() -> None:
    assert [c.status for c in verify(answering(), ["device"]).checks] == ["not-run"]


@pytest.mark.parametrize("level", ["device", "serve"])
def test_without_a_gpu_it_is_not_run_with_the_command(level: str) -> None:
    def no_gpu(_level: str) -> VerifierDocument:
        raise NoGpu('could not select device driver "" with capabilities: [[gpu]]')

    report = verify(target(runner=FakeRunner(gpu=no_gpu)), [level])
    assert [(c.level, c.status) for c in report.checks] == [(level, "not-run")]
    assert "could not select device driver" in report.checks[0].reason
    assert (
        "docker run --rm --gpus all --ipc host --entrypoint spark-verify me/image:1"
        in report.checks[0].reason
    )
    assert not report.passed([level])


def test_files_alone_cannot_run() -> None:
    check = verify(target(), ["serve"]).checks[0]
    assert check.status == "not-run"
    assert "only an image" in check.reason


# ------------------------------------------------------------------------------ what is put inside


def test_the_verifier_is_complete_and_readable(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"checks": []}))
    options = GpuOptions(against=other)
    data = tar_of(verifier_files(PLAN, "me/image:1", options, "/tmp/spark-verify/"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = {member.name.removeprefix("tmp/spark-verify/"): member for member in tar}
    assert set(names) == {*programs(), "plan.json", "device.json", "against.json"}
    assert all(member.mode == 0o644 for member in names.values())


def test_options_reach_the_command_line() -> None:
    options = GpuOptions(bench=True, model="org/name", serve_args="--max-num-seqs 4")
    words = options.arguments("/x", "serve")
    parsed = load("spark_verify").parse(words)
    assert (parsed.level, parsed.json, parsed.bench) == (["serve"], True, True)
    assert (parsed.model, parsed.serve_args) == ("org/name", "--max-num-seqs 4")


@pytest.mark.parametrize("text", ["", "[]", '{"checks": 1}', '{"x": []}'])
def test_malformed_evidence_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="not evidence") as caught:
        GpuOptions(against=file).evidence()
    assert "--bench --json" in caught.value.hint


# ---------------------------------------------------------------------- the verifier as a program


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The verifier's folder of an image, on a machine without a GPU."""
    site = tmp_path / "site-packages"
    site.mkdir()
    plan = replace(PLAN, base=replace(PLAN.base, site_packages=str(site)))
    for name, data in verifier_files(plan, "me/image:1", GpuOptions()).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-I", str(folder / VERIFIER), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_without_a_gpu_the_other_levels_run(inside: Path) -> None:
    """Here the image has no vLLM either, so dispatch fails; device and serve are not run."""
    ran = run(inside, "--json")
    document = validated("spark-verify", json.loads(ran.stdout))
    statuses = {(check["level"], check["status"]) for check in document["checks"]}
    assert ("dispatch", "fail") in statuses
    assert ("device", "not-run") in statuses
    assert ("serve", "not-run") in statuses
    assert {s for level, s in statuses if level in ("device", "serve")} == {"not-run"}
    assert (ran.returncode, document["passed"]) == (5, False)


@pytest.fixture
def sound(inside: Path) -> Path:
    """An image in which everything that needs no GPU passes."""
    plan = json.loads((inside / "plan.json").read_text())
    (inside / "plan.json").write_text(json.dumps({**plan, "env": {"LANG_OF_TEST": "1"}}))
    return inside


def run_sound(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", str(folder / VERIFIER), *words]
    env = {"PATH": "/usr/bin:/bin", "LANG_OF_TEST": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=env
    )


@pytest.fixture
def verifier(
    sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The verifier of that image, run in this process: exit status, stdout and stderr."""
    module = load("spark_verify")
    monkeypatch.setattr(module, "HERE", sound)
    monkeypatch.setenv("LANG_OF_TEST", "1")

    def called(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spark-verify", *words])
        try:
            code = module.main()
        except SystemExit as ended:
            code = ended.code
        return (code, *capsys.readouterr())

    return called


def test_a_sound_image_passes_what_can_run_here(sound: Path) -> None:
    assert run_sound(sound, "--level", "static").returncode == 0


@pytest.mark.parametrize("level", ["device", "serve"])
@pytest.mark.parametrize("option", ["--level", "--require"])
def test_a_level_that_is_named_must_run(verifier: Any, option: str, level: str) -> None:
    assert verifier("--level", "static")[0] == 0
    code, out, _ = verifier("--level", "static", option, level)
    assert code == 5, out
    assert f"NOT RUN {level}" in out
    assert "docker run --rm --gpus all --ipc host --entrypoint spark-verify me/image:1" in out


def test_the_verifier_in_the_image_names_an_expected_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = limit(ExpectedChoice(kind="w4a16-moe", refused="no"), "refused: ValueError: no")
    made = verify_checks.check("dispatch", "w4a16-moe", good=True, expected="no", seen="no")
    verify_checks.show([{**made, "refusal": said}, verify_checks.not_run("serve", "x", "e", "r")])
    shown = capsys.readouterr().out
    assert "PASS" not in shown
    assert f"expected refusal dispatch w4a16-moe: {said}" in shown
    assert shown.endswith("0 pass, 1 expected refusal, 0 fail, 1 not run\n")


def test_device_alone_without_a_gpu_does_not_pass(sound: Path) -> None:
    assert run_sound(sound, "--level", "device").returncode == 5


@pytest.mark.parametrize(
    "words", [["--level", "gpu"], ["--against", "/nowhere.json"], ["--unknown"]]
)
def test_wrong_usage_is_2(verifier: Any, words: list[str]) -> None:
    assert verifier(*words)[:2] == (2, "")


def test_a_local_environment_runs_the_verifier(sound: Path) -> None:
    document = run_beside(Path(sys.executable), PLAN, "serve", GpuOptions())
    assert {check.status for check in document.checks} == {"not-run"}


def test_a_local_environment_without_output_is_not_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho oh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(NoGpu, match="exited with 3 and no document: oh"):
        run_beside(python, PLAN, "device", GpuOptions())
