"""The level ``numbers`` without FlashInfer: launches in files, how they are run, what is said."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from builder.common.document import plain, read
from builder.common.paths import cache_dir, package_file
from builder.common.plan import ExpectedChoice
from builder.common.programs import LAUNCH, Program
from builder.errors import SparkBuildError, UsageError
from builder.proof import kernels, replies, sandbox
from builder.proof.isolation import Bubblewrap, SandboxUnavailable
from builder.proof.kernels import (
    ABSENT,
    LAUNCHED,
    LAYER,
    MOE_LAYER,
    NO_LAYER,
    OF_PACKAGE,
    PACKAGE,
    Replies,
    Reply,
    launch_in_sandbox,
    launch_request,
    wanted_launches,
)
from builder.proof.numbers import check_numbers, judged
from builder.proof.runners import NO_LAUNCH
from builder.proof.sandbox import NoDsl
from builder.proof.target import VerifyTarget
from builder.proof.trust import IsolatedRun, TrustedSources
from builder.ptx import runs
from builder.ptx.findings import FoundRace, Line, Ran, Run
from builder.ptx.grid import Schedule
from builder.ptx.launchfile import Comparison, ExpectedResult, compare, read_launch
from builder.ptx.machine import from_bf16, to_bf16
from builder.ptx.runs import run_file, run_files
from tests.unit.fakes import FakeRunner, dist_files, fake_base, of_files, vllm_files
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.proof.checks import Check

LINEAR = ExpectedChoice(kind="nvfp4-linear", line="Using FlashInferB12xNvFp4LinearKernel")
MOE = ExpectedChoice(kind="nvfp4-moe", line="Using 'FLASHINFER_B12X' NvFp4 MoE backend")
A16 = ExpectedChoice(
    kind="w4a16-linear", line="Using FlashInferCuteDslNvFp4W4A16LinearKernel for NVFP4 GEMM"
)
A16_EXPERTS = ExpectedChoice(kind="w4a16-moe", line="Using 'FLASHINFER_B12X' NvFp4 MoE backend")
MARLIN = ExpectedChoice(kind="nvfp4-linear", line="Using MarlinNvFp4LinearKernel")

#: Doubles 32 bfloat16 numbers, each lane one, by way of shared memory; {sync} orders the reading.
PTX = """.version 9.1
.target sm_121a
.visible .entry twice(.param .u64 p_in, .param .u64 p_out)
{{
.reg .b16 %rs<3>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
.shared .align 16 .b8 words[256];
ld.param.u64 %rd1, [p_in]; ld.param.u64 %rd2, [p_out]; mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 2; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
ld.global.b16 %rs1, [%rd1]; cvt.f32.bf16 %r2, %rs1; add.f32 %r2, %r2, %r2;
mov.b32 %r3, words; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4;
st.shared.b32 [%r5], %r2;
{sync}
xor.b32 %r4, %r4, 252; add.s32 %r5, %r3, %r4;
ld.shared.b32 %r2, [%r5]; cvt.rn.bf16.f32 %rs2, %r2;
st.global.b16 [%rd2], %rs2;
ret;
}}
"""


def write_launch(folder: Path, *, sync: str = "bar.sync 0;", **changes: Any) -> Path:
    """A launch of it with 64 threads."""
    folder.mkdir(parents=True, exist_ok=True)
    values = to_bf16(np.arange(64, dtype=np.float32)).astype(np.uint16)
    (folder / "in.bin").write_bytes(values.tobytes())
    (folder / "out.bin").write_bytes(b"\xff" * 128)
    exact = from_bf16(values)[::-1].astype(np.float64) * 2
    (folder / "exact.f64").write_bytes(exact.tobytes())
    (folder / "bound.f64").write_bytes(np.zeros(64).tobytes())
    (folder / "kernel.ptx").write_text(PTX.format(sync=sync))
    document = {
        "schema": 1,
        "name": "doubled",
        "ptx": "kernel.ptx",
        "kernel": "twice",
        "grid": [1, 1, 1],
        "block": [64, 1, 1],
        "shared": 0,
        "parameters": [(0x1000).to_bytes(8, "little").hex(), (0x2000).to_bytes(8, "little").hex()],
        "memory": [
            {"address": 0x1000, "file": "in.bin", "writable": False},
            {"address": 0x2000, "file": "out.bin", "writable": True},
        ],
        "result": {
            "address": 0x2000,
            "type": "bf16",
            "shape": [64],
            "exact": "exact.f64",
            "bound": "bound.f64",
        },
        **changes,
    }
    path = folder / "launch.json"
    path.write_text(json.dumps(document))
    return path


# -------------------------------------------------------------------------------- launches in files


def test_a_launch_runs_in_every_schedule(tmp_path: Path) -> None:
    ran = run_file(write_launch(tmp_path))
    assert (ran.kernel, ran.blocks) == ("twice", 3)
    assert [(r.schedule, r.values, r.wrong, r.races) for r in ran.runs] == [
        ("eager", 64, 0, ()),
        ("lazy", 64, 0, ()),
        ("random 1", 64, 0, ()),
    ]
    assert read(plain(ran), Ran) == ran


def test_a_race_and_its_wrong_values_are_in_the_runs(tmp_path: Path) -> None:
    eager, *_ = run_file(write_launch(tmp_path, sync="")).runs
    assert eager.wrong == 32
    assert eager.said.startswith("32 of 64 values wrong, 32 of them NaN; worst at [0]: nan instead")
    race = next(r for r in eager.races if r.kind == "write without order after a read")
    assert re.match(
        r"write without order after a read: line 11 \(warp 1\) and line 14 \(warp 0\), 32 places",
        str(race),
    )
    assert race.lines[0].text == "st.shared.b32 [%r5], %r2;"


def then(folder: Path, **changes: Any) -> Path:
    """A launch that doubles what :func:`write_launch`'s left, backwards again, in array 0x3000."""
    memory = [
        {"address": 0x2000, "file": "out.bin", "writable": True},
        {"address": 0x3000, "file": "out.bin", "name": "more", "writable": True},
    ]
    words = [(place).to_bytes(8, "little").hex() for place in (0x2000, 0x3000)]
    path = write_launch(folder, memory=memory, parameters=words, **changes)
    document = json.loads(path.read_text())
    document["result"]["address"] = 0x3000
    path.write_text(json.dumps(document))
    return path


def test_a_launch_uses_the_output_of_earlier_ones(tmp_path: Path) -> None:
    first, second = write_launch(tmp_path / "first"), then(tmp_path / "second")
    exact = np.arange(64, dtype=np.float64) * 4
    (tmp_path / "second" / "exact.f64").write_bytes(exact.tobytes())
    one, two = run_files([first, second])
    assert [run.wrong for run in (*one.runs, *two.runs)] == [0] * 6
    # alone it has the memory that the host left: NaN
    assert [run.wrong for run in run_file(second).runs] == [64] * 3


def test_host_changes_between_launches_are_kept(tmp_path: Path) -> None:
    first, second = write_launch(tmp_path / "first"), then(tmp_path / "second")
    ones = np.full(32, 0x3F80, np.uint16).tobytes()
    (tmp_path / "second" / "out.bin").write_bytes(ones + b"\xff" * 64)
    exact = np.array([4.0 * n for n in range(32)] + [2.0] * 32)
    (tmp_path / "second" / "exact.f64").write_bytes(exact.tobytes())
    assert [run.wrong for run in run_files([first, second])[1].runs] == [0] * 3


def test_nothing_runs_after_a_launch_that_did_not_end(tmp_path: Path) -> None:
    first = write_launch(tmp_path / "first", block=[96, 1, 1])
    one, two = run_files([first, then(tmp_path / "second")])
    assert (len(one.runs), two.runs) == (3, ())


def test_a_fault_is_a_result(tmp_path: Path) -> None:
    ran = run_file(write_launch(tmp_path, block=[96, 1, 1]))
    assert all("outside every buffer" in run.fault for run in ran.runs)
    assert not any(run.deadlock for run in ran.runs)
    stuck = run_file(write_launch(tmp_path, sync="bar.sync 0, 128;"))
    assert all(run.deadlock and "waits at barrier 0" in run.fault for run in stuck.runs)


def test_findings_before_a_fault_are_kept(tmp_path: Path) -> None:
    unset = "ld.shared.b32 %r6, [words+128]; bar.sync 0, 128;"
    eager, lazy, _ = run_file(write_launch(tmp_path, sync=unset)).runs
    assert eager.deadlock
    assert any(str(r).startswith("read of uninitialised memory: line 12") for r in eager.races)
    assert (lazy.watched, lazy.races) == (False, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "thrice"}, "no kernel thrice; it has twice"),
        ({"parameters": ["00"]}, "parameters of [1] bytes; twice takes [8, 8]"),
        ({"schema": 2}, "schema 2, not 1"),
        ({"grid": [1, 1]}, "is not a launch: grid is not a list of three numbers"),
        ({"memory": [{"address": 0}]}, "array memory-0 has none of file, values, fill"),
        ({"ptx": "none.ptx"}, "none.ptx: No such file or directory"),
        ({"parameters": ["xy"]}, "is not a launch"),
        ({"result": {"type": "f8", "shape": [1]}}, "results of type f8 are not known"),
    ],
)
def test_malformed_launches(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_file(write_launch(tmp_path, **changes))
    assert words in str(caught.value)


def test_values_are_judged_one_by_one() -> None:
    expected = ExpectedResult(
        0, (2, 2), np.array([[1.0, 2], [3, 4]]), np.array([[0.0, 0.5], [0.5, 0]])
    )
    assert compare(np.array([[1.0, 2.5], [2.5, 4]]), expected) == Comparison(4, 0, 0)
    assert str(compare(expected.exact, expected)) == "4 values right"
    bad = compare(np.array([[1.0, 9], [np.nan, np.inf]]), expected)
    assert (bad.wrong, bad.nans) == (3, 1)
    unknown = ExpectedResult(0, (2,), np.array([np.nan, 1.0]), np.array([1.0, np.nan]))
    assert compare(np.array([1.0, 1.0]), unknown).wrong == 2, "what cannot be compared is not right"
    assert str(compare(np.array([[1.0, 9], [3, 4]]), expected)) == (
        "1 of 4 values wrong; worst at [0,1]: 9 instead of 2 +- 0.5"
    )


def test_memory_is_reset_for_every_run(tmp_path: Path) -> None:
    file = read_launch(write_launch(tmp_path))
    first = file.fresh_memory()
    first.regions[1].data[:] = 0
    assert (file.fresh_memory().regions[1].data == 0xFF).all()


# ---------------------------------------------------------------------------------------- the level

GOOD = Run(
    launch="random", schedule="eager", values=64, watched=True, instructions=9, covered=(0, 3)
)
WRONG = Run(launch="random", schedule="lazy", values=64, wrong=3, said="3 of 64 values wrong")
AT, OTHER, THIRD = Line(1, "a;", "k.py:7"), Line(2, "b;", "k.py:9"), Line(3, "c;")
AGENTS = ("warp 0", "warp 1")
RACES = tuple(FoundRace("early", lines, AGENTS, 0, 4) for lines in ((AT, OTHER), (AT, THIRD)))
RACY = Run(launch="random", schedule="eager", values=64, races=RACES)
STUCK = Run(launch="random", schedule="eager", fault="block 0: warp 1 waits", deadlock=True)


def test_a_kernel_is_judged_by_races_between_warps_and_blocks() -> None:
    shared, lanes = RACES[0], replace(RACES[0], kind="early in the same warp")
    apart, other = replace(shared, missing="bar.warp.sync between two"), replace(shared, memory="x")
    run = Run(launch="one", schedule="eager", races=(shared, lanes, apart, other))
    assert judged(run) == (shared, other)


def reply_of(*runs: Run, error: str = "") -> Reply:
    """What came of one kernel."""
    ran = (Ran("k", "f" * 64, 4, runs, 9, ("k.py:7", "k.py:8")),) if runs else ()
    return Reply(error=error, stage="call" if error else "", ran=ran)


def target_of(
    answer: Sequence[Reply] | SparkBuildError | None, *expect: ExpectedChoice
) -> VerifyTarget:
    """A target whose kernels give these replies."""

    def launch(request: Mapping[str, Any]) -> Replies:
        if isinstance(answer, SparkBuildError):
            raise answer
        assert answer is not None
        assert len(request["kernels"]) == len(answer)
        layers = [k for k in request["kernels"] if k["kind"] in (LAYER, MOE_LAYER)]
        backends = {(k["linear_backend"], k["moe_backend"]) for k in layers}
        assert backends <= {("b12x", "auto")}, "as the profile's flags have it"
        versions = {"flashinfer-python": "0.6.9", "nvidia-cutlass-dsl": "4.4.2"}
        return Replies(replies=tuple(answer), versions=versions, simulated=("torch",))

    return VerifyTarget(
        name="t",
        subject=fake_base(vllm_files()),
        plan=replace(planned(), expect=expect, serve_flags=("--linear-backend", "b12x")),
        layers=(),
        runner=FakeRunner(launcher=None if answer is None else launch, why=NO_LAUNCH),
    )


def first(*runs: Run, error: str = "") -> Check:
    """The check of the first kernel."""
    replies = [reply_of(*runs, error=error)] * len(wanted_launches([LINEAR]))
    return next(check_numbers(target_of(replies, LINEAR)))


def test_a_race_message_names_both_sources() -> None:
    assert [str(race) for race in RACES] == [
        f"early: line 1 (warp 0, k.py:7) and line {other}, 4 places from shared memory offset 0"
        for other in ("2 (warp 1, k.py:9)", "3 (warp 1)")
    ]


def test_right_values_pass_with_the_launches_listed() -> None:
    check = first(GOOD, GOOD)
    assert (check.status, check.name) == ("pass", "b12x GEMM, tile 128x128")
    assert check.seen == (
        "128 values right, in 1 launch and 2 schedules each; no race; 2 of 4 basic blocks, "
        "7 of 9 source lines ran; 18 warp instructions"
    )
    assert check.where == "FlashInfer 0.6.9 + CuTe DSL 4.4.2 of t; PTX ffffffffffff"
    assert check.figures == {
        "values": 128, "wrong": 0, "races": 0, "did not end": 0, "inputs": 1, "schedules": 1,
        "% of code run": 50,
    }  # fmt: skip
    bad = first(GOOD, WRONG, RACY, STUCK).figures
    assert [bad[name] for name in ("wrong", "races", "did not end")] == [3, 2, 1]
    assert check.simulated[0] == "torch"
    assert any("executed on a CPU" in words for words in check.simulated)


UNSET = tuple(
    FoundRace("read of uninitialised memory", (line,), ("warp 0",), 0, 4) for line in (AT, OTHER)
)
EMPTY = Run(launch="random", schedule="eager", values=64, races=UNSET)


def test_an_uninitialised_read_fails_if_it_can_matter() -> None:
    check = first(GOOD, EMPTY)
    assert check.status == "pass"
    assert f"; no race; {UNSET[0]} (and 1 more): NaN there changed no value; 2 of" in check.seen
    for other in (WRONG, STUCK):
        check = first(GOOD, EMPTY, other)
        assert (check.status, check.seen.endswith(f"race, {UNSET[0]} (and 1 more)")) == (
            "fail",
            True,
        )
    check = first(EMPTY, RACY)
    assert (check.status, check.seen) == ("fail", f"race, {RACES[0]} (and 1 more)")


def test_coverage_is_reported_for_each_kernel() -> None:
    ran = (
        Ran("k", "f" * 64, 4, (GOOD,), 9, ("k.py:7", "k.py:9", "k.py:10")),
        Ran("k", "f" * 64, 4, (GOOD,), 9, ("k.py:8", "k.py:9", "k.py:10")),
        Ran("l", "f" * 64, 5, (GOOD,), 3, ("l.py:4",)),
    )
    replies = [Reply(error="", stage="", ran=ran)] * len(wanted_launches([LINEAR]))
    check = next(check_numbers(target_of(replies, LINEAR)))
    assert "; 2 of 4 and 2 of 5 basic blocks, 7 of 9 and 2 of 3 source lines ran; " in check.seen
    assert check.unreached == ("k.py:9", "k.py:10", "l.py:4"), "of both launches of a kernel"
    assert first(GOOD, WRONG).unreached == ("k.py:7", "k.py:8"), "whatever was found"


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ((GOOD, WRONG), "wrong values in 1 run of 2 (lazy); random, lazy: 3 of 64 values wrong"),
        (
            (GOOD, RACY, RACY),
            f"race, {RACES[0]} (and 1 more)",
        ),
        ((GOOD, STUCK), "1 run did not end; random, eager: deadlock: block 0: warp 1 waits"),
        ((STUCK,), "random, eager: deadlock: block 0: warp 1 waits"),
        ((Run(launch="random", schedule="eager"),), "no value was checked"),
        ((), "no launch gave a value"),
    ],
)
def test_every_defect_fails(runs: tuple[Run, ...], words: str) -> None:
    check = first(*runs)
    assert (check.status, check.seen) == ("fail", words)


def test_a_failed_launch_has_the_error_message() -> None:
    check = first(error="AttributeError: module 'flashinfer' has no attribute 'x'")
    assert check.status == "fail"
    assert check.seen == "AttributeError: module 'flashinfer' has no attribute 'x'"


@pytest.mark.parametrize(
    "error", ["Crashed: the child ended with signal 9", "OSError: [Errno 28] No space left"]
)
def test_what_this_machine_caused_is_no_failure(error: str) -> None:
    check = first(error=error)
    assert check.status == "not-run"
    assert error.partition(": ")[2] in check.reason


def test_the_time_of_launches_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time, and the reply of a program that took it all names the variable."""
    name = "SPARK_BUILD_LAUNCH_SECONDS"
    assert kernels.launch_seconds() == 600
    monkeypatch.setenv(name, "90")
    assert kernels.launch_seconds() == 90
    for text in ("0", "-1", "ten", "1.5", "9999999"):
        monkeypatch.setenv(name, text)
        with pytest.raises(UsageError, match=f"{name}='{text}' is not a number of seconds"):
            kernels.launch_seconds()


def test_a_target_that_cannot_run_is_not_run() -> None:
    for check in check_numbers(target_of(SparkBuildError("no index", hint="look"), LINEAR)):
        assert (check.status, check.reason) == ("not-run", "no index; try: look")
    other = Reply(error="ImportError: no such layer", stage=NO_LAYER, ran=())
    for check in check_numbers(target_of([other] * len(wanted_launches([LINEAR])), LINEAR)):
        assert check.status == "not-run"
        assert check.reason == (
            "vLLM's layer cannot be run on a CPU here: ImportError: no such layer"
        )
    absent = Reply(error="AbsentError: no such kernel", stage=ABSENT, ran=())
    for check in check_numbers(target_of([absent] * len(wanted_launches([MOE])), MOE)):
        assert (check.status, check.moot, check.reason) == ("not-run", True, "no such kernel")
    for check in check_numbers(target_of(None, MOE)):
        assert not check.moot
        assert check.status == "not-run"
        assert "released wheels" in check.reason
    for check in check_numbers(target_of(NoDsl("no DSL in the target"), LINEAR)):
        assert (check.status, check.seen) == ("fail", "no DSL in the target")
    (check,) = check_numbers(target_of([], MARLIN))
    assert (check.status, check.name) == ("not-run", "numbers")


def test_layers_that_are_not_run_are_named_with_the_reason() -> None:
    """They are no reason to doubt what ran, and none where the model does not start."""
    selected = ExpectedChoice(kind="w4a16-linear", selected="apply_fp4_marlin_linear")
    experts = ExpectedChoice(kind="w4a16-moe", line="Using 'MARLIN' NvFp4 MoE backend")
    refused = ExpectedChoice(kind="w4a16-moe", refused="'FLASHINFER_B12X' does not support")
    replies = [reply_of(GOOD)] * len(wanted_launches([LINEAR]))
    for expected, name, words in (
        (selected, "W4A16 linear layers", "Marlin, which is shipped as machine code"),
        (experts, "W4A16 MoE layers", "It does not test Marlin's numbers"),
    ):
        *ran, last = check_numbers(target_of(replies, LINEAR, expected))
        assert {check.status for check in ran} == {"pass"}
        assert (last.name, last.status, last.moot) == (name, "not-run", True)
        assert words in last.reason
    checks = list(check_numbers(target_of(replies, LINEAR, refused)))
    assert len(checks) == len(replies)


def test_experts_whose_activations_are_rounded_say_so() -> None:
    """Which kernel ran is known by its name; a failing check says what failed."""
    ran = Ran("kernel_moe_w4a16_kernelW4A16FusedMoeKernel_0", "0" * 64, 4, (GOOD,))
    replies = {"FP4": reply_of(GOOD), "": Reply(error="", stage="", ran=(ran,))}
    for words, reply in replies.items():
        (check,) = check_numbers(target_of([reply], A16_EXPERTS))
        assert check.status == "pass"
        assert ("the activations are rounded to FP4" in check.seen) is bool(words)
    (failed,) = check_numbers(target_of([reply_of(replace(GOOD, wrong=1, said="x"))], A16_EXPERTS))
    assert failed.status == "fail"
    (other, *_) = check_numbers(target_of([reply_of(GOOD)] * len(wanted_launches([MOE])), MOE))
    assert "rounded" not in other.seen


def test_each_kind_of_layer_has_its_kernels() -> None:
    linear, moe = wanted_launches([LINEAR]), wanted_launches([MOE])
    a16, a16_experts = wanted_launches([A16]), wanted_launches([A16_EXPERTS])
    assert len(a16) > 3
    every = [*linear, *moe, *a16, *a16_experts]
    assert {one.name for one in every} == {one.name for one in LAUNCHED}
    assert len(every) == len(LAUNCHED)
    assert wanted_launches([MARLIN]) == []
    (layer,) = (one for one in linear if one.request["kind"] == LAYER)
    (experts,) = (one for one in moe if one.request["kind"] == MOE_LAYER)
    settings = {"linear_backend": "b12x", "moe_backend": "flashinfer_b12x"}
    request = launch_request({}, "sm_121a", [layer, linear[0], experts], settings)
    asked = [(one.get("linear_backend"), one.get("moe_backend")) for one in request["kernels"]]
    both = ("b12x", "flashinfer_b12x")
    assert asked == [both, (None, None), both], "as one process has one configuration"
    linear.remove(layer)
    tiles = {tuple(one.request["tile"]) for one in linear if "tile" in one.request}
    assert tiles == {(128, 128), (64, 128), (128, 64), (64, 64)}
    for one in linear:
        depths = {k // 128 % 2 for _, _, k in one.request["shapes"]}
        assert depths == {0, 1} or one.request.get("inputs"), f"{one.name}: both parities"


def test_the_package_is_run_where_it_is_installed() -> None:
    """As one more choice of vLLM's, which its layers are told of."""
    every = wanted_launches([LINEAR], package=True)
    assert every == [*wanted_launches([LINEAR]), *OF_PACKAGE]
    assert wanted_launches([MARLIN], package=True) == []
    settings = {"linear_backend": "flashinfer_b12x", "moe_backend": "flashinfer_b12x"}
    request = launch_request({}, "sm_121a", every, settings)
    for one, asked in zip(every, request["kernels"], strict=True):
        if one.request["kind"] in (LAYER, MOE_LAYER):
            wanted = PACKAGE if one in OF_PACKAGE else "flashinfer_b12x"
            assert (asked["linear_backend"], asked["moe_backend"]) == (wanted, wanted)
    answers = Replies(
        replies=(reply_of(GOOD),) * len(every),
        versions={PACKAGE: "1.5.1", "flashinfer-python": "0.7", "nvidia-cutlass-dsl": "4.8.0"},
        simulated=(),
    )
    files = {**vllm_files(), **dist_files(PACKAGE, "1.5.1", {})}
    runner = FakeRunner(launcher=lambda _request: answers)
    tree = fake_base(files).tree
    target = of_files(target_of([], LINEAR), tree, runner=runner)
    checks = {one.name: one for one in check_numbers(target)}
    for one in every:
        library = "b12x 1.5.1" if one in OF_PACKAGE else "FlashInfer 0.7"
        assert checks[one.name].where.startswith(f"{library} + CuTe DSL 4.8.0 of ")


# ------------------------------------------------------------------------------- where launches are


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """A sandbox whose probe records the launch above; what it was asked."""
    asked: list[Mapping[str, Any]] = []

    class FakeSandbox:
        root, python = tmp_path / "sandbox", tmp_path / "python"

        def __init__(self, _requirements: object) -> None: ...

        def prepare(self) -> None: ...

    class Folder:
        folder, what = tmp_path / "torch", "a torch"

    def ask(
        _python: Path, request: Mapping[str, Any], form: Any, limit: float, program: Program,
        *, busy: bool,
    ) -> Any:  # fmt: skip
        assert (program, limit, busy) == (LAUNCH, 600, True)
        asked.append(request)
        kernels = []
        for number, kernel in enumerate(request["kernels"]):
            folder = Path(request["folder"]) / str(number)
            write_launch(folder, sync="bar.sync 0;" if kernel["kind"] != "new" else "frobnicate;")
            launched = [{"name": "doubled", "folders": [str(folder)]}]
            bad = kernel["kind"] in ("bad", "no layer", "full disk")
            stage = "call" if kernel["kind"] == "bad" else NO_LAYER
            full = kernel["kind"] == "full disk"
            message = "[Errno 28] No space left" if full else "no"
            error = {"type": "OSError", "message": message, "stage": stage}
            kernels.append({"error": error if bad else None, "launches": [] if bad else launched})
        said: dict[str, Any] = {
            "kernels": kernels,
            "fatal": None,
            "versions": {},
            "simulated": ["it"],
        }
        return replies.reply_of(said, form)

    monkeypatch.setattr(sandbox, "Sandbox", FakeSandbox)
    monkeypatch.setattr(sandbox, "requirements_for", lambda _release: None)
    monkeypatch.setattr(sandbox, "texts_of", lambda _tree: [])
    monkeypatch.setattr(sandbox, "mirror", lambda _tree: tmp_path / "dsl")
    monkeypatch.setattr(sandbox, "folder_of", lambda _tree: tmp_path / "files")
    monkeypatch.setattr(kernels, "lay_out", lambda _tree: None)
    monkeypatch.setattr(sandbox, "torch_folder", lambda _expected: Folder())
    monkeypatch.setattr(sandbox, "wanted_torch", lambda _tree, _packages: "2")
    monkeypatch.setattr(kernels, "ask_probe", ask)
    return asked


#: The files of these tests are their own.
TRUSTED = TrustedSources(everything=True)


def launcher(trust: TrustedSources = TRUSTED) -> Callable[[Mapping[str, Any]], Replies]:
    """Launches with a small vLLM."""
    tree, packages = fake_base(vllm_files()).tree, {"vllm": "0.20.1"}
    return partial(launch_in_sandbox, tree=tree, packages=packages, trust=trust)


def test_a_malformed_reply_gives_no_traceback(
    recorded: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in ({}, {"kernels": [{}], "versions": {}, "simulated": "it"}):
        monkeypatch.setattr(
            kernels,
            "ask_probe",
            lambda *_, answer=answer, **_more: replies.reply_of(answer, replies.LaunchReply),
        )
        launch = launcher()
        with pytest.raises(SparkBuildError, match="the probe's answer is malformed: "):
            launch(launch_request({}, "sm_121a", LAUNCHED[:1]))
    assert recorded == []


def test_unknown_code_is_not_run(
    recorded: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it could be isolated: what it launches could not be written to this machine."""
    apart = IsolatedRun(isolation=Bubblewrap(), because="vllm/core.py: not as a release has it")
    monkeypatch.setattr(TrustedSources, "apart", lambda *_: apart)
    launch = launcher(TrustedSources())
    with pytest.raises(SandboxUnavailable, match=r"vllm/core\.py") as caught:
        launch(launch_request({}, "sm_121a", LAUNCHED[:1]))
    assert "--trust-image" in caught.value.hint
    assert recorded == []


def test_results_are_cached_for_the_same_request(recorded: list[Mapping[str, Any]]) -> None:
    launch = launcher()
    request = launch_request({}, "sm_121a", LAUNCHED[:1])
    one = launch(request)
    assert [run.wrong for run in one.replies[0].ran[0].runs] == [0, 0, 0]
    assert (one.simulated, one.kept) == (("a torch", "it"), False)
    assert not Path(recorded[0]["folder"]).exists(), "nothing is left behind"
    again = launch(request)
    assert (again.kept, again.replies, len(recorded)) == (True, one.replies, 1)
    launch({**request, "arch": "sm_120a"})
    assert len(recorded) == 2


def test_launches_are_kept_where_the_user_wants_them(
    recorded: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launch = launcher()
    request = launch_request({}, "sm_121a", LAUNCHED[:1])
    launch(request)
    monkeypatch.setenv("SPARK_BUILD_KEEP_LAUNCHES", str(tmp_path / "keep"))
    assert not launch(request).kept, "a result of before has no launches"
    assert run_file(tmp_path / "keep" / "0" / "launch.json").runs
    assert len(recorded) == 1, "nothing was compiled again"
    with pytest.raises(UsageError, match="keep is not empty"):
        launch(request)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARK_BUILD_KEEP_LAUNCHES", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="SPARK_BUILD_KEEP_LAUNCHES"):
        launch(request)


def test_kernels_are_not_compiled_again_for_another_executor(
    recorded: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded launches depend on the probe alone; damaged ones are made again."""
    launch = launcher()
    request = {**launch_request({}, "sm_121a", []), "kernels": [{"kind": "a"}, {"kind": "b"}]}
    first = launch(request)
    shutil.rmtree(cache_dir() / "numbers")
    again = launch(request)
    assert (again.kept, again, len(recorded)) == (False, first, 1)
    (archive,) = (cache_dir() / "launches").iterdir()
    for damaged in (archive.read_bytes()[:-30], b""):
        archive.write_bytes(damaged)
        shutil.rmtree(cache_dir() / "numbers")
        assert launch(request) == first
    assert len(recorded) == 3
    assert kernels.RECORDINGS.programs == (LAUNCH,)
    assert "builder/probes/device_cases.py" in LAUNCH.sources


def test_a_layer_that_cannot_be_made_is_not_tried_again(recorded: list[Mapping[str, Any]]) -> None:
    launch = launcher()
    request = {**launch_request({}, "sm_121a", []), "kernels": [{"kind": "no layer"}]}
    first = launch(request).replies
    assert first == (Reply(error="OSError: no", stage=NO_LAYER, ran=()),)
    assert (launch(request).replies, len(recorded)) == (first, 1)


def test_what_this_machine_caused_is_tried_again(recorded: list[Mapping[str, Any]]) -> None:
    """Also in front of a kernel: the import of vLLM's layer from a full disk."""
    launch = launcher()
    request = {**launch_request({}, "sm_121a", []), "kernels": [{"kind": "full disk"}]}
    for number in (1, 2):
        (reply,) = launch(request).replies
        assert reply.error == "OSError: [Errno 28] No space left"
        assert len(recorded) == number


def test_a_failed_result_is_not_cached(recorded: list[Mapping[str, Any]]) -> None:
    launch = launcher()
    request = {**launch_request({}, "sm_121a", []), "kernels": [{"kind": "bad"}]}
    assert launch(request).replies == (Reply(error="OSError: no", stage="call", ran=()),)
    launch(request)
    assert len(recorded) == 2
    assert not (cache_dir() / "numbers").exists()
    assert not (cache_dir() / "launches").exists()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What processes would run is run here, and listed; in tests/processes they are started."""
    given: list[Any] = []

    class Here:
        def __init__(self, jobs: int, **_options: object) -> None:
            assert jobs > 0

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_error: object) -> None: ...

        def map(self, function: Any, groups: Any) -> list[Any]:
            given.extend(groups)
            return [function(group) for group in groups]

    monkeypatch.setattr(runs, "ProcessPoolExecutor", Here)
    return given


@pytest.mark.usefixtures("groups")
def test_an_unknown_instruction_is_named(recorded: list[Mapping[str, Any]]) -> None:
    launch = launcher()
    request = {**launch_request({}, "sm_121a", []), "kernels": [{"kind": "new"}, {"kind": "old"}]}
    new, old = launch(request).replies
    assert (new.error, new.stage) == ("PTX line 12: unknown instruction frobnicate", "read")
    assert [run.wrong for run in old.ran[0].runs] == [0, 0, 0]
    replies = [new] * len(wanted_launches([LINEAR]))
    for check in check_numbers(target_of(replies, LINEAR)):
        assert (check.status, check.reason) == ("not-run", new.error)


def test_another_executor_runs_it_again() -> None:
    """The name of a kept result holds every module of the executor, its core in C and the probe."""
    first, *modules = kernels.results().programs
    assert first is LAUNCH
    names = {module[1] for module in modules if isinstance(module, tuple)}
    folder = package_file("ptx", "runs.py").parent
    assert {"core.c", *(path.name for path in folder.glob("*.py"))} <= names


def test_calls_of_the_same_kernel_run_in_one_process(tmp_path: Path, groups: list[Any]) -> None:
    """A process reads the PTX once; the results have the order of the calls."""
    calls = []
    for number, sync in enumerate(("bar.sync 0;", "", "bar.sync 0;", "")):
        calls.append((str(tmp_path / str(number)),))
        write_launch(tmp_path / str(number), sync=sync)
    found = runs.run_calls(calls, 2)
    assert groups == [[calls[0], calls[2]], [calls[1], calls[3]]]
    assert [bool(call.ran[0].runs[0].races) for call in found] == [False, True, False, True]
    assert runs.run_calls(calls[:1], 2) == found[:1]
    assert len(groups) == 2, "one kernel alone needs no process"


def test_without_copies_the_lazy_schedule_is_the_eager_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run again, and reports the same, but for the races that it does not look for."""
    path, run = write_launch(tmp_path, sync=""), []
    once = runs.run_once

    def counted(*args: Any, **options: Any) -> Any:
        run.append(str(args[2]))
        return once(*args, **options)

    monkeypatch.setattr(runs, "run_once", counted)
    eager, lazy, chance = run_file(path).runs
    assert run == ["eager", "random 1"]
    assert [one.schedule for one in (eager, lazy, chance)] == ["eager", "lazy", "random 1"]
    assert eager.races
    assert (lazy.races, lazy.watched) == ((), False)
    assert (lazy.values, lazy.wrong, lazy.said) == (eager.values, eager.wrong, eager.said)
    run_file(path, [Schedule("lazy")])
    assert run[2:] == ["lazy"], "alone it runs"
    text = (tmp_path / "kernel.ptx").read_text("utf-8")
    copy = text.replace("ret;", "cp.async.bulk.commit_group;\nret;")
    assert copy != text
    (tmp_path / "kernel.ptx").write_text(copy, "utf-8")
    run_file(path)
    assert run[3:] == ["eager", "lazy", "random 1"], "a copy may be late"
