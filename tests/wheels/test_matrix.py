"""Every layer on every release, against a table kept beside this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.states import APPLIED, NEEDED, NOT_APPLICABLE, UPSTREAM

from .states import REFS, expected

if TYPE_CHECKING:
    from .support import Planned, Planner

TABLES = expected()
#: What b12x-full needs in files to have b12x selected; nothing of it is left to do from 0.28.0 on.
FILE_LAYERS = (
    "cutlass-dsl-cu13",
    "cutlass-dsl-sm121a",
    "flashinfer-b12x",
    "flashinfer-sm121",
    "vllm-b12x-backend",
    "vllm-b12x-reachable",
    "vllm-linear-fallback",
)


def stated(made: Planned, row: dict[str, str]) -> dict[str, str]:
    """The states of a plan for the layers of a row."""
    return {name: made.states[name] for name in row}


def assert_explained(made: Planned) -> None:
    """Every state says why, and a fix that is already there says since when."""
    for decision in made.plan.decisions:
        outcome = decision.outcome
        assert outcome.reason.strip(), f"{decision.name} is {outcome.state} without a reason"
        if outcome.state == UPSTREAM:
            assert outcome.since, f"{decision.name}: upstream since when?"
            assert outcome.since.split()[-1][0].isdigit(), outcome.since
        else:
            assert outcome.since is None
        if outcome.state != NEEDED:
            assert not outcome.changes, f"{decision.name} is {outcome.state} and changes files"
            assert decision.receipt is None


@pytest.mark.parametrize("release", TABLES["vllm"].releases)
def test_states_with_pinned_versions(planned: Planner, release: str) -> None:
    row, pins = TABLES["vllm"].row(release), TABLES["vllm"].releases[release]
    ref = REFS["vllm"].format(release)
    states = planned.states(ref)
    assert {name: states.get(name) for name in row} == row
    for made in planned.of_all(ref):
        assert made.plan.base.packages["flashinfer-python"] == pins["flashinfer"]
        assert made.plan.base.packages["nvidia-cutlass-dsl"] == pins["dsl"]
        assert_explained(made)


@pytest.mark.parametrize("kind", ["dsl", "dsl-cu13"])
@pytest.mark.parametrize("release", TABLES["dsl"].releases)
def test_states_on_every_cute_dsl(planned: Planner, release: str, kind: str) -> None:
    """libs-cu13 is missing or in front, by its extra; sm_121a is admitted from 4.5.0 on."""
    row = TABLES[kind].row(release)
    made = planned(REFS[kind].format(release), ",".join(row))
    assert stated(made, row) == row
    libs = {name: v for name, v in made.plan.base.packages.items() if "cutlass-dsl" in name}
    assert set(libs.values()) == {release}, "the libraries are those of the DSL"
    assert_explained(made)


@pytest.mark.parametrize("release", TABLES["flashinfer"].releases)
def test_states_on_every_flashinfer(planned: Planner, release: str) -> None:
    row = TABLES["flashinfer"].row(release)
    made = planned(REFS["flashinfer"].format(release), ",".join(row))
    assert stated(made, row) == row
    assert_explained(made)


@pytest.mark.parametrize("dsl", ["4.4.2", "4.5.3", "4.6.0"])
@pytest.mark.parametrize("flashinfer", ["0.6.9", "0.6.11.post3", "0.6.12", "0.7.2.post1"])
def test_layers_of_one_package_ignore_others(planned: Planner, flashinfer: str, dsl: str) -> None:
    """Mixed stacks have the state that each package has by itself."""
    ref = f"pypi:vllm==0.20.1,flashinfer-python=={flashinfer},nvidia-cutlass-dsl=={dsl}"
    made = planned(ref, "b12x-full")
    for kind, release in (("dsl", dsl), ("flashinfer", flashinfer)):
        row = TABLES[kind].row(release)
        assert stated(made, row) == row
    assert_explained(made)


@pytest.mark.parametrize("release", ["0.20.1", "0.24.0", "0.33.0"])
def test_the_other_architecture_has_the_same_states(planned: Planner, release: str) -> None:
    """The Python of a release is the same in both wheels, so its states are."""
    ref = f"pypi:vllm=={release}"
    assert planned.states(ref, "linux/amd64") == planned.states(ref)
    amd = planned(ref, "b12x-full", "linux/amd64")
    assert amd.plan.base.digest != planned(ref).plan.base.digest


@pytest.mark.parametrize("release", TABLES["vllm"].releases)
def test_every_setting_is_read_by_its_release(planned: Planner, release: str) -> None:
    """No VLLM_* variable is set that the release (as patched) does not know."""
    from builder.applier.edits import read_envs
    from builder.applier.trees import OverlayTree

    for made in planned.of_all(f"pypi:vllm=={release}"):
        tree = OverlayTree(made.base.tree)
        tree.update(made.plan.changes)
        known = read_envs((tree.read("vllm/envs.py") or b"").decode()).known
        unknown = {n for n in made.plan.env if n.startswith("VLLM_")} - known.keys()
        assert not unknown, f"unknown to {release}"


@pytest.mark.parametrize("release", [r for r in TABLES["vllm"].releases if r >= "0.28.0"])
def test_recent_releases_need_settings_and_kernel_fixes(planned: Planner, release: str) -> None:
    """Those kernels of FlashInfer, the scales of vLLM's experts, and nothing else."""
    made = planned(f"pypi:vllm=={release}")
    assert {made.states[name] for name in FILE_LAYERS} == {UPSTREAM}
    changed = {path for path in made.plan.changes if not path.startswith(".spark-build/")}
    early = {
        "moe_dynamic_kernel.py",
        "moe_static_kernel.py",
        "dense_blockscaled_gemm_sm120_b12x.py",
    }
    # FlashInfer 0.6.18: the next batch, no more the tile, a fence for 1 token, and the W4A16 GEMM
    late = {
        "generic.py",
        "gated.py",
        "moe_direct_micro_kernel.py",
        "dense_gemm_bf16_fp4_sm12x.py",
    }
    assert {path.rpartition("/")[2] for path in changed if "RECORD" not in path} == {
        "moe_micro_kernel.py",
        "moe_w4a16_kernel.py",
        "flashinfer_b12x_moe.py",
        *(late if release >= "0.29.0" else early),
        *({"moe_dispatch.py"} if "0.29.0" <= release < "0.31.0" else ()),
    }


def test_b12x_is_not_applicable_before_0_20(planned: Planner) -> None:
    for release in ("0.17.0", "0.17.1", "0.18.1", "0.19.1"):
        states = planned(f"pypi:vllm=={release}").states
        assert {states[n] for n in FILE_LAYERS[2:]} == {NOT_APPLICABLE}
        assert states["b12x-env"] == NOT_APPLICABLE


def test_the_cu13_extra_counts_only_while_its_files_win(planned: Planner) -> None:
    """vLLM 0.22.0 to 0.25.1 ask for the extra: laid out last it wins, and the reason says so."""
    for release in ("0.22.0", "0.25.1"):
        decision = planned(f"pypi:vllm=={release}").decision("cutlass-dsl-cu13")
        assert decision.outcome.state == APPLIED
        assert "already applied" in decision.outcome.reason
