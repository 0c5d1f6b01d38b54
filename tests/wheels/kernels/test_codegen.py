"""Level ``codegen`` on released wheels: what compiles for SM121, and what each layer is needed for.

Every kernel here is compiled by the release's own FlashInfer and CuTe DSL.  Needs ``nvdisasm``,
which spark-build installs; without it these tests fail: nothing here is skipped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.common.wheels import WheelTree
from builder.proof import codegen
from builder.proof.codegen import check_codegen
from builder.proof.opening import target_of_plan
from builder.proof.runners import InSandbox
from builder.proof.trust import TrustedSources
from tests.stack import APPLIED
from tests.unit.fakes import of_files

if TYPE_CHECKING:
    from builder.applier.trees import Changes, Tree
    from builder.proof.checks import Check
    from builder.proof.target import VerifyTarget
    from tests.wheels.support import Planned, Planner

STACK = "pypi:vllm==0.20.1"
#: The same with the DSL that b12x-full chooses for it; without the profile it would be the newest.
PINNED = f"{STACK},nvidia-cutlass-dsl==4.4.2"
OMMA = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
GATE, TILE, SMALL = "NVFP4 warp MMA", "b12x GEMM, tile 128x128", "b12x GEMM, 1 token"
EVERY = "b12x GEMM, every tile"
MOE, MOE_ONE = "b12x MoE, 64 tokens", "b12x MoE, 1 token"
KERNELS = {GATE, TILE, SMALL, EVERY, MOE, MOE_ONE}
PACKAGE = {"GEMM of the package b12x, 512 tokens": 96, "GEMM of the package b12x, 1 token": 48}

GATE_ERROR = "OpError: expects arch to be one of ['sm_120a'], but got Arch.sm_121a"
MMA_ERROR = "Unexpected instruction types specified for '_mma'"


def patched(made: Planned) -> VerifyTarget:
    """The base as its plan leaves it."""
    return target_of_plan(made.plan, made.base, "patched", patched=True)


def with_tree(target: VerifyTarget, tree: Tree) -> VerifyTarget:
    """The same expectations held against other files."""
    trust = TrustedSources(everything=True)  # the changes are ours
    runner = InSandbox(tree, target.plan.base.packages, trust)
    return of_files(target, tree, runner=runner)


def seen_in(target: VerifyTarget) -> dict[str, Check]:
    """The checks by kernel; all kernels are among them."""
    found = {check.name: check for check in check_codegen(target)}
    package = set(PACKAGE) if "b12x" in target.tree.distributions() else set()
    assert set(found) == KERNELS | package
    return found


def without(planned: Planner, layer: str) -> dict[str, Check]:
    """The checks of b12x-full on a base that every layer but one was applied to."""
    others = planned(PINNED, ",".join(name for name in APPLIED if name != layer))
    overlay = OverlayTree(others.base.tree)
    overlay.update(others.plan.changes)
    return seen_in(with_tree(patched(planned(STACK)), overlay))


@pytest.mark.parametrize(
    ("release", "ptx", "moe", "moe_one"),
    [
        ("0.20.1", "9.1", 384, 192),
        ("0.22.1", "9.1", 384, 192),
        ("0.28.0", "9.3", 384, 192),
        ("0.33.0", "9.4", 384, 0),
    ],
)
def test_b12x_full_compiles_for_sm121a(
    planned: Planner, release: str, ptx: str, moe: int, moe_one: int
) -> None:
    checks = seen_in(patched(planned(f"pypi:vllm=={release}")))
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(KERNELS, "pass")
    for name, number in ((TILE, 128), (SMALL, 64), (MOE, moe), (MOE_ONE, moe_one)):
        seen = checks[name].seen
        assert seen.startswith(f".target sm_121a, PTX {ptx}; "), seen
        assert (f"{number} x {OMMA};" if number else "no tensor-core instruction;") in seen
        assert "no spills; no BPT.TRAP" in seen
        assert any("stand-ins for CUDA" in part for part in checks[name].simulated)
    tiles = {"64x64": 32, "64x128": 64, "128x64": 64, "128x128": 128}
    swapped = {"64x32 swapped": 32} if release in ("0.28.0", "0.33.0") else {}
    assert checks[EVERY].figures == {**tiles, **swapped}
    assert checks[EVERY].seen.endswith("; no spills; no BPT.TRAP")


@pytest.mark.parametrize(
    ("release", "package"), [("0.28.0", "1.2.4"), ("0.30.0", "1.3.0"), ("0.33.0", "1.5.1")]
)
def test_the_package_compiles_where_it_is_installed(
    planned: Planner, release: str, package: str
) -> None:
    """Also where it pins another DSL than vLLM does, which are the first two."""
    checks = seen_in(patched(planned(f"pypi:vllm[b12x]=={release}")))
    for name, number in PACKAGE.items():
        assert checks[name].status == "pass"
        assert f"; {number} x {OMMA}; " in checks[name].seen
        assert f"b12x {package}" in checks[name].where
        assert any("package b12x" in part for part in checks[name].simulated)


def test_a_package_without_its_gemm_fails_only_that_check(planned: Planner) -> None:
    target = patched(planned("pypi:vllm[b12x]==0.33.0"))
    path = "b12x/gemm/blockscaled/api.py"
    overlay = OverlayTree(target.tree)
    source = (target.tree.read(path) or b"").replace(b"def mm_nvfp4(", b"def mm_nothing(")
    overlay.update({path: Content.of(source)})
    checks = seen_in(with_tree(target, overlay))
    assert {name for name, check in checks.items() if check.status == "fail"} == set(PACKAGE)
    assert all("no attribute 'mm_nvfp4'" in checks[name].seen for name in PACKAGE)


def test_a_warm_run_compiles_nothing(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = patched(planned("pypi:vllm==0.33.0"))
    first = seen_in(target)

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(codegen, "ask_probe", refuse)
    again = seen_in(target)
    assert [c.seen for c in again.values()] == [c.seen for c in first.values()]
    assert all("cached from the same files" in c.where for c in again.values())


def test_without_the_cuda_13_libraries_ptxas_refuses(planned: Planner) -> None:
    checks = without(planned, "cutlass-dsl-cu13")
    assert checks[GATE].status == "pass"
    for name in KERNELS - {GATE}:
        assert checks[name].status == "fail"
        assert MMA_ERROR in checks[name].seen
        assert checks[name].seen.startswith("DSLRuntimeError: ptxas ")
        assert "cutlass-dsl-cu13" in checks[name].reason


def test_without_the_open_gate_the_dsl_refuses(planned: Planner) -> None:
    for check in without(planned, "cutlass-dsl-sm121a").values():
        assert (check.status, check.seen) == ("fail", GATE_ERROR)
        assert "cutlass-dsl-sm121a" in check.reason


def test_a_later_reinstall_of_libs_base_undoes_both(planned: Planner) -> None:
    target = patched(planned(STACK))
    base = planned(STACK).base.tree
    assert isinstance(base, WheelTree)
    wheel = next(w for w in base.wheels if "libs_base" in w.file.filename)
    files: Changes = {
        path: Content(sha256=str(m.sha256), size=m.size, load=partial(wheel.read, path))
        for path, m in wheel.members.items()
        if m.sha256
    }
    record = f"{wheel.info_dir}/RECORD"
    overlay = OverlayTree(target.tree)
    overlay.update({**files, record: Content.of(wheel.read(record))})
    for check in seen_in(with_tree(target, overlay)).values():
        assert (check.status, check.seen) == ("fail", GATE_ERROR)


def test_the_unpatched_pinned_flashinfer_has_no_b12x(planned: Planner) -> None:
    made = planned(STACK)
    checks = seen_in(target_of_plan(made.plan, made.base, STACK, patched=False))
    assert {check.status for check in checks.values()} == {"fail"}
    assert checks[GATE].seen == GATE_ERROR
    assert "does not support backend 'b12x'" in checks[SMALL].seen
    assert "no attribute 'b12x_fused_moe'" in checks[MOE].seen


def test_a_profile_without_b12x_compiles_nothing(planned: Planner) -> None:
    (check,) = check_codegen(patched(planned(STACK, "marlin")))
    assert check.status == "not-run"
    assert "no b12x kernel" in check.reason
