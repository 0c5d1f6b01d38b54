"""Mutants of a released kernel: level ``numbers`` notices each, or it is known why it need not.

``SPARK_BUILD_MUTANTS`` is how many are drawn, ``SPARK_BUILD_MUTANTS_SEED`` another draw: then the
survivors are listed for somebody to look at (``-s``).  docs/verification.md has what was found.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from builder.proof.kernels import LAUNCHED, launch_request
from builder.proof.opening import target_of_plan
from builder.ptx.launchfile import read_launch
from builder.ptx.runs import program_of
from tests.mutants import CATCHERS, caught, drawn
from tests.wheels.support import replies_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.wheels.support import Planner

COUNT, SEED = "SPARK_BUILD_MUTANTS", "SPARK_BUILD_MUTANTS_SEED"
#: Survivors of the draw that is made without these: each computes the same.
SAME = {
    # two loads of parameters lie between
    "fence.mbarrier_init.release.cluster : moved by -2",
    # bits that a thread's number times 128 has not
    "and.b32 %r936, %r899, 1920: now and.b32 %r936, %r899, 1952",
    # two barriers follow each other
    "bar.sync 0: moved by 5",
}
#: Survivors of the draw of the MoE kernel for 1 token: none changes a result of this launch.
SAME_EXPERTS = {
    # past an addition and a comparison of registers
    "bar.sync 1, 128: moved by 2",
    # a row without a token, which nobody reads: NaN there is not noticed either; the other place
    # gets the same value from another warp, which is no race (docs/ptx.md)
    "st.shared.b32 [%r3902+0], %r4310: now st.shared.b32 [%r3902+8], %r4310",
    # how a copy uses the cache
    "mov.b64 %rd99, 0: now mov.b64 %rd99, 4",
}


@pytest.mark.parametrize(
    ("names", "count", "seed", "same"),
    [
        (["b12x GEMM, tile 64x64", "b12x GEMM, several tiles of 64x64 a block"], 12, 4, SAME),
        (["b12x MoE, 1 token"], 9, 7, SAME_EXPERTS),
    ],
    ids=["GEMM", "MoE"],
)
def test_checks_that_detect_a_mutant(
    names: list[str],
    count: int,
    seed: int,
    same: set[str],
    planned: Planner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = planned("pypi:vllm==0.20.1")
    target = target_of_plan(made.plan, made.base, "patched", patched=True)
    kernels = [one for one in LAUNCHED if one.name in names]
    monkeypatch.setenv("SPARK_BUILD_KEEP_LAUNCHES", str(tmp_path / "kept"))
    replies_of(target, launch_request(target.plan.env, "sm_121a", kernels))
    paths = sorted((tmp_path / "kept").rglob("launch.json"))
    launches = [read_launch(path) for path in paths]
    requests = [one.request for one in kernels]
    assert len(launches) == sum(len(one.get("shapes", one.get("tokens"))) for one in requests)
    assert len({launch.ptx for launch in launches}) == 1
    original = program_of(launches[0], paths[0]).kernel
    asked = os.environ.get(COUNT)
    mutants = drawn(original, int(asked or count), int(os.environ.get(SEED, seed)))
    counts: Counter[str] = Counter()
    survivors = []
    for mutant in mutants:
        by = caught(mutant, launches)
        counts.update(by or ["nothing"])
        if not by:
            survivors.append(mutant)
    print(f"{len(mutants)} mutants; noticed by {dict(counts)}")  # with -s
    for mutant in survivors:
        print(f"survived: PTX line {mutant.line}, {mutant.kind}: {mutant.said}")
    assert set(counts) <= {*CATCHERS, "nothing"}
    assert len(survivors) <= 0.35 * len(mutants)
    if asked is None and SEED not in os.environ:
        assert {mutant.said for mutant in survivors} <= same
