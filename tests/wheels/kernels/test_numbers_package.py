"""Level ``numbers`` on the package ``b12x``, which vLLM uses where it is asked to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from builder.proof import kernels
from builder.proof.kernels import OF_PACKAGE
from builder.proof.numbers import check_numbers, judged
from builder.proof.opening import target_of_plan

from .mutated import LaunchedAlone, without_effect

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.wheels.support import Planner

RELEASE = "pypi:vllm[b12x]==0.33.0"
IN_GRID = "race, read without order after a write in another block: .*"
#: With several tokens, the leader of a block writes the next batch where other warps may still read
#: the last.  With one token of FP4, and with weights alone in FP4, a block counts itself as ready
#: without a fence after what it wrote.
RACES = {
    "package b12x, vLLM's NVFP4 experts": (
        r"race, write without order after a read: line \d+ \(warp \d+, b12x/moe/",
        rf"{IN_GRID}b12x/moe/_shared/kernels/micro\.py:\d+\)",
    ),
    "package b12x, vLLM's W4A16 experts": (
        rf"{IN_GRID}b12x/moe/_shared/kernels/w4a16/kernel\.py:\d+\)",
    ),
}


def test_every_kernel_of_the_package_is_run(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LAUNCHED", ())
    made = planned(RELEASE)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    checks = {check.name: check for check in check_numbers(target)}
    assert set(checks) == {one.name for one in OF_PACKAGE}
    failed = {name: one.seen for name, one in checks.items() if one.status != "pass"}
    assert set(failed) == set(RACES)
    for name, seen in failed.items():
        assert seen.startswith("race, "), "and no value is wrong"
        for race in RACES[name]:
            assert re.search(race, seen), seen
    for one in checks.values():
        assert one.where.startswith("b12x 1.5.1 + CuTe DSL 4.8.0 of ")
        assert any("package b12x: its tensors" in words for words in one.simulated)
    experts = checks["package b12x, vLLM's W4A16 experts"]
    assert "rounded to FP4" not in experts.seen


#: What is made of all instructions of a name, and what notices that.
MUTANTS = {
    "bar.sync": (without_effect, "race"),
    "mbarrier.arrive": (without_effect, "deadlock"),
    "cp.async.bulk.shared": (without_effect, "deadlock"),
    "cvt.rn.bf16x2.e2m1x2": (without_effect, "numbers"),
    "cvt.rn.bf16x2.e4m3x2": (without_effect, "numbers"),
    "fence.mbarrier_init": (without_effect, "race"),
    "fence.proxy.async": (without_effect, "race"),
    "stmatrix": (without_effect, "numbers"),
}


def test_what_a_changed_gemm_of_the_package_gives_is_noticed(
    planned: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(RELEASE)
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    (one,) = (one for one in OF_PACKAGE if one.name == "package b12x, W4A16 GEMM")
    one = replace(one, request={**one.request, "shapes": [[9, 72, 320]]})
    alone = LaunchedAlone.of(target, one, tmp_path / "kept", monkeypatch)
    assert "b12x" in alone.ran.kernel
    assert [(run.values, run.wrong, judged(run), run.fault) for run in alone.ran.runs] == [
        (648, 0, (), "")
    ] * 3
    alone.check_mutants(MUTANTS)
