"""A check that could not run is never a pass, and every check is seen to fail here."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from builder.applier.receipts import RECEIPTS
from builder.applier.trees import OverlayTree
from builder.common.document import plain
from builder.common.leftovers import keep_latest
from builder.common.plan import digest_of
from builder.errors import SparkBuildError, UsageError
from builder.images.engines.baked import SHARE, read_layers, read_plan
from builder.images.subject import InFiles
from builder.proof.checks import Check, Status, parse_levels
from builder.proof.dispatch import check_dispatch, make_request
from builder.proof.replies import DispatchReply, DispatchRequest, reply_of
from builder.proof.report import Report
from builder.proof.run import verify
from builder.proof.sandbox import IN_USE
from builder.proof.static import check_static
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    BACKEND,
    FakeImage,
    FakeRunner,
    MemoryTree,
    Table,
    dist_files,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    of_env,
    of_files,
    record_line,
    replace_op,
    subject_of,
    vllm_files,
)
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.images.subject import OpenImage
    from builder.proof.checks import Level

# ------------------------------------------------------------------------------------- the report


def report_of(**checks: Status) -> Report:
    made = [
        Check(level=cast("Level", level), name="x", status=status, expected="", seen="")
        for level, status in checks.items()
    ]
    return Report(target="t", plan=planned(), checks=made)


@pytest.mark.parametrize(
    ("checks", "require", "passed"),
    [
        ({}, (), False),
        ({"static": "pass"}, (), True),
        ({"static": "fail"}, (), False),
        ({"static": "not-run"}, (), False),
        ({"static": "pass", "imports": "fail"}, (), False),
        ({"static": "pass", "dispatch": "not-run"}, (), True),
        ({"static": "pass", "dispatch": "not-run"}, ("dispatch",), False),
        ({"static": "pass", "dispatch": "not-run"}, ("static",), True),
        ({"static": "pass"}, ("dispatch",), False),
        ({"static": "pass", "dispatch": "pass"}, ("static", "dispatch"), True),
    ],
)
def test_checks_that_count_as_passed(
    checks: dict[str, Status], require: Sequence[str], passed: bool
) -> None:
    report = report_of(**checks)
    assert report.passed(require) is passed
    value = plain(report.document(require))
    assert value["passed"] is passed
    assert value["not_run"] == list(checks.values()).count("not-run")


@pytest.mark.parametrize(("level", "passed"), [("imports", True), ("dispatch", False)])
def test_a_required_level_with_nothing_to_check(level: Level, passed: bool) -> None:
    """No edited module to follow is fine; no line to expect leaves the kernels unproven."""
    report = report_of(static="pass")
    report.checks.append(
        Check(level=level, name="x", status="not-run", expected="", seen="", reason="r", moot=True)
    )
    assert report.passed([level]) is passed


@pytest.mark.parametrize(
    ("words", "levels"),
    [
        ([], ("static", "imports", "dispatch")),
        (["dispatch,static"], ("static", "dispatch")),
        (["dispatch", "static", "static"], ("static", "dispatch")),
        (["dispatch, static"], ("static", "dispatch")),
    ],
)
def test_levels_come_in_order_of_cost(words: list[str], levels: tuple[str, ...]) -> None:
    assert parse_levels(words) == levels


def test_nothing_is_required_by_default() -> None:
    assert parse_levels([], default=()) == ()


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(UsageError, match="'dispach'; did you mean 'dispatch'"):
        parse_levels(["static,dispach"])


# ----------------------------------------------------------------------------------------- static

SET = env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")
LAYER = make_layer("fix", BACKEND, SET)


def target_of(
    *layers: Layer, files: Mapping[str, bytes] | None = None, **changes: Any
) -> VerifyTarget:
    """A target as a build leaves it."""
    wheels, image = changes.pop("wheels", ()), changes.pop("image", None)
    base = fake_base(files or vllm_files())
    plan = make_plan_of(base, *layers, wheels=wheels)
    tree = OverlayTree(base.tree)
    tree.update(plan.changes)
    target = VerifyTarget(
        name="oci:out",
        subject=subject_of(tree, image=image, env=plan.env),
        plan=plan.document,
        layers=layers,
        runner=FakeRunner(),
    )
    return dataclasses.replace(target, **changes)


def overlay_of(*paths: str) -> InFiles:
    """An overlay that adds files at these paths."""
    return InFiles(files=dict.fromkeys(paths, b""), env={})


def static(target: VerifyTarget) -> dict[str, Check]:
    return {check.name: check for check in check_static(target)}


def edited(target: VerifyTarget, path: str, data: bytes | None) -> VerifyTarget:
    """The target with a file that somebody else changed or took away."""
    tree = MemoryTree(
        {name: target.tree.read(name) or b"" for name in _paths(target.tree) if name != path}
    )
    if data is not None:
        tree.files[path] = data
    return of_files(target, tree)


def _paths(tree: Any, folder: str = "") -> list[str]:
    found: list[str] = []
    for name in tree.children(folder):
        path = f"{folder}/{name}" if folder else name
        found += [path] if tree.read(path) is not None else _paths(tree, path)
    return found


def test_a_good_target_passes_every_static_check() -> None:
    checks = static(target_of(LAYER))
    assert {check.status for check in checks.values()} == {"pass"}
    assert list(checks) == [
        "layer fix",
        "environment",
        "patched modules parse",
        "no other file touched",
        "imported modules",
    ]


@pytest.mark.parametrize(
    ("kind", "image", "why"),
    [
        ("dir", None, "of a directory, only site-packages is read"),
        ("docker", FakeImage(in_engine=True), "an image in a Docker Engine"),
        ("oci", InFiles(files={}, env={}), ""),
        ("pypi", None, ""),
    ],
)
def test_what_a_target_does_not_show_is_named(kind: str, image: OpenImage | None, why: str) -> None:
    """Without the layers of an image nobody looked at its startup hooks, so no pass says it."""
    target = target_of(LAYER, image=image)
    identity = dataclasses.replace(target.subject.identity, kind=kind)
    target = dataclasses.replace(
        target, subject=dataclasses.replace(target.subject, identity=identity)
    )
    checks = static(target)
    assert "site-packages" in checks["imported modules"].seen
    if not why:
        assert "startup hooks" not in checks
        return
    check = checks["startup hooks"]
    assert (check.status, check.moot, check.seen) == ("not-run", True, "")
    assert why in check.reason
    assert "sys.path" in check.reason
    assert verify(target, ["static"]).verdict().status == "proven", "it is not what was asked"
    subject = target.subject.planned(target.tree, target.env)
    assert "startup hooks" not in static(dataclasses.replace(target, subject=subject))


@pytest.mark.parametrize(
    ("path", "data", "name", "where"),
    [
        pytest.param(f"{RECEIPTS}/fix.json", None, "layer fix", f"{RECEIPTS}/fix.json", id="gone"),
        pytest.param("vllm/core.py", b"x = 1\n", "layer fix", "vllm/core.py", id="edited"),
        pytest.param("vllm/core.py", b"x = (\n", "patched modules parse", "vllm/core.py", id="py"),
        pytest.param("vllm/envs.py", b"", "no other file touched", "vllm/envs.py", id="other"),
        pytest.param("vllm/envs.py", None, "no other file touched", "vllm/envs.py", id="lost"),
    ],
)
def test_a_failed_static_check_names_the_file(
    path: str, data: bytes | None, name: str, where: str
) -> None:
    check = static(edited(target_of(LAYER), path, data))[name]
    assert (check.status, check.where) == ("fail", where)


OTHER = f"sha256:{'0' * 64}"


def baked(target: VerifyTarget, label: str = "", **changes: Any) -> VerifyTarget:
    """The target with its plan read back from an image, changed."""
    plan = read_plan(json.dumps({**plain(target.plan), **changes}).encode(), "image")
    return dataclasses.replace(target, plan=plan.document, label=label, recomputed=plan.digest)


def test_a_new_plan_is_not_checked() -> None:
    assert "plan" not in static(target_of(LAYER))


def test_a_baked_plan_passes_with_and_without_a_label() -> None:
    target = target_of(LAYER)
    for label in ("", target.plan.plan_digest):
        check = static(baked(target, label))["plan"]
        assert (check.status, check.seen) == ("pass", target.plan.plan_digest)


@pytest.mark.parametrize(
    ("changes", "label", "seen"),
    [
        pytest.param({"env": {}}, "", "but it states", id="edited"),
        pytest.param({"plan_digest": OTHER}, "", f"but it states {OTHER}", id="digest"),
        pytest.param({"later": 1}, "", "but it states", id="a newer key"),
        pytest.param(
            {}, "sha256:1", "but the label of the image states sha256:1", id="another plan"
        ),
    ],
)
def test_a_changed_plan_fails(changes: dict[str, Any], label: str, seen: str) -> None:
    check = static(baked(target_of(LAYER), label, **changes))["plan"]
    assert check.status == "fail"
    assert seen in check.seen
    assert check.reason == "changed after the image was built"


@pytest.mark.parametrize("layers", [(), (make_layer("fix", BACKEND),)])
def test_layers_that_differ_from_the_plan_fail(layers: tuple[Layer, ...]) -> None:
    target = dataclasses.replace(baked(target_of(LAYER)), layers=layers)
    assert "layers.json has another fix" in static(target)["plan"].seen


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"plan_digest": "x"}'])
def test_a_malformed_plan_is_refused(text: bytes) -> None:
    with pytest.raises(UsageError, match=r"^image: /usr/share/spark-build/plan.json is "):
        read_plan(text, "image")


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"\xff", b"{}", b"[1]", b'[{"name": 1}]', b"[" * 99999,
        b'[{"name": "x", "summary": "\\ud800"}]',
    ],
)  # fmt: skip
def test_a_malformed_list_of_layers_is_refused(text: bytes) -> None:
    with pytest.raises(UsageError, match=r"^image: /usr/share/spark-build/layers.json is "):
        read_layers(text, "image")
    assert read_layers(None, "image") == []


@pytest.mark.parametrize("build", [None, [], {}, {"epoch": "1"}, {"epoch": -1}, {"epoch": 10**99}])
def test_a_plan_without_build_settings_is_refused(build: object) -> None:
    document = make_plan_of(fake_base(vllm_files()), LAYER).as_json()
    whole: Any = {**document["build"], **build} if isinstance(build, dict) else build
    if build == {}:
        del whole["epoch"]
    with pytest.raises(UsageError, match=r"is not a plan: .*build"):
        read_plan(json.dumps({**document, "build": whole}).encode(), "image")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layers", ["fix"], r"Expected `object`, got `str` - at `\$\.layers\[0\]`"),
        ("layers", [{}], r"Object missing required field `name` - at `\$\.layers\[0\]`"),
        ("base", {"kind": 1}, r"Expected `str`, got `int` - at `\$\.base\.kind`"),
        ("env", {"A": 1}, r"Expected `str`, got `int` - at `\$\.env\[...\]`"),
        ("serve_flags", "x", r"Expected `array`, got `str` - at `\$\.serve_flags`"),
        ("expect", [{"kind": "moe"}], r"moe must have one of .* - at `\$\.expect\[0\]`"),
        ("plan_digest", "sha256:x", r"Expected `str` matching .* - at `\$\.plan_digest`"),
    ],
)
def test_a_plan_with_wrong_types_is_refused(key: str, value: object, said: str) -> None:
    document = make_plan_of(fake_base(vllm_files()), LAYER).as_json()
    with pytest.raises(UsageError, match=rf"is not a plan: {said}"):
        read_plan(json.dumps({**document, key: value}).encode(), "image")
    assert read_plan(json.dumps({**document, "later": 1}).encode(), "image").json["later"] == 1


def test_an_input_with_a_newer_key_is_read_and_counts_in_the_digest() -> None:
    document = make_plan_of(fake_base(vllm_files()), LAYER).as_json()
    pin = {"distribution": "a", "version": "1", "filename": "a.whl", "sha256": "0" * 64}
    document["layers"][0]["inputs"] = [pin]
    before = read_plan(json.dumps(document).encode(), "image")
    document["layers"][0]["inputs"] = [{**pin, "later": 1}]
    after = read_plan(json.dumps(document).encode(), "image")
    assert after.document == before.document
    assert after.digest == digest_of(document) != before.digest


def test_a_plan_for_no_vllm_is_refused() -> None:
    document = make_plan_of(fake_base(vllm_files()), LAYER).as_json()
    document["base"]["packages"] = {}
    with pytest.raises(UsageError, match=r"is not a plan: base\.packages lacks vllm"):
        read_plan(json.dumps(document).encode(), "image")


def test_a_newer_plan_schema_is_refused_and_an_older_one_is_read() -> None:
    document = make_plan_of(fake_base(vllm_files()), LAYER).as_json()
    with pytest.raises(UsageError, match=r"has schema 3, .* reads 1 to 2: a newer one made it"):
        read_plan(json.dumps({**document, "schema": 3}).encode(), "image")
    older = {**document, "schema": 1}
    del older["build"]
    assert read_plan(json.dumps(older).encode(), "image").json == older


@pytest.mark.parametrize("env", [{}, {"VLLM_NVFP4_GEMM_BACKEND": "cutlass"}])
def test_a_missing_variable_fails(env: dict[str, str]) -> None:
    check = static(of_env(target_of(LAYER), env))["environment"]
    assert check.status == "fail"
    assert check.reason == "VLLM_NVFP4_GEMM_BACKEND differs"
    assert check.expected == "VLLM_NVFP4_GEMM_BACKEND=marlin"


def test_a_file_in_place_of_a_folder_fails() -> None:
    """As a copy onto ``vllm`` would leave it; what is below would be gone."""
    target = target_of(make_layer("fix", BACKEND, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")))
    record = target.tree.read("vllm-0.20.1.dist-info/RECORD") or b""
    for path in ("vllm", "vllm/core.py/x"):
        row = record_line(path, b"x").encode()
        odd = edited(target, "vllm-0.20.1.dist-info/RECORD", row + record)
        check = static(edited(odd, path, b"x"))["no other file touched"]
        assert check.status == "fail"
        assert "needs a folder there" in check.seen


@pytest.mark.parametrize("path", ["/usr/bin/vllm", "/etc/ld.so.preload", "/usr/lib/x.py"])
def test_an_overlay_adds_nothing_elsewhere(path: str) -> None:
    own = (f"{SHARE}/x.py", "/usr/local/bin/spark-verify", "/workspace/build-metadata.yaml")
    target = target_of(LAYER, image=overlay_of(*own))
    assert static(target)["no other file touched"].status == "pass"
    odd = target_of(LAYER, image=overlay_of(*own, path))
    assert static(odd)["no other file touched"].where == path


def test_a_changed_command_of_a_package_fails() -> None:
    files = vllm_files()
    files["vllm-0.20.1.dist-info/RECORD"] += record_line("../../../bin/vllm", b"good").encode()
    place = "/usr/bin/vllm"
    for data, status in ((b"good", "pass"), (b"evil", "fail")):
        target = target_of(LAYER, files=files, image=FakeImage(files={place: data}))
        assert target.plan.base.site_packages == "/usr/lib/python3/dist-packages"
        assert static(target)["no other file touched"].status == status


def test_an_unpatched_base_fails() -> None:
    patched = target_of(LAYER)
    checks = static(of_files(patched, fake_base(vllm_files()).tree))
    assert checks["layer fix"].status == "fail"
    assert checks["layer fix"].reason == "layer fix is missing"


def test_a_change_in_the_base_needs_no_receipt() -> None:
    files = vllm_files()
    files["vllm/core.py"] = files["vllm/core.py"].replace(b"cutlass", b"b12x")
    checks = static(target_of(make_layer("fix", BACKEND), files=files))
    assert checks["layer fix"].status == "pass"
    assert checks["no other file touched"].status == "fail"


def test_a_tree_without_any_record_does_not_pass() -> None:
    files = {path: data for path, data in vllm_files().items() if "RECORD" not in path}
    assert static(target_of(LAYER, files=files))["no other file touched"].status == "fail"


def test_files_of_a_wheel_layer_are_compared_with_its_record() -> None:
    wheel = make_wheel("lib", "2.0", {"lib/__init__.py": "v = 2\n"})
    op = {"op": "wheel", "distribution": "lib", "version": "2.0"}
    layer = make_layer("lib", op, wheels=[wheel])
    files = vllm_files() | dist_files("lib", "1.0", {"lib/__init__.py": "", "lib/old.py": ""})
    target = target_of(layer, files=files, wheels=[wheel])
    assert {check.status for check in static(target).values()} == {"pass"}
    assert "7 files match RECORD" in static(target)["no other file touched"].seen
    broken = edited(target, "lib/__init__.py", b"v = 3\n")
    assert static(broken)["no other file touched"].where == "lib/__init__.py"


@pytest.mark.parametrize(
    ("op", "state"),
    [
        (replace_op("gone", "never"), "drift"),
        (replace_op("BACKEND", "BACK"), "ambiguous"),
        ({"op": "compile"}, "needs-rebuild"),
    ],
)
def test_a_layer_that_does_not_fit_fails(op: Table, state: str) -> None:
    check = static(target_of(make_layer("fix", op)))["layer fix"]
    assert check.status == "fail"
    assert state in f"{check.seen} {check.reason}"


def test_a_layer_that_was_not_needed_is_not_checked() -> None:
    assert "layer idle" not in static(target_of(LAYER, make_layer("idle", package="sglang")))


# --------------------------------------------------------------------------------------- dispatch

EXPECT = [
    {"kind": "nvfp4-linear", "line": "Using MarlinKernel for NVFP4 GEMM"},
    {"kind": "nvfp4-moe", "line": "Using 'MARLIN' MoE"},
]
PLAN = planned(
    env={"VLLM_X": "1"},
    serve_flags=["--linear-backend", "marlin"],
    moe_serve_flags=["--moe-backend", "cutlass"],
    expect=EXPECT,
)


def answer(
    *lines: str,
    selected: str | None = "x",
    error: Mapping[str, str] | None = None,
    not_applicable: str | None = None,
) -> Any:
    return {
        "lines": list(lines),
        "selected": selected,
        "error": error,
        "not_applicable": not_applicable,
    }


def dispatch(*answers: Any, **changes: Any) -> list[Check]:
    """The checks when the target's vLLM answers like that."""
    result = {"fatal": None, "simulated": ["the device"], "answers": list(answers)}

    def ask(request: DispatchRequest) -> DispatchReply:
        assert len(request.ask) == len(answers) or changes
        return reply_of({**result, **changes}, DispatchReply)

    return list(
        check_dispatch(dataclasses.replace(target_of(LAYER), plan=PLAN, runner=FakeRunner(ask=ask)))
    )


GOOD = [answer(expectation["line"]) for expectation in EXPECT]
DEFAULT = [answer("Using Default", selected="Default")] * 2


def test_the_expected_lines_pass_with_the_line_as_evidence() -> None:
    checks = dispatch(*GOOD, *DEFAULT)
    assert [(c.name, c.status, c.seen) for c in checks] == [
        (e["kind"], "pass", e["line"]) for e in EXPECT
    ]
    assert checks[0].simulated == ("the device",)


@pytest.mark.parametrize(
    ("bad", "seen", "reason"),
    [
        (answer("noise", "Using x"), "Using x", "selected instead: x"),
        (answer("Using y"), "selected x; no log line says so", "selected instead: x"),
        (
            answer(selected=None, error={"type": "ValueError", "message": "not\n  supported"}),
            "ValueError: not supported",
            "the choice was refused; without these settings it is: Default",
        ),
        (
            answer(EXPECT[0]["line"], error={"type": "E", "message": "later"}),
            "E: later",
            "selected instead: x",
        ),
    ],
)
def test_another_line_or_an_error_fails(bad: Any, seen: str, reason: str) -> None:
    linear, moe = dispatch(bad, GOOD[1], *DEFAULT)
    assert (linear.status, linear.seen, linear.reason) == ("fail", seen, reason)
    assert linear.expected == EXPECT[0]["line"]
    assert moe.status == "pass"


@pytest.mark.parametrize("wanted", [{"line": "Using"}, {"selected": "*"}, {"refused": "x"}])
def test_an_unavailable_check_is_not_run_and_never_a_pass(wanted: Any) -> None:
    """Not even where the profile would be content with any kernel, or with a refusal."""
    reason = "this release has no linear_backend setting"
    plan = planned(PLAN, expect=[{"kind": "w4a16-linear", **wanted}])
    replies = [answer(selected=None, not_applicable=reason), answer("Using x")]
    reply = reply_of({"answers": replies}, DispatchReply)
    target = dataclasses.replace(
        target_of(LAYER), plan=plan, runner=FakeRunner(ask=lambda _: reply)
    )
    (check,) = check_dispatch(target)
    assert (check.status, check.reason) == ("not-run", f"not applicable: {reason}")


def test_a_vllm_that_does_not_import_fails_every_line() -> None:
    checks = dispatch(fatal={"type": "ImportError", "message": "no module"})
    assert [check.status for check in checks] == ["fail", "fail"]
    assert checks[0].seen == "ImportError: no module"


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        (
            "Crashed",
            "the child that asked ended with signal 9",
            "the child that asked ended with signal 9; Linux does this where memory runs out",
        ),
        ("Crashed", "the child that asked took more than 120 s", "took more than 120 s"),
        ("MemoryError", "", "on this machine: MemoryError"),
        ("EOFError", "marshal data too short", "on this machine: EOFError: marshal data"),
        ("OSError", "[Errno 28] No space left on device: 'x'", "on this machine: OSError: [Errno"),
        ("ImportError", "x: cannot allocate memory in static TLS", "on this machine: ImportError"),
        ("RuntimeError", "can't start new thread", "on this machine: RuntimeError: can't start"),
    ],
)
def test_what_this_machine_caused_is_no_failure(kind: str, message: str, reason: str) -> None:
    error = {"type": kind, "message": message}
    linear, moe = dispatch(answer(selected=None, error=error), GOOD[1], *DEFAULT)
    assert (linear.status, moe.status) == ("not-run", "pass")
    assert reason in linear.reason
    for check in dispatch(fatal=error):
        assert check.status == "not-run"
        assert reason in check.reason


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x'"),
        ("PermissionError", "[Errno 13] Permission denied: '/root'"),
        ("EOFError", "no more input"),
        ("ImportError", "libcudart.so.12: cannot open shared object file"),
    ],
)
def test_what_the_target_may_have_caused_is_a_failure(kind: str, message: str) -> None:
    error = {"type": kind, "message": message}
    assert dispatch(answer(selected=None, error=error), GOOD[1], *DEFAULT)[0].status == "fail"


class Doubting(FakeRunner):
    """A runner whose folders were damaged when it answered first."""

    again: DispatchReply | None = None

    def doubt(self, request: DispatchRequest) -> DispatchReply | None:
        assert request.ask
        return self.again


@pytest.mark.parametrize(("damaged", "status"), [(True, "pass"), (False, "fail")])
def test_a_failure_is_doubted(damaged: bool, status: str) -> None:
    wrong = answer(selected=None, error={"type": "ValueError", "message": "not supported"})
    first, again = (
        reply_of({"fatal": None, "simulated": [], "answers": answers}, DispatchReply)
        for answers in ([wrong, GOOD[1], *DEFAULT], [*GOOD, *DEFAULT])
    )
    runner = Doubting(ask=lambda _: first)
    runner.again = again if damaged else None
    target = dataclasses.replace(target_of(LAYER), plan=PLAN, runner=runner)
    assert [check.status for check in check_dispatch(target)] == [status, "pass"]


def test_a_target_that_cannot_run_has_a_reason() -> None:
    target = dataclasses.replace(target_of(LAYER), plan=PLAN)
    checks = list(check_dispatch(target))
    assert [(c.status, c.reason) for c in checks] == [("not-run", "no sandbox")] * 2

    def ask(request: DispatchRequest) -> DispatchReply:
        raise SparkBuildError("the probe took too long")

    checks = list(check_dispatch(dataclasses.replace(target, runner=FakeRunner(ask=ask))))
    assert [(c.status, c.reason) for c in checks] == [("not-run", "the probe took too long")] * 2


def test_without_a_profile_no_line_is_expected_and_none_passes() -> None:
    target = dataclasses.replace(target_of(LAYER), plan=planned(PLAN, expect=[]))
    assert [check.status for check in check_dispatch(target)] == ["not-run"]


def test_the_probe_runs_with_and_without_the_settings() -> None:
    request = make_request(PLAN, {"OTHER": "2"})
    assert request.env == {"OTHER": "2", "VLLM_X": "1"}
    assert [plain(one) for one in request.ask] == [
        {"kind": "nvfp4-linear", "linear_backend": "marlin"},
        {"kind": "nvfp4-moe", "moe_backend": "cutlass"},
        {"kind": "nvfp4-linear", "env": {"VLLM_X": None}},
        {"kind": "nvfp4-moe", "env": {"VLLM_X": None}},
    ]


# ------------------------------------------------------------------------------------ all together


def test_levels_that_were_not_requested_do_not_run() -> None:
    report = verify(target_of(LAYER), ["static"])
    assert {check.level for check in report.checks} == {"static"}
    assert report.passed()


@pytest.mark.parametrize("level", ["dispatch", "codegen", "numbers"])
def test_what_is_not_imported_here_is_not_run(level: str) -> None:
    """The probes import copies of Python files; in the target another file comes first."""
    target = edited(target_of(LAYER), "vllm/core.abi3.so", b"x")

    def ask(_request: DispatchRequest) -> DispatchReply:
        raise AssertionError("it was run")

    report = verify(dataclasses.replace(target, runner=FakeRunner(ask=ask)), [level])
    (check,) = report.checks
    assert (check.status, check.where) == ("not-run", "vllm/core.abi3.so")
    assert "vllm/core.abi3.so instead of vllm/core.py" in check.reason
    assert not report.passed()


def test_all_levels_together() -> None:
    report = verify(target_of(LAYER), ["static", "imports", "dispatch"])
    assert [c.level for c in report.of("not-run")] == ["dispatch"]
    assert report.passed()
    assert not report.passed(["dispatch"])


def test_what_another_run_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    keep_latest([tmp_path / "gone", tmp_path / "here"], most=1)

    def removed(path: Path) -> int:
        raise FileNotFoundError(path)

    keep_latest(tmp_path.iterdir(), most_bytes=1, size=removed)
    assert (tmp_path / "here").exists()


def test_a_tree_in_use_by_another_run_is_kept(tmp_path: Path) -> None:
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        age = 7200.0 * (number < 3)
        os.utime(folder, (time.time() - age + number, time.time() - age + number))
    keep_latest(tmp_path.iterdir(), most=1, unused_for=IN_USE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]
