"""The level ``codegen`` without a compiler: what is asked, how code is read, what is said."""

from __future__ import annotations

import base64
import dataclasses
import os
import struct
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common import machinecode
from builder.common.machinecode import BadCubin, ToolMissing, parse_sass, resources
from builder.common.paths import cache_dir
from builder.common.plan import ExpectedChoice
from builder.common.programs import DISPATCH
from builder.errors import SparkBuildError
from builder.proof import codegen
from builder.proof.codegen import RESULTS, check_codegen, keep_result
from builder.proof.kernels import KERNELS, headline, wanted_kernels
from builder.proof.replies import CodegenReply, CodegenRequest, reply_of
from builder.proof.sandbox import CannotMirror, NoDsl, contents_of, neutral
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    FakeImage,
    FakeRunner,
    MemoryTree,
    dist_files,
    fake_base,
    make_plan_of,
    vllm_files,
)
from tests.unit.inimage import load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.proof.checks import Check

probe = load("codegen_probe")

# ---------------------------------------------------------------------------- FlashInfer's buffers


def test_scratch_buffers_need_no_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashInfer 0.7.4 asks for them; a release before it has no such function."""
    utils = ModuleType("flashinfer.utils")
    gemm, older = (ModuleType(f"flashinfer.{name}") for name in ("gemm", "older"))
    of_process, of_stream = object(), object()
    vars(utils).update(_get_cache_buf=of_process, _get_stream_cache_buf=of_stream)
    vars(gemm).update(_get_stream_cache_buf=of_stream)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utils)
    one = probe.Probe()
    probe.share_scratch_buffers([utils, gemm, older], one)
    assert vars(gemm)["_get_stream_cache_buf"] is vars(utils)["_get_stream_cache_buf"] is of_process
    assert not hasattr(older, "_get_stream_cache_buf")
    assert [words for words in one.simulated if "_get_stream_cache_buf" in words]


# ------------------------------------------------------------------------------------ machine code

LISTING = """
\t.target\tsm_121a
//--------------------- .text.kernel_a ------------------------
.text.kernel_a:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/             @!UP1 UIADD3 UR4, UPT, UPT, UR5, UR4, URZ ;
        /*1000*/                   OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R104, R24, R16, R104, R108 ;
        /*1010*/               @P6 OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R104, R24, R16, R104, R108 ;
        /*1020*/                   QMMA.16832.F32.E4M3.E4M3 R4, R8, R12, R4 ;
        /*1030*/                   STL.64 [R1+0x10], R4 ;
        /*1040*/                   LDL R4, [R1+0x10] ;
        /*1050*/                   LDG.E R140, desc[UR4][R140.64] ;
        /*1060*/                   BPT.TRAP 0x1 ;
.L_x_0:
        /*0000*/ \t.byte\t0xff, 0xff
"""


def test_instructions_are_counted_by_full_name() -> None:
    code = parse_sass(LISTING)
    assert code.target == "sm_121a"
    assert code.counts["BRA"] == 1
    assert code.counts["UIADD3"] == 1
    assert sum(code.counts.values()) == 10
    assert code.tensor == {
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 2,
        "QMMA.16832.F32.E4M3.E4M3": 1,
    }
    assert code.of("OMMA.SF", having="E2M1") == 2
    assert code.of("QMMA", having="E2M1") == 0
    assert (code.spills, code.traps) == (2, 1)


def test_an_empty_listing_has_nothing() -> None:
    code = parse_sass("")
    assert (code.target, dict(code.counts), code.tensor) == ("", {}, {})


def cubin_of(*kernels: tuple[str, int, int, int]) -> bytes:
    """The sections that are read, in the layout of a real cubin."""
    strings = bytearray(b"\0")
    symbols = bytearray(24)
    info = bytearray(struct.pack("<BBH", 3, 0x50, 7))
    sections: list[tuple[str, int, bytes, int]] = []
    for number, (name, registers, stack, shared) in enumerate(kernels, 1):
        symbols += struct.pack("<IBBHQQ", len(strings), 0, 0, 0, 0, 0)
        strings += name.encode() + b"\0"
        info += struct.pack("<BBHII", 4, 0x2F, 8, number, registers)
        info += struct.pack("<BBHII", 4, 0x11, 8, number, stack)
        sections.append((f".text.{name}", 1, b"\0" * 16, 16))
        sections.append((f".nv.shared.{name}", 8, b"", shared))
    info += struct.pack("<BBHI", 4, 0x1E, 4, 0)
    for name, table in ((".strtab", strings), (".symtab", symbols), (".nv.info", info)):
        sections.append((name, 1, bytes(table), len(table)))
    names = bytearray(b"\0")
    headers, body = bytearray(64), bytearray()
    for name, kind, data, size in sections:
        headers += struct.pack(
            "<IIQQQQIIQQ", len(names), kind, 0, 0, 64 + len(body), size, 0, 0, 0, 0
        )
        names += name.encode() + b"\0"
        body += data
    headers += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(body), len(names), 0, 0, 0, 0)
    body += names
    count = len(sections) + 2
    start = b"\x7fELF\x02\x01\x01\x41" + b"\0" * 32 + struct.pack("<Q", 64 + len(body))
    start += b"\0" * 10 + struct.pack("<HHH", 64, count, count - 1)
    return bytes(start + body + headers)


def test_resources_are_read_from_the_cubin() -> None:
    found = resources(cubin_of(("gemm", 138, 0, 1024), ("finalize", 255, 280, 2048)))
    assert [dataclasses.astuple(r) for r in found] == [
        ("finalize", 255, 280, 2048),
        ("gemm", 138, 0, 1024),
    ]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\0" * 100, b"{}" * 99])
def test_a_file_that_is_not_a_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(BadCubin, match="not a cubin"):
        resources(data)


def test_nvdisasm_is_found_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(machinecode, "_package_folders", lambda: [tmp_path])
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert machinecode.find_nvdisasm() == tool


def no_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be none anywhere, a CUDA toolkit's included."""

    def missing() -> Path:
        raise ToolMissing("nvdisasm is not installed", hint="pip install it")

    monkeypatch.setattr(machinecode, "find_nvdisasm", missing)


# ---------------------------------------------------------------------------------- what is asked

LINEAR = ExpectedChoice(
    kind="nvfp4-linear", line="Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
)
MOE = ExpectedChoice(kind="nvfp4-moe", line="Using 'FLASHINFER_B12X' NvFp4 MoE backend")
MARLIN = ExpectedChoice(kind="nvfp4-linear", line="Using MarlinNvFp4LinearKernel for NVFP4 GEMM")


@pytest.mark.parametrize(
    ("expect", "kinds"),
    [
        ([], []),
        ([MARLIN], []),
        ([LINEAR], ["mma-gate", "dense-b12x", "dense-b12x", "dense-b12x-tiles"]),
        ([MARLIN, MOE], ["mma-gate", "moe-b12x", "moe-b12x"]),
        ([LINEAR, MOE], [k.request.kind for k in KERNELS if k.serves != "b12x"]),
    ],
)
def test_expected_log_lines_determine_the_kernels(
    expect: list[ExpectedChoice], kinds: list[str]
) -> None:
    assert [kernel.request.kind for kernel in wanted_kernels(expect)] == kinds


def test_the_package_is_compiled_where_it_is_installed() -> None:
    assert wanted_kernels([LINEAR, MOE], package=True) == list(KERNELS)
    assert wanted_kernels([MARLIN], package=True) == []


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        ("OpError: expects X\n\n  hint", "OpError", "expects X"),
        (
            (
                "ICE\nerror: unknown: log: ptxas application, line 4; error   : Unexpected '_mma'\n"
                "  ptxas application, line 5; error   : Unexpected '_mma'"
            ),
            "DSLRuntimeError",
            "ptxas application, line 4; error : Unexpected '_mma' (and 1 more of its kind)",
        ),
        ("", "KeyError", "no message"),
    ],
)
def test_compiler_messages_are_quoted(message: str, kind: str, words: str) -> None:
    assert headline(message, kind) == words


# ------------------------------------------------------------------------------------ what is said


def reply(said: dict[str, Any]) -> CodegenReply:
    """What the probe printed, read."""
    return reply_of({"fatal": None, **said}, CodegenReply)


def target_of(
    replies: Any, expect: tuple[ExpectedChoice, ...] = (LINEAR,), image: FakeImage | None = None
) -> VerifyTarget:
    """A target whose probe gives these replies, or raises them."""
    base = fake_base(vllm_files())
    plan = replace(make_plan_of(base).document, expect=expect)

    def compile_kernels(request: CodegenRequest) -> CodegenReply:
        if isinstance(replies, Exception):
            raise replies
        assert len(request.kernels) == len(replies)
        versions = {"nvidia-cutlass-dsl": "4.4.2", "flashinfer-python": "0.6.9"}
        return reply({"kernels": replies, "simulated": ["torch"], "versions": versions})

    return VerifyTarget(
        name="t",
        subject=dataclasses.replace(base, image=image),
        plan=plan,
        layers=(),
        runner=FakeRunner(compiler=compile_kernels),
    )


def compiled(target: str = "sm_121a") -> dict[str, Any]:
    """A reply with a cubin."""
    data = base64.b64encode(cubin_of(("gemm", 138, 0, 1024))).decode()
    file = {"kind": "cubin", "name": "k.cubin", "size": 9, "sha256": "f" * 64, "base64": data}
    return {
        "compiled": True,
        "error": None,
        "target": target,
        "ptx_version": "9.1",
        "files": [file],
    }


def failed(kind: str, message: str) -> dict[str, Any]:
    """A reply without one."""
    return {"compiled": False, "error": {"type": kind, "message": message, "stage": "compile"}}


GOOD = LISTING.replace("BPT.TRAP", "EXIT").replace("LDL", "LDS").replace("STL", "STS")


def of_tiles(*replies: dict[str, Any]) -> dict[str, Any]:
    """The reply for every tile, made of those for 64x64, 128x64, and 64x32 swapped."""
    tiles = ({"tile": [64, 64]}, {"tile": [128, 64]}, {"tile": [64, 32], "swap_ab": True})
    asked = ({"kind": "dense-b12x", "tokens": 512, **tile} for tile in tiles)
    each = [{**reply, "request": ask} for ask, reply in zip(asked, replies, strict=False)]
    return {"compiled": all(r["compiled"] for r in each), "error": None, "each": each}


def judge(
    monkeypatch: pytest.MonkeyPatch, listing: str = GOOD, target: str = "sm_121a"
) -> dict[str, Check]:
    """The checks of GEMMs whose code is this."""
    monkeypatch.setattr(codegen, "disassemble", lambda _cubin: parse_sass(listing))
    good = compiled(target)
    replies = [{"compiled": True}, good, good, of_tiles(good, good, good)]
    return {check.name: check for check in check_codegen(target_of(replies))}


def test_a_good_kernel_passes_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, tile, _, _ = judge(monkeypatch).values()
    assert (gate.status, tile.status) == ("pass", "pass")
    assert "128 of them in every release" in tile.expected
    assert tile.seen == (
        ".target sm_121a, PTX 9.1; 2 x OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X, "
        "1 x QMMA.16832.F32.E4M3.E4M3; 138 registers; 1024 B shared memory fixed at compile time; "
        "no spills; no BPT.TRAP"
    )
    assert tile.where == "FlashInfer 0.6.9 + CuTe DSL 4.4.2 of t; cubin ffffffffffff (9 bytes)"
    assert tile.simulated == ("torch",)
    assert tile.figures == {
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 2,
        "QMMA.16832.F32.E4M3.E4M3": 1,
    }


@pytest.mark.parametrize(
    ("listing", "target", "reason"),
    [
        (GOOD.replace("OMMA", "HMMA"), "sm_121a", "no FP4 tensor-core instruction in it"),
        (GOOD.replace(".E2M1.E2M1", ".E3M2.E3M2"), "sm_121a", "no FP4 tensor-core"),
        (LISTING, "sm_121a", "1 BPT.TRAP"),
        (GOOD, "sm_120a", "not for sm_121a"),
        (GOOD.replace("sm_121a", "sm_121"), "sm_121a", "it is for sm_121, not for sm_121a"),
    ],
)
def test_wrong_machine_code_fails(
    monkeypatch: pytest.MonkeyPatch, listing: str, target: str, reason: str
) -> None:
    _, *gemms = judge(monkeypatch, listing, target).values()
    assert len(gemms) == 3
    for check in gemms:
        assert check.status == "fail"
        assert reason in check.reason


def test_spills_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tile, _, every = judge(monkeypatch, LISTING.replace("BPT.TRAP", "EXIT")).values()
    assert (tile.status, every.status) == ("pass", "pass")
    assert "2 local loads and stores, 0 B stack" in tile.seen
    assert "; spills in 64x64, 128x64, 64x32 swapped; " in every.seen


def test_all_tiles_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check = judge(monkeypatch)["b12x GEMM, every tile"]
    assert check.status == "pass"
    assert check.seen == (
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X: 2 in 64x64, 2 in 128x64, 2 in 64x32 swapped; "
        "QMMA.16832.F32.E4M3.E4M3: 1 in 64x64, 1 in 128x64, 1 in 64x32 swapped; "
        "no spills; no BPT.TRAP"
    )
    assert check.figures == {"64x64": 3, "128x64": 3, "64x32 swapped": 3}


def test_one_bad_tile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "disassemble", lambda _cubin: parse_sass(GOOD))
    said = failed("OpError", "expects another shape")
    good = compiled()
    replies = [{"compiled": True}, good, good, of_tiles(good, said, good)]
    gate, tile, small, every = check_codegen(target_of(replies))
    assert {gate.status, tile.status, small.status} == {"pass"}
    assert every.status == "fail"
    assert every.seen == (
        "128x64, of 64x64, 128x64, 64x32 swapped; 128x64: OpError: expects another shape"
    )


def test_tiles_that_cannot_be_requested_are_a_failure() -> None:
    said = failed("AttributeError", "module 'g' has no attribute '_b12x_gemm_fp4_runner'")
    checks = list(check_codegen(target_of([said, said, said, said])))
    assert (checks[-1].status, checks[-1].name) == ("fail", "b12x GEMM, every tile")
    assert "the layer flashinfer-b12x adds it" in checks[-1].reason


def test_a_compiler_error_is_a_failure_with_its_message() -> None:
    said = failed("OpError", "OpError: expects arch to be one of ['sm_120a'], but got X\nmore")
    for check in check_codegen(target_of([said, said, said, of_tiles(said, said)])):
        assert check.status == "fail"
        assert check.seen == "OpError: expects arch to be one of ['sm_120a'], but got X"
        assert "cutlass-dsl-sm121a" in check.reason


@pytest.mark.parametrize(
    ("in_engine", "module", "status"),
    [
        (False, "einops", "not-run"),
        (False, "cutlass.utils", "fail"),
        (False, "flashinfer.gemm", "fail"),
        (False, "b12x.gemm.blockscaled", "fail"),
        (True, "einops", "fail"),
    ],
)
def test_only_a_sandbox_may_lack_a_module(in_engine: bool, module: str, status: str) -> None:
    said = failed("ModuleNotFoundError", f"No module named '{module}'")
    image = FakeImage(in_engine=in_engine)
    for check in check_codegen(target_of([said, said, said, said], image=image)):
        assert check.status == status
        assert module in check.seen + check.reason


def test_without_nvdisasm_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvdisasm(monkeypatch)
    replies = [{"compiled": True}, compiled(), compiled(), of_tiles(compiled(), compiled())]
    gate, *gemms = check_codegen(target_of(replies))
    assert gate.status == "pass"
    assert len(gemms) == 3
    for check in gemms:
        assert (check.status, check.seen) == ("not-run", ".target sm_121a, PTX 9.1")
        assert check.reason == "it compiled, but nvdisasm is not installed; try: pip install it"


def test_a_target_without_the_dsl_fails() -> None:
    for check in check_codegen(target_of(NoDsl("nvidia-cutlass-dsl is not in the target"))):
        assert (check.status, check.seen) == ("fail", "nvidia-cutlass-dsl is not in the target")


def test_an_environment_that_cannot_be_made_is_not_run() -> None:
    for check in check_codegen(target_of(SparkBuildError("no index", hint="look"))):
        assert (check.status, check.reason) == ("not-run", "no index; try: look")


def test_a_target_that_cannot_compile_is_not_run() -> None:
    target = dataclasses.replace(target_of([]), runner=FakeRunner(why="no interpreter"))
    assert {(c.status, c.reason) for c in check_codegen(target)} == {("not-run", "no interpreter")}


def test_an_error_before_any_kernel_fails_every_check() -> None:
    fatal = {"type": "ImportError", "message": "libcute is damaged", "stage": "import"}
    target = dataclasses.replace(
        target_of([]), runner=FakeRunner(compiler=lambda _r: reply({"fatal": fatal}))
    )
    for check in check_codegen(target):
        assert (check.status, check.seen) == ("fail", "ImportError: libcute is damaged")


@pytest.mark.parametrize(
    "kernels",
    [
        [],
        [{"compiled": True}] * 4,
        [{"compiled": False, "error": None}] * 4,
        [{"compiled": "yes"}] * 4,
        [{"compiled": False, "error": "a word"}] * 4,
        [{**compiled(), "files": [{"kind": "cubin", "base64": "%"}]}] * 4,
    ],
    ids=["none", "no cubin", "no error", "a word for yes", "no form of error", "no base64"],
)
def test_a_malformed_reply_is_a_failure(kernels: list[Any]) -> None:
    def compile_kernels(_request: CodegenRequest) -> CodegenReply:
        return reply({"kernels": kernels})

    target = dataclasses.replace(target_of([]), runner=FakeRunner(compiler=compile_kernels))
    checks = list(check_codegen(target))
    assert len(checks) == 4
    assert {check.status for check in checks} == {"fail"}
    assert all("the probe's answer is malformed" in check.seen for check in checks)


def test_other_profiles_compile_nothing() -> None:
    (check,) = check_codegen(target_of([], expect=(MARLIN,)))
    assert (check.status, check.name) == ("not-run", "codegen")
    assert check.reason.endswith("this level compiles no others")  # FlashInfer's CUTLASS are, too


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        ("Crashed", "the child ended with signal 9", "the child ended with signal 9; Linux does"),
        ("MemoryError", "", "on this machine: MemoryError"),
        ("OSError", "[Errno 28] No space left on device", "on this machine: OSError: [Errno 28]"),
    ],
)
def test_what_this_machine_caused_is_no_failure(kind: str, message: str, reason: str) -> None:
    kernels = [failed(kind, message), of_tiles(*[failed(kind, message)] * 3)]

    def compile_kernels(_request: CodegenRequest) -> CodegenReply:
        return reply({"kernels": [kernels[0], kernels[0], kernels[0], kernels[1]]})

    target = dataclasses.replace(target_of([]), runner=FakeRunner(compiler=compile_kernels))
    checks = list(check_codegen(target))
    assert {check.status for check in checks} == {"not-run"}
    assert all(check.reason.startswith(reason) for check in checks)


# --------------------------------------------------------------------------------- what is kept

INPUTS = ["sandbox", "dsl", "files", {"kernels": [{"kind": "mma-gate"}]}]


def test_a_good_result_is_cached_for_the_same_files_only() -> None:
    result = reply({"kernels": [compiled()]})
    assert RESULTS.get(INPUTS, CodegenReply) is None
    keep_result(INPUTS, result)
    assert RESULTS.get(INPUTS, CodegenReply) == replace(result, kept=True)
    for number in range(len(INPUTS)):
        changed = [*INPUTS[:number], "other", *INPUTS[number + 1 :]]
        assert RESULTS.get(changed, CodegenReply) is None


@pytest.mark.parametrize(
    "result",
    [
        {"kernels": [], "fatal": {"type": "ImportError", "message": "", "stage": "import"}},
        {"kernels": [compiled(), failed("Crashed", "signal 9")], "fatal": None},
        {"kernels": [failed("OSError", "no space")], "fatal": None},
        {"kernels": [failed("RuntimeError", "[Errno 28] No space left")], "fatal": None},
        {"kernels": [of_tiles(compiled(), failed("MemoryError", "no"))], "fatal": None},
    ],
)
def test_what_this_machine_may_have_caused_is_not_cached(result: dict[str, Any]) -> None:
    keep_result(INPUTS, reply(result))
    assert RESULTS.get(INPUTS, CodegenReply) is None


@pytest.mark.parametrize(
    "kernel", [failed("OpError", "no"), of_tiles(compiled(), failed("OpError", "no"))]
)
def test_what_the_compiler_refuses_is_cached(kernel: dict[str, Any]) -> None:
    result = reply({"kernels": [compiled(), kernel]})
    keep_result(INPUTS, result)
    assert RESULTS.get(INPUTS, CodegenReply) == replace(result, kept=True)


def test_a_changed_probe_or_damaged_cache_compiles_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep_result(INPUTS, reply({"kernels": [compiled()]}))
    (file,) = (cache_dir() / "codegen").iterdir()
    file.write_text("{")
    assert RESULTS.get(INPUTS, CodegenReply) is None
    keep_result(INPUTS, reply({"kernels": [compiled()]}))
    changed = dataclasses.replace(RESULTS, programs=(DISPATCH,))
    assert changed.get(INPUTS, CodegenReply) is None


def test_only_the_latest_results_are_cached() -> None:
    few = dataclasses.replace(RESULTS, most=2)
    for number in range(4):
        few.put([number], CodegenReply())
        os.utime(few.file([number]), (number, number))
    assert [few.get([n], CodegenReply) is not None for n in range(4)] == [False, False, True, True]


def test_cached_results_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "disassemble", lambda _cubin: parse_sass(GOOD))
    target = target_of([{"compiled": True}, compiled(), compiled(), of_tiles(compiled())])

    def cached(request: CodegenRequest) -> CodegenReply:
        made = target.runner.compile(request)
        assert isinstance(made, CodegenReply)
        return replace(made, kept=True)

    again = dataclasses.replace(target, runner=FakeRunner(compiler=cached))
    for check in check_codegen(again):
        assert "of t, cached from the same files" in check.where


# ------------------------------------------------------------------------------------- the mirror

IR = "nvidia_cutlass_dsl/lib/_ir.cpython-312-aarch64-linux-gnu.so"
MMA = "nvidia_cutlass_dsl/python_packages/cutlass/mma.py"


def dsl_tree(changed: Mapping[str, bytes] | None = None) -> MemoryTree:
    """Two DSL wheels that share their paths, the later one in front."""
    base = dist_files("nvidia-cutlass-dsl-libs-base", "4.4.2", {IR: b"12.9", MMA: b"# base\n"})
    newer = dist_files("nvidia-cutlass-dsl-libs-cu13", "4.4.2", {IR: b"13.0", MMA: b"# cu13\n"})
    meta = dist_files("nvidia-cutlass-dsl", "4.4.2", {})
    return MemoryTree({**meta, **base, **newer, **(changed or {})})


@pytest.mark.parametrize(
    ("changed", "owner"),
    [
        ({}, "nvidia-cutlass-dsl-libs-cu13"),
        ({IR: b"12.9"}, "nvidia-cutlass-dsl-libs-base"),
        ({MMA: b"# patched\n"}, "nvidia-cutlass-dsl-libs-cu13"),
    ],
)
def test_a_library_belongs_to_the_wheel_that_won(changed: dict[str, bytes], owner: str) -> None:
    tree = dsl_tree(changed)
    found = contents_of(tree)
    assert [(o.path, o.distribution, o.version) for o in found.libraries] == [(IR, owner, "4.4.2")]
    assert found.texts[MMA] == tree.digest(MMA)
    assert not [path for path in found.texts if path.endswith((".so", "RECORD"))]


def test_an_unknown_library_has_no_counterpart() -> None:
    with pytest.raises(CannotMirror, match=r"_ir\.cpython-312-aarch64-linux-gnu\.so matches no"):
        contents_of(dsl_tree({IR: b"edited"}))


def test_a_missing_dsl_is_a_separate_error() -> None:
    with pytest.raises(NoDsl, match="nvidia-cutlass-dsl is not in the target"):
        contents_of(MemoryTree(vllm_files()))


@pytest.mark.parametrize(
    ("path", "short"),
    [
        (IR, "nvidia_cutlass_dsl/lib/_ir.so"),
        ("a/_ir.cu13.cpython-311-x86_64-linux-gnu.so", "a/_ir.cu13.so"),
        ("a/libcute.so", "a/libcute.so"),
    ],
)
def test_libraries_are_matched_without_their_abi(path: str, short: str) -> None:
    assert neutral(path) == short


# -------------------------------------------------------------------------------------- the probe

PTX = """.version 9.1
.target sm_121a
.address_size 64
.visible .entry kernel_a(
.visible .entry kernel_b(
"""


def compile_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, cubin: bool, error: Exception | None
) -> dict[str, Any]:
    """What the probe says of a compiler that writes these files and ends this way."""

    def build(_ask: dict[str, Any]) -> None:
        (tmp_path / "k.ptx").write_text(PTX)
        if cubin:
            (tmp_path / "k.cubin").write_bytes(b"code")
        raise probe.Compiled from error

    monkeypatch.setitem(probe.KINDS, "dense-b12x", build)
    value: dict[str, Any] = probe.compile_kernel({"kind": "dense-b12x"}, tmp_path)
    return value


def test_a_cubin_on_disk_counts_even_if_loading_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reply = compile_with(monkeypatch, tmp_path, cubin=True, error=OSError("libcuda.so.1: no"))
    assert reply["compiled"]
    assert reply["error"] is None
    assert reply["loading"]["message"] == "libcuda.so.1: no"
    assert (reply["target"], reply["ptx_version"]) == ("sm_121a", "9.1")
    assert reply["entries"] == ["kernel_a", "kernel_b"]
    cubin = next(file for file in reply["files"] if file["kind"] == "cubin")
    assert base64.b64decode(cubin["base64"]) == b"code"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("\x1b[1mptxas\x1b[0m refuses"), "ptxas refuses"),
        (None, "the compiler returned and wrote no cubin"),
    ],
)
def test_ptx_alone_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, message: str
) -> None:
    reply = compile_with(monkeypatch, tmp_path, cubin=False, error=error)
    assert not reply["compiled"]
    assert reply["error"]["message"] == message
    assert reply["error"]["stage"] == "compile"


def test_an_error_before_the_compiler_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_ask: dict[str, Any]) -> None:
        raise ValueError("b12x is not for you")

    monkeypatch.setitem(probe.KINDS, "dense-b12x", refuse)
    reply = probe.compile_kernel({"kind": "dense-b12x"}, tmp_path)
    assert reply["error"] == {
        "type": "ValueError",
        "message": "b12x is not for you",
        "stage": "call",
    }


def test_a_call_that_compiles_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(probe.KINDS, "moe-b12x", lambda _ask: None)
    reply = probe.compile_kernel({"kind": "moe-b12x"}, tmp_path)
    assert not reply["compiled"]
    assert "without compiling" in reply["error"]["message"]


class Runner:
    """A FlashInfer that offers these tiles for layers of so many tokens."""

    def __init__(self, tiles: Mapping[int, list[tuple[tuple[int, int], bool]]]) -> None:
        self.tiles = tiles

    def get_valid_tactics(self, inputs: list[int], _profile: None) -> list[tuple[Any, ...]]:
        both = [(t, s, p) for t, s in self.tiles.get(inputs[0], []) for p in (False, True)]
        return [
            (tile, (1, 1), swapped, prefetch, "sm120", None) for tile, swapped, prefetch in both
        ]


def offer(
    monkeypatch: pytest.MonkeyPatch, tiles: Mapping[int, list[tuple[tuple[int, int], bool]]]
) -> None:
    """Let FlashInfer's tuner have these tiles."""
    modules = {
        "flashinfer.gemm.gemm_base": SimpleNamespace(
            _b12x_gemm_fp4_runner=lambda *_args: Runner(tiles)
        ),
        "torch": SimpleNamespace(bfloat16=None),
    }
    monkeypatch.setattr(probe, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(probe, "dense_arguments", lambda ask, _device: (ask["tokens"],))


def test_every_tile_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, swapped = ((128, 128), False), ((64, 32), True)
    offer(monkeypatch, {512: [wide], 1: [wide, swapped]})
    assert probe.tiles_offered() == [
        {"kind": "dense-b12x", "tokens": 512, "tile": [128, 128]},
        {"kind": "dense-b12x", "tokens": 1, "tile": [64, 32], "swap_ab": True},
    ]
    offer(monkeypatch, {})
    with pytest.raises(RuntimeError, match="offers no tile"):
        probe.tiles_offered()


def test_a_kernel_requested_twice_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = {"kind": "dense-b12x", "tokens": 512, "tile": [128, 128]}
    other = {"kind": "dense-b12x", "tokens": 512, "tile": [64, 64]}
    compiled_now: list[dict[str, Any]] = []

    def compile_all(kernels: list[dict[str, Any]], *_: object) -> list[dict[str, Any]]:
        compiled_now.extend(kernels)
        return [{"request": k, "compiled": k is not other, "error": None} for k in kernels]

    monkeypatch.setattr(probe, "prepare", lambda *_: None)
    monkeypatch.setattr(probe, "stop_after_compiling", lambda: None)
    monkeypatch.setattr(probe, "tiles_offered", lambda: [one, other])
    monkeypatch.setattr(probe, "compile_all", compile_all)
    asks = [one, {"kind": probe.EVERY_TILE}]
    tile, every = probe.compile_requested({"kernels": asks}, probe.Probe(), tmp_path)
    assert compiled_now == [one, other]
    assert tile["request"] == one
    assert [reply["request"] for reply in every["each"]] == [one, other]
    assert not every["compiled"]


def test_a_failed_flashinfer_import_does_not_affect_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"type": "ImportError", "message": "damaged", "stage": "import"}
    monkeypatch.setattr(probe, "prepare", lambda *_: said)
    monkeypatch.setattr(probe, "stop_after_compiling", lambda: None)
    monkeypatch.setattr(
        probe, "compile_all", lambda kernels, *_: [{"compiled": True, **k} for k in kernels]
    )
    kinds = ("mma-gate", "dense-b12x", probe.EVERY_TILE, "dense-b12x-package")
    request = {"kernels": [{"kind": kind} for kind in kinds], "pretend_triton": True}
    replies = probe.compile_requested(request, probe.Probe(), tmp_path)
    assert [r["compiled"] for r in replies] == [True, False, False, True]
    assert [r.get("error") for r in replies[1:3]] == [said, said]
    assert replies[3]["stand_in"] is True


def test_an_unknown_list_of_tiles_is_a_separate_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise AttributeError("no runner")

    monkeypatch.setattr(probe, "tiles_offered", refuse)
    error = probe.spread_out({"kind": probe.EVERY_TILE}, None)
    assert error == {"type": "AttributeError", "message": "no runner", "stage": "call"}
    reply = probe.gather({"kind": probe.EVERY_TILE}, error, {})
    assert (reply["compiled"], reply["error"]) == (False, error)


def test_the_package_compiles_what_its_plan_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    job = SimpleNamespace(factory="factories:make", args=(1, 2), kwargs=(("k", 3),))
    plan = SimpleNamespace(_compile_jobs=lambda _config, device: (job, job, device)[:2])
    preparation: Any = ModuleType("preparation")
    linear: Any = ModuleType("linear")
    preparation.heuristic_plan = lambda query, device: (query, device)
    modules = {
        "torch": SimpleNamespace(device=lambda *words: words),
        "b12x.gemm.blockscaled._linear": linear,
        "b12x.preparation.device": SimpleNamespace(detect_device=lambda device: device),
        "factories": SimpleNamespace(make=lambda *args, **kwargs: done.append((args, kwargs))),
    }
    monkeypatch.setattr(probe, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    probe.compile_without_session(preparation)
    assert preparation.heuristic_plan("query", "cpu") == ("query", ("cuda", 0))
    linear.require_prepared(plan, "gemm", "cpu")
    assert done == [((1, 2), {"k": 3})] * 2


def test_an_unknown_kind_is_refused_before_anything_else() -> None:
    result = probe.run({"kernels": [{"kind": "nonsense"}]})
    assert result["fatal"]["type"] == "ValueError"
    assert "mma-gate" in result["fatal"]["message"]
    assert result["kernels"] == []


def test_the_triton_substitute_has_decorators_without_effect() -> None:
    triton: Any = probe.StubModule("triton")

    def kernel() -> int:
        return 7

    tuned = triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])
    assert tuned(triton.jit(kernel)) is kernel
    assert vars(kernel)["fn"] is kernel
    assert triton.__version__ == "3.0.0"
    with pytest.raises(AttributeError):
        _ = triton.__wrapped__
