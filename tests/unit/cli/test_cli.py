"""The command line: exit codes, streams, JSON, and what is written where."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from builder import settings
from builder.applier.store import Store
from builder.applier.values import sha256_hex
from builder.common.pypi import PackageIndex
from builder.errors import RemoteError, UsageError
from builder.images.bases.identify import IDENTIFIERS
from builder.images.engines.oci import Scratch
from builder.pipeline import verify
from builder.proof.checks import Check
from builder.proof.report import Report
from builder.proof.sandbox import Sandbox
from tests.unit.caller import Call
from tests.unit.fakes import (
    every_base_is,
    fake_base,
    layer_text,
    no_sandbox,
    snapshot,
    vllm_files,
    write_tree,
)
from tests.unit.plans import planned

if TYPE_CHECKING:
    from pathlib import Path

    from builder.images.subject import Subject


LAYER = layer_text('op = "replace"\nfile = "vllm/core.py"\nold = "OLD"\nnew = "NEW"\n')
FIX = LAYER.replace("OLD", "BACKEND = 'cutlass'").replace("NEW", "BACKEND = 'b12x'")
LAYERS = {
    "fix": FIX,
    "drifted": LAYER,
    "newer": FIX.replace(">=0.20.0,<0.30.0rc0", ">=0.30.0rc0"),
    "broken": "summary = ",
    "compiled": LAYER.partition('op = "replace"')[0]
    + 'op = "compile"\nsource = "vllm"\nchange = "sm120-family"\narch = "12.1a"\n',
}
#: An extension module of the base, and what its machine code is known to be.
MODULE = {"vllm/_C.abi3.so": b"code for sm_120a"}
CODE = f"""\
[[code]]
version = "0.20.1"
platform = "linux/arm64"
module = "vllm/_C.abi3.so"
sha256 = "{sha256_hex(MODULE["vllm/_C.abi3.so"])}"
how = "not-loadable"
arch = "sm_120a"
"""
BASE = "pypi:vllm==0.20.1"


@pytest.fixture(autouse=True)
def own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A patches directory with one layer for each way to end, and an empty current directory."""
    for name, text in LAYERS.items():
        write_tree(tmp_path / "patches", {f"{name}/layer.toml": text.encode()})
    write_tree(tmp_path / "patches", {"compiled/pins.toml": CODE.encode()})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every base is a vLLM in memory; nothing can be asked in a sandbox."""
    made = fake_base(vllm_files() | MODULE)
    every_base_is(monkeypatch, made)
    no_sandbox(monkeypatch)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run one command."""
    return Call(capsys)


# ----------------------------------------------------------------------------------- usage errors

USAGE = {
    "no-such-command": (["imgae"], "imgae"),
    "no-such-subcommand": (["layers", "lst"], "lst"),
    "no-such-option": (["plan", "--layer-s", "fix"], "--layer-s"),
    "missing-option": (["plan"], "--layers"),
    "missing-argument": (["verify"], "TARGET"),
    "missing-value": (["plan", "--layers"], "--layers"),
    "unknown-layer": (["plan", "-l", "marlinn", "-b", BASE], "did you mean 'marlin'?"),
    "unknown-layer-shown": (["layers", "show", "fxi"], "did you mean 'fix'?"),
    "unknown-mod": (["mods", "export", "sm121-marlim"], "did you mean 'sm121-marlin'?"),
    "malformed-layer": (["plan", "-l", "broken", "-b", BASE], "broken/layer.toml: not valid TOML"),
    "malformed-layer-checked": (["layers", "check"], "broken/layer.toml: not valid TOML"),
    "unknown-engine": (["image", "-l", "fix", "--engine", "podman"], "auto, buildkit, oci"),
    "unknown-level": (["verify", BASE, "--level", "sttaic"], "did you mean 'static'?"),
    "unknown-required-level": (["verify", BASE, "--require", "all"], "unknown verification level"),
    "no-default-base": (["plan", "-l", "fix"], "no base: give --base, or a profile that has one"),
    "unknown-scheme": (["plan", "-l", "fix", "-b", "pypii:vllm==1"], "did you mean 'pypi'?"),
    "no-exact-version": (["plan", "-l", "fix", "-b", "pypi:vllm>=1"], "is not NAME==VERSION"),
    "no-vllm": (["plan", "-l", "fix", "-b", "pypi:torch==1"], "needs vllm==VERSION"),
    "platform": (
        ["plan", "-l", "fix", "-b", BASE, "--platform", "linux/riscv64"],
        "is not linux/arm64 or linux/amd64",
    ),
    "python": (["plan", "-l", "fix", "-b", BASE, "--python", "three"], "is not of the form 3.12"),
    "no-directory": (["apply", "gone", "-l", "fix"], "gone is not a directory"),
    "directory-without-vllm": (["revert", "."], "has no vllm"),
    "dir-without-vllm": (["plan", "-l", "fix", "-b", "dir:."], "has no vllm"),
    "no-patches": (["layers", "list", "--patches", "gone"], "gone does not exist"),
    "layer-name": (["layers", "new", "My Layer"], "is not a layer name"),
    "no-layout": (["verify", "oci:gone"], "is not an OCI layout"),
    "unclear-target": (["verify", "dir:."], "has no vllm"),
    "layers-without-a-mod": (["mods", "export", "-l", "fix"], "needs its name"),
}
WITH_JSON = {name for name, (words, _) in USAGE.items() if words[0] != "mods"} - {
    "no-such-command",
    "no-such-subcommand",
    "missing-value",
    "layer-name",
}


@pytest.mark.parametrize(("words", "message"), USAGE.values(), ids=USAGE.keys())
def test_a_usage_error(call: Call, words: list[str], message: str) -> None:
    result = call(*words)
    assert result.code == 2
    assert message in result.err
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize("name", sorted(WITH_JSON))
def test_a_usage_error_in_json(call: Call, name: str) -> None:
    words, message = USAGE[name]
    result = call(*words, "--json")
    assert result.code == 2
    error = result.json["error"]
    assert result.json["schema"] == 1
    assert error["code"] == 2
    assert message in error["message"]
    assert set(error) == {"code", "message", "hint"}


def test_the_next_command_to_try_is_shown(call: Call) -> None:
    assert "  try: spark-build layers list" in call("plan", "-l", "zzz").err
    assert "  try: spark-build plan --help" in call("plan", "--zzz").err


# ------------------------------------------------------------------------- exit codes, one by one


@pytest.mark.usefixtures("base")
class TestExitCodes:
    def test_0_ok(self, call: Call) -> None:
        assert call("plan", "-l", "fix", "-b", BASE).code == 0

    @pytest.mark.parametrize("debug", [False, True])
    def test_1_internal_error(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, debug: bool
    ) -> None:
        def broken(_request: object, _rest: str) -> Subject:
            raise RuntimeError("unexpected")

        monkeypatch.setitem(IDENTIFIERS, "pypi", broken)
        words = ["plan", "-l", "fix", "-b", BASE]
        if debug:
            with pytest.raises(RuntimeError, match="unexpected"):
                call("--debug", *words)
            return
        result = call(*words)
        assert (result.code, result.out) == (1, "")
        assert "internal error: RuntimeError: unexpected" in result.err
        assert "--debug" in result.err

    def test_2_usage(self, call: Call) -> None:
        assert call("plan", "-l", "broken", "-b", BASE).code == 2

    def test_3_nothing_to_do(self, call: Call) -> None:
        result = call("plan", "-l", "newer", "-b", BASE)
        assert result.code == 3
        assert "layer newer: made for vllm" in result.err

    def test_2_a_profile_that_does_not_support_the_base(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = fake_base(vllm_files("0.19.0"))
        every_base_is(monkeypatch, old)
        result = call("plan", "-l", "b12x-full", "-b", BASE)
        assert result.code == 2
        assert "the newest supported release is 0.33.0\n" in result.err
        assert "try: spark-build plan --layers b12x-full --base pypi:vllm==0.33.0" in result.err
        assert result.out == "", "no table before the error"

    def test_4_drift(self, call: Call) -> None:
        result = call("image", "-l", "fix,drifted", "-b", BASE, "--engine", "oci")
        assert result.code == 4
        assert "layer drifted: drift: op 1 (replace vllm/core.py)" in result.err
        assert "try: spark-build layers show drifted" in result.err

    def test_5_verification_failed(self, call: Call) -> None:
        words = ["verify", BASE, "-l", "fix", "--level", "static"]
        assert call(*words).code == 5
        assert call(*words, "--json").json["passed"] is False

    def test_5_a_required_level_did_not_run(self, call: Call) -> None:
        call("image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out", "--no-verify")
        assert call("verify", "oci:out").code == 0
        assert call("verify", "oci:out", "--require", "dispatch").code == 5

    def test_5_a_level_that_was_named_did_not_run(self, call: Call) -> None:
        """Whoever asks for a level by name wants its answer: not run is none."""
        call("image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out", "--no-verify")
        assert call("verify", "oci:out", "--level", "static,imports").code == 0
        for level in ("dispatch", "device", "serve"):
            result = call("verify", "oci:out", "--level", f"static,{level}")
            assert result.code == 5
            assert f"{level} did not run" in result.err

    def test_6_engine_missing(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        result = call("image", "-l", "fix", "-b", BASE, "--engine", "buildkit")
        assert result.code == 6
        assert "no docker client" in result.err

    def test_6_the_named_docker_engine_does_not_answer(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Nothing else is made instead."""
        monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        for words in (["-b", BASE], ["-b", "h.example/vllm:1"], ["-b", BASE, "--dry-run"]):
            result = call("image", "-l", "fix", *words)
            assert result.code == 6, result.err
            assert "no Docker Engine is running at unix:///nonexistent" in result.err
            assert "--engine oci" in result.err
        assert list((tmp_path / "work").iterdir()) == []
        assert call("image", "-l", "fix", "-b", BASE, "-o", "oci:out", "--no-verify").code == 0

    def test_auto_says_why_it_makes_an_overlay(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")
        said = call("image", "-l", "fix", "-b", BASE, "--no-verify").err
        assert "engine  oci, because no docker client with buildx is on PATH" in said
        assert "released wheels become an overlay" in said

    def test_6_engine_cannot(self, call: Call) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "--output", "docker"]
        assert call(*words).code == 6

    def test_7_build_failed(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def full(*words: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Scratch, "add_layer", full)
        result = call("image", "-l", "fix", "-b", BASE, "--engine", "oci")
        assert result.code == 7
        assert list((tmp_path / "work").iterdir()) == []

    def test_8_remote_failed(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        def down(_request: object, _rest: str) -> Subject:
            raise RemoteError("the package index did not answer")

        monkeypatch.setitem(IDENTIFIERS, "pypi", down)
        assert call("plan", "-l", "fix", "-b", BASE).code == 8

    def test_9_stale(self, call: Call, tmp_path: Path) -> None:
        words = ["mods", "export", "mine", "-l", "fix", "--in", tmp_path / "mods"]
        assert call(*words, "--check").code == 9
        value = call(*words, "--json").json
        assert (value["mods"], value["written"]) == (["mine"], True)
        assert call(*words, "--check").code == 0
        assert call(*words, "--check", "--json").json["written"] is False

    def test_10_needs_a_rebuild(self, call: Call) -> None:
        result = call("plan", "-l", "compiled", "-b", BASE)
        assert result.code == 10
        assert "compiled: the base is prebuilt" in result.err
        assert (
            "vllm/_C.abi3.so has the FP8 per-tensor GEMM (CUTLASS) only for sm_120a" in result.err
        )
        assert re.search(r"4 units, about \d+ min if .*, 10 GB of memory, and g\+\+", result.err)
        assert (
            "image --layers compiled --base docker://vllm/vllm-openai:v0.20.1 --compile"
            in result.err
        )

    def test_130_interrupted(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_request: object, _rest: str) -> Subject:
            raise KeyboardInterrupt

        monkeypatch.setitem(IDENTIFIERS, "pypi", interrupted)
        result = call("plan", "-l", "fix", "-b", BASE)
        assert result.code == 130
        assert "no partial output was left" in result.err

    @pytest.mark.parametrize("cause", [KeyboardInterrupt(), ValueError()], ids=["signal", "bug"])
    def test_130_interrupted_while_a_class_is_created(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, cause: BaseException
    ) -> None:
        """What ``__set_name__`` raises comes out of Python 3.11 as the cause of a RuntimeError."""

        def imports(_request: object, _rest: str) -> Subject:
            raise RuntimeError("Error calling __set_name__ on 'Field' instance") from cause

        monkeypatch.setitem(IDENTIFIERS, "pypi", imports)
        result = call("plan", "-l", "fix", "-b", BASE)
        assert result.code == (130 if isinstance(cause, KeyboardInterrupt) else 1)
        assert ("interrupted" in result.err) == (result.code == 130)

    @pytest.mark.parametrize("before", [KeyboardInterrupt, ValueError])
    def test_130_interrupted_and_then_the_cleaning_fails(
        self, call: Call, monkeypatch: pytest.MonkeyPatch, before: type[BaseException]
    ) -> None:
        """It is still an interruption, and what failed is shown."""

        def cleans(_request: object, _rest: str) -> Subject:
            try:
                raise before
            finally:
                raise UsageError("the folder is not empty", hint="empty it") from None

        monkeypatch.setitem(IDENTIFIERS, "pypi", cleans)
        result = call("plan", "-l", "fix", "-b", BASE)
        interrupted = before is KeyboardInterrupt
        assert result.code == (130 if interrupted else 2)
        assert ("interrupted; after that: the folder is not empty" in result.err) == interrupted
        assert "no partial output was left" not in result.err


# --------------------------------------------------------------------------------- streams, JSON


@pytest.mark.usefixtures("base")
class TestStreams:
    @pytest.mark.parametrize("quiet", [[], ["-q"]])
    def test_a_plan_is_printed_on_stdout(self, call: Call, quiet: list[str]) -> None:
        result = call("plan", "-l", "fix", "-b", BASE, *quiet)
        assert result.code == 0
        assert "needed         fix" in result.out
        assert result.out.splitlines()[-1].startswith("plan  sha256:")
        assert "needed" not in result.err

    def test_a_plan_that_is_piped_has_no_colour(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever standard error is."""
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        assert "\033" not in call("plan", "-l", "fix", "-b", BASE).out

    def test_the_plan_of_a_build_is_printed_on_stderr(self, call: Call) -> None:
        result = call("image", "-l", "fix", "-b", BASE, "--engine", "oci", "--dry-run")
        assert "needed         fix" in result.err
        assert re.fullmatch(r"sha256:[0-9a-f]{64}\n", result.out)

    def test_a_plan_in_json(self, call: Call) -> None:
        plan = call("plan", "-l", "fix", "-b", BASE, "--json").json
        assert {"schema", "plan_digest", "base", "layers", "env"} <= set(plan)
        (layer,) = plan["layers"]
        assert {"name", "state", "reason", "variant", "files"} <= set(layer)
        assert [file["path"] for file in layer["files"]] == ["vllm/core.py"]

    @pytest.mark.parametrize(("name", "code"), [("drifted", 4), ("newer", 3)])
    def test_a_refused_plan_is_still_one_json_document(
        self, call: Call, name: str, code: int
    ) -> None:
        result = call("plan", "-l", name, "-b", BASE, "--json")
        assert result.code == code
        assert result.json["error"]["code"] == code

    def test_the_last_line_of_stdout_is_the_image(self, call: Call) -> None:
        result = call("image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out")
        assert result.code == 0, result.err
        assert re.fullmatch(r"oci:out@sha256:[0-9a-f]{64}\n", result.out)
        assert "NOT RUN" in result.err

    def test_quiet_keeps_the_output_on_stdout(self, call: Call) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out"]
        result = call("-q", *words)
        assert result.out.startswith("oci:out@sha256:")
        assert result.err == ""

    def test_an_image_in_json(self, call: Call) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out", "--json"]
        value = call(*words).json
        assert {"schema", "plan_digest", "image", "digest", "layers", "verify", "timings"} <= set(
            value
        )
        assert value["layers"] == [{"name": "fix", "state": "needed", "cached": False}]
        checks = {check["name"]: check["status"] for check in value["verify"]["checks"]}
        assert checks["layer fix"] == "pass"
        assert value["verify"]["passed"] is True

    def test_image_prints_the_run_command_last(self, call: Call, tmp_path: Path) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out"]
        said = call(*words).err
        assert "This is an overlay" in said
        path = tmp_path / "work" / "out.Dockerfile"
        assert f" - <{path}" in said
        assert (
            said[said.index("Run it:") :].splitlines()[1].startswith("    docker run --rm --gpus")
        )
        value = call(*words, "--json").json
        assert value["overlay"] is True
        assert value["run"]["dockerfile"] == str(path)
        assert value["run"]["serve"] == "vllm serve MODEL"

    def test_an_image_that_fails_verification_is_still_named(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check = Check(level="static", name="x", status="fail", expected="a", seen="b")
        report = Report(target="oci:out", plan=planned(), checks=[check])
        monkeypatch.setattr(verify, "verify", lambda *_: report)
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out"]
        result = call(*words)
        assert result.code == 5
        assert result.out.startswith("oci:out@sha256:")
        assert "expected 'a', seen 'b'" in result.err
        assert "Run it" not in result.err
        value = call(*words, "--json").json
        assert (value["image"], value["error"]["code"]) == ("oci:out", 5)

    def test_without_verification_nothing_is_reported_as_passed(self, call: Call) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out"]
        assert "not verified" in call(*words, "--no-verify").err
        assert call(*words, "--no-verify", "--json").json["verify"]["passed"] is False

    def test_a_dry_run_writes_nothing(self, call: Call, tmp_path: Path) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "--dry-run"]
        digest = call(*words).out.strip()
        assert digest == call(*words, "--json").json["plan_digest"]
        assert list((tmp_path / "work").iterdir()) == []

    def test_the_dockerfile_is_printed_on_stdout(self, call: Call, tmp_path: Path) -> None:
        words = ["image", "-l", "fix", "-b", BASE, "--engine", "oci", "--print-dockerfile"]
        result = call(*words)
        lines = [line.split()[0] for line in result.out.splitlines()]
        assert list(dict.fromkeys(lines)) == ["#", "FROM", "COPY", "RUN", "LABEL"]
        value = call(*words, "--json").json
        assert value["dockerfile"] == result.out
        planned = call("plan", "-l", "fix", "-b", BASE, "--json").json
        assert value["plan_digest"] == planned["plan_digest"]
        assert list((tmp_path / "work").iterdir()) == []

    def test_verify_prints_its_verdict(self, call: Call) -> None:
        call("image", "-l", "fix", "-b", BASE, "--engine", "oci", "-o", "oci:out", "--no-verify")
        result = call("verify", "oci:out")
        assert result.out == "verified oci:out\n"
        assert (
            "oci:out is an overlay; it is checked on the files of pypi:vllm==0.20.1" in result.err
        )
        value = call("verify", "oci:out", "--json").json
        assert value["schema"] == 1
        keys = {"level", "name", "status", "expected", "seen", "where", "reason"}
        assert all(keys <= set(check) for check in value["checks"])

    def test_a_matrix(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
        words = ["matrix", "-l", "fix,newer", "--releases", "0.20.1,0.20.2"]
        value = call(*words, "--json").json
        assert value["layers"] == ["fix", "newer"]
        assert [row["vllm"] for row in value["rows"]] == ["0.20.1", "0.20.2"]
        assert value["rows"][0]["states"] == {"fix": "needed", "newer": "not-applicable"}
        table = call(*words).out.splitlines()
        assert [line.split() for line in table[:4]] == [
            ["0.20.1"], ["0.20.2"], ["fix", "needed"], ["newer", "-"]
        ]  # fmt: skip

    def test_a_matrix_with_drift_fails(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [])
        words = ["matrix", "-l", "drifted", "--releases", "0.20.1"]
        assert call(*words).code == 4
        assert "DRIFT" in call(*words).out
        assert call(*words, "--json").json["error"]["code"] == 4

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["--tag", "UPPER CASE"], 2),
            (["--output", "somewhere"], 2),
            (["--output", "docker"], 6),
            (["--push", "--output", "oci:out"], 2),
        ],
    )
    def test_outputs_that_conflict(
        self, call: Call, tmp_path: Path, words: list[str], code: int
    ) -> None:
        assert call("image", "-l", "fix", "-b", BASE, "--engine", "oci", *words).code == code
        assert list((tmp_path / "work").iterdir()) == []


# -------------------------------------------------------------------------------- apply and revert


class TestDirectory:
    def test_apply_then_revert(self, call: Call, site: Path) -> None:
        before = snapshot(site)
        result = call("apply", site, "-l", "fix")
        assert (result.code, result.out) == (0, f"1 layer applied to {site}\n")
        assert "b12x" in (site / "vllm/core.py").read_text()
        assert call("revert", site).out == f"1 layer reverted in {site}\n"
        assert snapshot(site) == before

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_a_dry_run_writes_nothing(self, call: Call, site: Path, command: str) -> None:
        if command == "revert":
            call("apply", site, "-l", "fix")
        before = snapshot(site)
        value = call(command, site, "-l", "fix", "--dry-run", "--json").json
        assert value["written"] is False
        assert snapshot(site) == before

    def test_a_virtual_environment_is_found(self, call: Call, tmp_path: Path) -> None:
        root = write_tree(tmp_path / "venv" / "lib/python3.12/site-packages", vllm_files())
        value = call("apply", tmp_path / "venv", "-l", "fix", "--json").json
        assert value["directory"] == str(root)
        assert value["base"]["python"] == "3.12"

    def test_drift_changes_nothing(self, call: Call, site: Path) -> None:
        before = snapshot(site)
        assert call("apply", site, "-l", "fix,drifted").code == 4
        assert snapshot(site) == before

    def test_another_run_holds_the_lock(self, call: Call, site: Path) -> None:
        with Store(site):
            result = call("apply", site, "-l", "fix")
        assert result.code == 2
        assert "another spark-build is writing to it" in result.err

    def test_verify_names_what_is_missing(
        self, call: Call, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        no_sandbox(monkeypatch)
        words = ["verify", f"dir:{site}", "-l", "fix", "--level", "static"]
        assert call(*words).code == 5
        call("apply", site, "-l", "fix")
        assert call(*words).code == 0

    def test_a_layer_that_does_not_apply_is_not_verified(
        self, call: Call, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        no_sandbox(monkeypatch)
        result = call("verify", f"dir:{site}", "-l", "drifted", "--level", "static")
        assert result.code == 5
        assert "drifted" in result.err

    def test_static_verification_makes_no_sandbox(
        self, call: Call, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files are all it needs; a sandbox is a download of hundreds of megabytes."""
        asked: list[object] = []
        monkeypatch.setattr(Sandbox, "prepare", asked.append)
        monkeypatch.setattr(Sandbox, "dsl", lambda *_: site)
        call("apply", site, "-l", "fix")
        assert call("verify", f"dir:{site}", "-l", "fix", "--level", "static").code == 0
        assert asked == []

    def test_verify_needs_to_know_the_expected_layers(self, call: Call, site: Path) -> None:
        assert "does not name its layers" in call("verify", f"dir:{site}").err


# ------------------------------------------------------------------------------ layers and settings


class TestLayers:
    def test_list(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SPARK_BUILD_PATCHES")
        assert "b12x-full" in call("layers", "list").out
        value = call("layers", "list", "--json").json
        assert {"marlin", "b12x-full"} <= {profile["name"] for profile in value["profiles"]}

    @pytest.mark.parametrize("name", ["marlin", "marlin-env", "fix"])
    def test_show(self, call: Call, name: str) -> None:
        assert call("layers", "show", name).out.startswith(f"{name}: ")
        value = call("layers", "show", name, "--json").json
        assert name in (value.get("layer") or value["profile"])["name"]

    def test_check_of_one(self, call: Call) -> None:
        words = ["layers", "check", "fix"]
        result = call(*words)
        assert (result.code, result.out) == (0, "1 layer well-formed\n"), result.err

    def test_a_new_layer_is_well_formed_and_is_not_overwritten(
        self, call: Call, tmp_path: Path
    ) -> None:
        folder = tmp_path / "mine"
        assert call("layers", "new", "my-fix", "--in", folder).out == f"{folder / 'my-fix'}\n"
        plan = call("plan", "-l", "my-fix", "-b", "dir:.", "--patches", folder)
        assert "has no vllm" in plan.err
        assert call("layers", "new", "my-fix", "--in", folder).code == 2
        value = call("layers", "new", "other", "--in", folder, "--json").json
        assert value == {"schema": 1, "name": "other", "directory": str(folder / "other")}
        value = call("layers", "pin", "other", "--patches", folder, "--json").json
        assert value["file"] == str(folder / "other" / "pins.toml")


def test_settings_name_their_source(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    rows = {row["name"]: row for row in call("config", "show", "--json").json["settings"]}
    assert (rows["SOURCE_DATE_EPOCH"]["value"], rows["SOURCE_DATE_EPOCH"]["source"]) == (
        "1",
        "environment",
    )
    assert rows["DOCKER_HOST"]["source"] == "not set"
    assert rows["DOCKER_HOST"]["meaning"] == "the Docker Engine"
    assert {variable.name for variable in settings.VARIABLES} <= set(rows)
    assert "SOURCE_DATE_EPOCH" in call("config", "show").out
    monkeypatch.setenv("SPARK_BUILD_REGISTRY_PASSWORD", "never-shown")
    for words in (("config", "show"), ("config", "show", "--json")):
        shown = call(*words).out
        assert "SPARK_BUILD_REGISTRY_PASSWORD" in shown
        assert "never-shown" not in shown


def test_version(call: Call) -> None:
    result = call("--version")
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"spark-build \d+\.\d+\.\d+\n", result.out)
